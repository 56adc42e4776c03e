"""A universal checkpoint as a source of our parameters: one file for each parameter and kind of tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_vcycle.checkpoint.deepspeed.files import OPTIMIZER_STATE, ZERO, digest, model_files
from ds_vcycle.checkpoint.deepspeed.loading import load_file, load_value
from ds_vcycle.checkpoint.deepspeed.matching import Found, held_parameters, pad_as_real, plain_names
from ds_vcycle.checkpoint.deepspeed.partition_files import MOMENTS
from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.config import RunConfig
from ds_vcycle.levels import ModelShape, resolve_levels
from ds_vcycle.schema import Parameter

FILES = {"master": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
STEP = "step.pt"
_NATIVE = "convert the native checkpoint it was made from instead (--from the directory with zero_pp_rank_* files)"


class UniversalSource:
    """The weights of a universal checkpoint under our names (a :class:`ds_vcycle.checkpoint.source.WeightSource`).

    Attributes:
        config: the configuration given; level 1 is the model.
        keys: "master", and the moments if they are there.
        layout: what it is, in words.
        held: the parameters with the pad rows of their vocabulary as they are there.
    """

    def __init__(self, directory: Path, config: RunConfig, whose: str) -> None:
        self.config = config
        self.directory = directory
        self.layout = "universal layout"
        shape = resolve_levels(config)[0].shape
        folders = {str(p.parent.relative_to(directory / ZERO)): p.parent for p in directory.glob(f"{ZERO}/**/fp32.pt")}
        if not folders:
            raise CheckpointError(f"{directory / ZERO} holds no parameter (no NAME/fp32.pt); copy it again")
        plain = plain_names(list(folders))
        self._folders = {plain[name]: path for name, path in sorted(folders.items())}
        self.keys = self._common_keys()
        _check_source(directory, shape)
        self._tensors = {
            (name, key): _tensor(path / FILES[key]) for name, path in self._folders.items() for key in self.keys
        }
        found = Found(where=directory, config=whose, tp=1)
        shapes = {name: self._shape(name) for name in self._folders}
        self.held = held_parameters(found, shapes, shape)
        self._check_parts(shape)
        self._state = {
            "level": 1,
            "config": config.model_dump(mode="json"),
            "adam_step": self._step() if len(self.keys) > 1 else 0,
            "counters": _counters(directory),
        }

    @property
    def identity(self) -> str:
        """A digest of the files' names, sizes and times."""
        return digest(path / FILES[key] for path in self._folders.values() for key in self.keys)

    @property
    def state(self) -> Mapping[str, Any]:
        """As a checkpoint of ours would record it."""
        return self._state

    def expect(self, parameters: Iterable[Parameter]) -> None:
        """It holds these parameters and no others; the constructor has made sure of that."""
        assert {parameter.name for parameter in parameters} == self.held.keys()

    def check(self, parameter: Parameter) -> None:
        """Nothing is held twice here."""

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
        out = torch.zeros(length)
        width = parameter.numel // parameter.dims[0].size
        real = max(min(start + length, parameter.dims[0].real * width) - start, 0)
        out[:real] = self._tensors[parameter.name, key].reshape(-1)[start : start + real]
        return out

    def trained_padding(self) -> list[str]:
        """The parameters whose pad rows are not zero, as where the model does not mask their logits."""
        found = []
        for name, held in self.held.items():
            first, whole = held.dims[0].real * (held.numel // held.dims[0].size), pad_as_real(held)
            if self.read(whole, tp=1, tp_rank=0, start=first, length=held.numel - first, key="master").any():
                found.append(name)
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter; a vocabulary's bias may be kept as one column, so that DeepSpeed can pad it."""
        shapes = [tuple(self._tensors[name, key].shape) for key in self.keys]
        for key, shape in zip(self.keys, shapes):
            if shape != shapes[0]:
                raise CheckpointError(
                    f"{self._folders[name]}: {FILES[key]} has shape {list(shape)}, fp32.pt {list(shapes[0])}; copy it "
                    "again"
                )
        return shapes[0][:1] if name.endswith(".bias") and shapes[0][1:] == (1,) else shapes[0]

    def _common_keys(self) -> tuple[str, ...]:
        names = {key: [name for name, path in self._folders.items() if (path / FILES[key]).is_file()] for key in FILES}
        if not any(names[key] for key in MOMENTS):
            return ("master",)
        for key in MOMENTS:
            lacking = [name for name in self._folders if name not in names[key]]
            if lacking:
                raise CheckpointError(
                    f"{self._folders[lacking[0]] / FILES[key]} is missing, and other parameters have theirs; copy the "
                    "checkpoint again, or remove every exp_avg.pt and exp_avg_sq.pt to go on without moments"
                )
        return tuple(FILES)

    def _check_parts(self, shape: ModelShape) -> None:
        """Gate and up rows that were merged as if they were one have the right shape and are interleaved."""
        if len(model_files(self.directory)) < 2:
            return
        for name, parameter in self.held.items():
            path = self._folders[name] / FILES["master"]
            parts = load_file(path).get("param_n_sub_params", 1)
            if parameter.tp_stride != parts and parameter.tp_dim is not None:
                raise CheckpointError(
                    f"{path}: tensor-parallel slices of {name} were merged in {parts} part, its gate and up rows are "
                    f"{parameter.tp_stride}, which are now interleaved; save with '.*linear_fc1.*' among the "
                    f"parameter_with_2_sub_params_cat_dim_0 of universal_checkpoint_info, or {_NATIVE}"
                )

    def _step(self) -> int:
        """Adam's step, of each parameter or for all in ``optimizer_state.pt``."""
        files = [path / STEP for path in self._folders.values()]
        there = [path for path in files if path.is_file()]
        for path in files:
            if there and path not in there:
                raise CheckpointError(f"{path} is missing, and other parameters have theirs; copy the checkpoint again")
        steps = {int(load_value(path)): path for path in there}
        path = self.directory / ZERO / OPTIMIZER_STATE
        if not steps:
            groups = load_file(path).get("param_groups", ())
            steps = {int(group["step"]): path for group in groups if "step" in group}
        if len(steps) != 1:
            said = " and ".join(f"{step} ({file})" for step, file in steps.items()) or f"none ({path})"
            raise CheckpointError(f"Adam's step is {said}, where there is one for all parameters; copy it again")
        return next(iter(steps))


def _check_source(directory: Path, shape: ModelShape) -> None:
    """What the job that saved it says of itself does not contradict the weights."""
    for path in model_files(directory)[:1]:
        tree = load_file(path)
        settings = tree.get("ds_config")
        zero = settings.get("zero_optimization") if isinstance(settings, dict) else None
        if isinstance(zero, dict) and zero.get("round_robin_gradients") and int(tree.get("dp_world_size", 2)) > 1:
            raise CheckpointError(
                f"{path} was saved with zero_optimization.round_robin_gradients=true, under which ds_to_universal "
                f"takes one parameter's elements for another's; {_NATIVE}"
            )
        info = tree.get("universal_checkpoint_info")
        said = info.get("original_vocab_size") if isinstance(info, dict) else None
        if said is not None and said != shape.vocab_size:
            raise CheckpointError(
                f"{path}: original_vocab_size={said}, the configuration has model.vocab_size={shape.vocab_size}; set "
                f"model.vocab_size={said}"
            )


def _counters(directory: Path) -> dict[str, int]:
    trees = [load_file(path) for path in model_files(directory)[:1]]
    return {key: int(tree.get(key, 0)) for tree in trees for key in ("global_steps", "global_samples")}


def _tensor(path: Path) -> Tensor:
    found = load_value(path)
    if isinstance(found, Tensor):
        raise CheckpointError(
            f"{path} is a bare tensor, as ds_to_universal writes for ZeRO 3, where padded vocabularies and "
            f"tensor-parallel slices go wrong; {_NATIVE}"
        )
    tensor = found.get("param") if isinstance(found, dict) else None
    if not isinstance(tensor, Tensor):
        raise CheckpointError(
            f"{path} has no tensor 'param'; it is no universal checkpoint's, or damaged: copy it again"
        )
    return tensor.detach()
