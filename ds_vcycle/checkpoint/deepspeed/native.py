"""A native DeepSpeed checkpoint (ZeRO 1, 2 or 3) as a source of our parameters: masters, Adam's moments and step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_vcycle.checkpoint.deepspeed.files import NativeFiles, digest, native_files
from ds_vcycle.checkpoint.deepspeed.loading import load_file
from ds_vcycle.checkpoint.deepspeed.matching import Found, held_parameters, pad_as_real
from ds_vcycle.checkpoint.deepspeed.partition_files import (
    Geometry,
    Partition,
    check_ranks,
    common_keys,
    common_step,
    geometry_of,
    is_split,
    partition_of,
    saved_shapes,
)
from ds_vcycle.checkpoint.manifest import CheckpointError, describe
from ds_vcycle.checkpoint.slices import shared_blocks
from ds_vcycle.config import RunConfig
from ds_vcycle.levels import resolve_levels
from ds_vcycle.schema import Parameter


class NativeSource:
    """The weights of a native checkpoint under our names (a :class:`ds_vcycle.checkpoint.source.WeightSource`).

    Attributes:
        config: the configuration given; level 1 is the model.
        keys: "master", and the moments if Adam had made a step.
        layout: how it is split, in words.
        held: the parameters with the pad rows of their vocabulary as they are there.
    """

    def __init__(self, files: NativeFiles, config: RunConfig, whose: str) -> None:
        self.config = config
        self._files = files
        models = [load_file(path) for path in files.model]
        shapes = [saved_shapes(tree, path) for tree, path in zip(models, files.model)]
        check_ranks(files, models[0])
        found = Found(where=files.directory, config=whose, tp=files.tp)
        for groups in shapes:
            local = {name: size for group in groups for name, size in group.items()}
            self.held = held_parameters(found, local, resolve_levels(config)[0].shape)
        loaded = [[load_file(path) for path in ranks] for ranks in files.optimizer]
        split = is_split(loaded[0][0], files.optimizer[0][0])
        self._geometry: list[Geometry] = [
            geometry_of(groups, ranks[0], files.dp, split=split) for groups, ranks in zip(shapes, loaded)
        ]
        self._partitions: list[list[Partition]] = [
            [partition_of(tree, path, split=split) for tree, path in zip(ranks, paths)]
            for ranks, paths in zip(loaded, files.optimizer)
        ]
        self._check_lengths()
        self.keys = common_keys(self._partitions)
        self.layout = f"ZeRO {'3' if split else '1 or 2'}, TP {files.tp}, {files.dp} data-parallel ranks"
        self._state = {
            "level": 1,
            "config": config.model_dump(mode="json"),
            "adam_step": common_step(self._partitions),
            "counters": {key: int(models[0].get(key, 0)) for key in ("global_steps", "global_samples")},
        }

    @property
    def directory(self) -> Path:
        """The tag's directory."""
        return self._files.directory

    @property
    def identity(self) -> str:
        """A digest of the files' names, sizes and times."""
        return digest([*self._files.model, *(path for ranks in self._files.optimizer for path in ranks)])

    @property
    def state(self) -> Mapping[str, Any]:
        """As a checkpoint of ours would record it."""
        return self._state

    def expect(self, parameters: Iterable[Parameter]) -> None:
        """It holds these parameters and no others; the constructor has made sure of that."""
        assert {parameter.name for parameter in parameters} == self.held.keys()

    def check(self, parameter: Parameter) -> None:
        """A parameter that is not split has the same bits on every tensor-parallel rank.

        Raises:
            CheckpointError: it has not; names it.
        """
        if parameter.tp_dim is not None:
            return
        for key in self.keys:
            first, *others = (self._flat(parameter.name, t, 0, parameter.numel, key) for t in range(self._files.tp))
            for rank, other in enumerate(others, 1):
                if not torch.equal(first, other):
                    raise CheckpointError(
                        f"{self.directory}: {key} of {parameter.name} differs between mp_rank_00 and mp_rank_"
                        f"{rank:02d}, although it is not split over tensor-parallel ranks: these did not train one "
                        "model; give DeepSpeed the mpu, and the same seed for such weights"
                    )

    def read(self, parameter: Parameter, *, tp: int, tp_rank: int, start: int, length: int, key: str) -> Tensor:
        """A flat range of a whole parameter as fp32 [length] on the CPU, pad rows zero.

        Args:
            parameter: of the level.
            tp: must be 1.
            tp_rank: must be 0.
            start: first element.
            length: number of elements.
            key: "master", "exp_avg" or "exp_avg_sq".
        """
        assert (tp, tp_rank) == (1, 0), f"{parameter.name}: {tp}, {tp_rank}"
        return self._read(self.held[parameter.name], parameter, start, length, key)

    def trained_padding(self) -> list[str]:
        """The parameters whose pad rows are not zero, as where the model does not mask their logits."""
        found = []
        for name, held in self.held.items():
            first, whole = held.dims[0], pad_as_real(held)
            width = held.numel // first.size
            rest = first.pad * width
            if rest and self._read(whole, whole, first.real * width, rest, "master").any():
                found.append(name)
        return found

    def _read(self, held: Parameter, wanted: Parameter, start: int, length: int, key: str) -> Tensor:
        theirs, ours = describe(held, self._files.tp), describe(wanted, 1)
        out = torch.zeros(length)
        for block in shared_blocks(theirs, ours, 0, start, length):
            (top, bottom), (left, right) = block.rows, block.cols
            size = (bottom - top, right - left)
            first, last = top * theirs.width + left, (bottom - 1) * theirs.width + right
            taken = self._flat(held.name, block.tp_rank, first, last, key)
            into = out.as_strided(size, (ours.width, 1), block.into - start)
            into.copy_(taken.as_strided(size, (theirs.width, 1)))
        return out

    def _flat(self, name: str, tp_rank: int, first: int, last: int, key: str) -> Tensor:
        """Elements [first, last) of a parameter's slice, put together from the data-parallel ranks' files."""
        parts = []
        for piece in self._geometry[tp_rank].pieces[name]:
            low, high = max(piece.start, first), min(piece.start + piece.length, last)
            if low < high:
                flat = self._partitions[tp_rank][piece.dp_rank].flats[key][piece.group]
                parts.append(flat[piece.offset + low - piece.start :][: high - low].float())
        return torch.cat(parts)

    def _check_lengths(self) -> None:
        """Every flat tensor is as long as the order and the paddings say: else the offsets would be others."""
        for geometry, ranks in zip(self._geometry, self._partitions):
            for sizes, partition in zip(geometry.sizes, ranks):
                for key, flats in partition.flats.items():
                    lengths = [flat.numel() for flat in flats]
                    if len(flats) != len(sizes) or any(n not in (s.padded, s.real) for n, s in zip(lengths, sizes)):
                        raise CheckpointError(
                            f"{partition.path}: {key} has partitions of {lengths} elements, param_shapes of "
                            f"{self._files.model[0].name} make {[size.padded for size in sizes]}: the files are of "
                            "different jobs, or of another DeepSpeed release; load them with 0.19.8 and save again"
                        )


def open_native(directory: Path, config: RunConfig, whose: str) -> NativeSource:
    """Open a native checkpoint; its tensors are mapped, and read when asked for.

    Args:
        directory: the tag's.
        config: whose level 1 it is of.
        whose: the configuration, for messages.

    Raises:
        CheckpointError: a file is missing, damaged or of another kind; a parameter is missing, left over or of another
            shape; all by name.
    """
    return NativeSource(native_files(directory), config, whose)
