"""DeepSpeed's own checkpoints: native ones and the universal layout are read, the universal layout is written."""
