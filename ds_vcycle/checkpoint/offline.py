"""``ds-vcycle coalesce`` and ``ds-vcycle refine``: a change of level on finished checkpoints, without a model or a GPU.

The same bits as a live transition's, parameter by parameter and block by block, so that memory holds a few blocks
however large the model is. Each process takes a share of the parameters and writes one file of the new checkpoint, in
which parameters are whole: any layout reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ds_vcycle
from ds_vcycle.checkpoint.blockwise import (
    BUCKET_ELEMENTS,
    Blend,
    coarse_fragments,
    coarse_tensors,
    fine_fragments,
    fine_tensors,
)
from ds_vcycle.checkpoint.offline_inputs import both_levels, check_target, plan_between, two_levels
from ds_vcycle.checkpoint.processes import ALONE, Processes, together
from ds_vcycle.checkpoint.reader import Checkpoint, open_checkpoint
from ds_vcycle.checkpoint.recorded import locate_checkpoint, recorded
from ds_vcycle.checkpoint.store import save_written
from ds_vcycle.checkpoint.streamed import AnnouncedFragment, write_streamed
from ds_vcycle.config import MomentPolicy, RunConfig
from ds_vcycle.levels import Level
from ds_vcycle.operators.apply import QUANTITIES, Quantity
from ds_vcycle.operators.plan import ParameterMap, TransitionPlan

Advance = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The checkpoint an offline verb wrote: its level, the configuration, Adam's step if it has moments (0: none)."""

    directory: Path
    level: Level
    adam_step: int
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What is written: per coarse parameter the fragments it gives, and their tensors when they are asked for."""

    fragments: Callable[[ParameterMap], list[AnnouncedFragment]]
    tensors: Callable[[ParameterMap], Iterator[Tensor]]


def coalesce_checkpoint(
    source: Path, to: Path, *, overrides: Sequence[str] = (), overwrite: bool = False, processes: Processes = ALONE,
    advance: Advance = lambda done, total: None, bucket: int = BUCKET_ELEMENTS,
) -> Written:  # fmt: skip
    """Coalesce a checkpoint's level n to level n + 1 and write it to ``to``. Called by every process.

    Args:
        source: a checkpoint, or a run directory (its latest).
        to: directory to write; its parent may hold other things.
        overrides: of the recorded configuration (``operators.depth_residual=copy``, ``levels.1.hidden=256``).
        overwrite: replace a checkpoint at ``to``.
        processes: this one alone, or those of a launch.
        advance: told of the elements done and to do in this process.
        bucket: fine elements of one parameter handled at once.

    Raises:
        UserError: on every process, with the same text; nothing is written.
    """
    with ExitStack() as stack:

        def prepare() -> tuple[Checkpoint, RunConfig, TransitionPlan]:
            fine = stack.enter_context(open_checkpoint(locate_checkpoint(source)))
            check_target(to, [fine], overwrite=overwrite)
            held = recorded(fine)
            config = two_levels(held.config, held.level.index, overrides)
            return fine, config, plan_between(config, held.level.index, fine=fine)

        fine, config, plan = together(processes, prepare)
        keys, step = _quantities(fine, config.operators.moments)
        task = _Task(
            fragments=lambda item: coarse_fragments(item, keys, bucket),
            tensors=lambda item: coarse_tensors(fine, item, keys, bucket),
        )
        origin = {"verb": "coalesce", "fine": _origin(fine)}
        state = _state(config, plan.coarse, step, origin)
        _save(to, plan, task, state, processes, advance)
        return Written(directory=to, level=plan.coarse, adam_step=step, config=config)


def refine_checkpoints(
    fine_source: Path, coarse_source: Path, to: Path, *, alpha: float | None = None, beta: float | None = None,
    overrides: Sequence[str] = (), overwrite: bool = False, processes: Processes = ALONE,
    advance: Advance = lambda done, total: None, bucket: int = BUCKET_ELEMENTS,
) -> Written:  # fmt: skip
    """De-coalesce a coarse checkpoint, blend it with a fine one, and write the fine level to ``to``.

    The maps are those of the coarse checkpoint's configuration where that has both levels, else of the fine one's with
    the coarse model's sizes.

    Args:
        fine_source: the kept fine level: a checkpoint, or a run directory (its latest).
        coarse_source: the trained coarse level, of the same run or of a run of its own.
        to: as for :func:`coalesce_checkpoint`, and so all that follows.
        alpha: default ``operators.alpha``.
        beta: default ``operators.beta``.
        overrides: of the configuration that has both levels.
        overwrite: replace a checkpoint at ``to``.
        processes: this one alone, or those of a launch.
        advance: told of the elements done and to do in this process.
        bucket: fine elements of one parameter handled at once.

    Raises:
        UserError: on every process, with the same text; nothing is written.
    """
    given = {"alpha": alpha, "beta": beta}
    blended = [*overrides, *(f"operators.{key}={value}" for key, value in given.items() if value is not None)]
    with ExitStack() as stack:

        def prepare() -> tuple[Checkpoint, Checkpoint, RunConfig, TransitionPlan]:
            fine = stack.enter_context(open_checkpoint(locate_checkpoint(fine_source)))
            coarse = stack.enter_context(open_checkpoint(locate_checkpoint(coarse_source)))
            check_target(to, [fine, coarse], overwrite=overwrite)
            config, index = both_levels(fine, coarse, blended)
            return fine, coarse, config, plan_between(config, index, fine=fine, coarse=coarse)

        fine, coarse, config, plan = together(processes, prepare)
        keys, step = _quantities(coarse, config.operators.moments)
        blend = Blend(fine=fine, coarse=coarse, alpha=config.operators.alpha, beta=config.operators.beta)
        task = _Task(
            fragments=lambda item: fine_fragments(item, keys, bucket),
            tensors=lambda item: fine_tensors(blend, item, keys, bucket),
        )
        blending = {"alpha": blend.alpha, "beta": blend.beta}
        origin = {"verb": "refine", "fine": _origin(fine), "coarse": _origin(coarse), **blending}
        _save(to, plan, task, _state(config, plan.fine, step, origin), processes, advance)
        return Written(directory=to, level=plan.fine, adam_step=step, config=config)


def _quantities(source: Checkpoint, moments: MomentPolicy) -> tuple[tuple[Quantity, ...], int]:
    """Which tensors are mapped, and Adam's step with them."""
    step = int(source.state.get("adam_step", 0))
    return (QUANTITIES, step) if moments == "map" and step else (("master",), 0)


