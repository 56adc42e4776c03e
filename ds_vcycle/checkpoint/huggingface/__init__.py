"""Hugging Face model directories: config.json and safetensors files, read and written without transformers."""
