"""Multi-level (V-cycle) pretraining on DeepSpeed and Megatron-core."""

__version__ = "0.1.0"
