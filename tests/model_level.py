"""Tiny levels and batches for the tests of the models."""

from __future__ import annotations

from typing import Any

import torch

from ds_vcycle.config import ModelConfig, RunConfig, parse_config
from ds_vcycle.levels import Level, resolve_levels

SIZES: dict[str, Any] = {
    "architecture": "gpt",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "sequence_length": 16,
    "vocab_size": 101,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


def tiny_config(tp: int = 1, *, zero_stage: int = 0, **options: Any) -> RunConfig:
    """A flat run of one tiny level."""
    return parse_config(
        {
            "model": SIZES | {"tensor_parallel": tp} | options,
            "training": {"global_batch": 4, "micro_batch": 2, "zero_stage": zero_stage},
            "data": {"path": "unused"},
            "cycle": {"kind": "flat"},
        }
    )


def tiny(tp: int = 1, **options: Any) -> tuple[Level, ModelConfig]:
    """The level of :func:`tiny_config`, and its model section."""
    config = tiny_config(tp, **options)
    return resolve_levels(config)[0], config.model


def batch_for(level: Level, *, samples: int = 3, seed: int = 5) -> dict[str, torch.Tensor]:
    """Random tokens with unequal weights; BERT's last sample is a third padding, its last masked slot unused."""
    shape = level.shape
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=generator)

    def fractions(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    length = shape.sequence_length
    tokens = integers(shape.vocab_size, samples, length)
    if shape.architecture == "gpt":
        labels = integers(shape.vocab_size, samples, length)
        return {"tokens": tokens, "labels": labels, "weights": fractions(samples, length)}
    slots = 3
    real = torch.ones(samples, length, dtype=torch.bool)
    real[-1, 2 * length // 3 :] = False
    batch = {
        "tokens": tokens,
        "token_types": integers(2, samples, length),
        "padding_mask": real,
        "masked_positions": integers(2 * length // 3, samples, slots),
        "labels": integers(shape.vocab_size, samples, slots),
        "weights": fractions(samples, slots),
    }
    batch["masked_positions"][-1, -1] = 0
    batch["weights"][-1, -1] = 0
    if shape.sentence_order:
        batch["sentence_order"] = integers(2, samples)
    return batch


def is_vocabulary(name: str) -> bool:
    """Whether the first dim of the parameter is the padded vocabulary."""
    return "word_embeddings" in name or name.startswith("output_layer")