def _origin(source: Checkpoint) -> dict[str, Any]:
    return {"directory": str(source.directory), "identity": source.manifest.identity}


def _state(config: RunConfig, level: Level, adam_step: int, origin: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "level": level.index,
        "config": config.model_dump(mode="json"),
        "adam_step": adam_step,
        "origin": dict(origin),
        "versions": {"ds-vcycle": ds_vcycle.__version__, "torch": str(torch.__version__)},
    }


def _save(
    to: Path, plan: TransitionPlan, task: _Task, state: Mapping[str, Any], processes: Processes, advance: Advance
) -> None:
    mine = _shares(plan.maps, processes.world_size)[processes.rank]
    fragments = [fragment for item in mine for fragment in task.fragments(item)]
    made = _counted((tensor for item in mine for tensor in task.tensors(item)), fragments, advance)
    save_written(
        to, lambda staging, identity: write_streamed(staging, identity, processes.rank, fragments, made),
        state=state, rank=processes.rank, world_size=processes.world_size, gather=processes.gather,
        barrier=processes.barrier, alone=False,
    )  # fmt: skip


def _shares(maps: Sequence[ParameterMap], world_size: int) -> list[list[ParameterMap]]:
    """The parameters of each process: the largest first, each to the one that has least."""
    shares: list[list[ParameterMap]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for item in sorted(maps, key=_elements, reverse=True):
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += _elements(item)
    return shares


def _elements(item: ParameterMap) -> int:
    return sum(child.parameter.numel for child in item.children)


def _counted(tensors: Iterable[Tensor], fragments: Sequence[AnnouncedFragment], advance: Advance) -> Iterator[Tensor]:
    total = sum(fragment.length * len(fragment.keys) for fragment in fragments)
    done = 0
    for tensor in tensors:
        yield tensor
        done += tensor.numel()
        advance(done, total)
