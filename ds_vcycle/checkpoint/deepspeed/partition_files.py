"""What a native checkpoint's files say: shapes in order, each rank's flat partitions, Adam's state and step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ds_vcycle.checkpoint.deepspeed.files import NativeFiles
from ds_vcycle.checkpoint.deepspeed.loading import entry
from ds_vcycle.checkpoint.deepspeed.matching import plain_names
from ds_vcycle.checkpoint.deepspeed.partitions import (
    FlatSizes,
    Piece,
    Shapes,
    flat_pieces,
    flat_sizes,
    split_pieces,
    split_sizes,
)
from ds_vcycle.checkpoint.manifest import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """One rank's file.

    Attributes:
        path: of the file.
        flats: "master", and the moments if Adam had made a step -> the flat tensor of each group.
        step: Adam's; 0 without moments.
    """

    path: Path
    flats: Mapping[str, Sequence[Tensor]]
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Of one tensor-parallel rank.

    Attributes:
        pieces: of each parameter, in the order of its elements.
        sizes: of the flat tensors, by data-parallel rank and group.
    """

    pieces: Mapping[str, Sequence[Piece]]
    sizes: Sequence[Sequence[FlatSizes]]


def saved_shapes(tree: Mapping[str, Any], path: Path) -> list[Shapes]:
    """The local shapes of each group, in the order its parameters were flattened in (``param_shapes``).

    Args:
        tree: of a model file.
        path: of it.

    Raises:
        CheckpointError: it was saved without ZeRO, or with frozen parameters.
    """
    groups = entry(tree, "param_shapes", path=path)
    if groups is None:
        raise CheckpointError(f"{path} was saved without ZeRO; save it with zero_optimization.stage 1, 2 or 3")
    if frozen := tree.get("frozen_param_shapes"):
        raise CheckpointError(f"{path}: {min(frozen)} is frozen, while every parameter is trained here; unfreeze it")
    plain = plain_names([name for group in groups for name in group])
    return [{plain[name]: tuple(shape) for name, shape in group.items()} for group in groups]


def check_ranks(files: NativeFiles, model: Mapping[str, Any]) -> None:
    """The files are those of as many ranks as the model file records (raises :class:`CheckpointError`)."""
    for key, count in (("dp_world_size", files.dp), ("mp_world_size", files.tp)):
        said = model.get(key, count)
        if said != count:
            raise CheckpointError(
                f"{files.directory} has the files of {count} ranks, {files.model[0].name} says {key}={said}; copy it "
                "again, without what another job left there"
            )


def is_split(tree: Mapping[str, Any], path: Path) -> bool:
    """Whether the partitions are ZeRO 3's: each parameter split, rather than their sequence."""
    return "fp32_flat_groups" in entry(tree, "optimizer_state_dict", path=path)


def geometry_of(groups: Sequence[Shapes], optimizer: Mapping[str, Any], dp: int, *, split: bool) -> Geometry:
    """Where the elements lie.

    Args:
        groups: as :func:`saved_shapes` gives them.
        optimizer: the first data-parallel rank's file, which says what lies between parameters
            (``zero_optimization.parameter_alignment``).
        dp: data-parallel ranks.
        split: as :func:`is_split` says.
    """
    said = None if split else optimizer["optimizer_state_dict"].get("param_alignment_paddings")
    gaps = [list(map(int, gaps)) for gaps in said] if said else [[0] * len(group) for group in groups]
    made: Iterator[Piece] = split_pieces(groups, dp) if split else flat_pieces(groups, gaps, dp)
    pieces: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in made:
        pieces[piece.name].append(piece)
    sizes = [
        [split_sizes(g, dp) if split else flat_sizes(g, gap, dp, rank) for g, gap in zip(groups, gaps)]
        for rank in range(dp)
    ]
    return Geometry(pieces=pieces, sizes=sizes)


def partition_of(tree: Mapping[str, Any], path: Path, *, split: bool) -> Partition:
    """A rank's masters, moments and step.

    Raises:
        CheckpointError: a part is missing, or Adam's step is not one number.
    """
    state = entry(tree, "optimizer_state_dict", path=path)
    masters = entry(state, "fp32_flat_groups" if split else "single_partition_of_fp32_groups", path=path)
    adam = entry(state, "optimizer_state_dict" if split else "base_optimizer_state", path=path)
    kept, steps = _adam(adam, path)
    flats = {"master": [flat.detach().view(-1) for flat in masters]}
    if not any(key in group for group in kept for key in MOMENTS):
        return Partition(path=path, flats=flats, step=0)
    flats |= {key: [entry(group, key, path=path).detach().view(-1) for group in kept] for key in MOMENTS}
    if len(steps) != 1:
        raise CheckpointError(
            f"{path}: Adam's moments are of {f'steps {sorted(steps)}' if steps else 'no step'}, where they have one "
            "step here; save it from an engine whose groups all take every step"
        )
    return Partition(path=path, flats=flats, step=steps.pop())


def common_keys(partitions: Sequence[Sequence[Partition]]) -> tuple[str, ...]:
    """The kinds of tensors, the same in every file (raises :class:`CheckpointError`)."""
    first = partitions[0][0]
    for partition in (partition for ranks in partitions for partition in ranks):
        if partition.flats.keys() != first.flats.keys():
            raise CheckpointError(
                f"{partition.path} has {', '.join(partition.flats)}, {first.path.name} has {', '.join(first.flats)}: "
                "they are of different saves; copy the checkpoint again"
            )
    return tuple(first.flats)


def common_step(partitions: Sequence[Sequence[Partition]]) -> int:
    """Adam's step, the same in every file (raises :class:`CheckpointError`)."""
    first = partitions[0][0]
    for partition in (partition for ranks in partitions for partition in ranks):
        if partition.step != first.step:
            raise CheckpointError(
                f"{partition.path} is of Adam's step {partition.step}, {first.path.name} of {first.step}: they are of "
                "different saves; copy the checkpoint again"
            )
    return first.step


def _adam(adam: Any, path: Path) -> tuple[list[Mapping[str, Any]], set[int]]:
    """The state of each group's flat tensor, and the steps that are recorded (per tensor, or per group)."""
    if isinstance(adam, list):  # zero_optimization.elastic_checkpoint
        return adam, {int(group["step"]) for group in adam if "step" in group}
    groups, state = entry(adam, "param_groups", path=path), entry(adam, "state", path=path)
    kept = [state.get(index, {}) for group in groups for index in group["params"]]
    owners = kept if any("step" in group for group in kept) else groups
    return kept, {int(group["step"]) for group in owners if "step" in group}
