"""A change of level on live, partitioned engines, so that two engines never exist at once (DESIGN section 4).

Going down: the fine engine's masters become coarse fragments on the host, the fine level is parked, its engine is
released, the coarse engine is built empty and filled. Going up: z is computed at coarse size, the coarse engine is
released, the fine one is built empty, filled from the parked fragments and refined in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.distributed as dist
from ds_vcycle_kernels import Implementation
from torch import Tensor

from ds_vcycle.config import MomentPolicy
from ds_vcycle.faults import fault_point
from ds_vcycle.operators.apply import blend_coarse, coarse_factor
from ds_vcycle.parallel import Mesh
from ds_vcycle.sharding.copies import Taken, take
from ds_vcycle.sharding.exchange import Exchange
from ds_vcycle.sharding.geometry import Geometry
from ds_vcycle.sharding.transfer import coalesce_fragments, refine_fragments
from ds_vcycle.sharding.zero import Engine, adam_step, fragments, push, set_moments

Fragments = dict[str, Tensor]  # this rank's flat fragments by parameter name, float32


class Blend(TypedDict):
    """The factors of a refine, and what computes it."""

    alpha: float
    beta: float
    kernels: Implementation


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """What the next level is filled from, on the host: weights and, if they are mapped, Adam's moments at ``step``.

    ``trained``: going up, the coarse weights as they were trained, if ``master`` holds something else.
    """

    master: Fragments
    trained: Fragments | None = None
    exp_avg: Fragments | None = None
    exp_avg_sq: Fragments | None = None
    step: int = 0


def common_step(engine: Engine, mesh: Mesh) -> int:
    """Adam's step of the engine; a rank that holds no fragment has none of its own. Collective over all ranks."""
    step = torch.tensor(adam_step(engine))
    dist.all_reduce(step, op=dist.ReduceOp.MAX, group=mesh.host_group)
    return int(step)


def masters(engine: Engine) -> Fragments:
    """Copies of the engine's fp32 masters on the host, pinned where they come from a GPU: a parked level."""
    copies = {}
    for fragment in fragments(engine):
        master = fragment.master.detach()
        copies[fragment.name] = torch.empty(master.shape, pin_memory=master.is_cuda).copy_(master)
    return copies


def stage_down(
    engine: Engine, geometry: Geometry, mesh: Mesh, moments: MomentPolicy, *, kernels: Implementation = "auto"
) -> Staged:
    """Coalesce the fine engine's weights (and moments under ``map``) into this rank's coarse fragments. Collective."""
    exchange = Exchange(mesh=mesh)
    held = fragments(engine)
    weights = {f.name: f.master.detach() for f in held}
    master = coalesce_fragments(geometry, weights, "master", exchange, kernels=kernels)
    fault_point("coalesce.staged")
    step = common_step(engine, mesh)
    if moments == "reset" or step == 0:
        return Staged(master=master)
    first = {f.name: f.exp_avg for f in held if f.exp_avg is not None}
    second = {f.name: f.exp_avg_sq for f in held if f.exp_avg_sq is not None}
    return Staged(
        master=master,
        exp_avg=coalesce_fragments(geometry, first, "exp_avg", exchange, kernels=kernels),
        exp_avg_sq=coalesce_fragments(geometry, second, "exp_avg_sq", exchange, kernels=kernels),
        step=step,
    )


def stage_up(
    engine: Engine, parked: Mapping[str, Tensor], geometry: Geometry, mesh: Mesh, *, alpha: float, beta: float,
    moments: MomentPolicy, kernels: Implementation = "auto",
) -> Staged:  # fmt: skip
    """z = alpha y + (1 - alpha - beta) C x at coarse size, and the coarse moments under ``map``. Collective.

    C x is computed again from the parked weights, when its factor is not zero.
    """
    held = fragments(engine)
    cx: Fragments = {}
    if coarse_factor(alpha, beta):
        cx = coalesce_fragments(geometry, parked, "master", Exchange(mesh=mesh), kernels=kernels)
    z = {f.name: blend_coarse(f.master.detach().cpu(), cx.get(f.name), alpha=alpha, beta=beta) for f in held}
    trained = None if alpha == 1.0 and not cx else {f.name: f.master.detach().cpu().clone() for f in held}
    fault_point("refine.staged")
    step = common_step(engine, mesh)
    if moments == "reset" or step == 0:
        return Staged(master=z, trained=trained)
    return Staged(
        master=z,
        trained=trained,
        exp_avg={f.name: f.exp_avg.cpu().clone() for f in held if f.exp_avg is not None},
        exp_avg_sq={f.name: f.exp_avg_sq.cpu().clone() for f in held if f.exp_avg_sq is not None},
        step=step,
    )


