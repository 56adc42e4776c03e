"""Text in, batches out: ``prepare`` writes tokenised corpora, ``samples`` and ``batches`` read them by position."""
