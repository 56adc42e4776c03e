"""Weights split by tensor parallelism and ZeRO: where they lie, how to reach them, how they cross a transition."""
