"""Megatron-core models from layer specs, built to the schema."""