@torch.no_grad()
def fill(engine: Engine, staged: Staged) -> None:
    """Write staged fragments into an engine built empty, and push them. Collective over the data-parallel group.

    Raises:
        ValueError: a fragment of the engine has no staged value, or a staged value no fragment.
    """
    held = fragments(engine)
    _same_names({f.name for f in held}, set(staged.master))
    for fragment in held:
        fragment.master.copy_(staged.master[fragment.name])
    if staged.exp_avg is not None and staged.exp_avg_sq is not None:
        pairs = {name: (staged.exp_avg[name], staged.exp_avg_sq[name]) for name in staged.exp_avg}
        set_moments(engine, pairs, staged.step)
    fault_point("fill.written")
    push(engine)


@torch.no_grad()
def decoalesce_into(
    engine: Engine, staged: Staged, geometry: Geometry, mesh: Mesh, *, kernels: Implementation = "auto"
) -> None:
    """Fill the weights of an engine with what the coarse level has learned, nothing else; push. Collective."""
    coarse = staged.master if staged.trained is None else staged.trained
    weights = {f.name: f.master for f in fragments(engine)}
    refine_fragments(geometry, coarse, weights, "master", Exchange(mesh=mesh), beta=0.0, kernels=kernels)
    push(engine)


@torch.no_grad()
def take_copies(
    engine: Engine, staged: Staged, geometry: Geometry, mesh: Mesh, taken: Taken, *, kernels: Implementation = "auto"
) -> None:
    """Overwrite of an engine's weights what ``taken`` says with what these coarse weights give it; push. Collective.

    Args:
        engine: a fine engine that is filled already.
        staged: this rank's coarse fragments.
        geometry: whose plan says what of them each fine element reads.
        mesh: of the fine level.
        taken: which fine elements, see :mod:`ds_vcycle.sharding.copies`.
        kernels: what de-coalesces.
    """
    weights = {f.name: f.master for f in fragments(engine)}
    second = {name: torch.empty_like(weight) for name, weight in weights.items()}
    refine_fragments(geometry, staged.master, second, "master", Exchange(mesh=mesh), beta=0.0, kernels=kernels)
    take(second, weights, geometry, mesh.rank, taken)
    push(engine)


@torch.no_grad()
def refine_into(
    engine: Engine, parked: Mapping[str, Tensor], staged: Staged, geometry: Geometry, mesh: Mesh, *,
    alpha: float, beta: float, kernels: Implementation = "auto",
) -> None:  # fmt: skip
    """Fill an engine built empty from the parked level and blend z into it in place; push. Collective.

    Adam's moments come from the coarse level where they are mapped; the fine level's own are gone (DESIGN section 3).
    """
    held = fragments(engine)
    _same_names({f.name for f in held}, set(parked))
    for fragment in held:
        fragment.master.copy_(parked[fragment.name])
    fault_point("refine.filled")
    exchange = Exchange(mesh=mesh)
    if not (alpha == 0.0 and beta == 1.0):
        weights = {f.name: f.master for f in held}
        refine_fragments(geometry, staged.master, weights, "master", exchange, beta=beta, kernels=kernels)
    fault_point("refine.blended")
    if staged.exp_avg is not None and staged.exp_avg_sq is not None:
        first = {f.name: torch.zeros_like(f.master) for f in held}
        second = {f.name: torch.zeros_like(f.master) for f in held}
        refine_fragments(geometry, staged.exp_avg, first, "exp_avg", exchange, beta=0.0, kernels=kernels)
        refine_fragments(geometry, staged.exp_avg_sq, second, "exp_avg_sq", exchange, beta=0.0, kernels=kernels)
        set_moments(engine, {name: (first[name], second[name]) for name in first}, staged.step)
    push(engine)


def _same_names(held: set[str], given: set[str]) -> None:
    if held != given:
        raise ValueError(f"fragments held and given differ: {', '.join(sorted(held ^ given)[:5])}")
