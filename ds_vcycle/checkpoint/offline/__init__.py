"""The verbs on finished checkpoints: coalesce, refine, convert and inspect, without a model or a GPU."""
