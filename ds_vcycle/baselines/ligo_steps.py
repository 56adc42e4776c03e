"""Learning LiGO's maps: the language model's loss of the fine level, whose weights are functions of the maps.

A step makes all fine weights of the maps, gives each rank its tensor-parallel slices as a module's parameters, runs the
micro-batches forward and backward, puts the gradients of the slices together to those of the whole weights, the same on
all tensor-parallel ranks, and takes them back to the maps; these are summed over data-parallel ranks. So the maps stay
the same on all ranks, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_vcycle.baselines.ligo import LearnedMaps, expand, initial_maps
from ds_vcycle.config import RunConfig
from ds_vcycle.levels import Level, ModelShape
from ds_vcycle.model.build import build_model
from ds_vcycle.parallel import Mesh
from ds_vcycle.schema import Parameter, parameters
from ds_vcycle.train.loop import Batch, LossScale, StepResult, global_weight, language_model_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """The maps between two levels while they are learned.

    ``weights``: every coarse parameter, whole, on the device. ``module``: the fine level under ``mesh``, its parameters
    this rank's slices.
    """

    fine: ModelShape
    coarse: ModelShape
    weights: Mapping[str, Tensor]
    maps: LearnedMaps
    module: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: Mesh
    grad_clip: float


def begin_learning(
    fine: Level, coarse: Level, weights: Mapping[str, Tensor], config: RunConfig, mesh: Mesh, *, lr: float
) -> Learner:
    """The maps as they begin, under AdamW with ``optimizer``'s betas, eps and weight decay, at a constant rate.

    Args:
        fine: the level that is made, under ``mesh``.
        coarse: the level that it is made of.
        weights: every coarse parameter, whole, flat or in its shape, fp32.
        config: the run's.
        mesh: of the fine level.
        lr: the learning rate.
    """
    drawn, settings = initial_maps(fine.shape, coarse.shape, config.training.seed), config.optimizer
    maps = LearnedMaps(
        widths={name: m.detach().to(mesh.device).requires_grad_() for name, m in drawn.widths.items()},
        depths={name: w.detach().to(mesh.device).requires_grad_() for name, w in drawn.depths.items()},
    )
    shapes = {parameter.name: parameter.shape for parameter in parameters(coarse.shape)}
    return Learner(
        fine=fine.shape,
        coarse=coarse.shape,
        weights={name: weights[name].to(mesh.device).view(shape) for name, shape in shapes.items()},
        maps=maps,
        module=build_model(fine, config.model, mesh=mesh, seed=None),
        optimizer=torch.optim.AdamW(
            [tensor for tensor in maps.tensors() if tensor.numel()],
            lr=lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay,
        ),
        mesh=mesh,
        grad_clip=settings.grad_clip,
    )  # fmt: skip


def learning_step(learner: Learner, batches: Sequence[Batch]) -> StepResult:
    """One step of the maps over this rank's micro-batches of one global batch. Collective over all ranks.

    Returns:
        The loss before the step, and the norm of the maps' gradients before clipping.
    """
    mesh, optimizer = learner.mesh, learner.optimizer
    samples = len(batches) * mesh.dp_size * len(batches[0]["tokens"])
    scale = LossScale(per_weight=1 / global_weight(batches, mesh), per_sample=1 / samples)
    whole = expand(learner.fine, learner.coarse, learner.weights, learner.maps)
    _give_slices(learner, whole)
    total = torch.zeros((), device=mesh.device)
    module: Any = learner.module
    for batch in batches:
        placed = {name: tensor.to(mesh.device, non_blocking=True) for name, tensor in batch.items()}
        value = language_model_loss(module, placed, scale)
        torch.autograd.backward(value)
        total += value.detach().float()
    gradients = _whole_gradients(learner)
    learned = [name for name, weight in whole.items() if weight.requires_grad]
    optimizer.zero_grad(set_to_none=False)
    torch.autograd.backward([whole[name] for name in learned], [gradients[name] for name in learned])
    maps = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if mesh.dp_size > 1:
        for tensor in maps:
            assert tensor.grad is not None
            dist.all_reduce(tensor.grad, group=mesh.dp_group)
        dist.all_reduce(total, group=mesh.dp_group)
    norm = nn.utils.clip_grad_norm_(maps, learner.grad_clip or float("inf"))
    optimizer.step()
    return StepResult(loss=total, grad_norm=norm, stop=False)


@torch.no_grad()
def learned_weights(learner: Learner) -> dict[str, Tensor]:
    """This rank's slice of every fine parameter, fp32, as the maps make it now."""
    whole = expand(learner.fine, learner.coarse, learner.weights, learner.maps)
    return {p.name: own_slice(whole[p.name], p, learner.mesh) for p in parameters(learner.fine)}


def own_slice(whole: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    """The part of a whole parameter that a rank holds under its tensor-parallel degree."""
    if parameter.tp_dim is None:
        return whole
    ranges = parameter.global_ranges(parameter.tp_dim, mesh.tp_size, mesh.tp_rank)
    return torch.cat([whole.narrow(parameter.tp_dim, start, end - start) for start, end in ranges], parameter.tp_dim)


@torch.no_grad()
def _give_slices(learner: Learner, whole: Mapping[str, Tensor]) -> None:
    held = dict(learner.module.named_parameters())
    for parameter in parameters(learner.fine):
        held[parameter.name].copy_(own_slice(whole[parameter.name], parameter, learner.mesh))
        held[parameter.name].grad = None


def _whole_gradients(learner: Learner) -> dict[str, Tensor]:
    """The gradient of every whole parameter, fp32: slices from the ranks that hold them, replicated ones as they are.

    Those are whole on every rank already (:func:`ds_vcycle.model.build.build_model` sees to the norms over heads).
    """
    held, mesh, found = dict(learner.module.named_parameters()), learner.mesh, {}
    for parameter in parameters(learner.fine):
        weight = held[parameter.name]
        own = torch.zeros_like(weight) if weight.grad is None else weight.grad
        found[parameter.name] = own.float()
        if parameter.tp_dim is None or mesh.tp_size == 1:
            continue
        whole = torch.zeros(parameter.shape, device=mesh.device)
        at = 0
        for start, end in parameter.global_ranges(parameter.tp_dim, mesh.tp_size, mesh.tp_rank):
            part = own.narrow(parameter.tp_dim, at, end - start)
            whole.narrow(parameter.tp_dim, start, end - start).copy_(part)
            at += end - start
        dist.all_reduce(whole, group=mesh.tp_group)
        found[parameter.name] = whole
    return found
