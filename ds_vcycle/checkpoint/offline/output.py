"""What an offline verb writes: a checkpoint, each process its share, or a Hugging Face directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ds_vcycle
from ds_vcycle.checkpoint.huggingface.tokenizer_files import find_tokenizer
from ds_vcycle.checkpoint.huggingface.writing import DEFAULT_SHARD, Export, shard_bytes, write_huggingface
from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.checkpoint.offline.inputs import Form, Source, form_of, tokenizer_directories
from ds_vcycle.checkpoint.offline.processes import Processes
from ds_vcycle.checkpoint.offline.streamed import AnnouncedFragment, write_streamed
from ds_vcycle.checkpoint.offline.target import check_target
from ds_vcycle.checkpoint.source import WeightSource
from ds_vcycle.checkpoint.store import save_written
from ds_vcycle.config import GroupingsConfig, RunConfig
from ds_vcycle.levels import Level
from ds_vcycle.operators.plan import ParameterMap

Advance = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The checkpoint an offline verb wrote: its level, the configuration, Adam's step if it has moments (0: none).

    ``groupings``: from the fine level to the coarse one.
    """

    directory: Path
    level: Level
    groupings: GroupingsConfig
    adam_step: int
    config: RunConfig
    form: Form = "store"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is written: per coarse parameter the fragments it gives, and their tensors when they are asked for."""

    maps: Sequence[ParameterMap]
    fragments: Callable[[ParameterMap], list[AnnouncedFragment]]
    tensors: Callable[[ParameterMap], Iterator[Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Where an offline verb writes, and how.

    Attributes:
        to: directory to write; its parent may hold other things.
        form: a checkpoint, or a Hugging Face directory; by default what the (fine) source is.
        overwrite: replace what is there, if it has that form.
        max_shard_size: of the files of a Hugging Face directory.
    """

    to: Path
    form: Form | None = None
    overwrite: bool = False
    max_shard_size: str = DEFAULT_SHARD


def checked_form(output: Output, sources: Sequence[Source], processes: Processes) -> Form:
    """The form that is written; refuses what the target does not allow."""
    form = output.form or form_of(sources[0])
    check_target(output.to, sources, overwrite=output.overwrite, form=form)
    if form == "huggingface" and processes.world_size > 1:
        raise CheckpointError(
            f"--to {output.to}: a Hugging Face directory is written by one process; start without a launcher, or "
            "write a checkpoint with --format store"
        )
    return form


def write(
    output: Output, written: Written, task: Task, *, origin: Mapping[str, Any], source: Source, processes: Processes,
    advance: Advance,
) -> None:  # fmt: skip
    """Write what ``written`` says. Called by every process.

    Args:
        output: where, and how.
        written: the level, its configuration, the form.
        task: what its parameters are made of.
        origin: where they come from, for a checkpoint's record.
        source: the (fine) one, which may have the tokenizer.
        processes: this one alone, or those of a launch.
        advance: told of the elements done and to do in this process.

    Raises:
        UserError: it cannot be written; nothing is left behind.
    """
    if written.form == "store":
        state = state_of(written.config, written.level, written.adam_step, origin)
        _save(output.to, task, state, processes, advance)
        return
    named = {f.parameter.name: f.parameter for item in task.maps for f in task.fragments(item)}
    export = Export(
        shape=written.level.shape, model=written.config.model, parameters=tuple(named.values()),
        identity=source.identity, tokenizer=find_tokenizer(tokenizer_directories(source, written.config)),
        max_shard_bytes=shard_bytes(output.max_shard_size),
    )  # fmt: skip
    write_huggingface(output.to, export, _wholes(task), advance)


def origin_of(source: WeightSource) -> dict[str, Any]:
    """What a checkpoint records of a source."""
    return {"directory": str(source.directory), "identity": source.identity}


def state_of(config: RunConfig, level: Level, adam_step: int, origin: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of an offline verb records."""
    return {
        "level": level.index,
        "config": config.model_dump(mode="json"),
        "adam_step": adam_step,
        "origin": dict(origin),
        "versions": {"ds-vcycle": ds_vcycle.__version__, "torch": str(torch.__version__)},
    }


def _save(to: Path, task: Task, state: Mapping[str, Any], processes: Processes, advance: Advance) -> None:
    mine = _shares(task.maps, processes.world_size)[processes.rank]
    fragments = [fragment for item in mine for fragment in task.fragments(item)]
    made = _counted((tensor for item in mine for tensor in task.tensors(item)), fragments, advance)
    save_written(
        to, lambda staging, identity: write_streamed(staging, identity, processes.rank, fragments, made),
        state=state, rank=processes.rank, world_size=processes.world_size, gather=processes.gather,
        barrier=processes.barrier, alone=False,
    )  # fmt: skip


def _wholes(task: Task) -> Iterator[Tensor]:
    """Whole parameters put together from the fragments that a task makes of them."""
    for item in task.maps:
        fragments = task.fragments(item)
        sizes: Counter[str] = Counter()
        for fragment in fragments:
            sizes[fragment.parameter.name] += fragment.length
        wholes = {name: torch.empty(size) for name, size in sizes.items()}
        shapes = {fragment.parameter.name: fragment.parameter.shape[1:] for fragment in fragments}
        for fragment, tensor in zip(fragments, task.tensors(item), strict=True):
            wholes[fragment.parameter.name][fragment.start : fragment.start + fragment.length] = tensor
        for name, whole in wholes.items():
            yield whole.view(-1, *shapes[name])


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
