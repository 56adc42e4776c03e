"""One optimizer step, and the loop over a phase's steps. What happens in a step is what is written here, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ds_vcycle.config import UserError
from ds_vcycle.faults import fault_point
from ds_vcycle.model.distillation import Teaching
from ds_vcycle.parallel import Mesh
from ds_vcycle.sharding.zero import Engine
from ds_vcycle.train.engine import gradient_norm, set_lr
from ds_vcycle.train.metrics import Place

Batch: TypeAlias = Mapping[str, Tensor]


class TrainingError(UserError):
    """Training cannot go on: a loss, a gradient norm or the weights are not finite."""

    def __init__(self, place: Place, problem: str, kept: Path | None) -> None:
        checkpoint = f"the last checkpoint, {kept}, is from before" if kept else "there is no checkpoint yet"
        super().__init__(
            f"phase {place.phase} (level {place.level}), step {place.phase_step} of it, step {place.step} of the run: "
            f"{problem}; {checkpoint}; lower the phase's learning rate or lengthen its warm-up, and start again"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """Factors that make a micro-batch's sums the mean over the global batch.

    DeepSpeed divides by the accumulation steps and averages over the data-parallel ranks; both are undone here, so
    that every predicted position of the global batch weighs the same however it is split.
    """

    per_weight: float
    per_sample: float


LossFunction: TypeAlias = Callable[[Engine, Batch, LossScale], Tensor]
AfterStep: TypeAlias = Callable[[Engine], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step measured, still on the device: mean loss over the global batch, gradient norm before clipping."""

    loss: Tensor
    grad_norm: Tensor
    stop: bool


def language_model_loss(engine: Engine, batch: Batch, scale: LossScale, teaching: Teaching | None = None) -> Tensor:
    """Cross entropy of the predicted positions, plus that of the sentence order where the model has the head.

    ``teaching``: mixes a teacher's predictions into the first.
    """
    positions: Tensor
    sentence_order: Tensor
    positions, sentence_order = engine(**batch) if teaching is None else engine(**batch, teaching=teaching)
    return positions * scale.per_weight + sentence_order * scale.per_sample


def train_step(
    engine: Engine,
    batches: Sequence[Batch],
    *,
    lr: float,
    mesh: Mesh,
    loss: LossFunction = language_model_loss,
    after_step: AfterStep | None = None,
    stop: bool = False,
) -> StepResult:
    """One optimizer step over this rank's micro-batches of one global batch. Collective over all ranks.

    Args:
        engine: the level's engine.
        batches: this data-parallel rank's micro-batches (on the CPU).
        lr: learning rate of this step.
        mesh: of the level.
        loss: scalar loss of one micro-batch.
        after_step: called once the weights have been updated; it must not wait for the device.
        stop: this rank was asked to stop after the step; the result says whether any rank was.
    """
    weight, stopping = _agree(batches, stop, mesh)
    micro_batches = len(batches) * mesh.dp_size
    samples = micro_batches * len(batches[0]["tokens"])
    scale = LossScale(per_weight=micro_batches / weight, per_sample=micro_batches / samples)
    set_lr(engine, lr)
    total = torch.zeros((), device=mesh.device)
    for batch in batches:
        placed = {name: tensor.to(mesh.device, non_blocking=True) for name, tensor in batch.items()}
        value = loss(engine, placed, scale)
        engine.backward(value)
        engine.step()
        total += value.detach().float()
    if after_step is not None:
        after_step(engine)
    fault_point("step")
    total /= micro_batches
    if mesh.dp_size > 1:
        dist.all_reduce(total, group=mesh.dp_group)
    return StepResult(loss=total, grad_norm=gradient_norm(engine), stop=stopping)


def global_weight(batches: Sequence[Batch], mesh: Mesh) -> float:
    """The weight of a global batch, from each data-parallel rank's micro-batches. Collective over all ranks."""
    return _agree(batches, False, mesh)[0]


def _agree(batches: Sequence[Batch], stop: bool, mesh: Mesh) -> tuple[float, bool]:
    """(weight of the global batch, whether any rank was asked to stop): one small all-reduce between hosts."""
    mine = torch.stack([batch["weights"].double().sum() for batch in batches]).sum()
    values = torch.stack([mine, torch.tensor(float(stop), dtype=torch.float64)])
    dist.all_reduce(values, group=mesh.host_group)
    weight, stops = values.tolist()
    return weight / mesh.tp_size, stops > 0
