"""Starting runs on a cluster: the batch script, its submission, and whether a run that has ended is queued again."""
