"""A teacher beside the engine that learns from it: a plain module without an optimizer, and the loss of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_vcycle.config import ModelConfig
from ds_vcycle.levels import Level
from ds_vcycle.model.build import build_model
from ds_vcycle.model.distillation import Teaching
from ds_vcycle.parallel import Mesh
from ds_vcycle.random_states import rng_state, set_rng_state
from ds_vcycle.sharding.zero import Engine
from ds_vcycle.train.loop import Batch, LossFunction, LossScale, language_model_loss


def build_teacher(level: Level, model: ModelConfig, mesh: Mesh, weights: Mapping[str, Tensor]) -> nn.Module:
    """A level that predicts and is not trained: no dropout, no gradients. It leaves the random generators as they are.

    Args:
        level: see :func:`ds_vcycle.baselines.inheritance.as_teacher`.
        model: the options that are the same at every level.
        mesh: of the student.
        weights: of every parameter this rank's slice, in any shape.

    Raises:
        ValueError: a parameter has no weights, or weights have no parameter.
    """
    before = rng_state()  # modules draw as they are built, and a resumed run builds its teacher at another step
    teacher = build_model(level, model, mesh=mesh, seed=None)
    set_rng_state(before)
    held = dict(teacher.named_parameters())
    if held.keys() != weights.keys():
        raise ValueError(f"weights and parameters differ: {', '.join(sorted(held.keys() ^ weights.keys())[:5])}")
    with torch.no_grad():
        for name, parameter in held.items():
            parameter.copy_(weights[name].view_as(parameter))
    return teacher.requires_grad_(False).eval()


def distillation_loss(teacher: Any, *, share: float, temperature: float) -> LossFunction:
    """The loss of a micro-batch with ``share`` of the teacher's in it; the sentence order is learned from the data.

    Args:
        teacher: of :func:`build_teacher`.
        share: in (0, 1].
        temperature: above 0.
    """

    def loss(engine: Engine, batch: Batch, scale: LossScale) -> Tensor:
        with torch.no_grad():
            logits = teacher.predictions(batch)
        return language_model_loss(engine, batch, scale, Teaching(logits=logits, share=share, temperature=temperature))

    return loss
