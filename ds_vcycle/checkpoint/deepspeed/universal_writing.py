"""Writing the universal layout that DeepSpeed's ``load_universal`` takes under ZeRO 1 and 2, at any TP and dp.

The layout is that of DeepSpeed 0.19.8 (``deepspeed/checkpoint``: ds_to_universal.py, universal_checkpoint.py): a file
for each whole parameter and kind of tensor, which a loading rank cuts by ``cat_dim``, ``param_n_sub_params`` and
``vocab_tensor`` in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_vcycle.checkpoint.deepspeed.files import LATEST_UNIVERSAL, OPTIMIZER_STATE, ZERO
from ds_vcycle.checkpoint.deepspeed.universal import FILES, STEP
from ds_vcycle.checkpoint.retention import staged, sync_directory
from ds_vcycle.levels import ModelShape
from ds_vcycle.schema import Parameter, parameters

_UNIVERSAL_VERSION = 0.4
# DeepSpeed goes through its optimizer groups and the file's side by side and leaves out those that one has more of.
_GROUPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class UniversalExport:
    """What is to be written.

    Attributes:
        shape: of the level.
        keys: kinds of tensors that are there: "master", and the moments if there are any.
        adam_step: of the moments.
        counters: global_steps, global_samples and skipped_steps, as far as they are known.
        tp: number of model files, which say the same.
    """

    shape: ModelShape
    keys: Sequence[str]
    adam_step: int
    counters: Mapping[str, int]
    tp: int

    @property
    def tag(self) -> str:
        """The name of the checkpoint inside the directory."""
        return f"global_step{self.counters.get('global_steps', self.adam_step)}"


def write_universal(
    to: Path, export: UniversalExport, whole: Callable[[Parameter, str], Tensor],
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> None:  # fmt: skip
    """Write a directory that ``engine.load_checkpoint`` takes where ``checkpoint.load_universal`` is set.

    What was there before goes only after the new one is complete.

    Args:
        to: the directory; its parent may hold other things.
        export: what is to be written.
        whole: the value of a parameter for a key, fp32 of its shape without pad rows.
        advance: told of the elements done and to do.

    Raises:
        CheckpointError: the disk is full, or the file system refuses otherwise; nothing is left behind.
    """
    with staged(to) as staging:
        _write_parameters(staging / export.tag / ZERO, export, whole, advance)
        _write_rest(staging, export)


def universal_checkpoint_info(shape: ModelShape) -> dict[str, Any]:
    """The names and sizes by which ds_to_universal merges tensor-parallel slices, for models of this shape.

    A job whose native checkpoints are to be converted by ds_to_universal saves it as
    ``client_state={"universal_checkpoint_info": ...}``.
    """
    table = parameters(shape)
    return {
        "universal_checkpoint_version": _UNIVERSAL_VERSION,
        "original_vocab_size": shape.vocab_size,
        "padded_vocab_size": shape.padded_vocab,
        "vocabulary_parameter_patterns": _patterns(p for p in table if p.dims[0].axis == "vocab" and len(p.dims) > 1),
        "tp_replicated_parameter_patterns": _patterns(p for p in table if p.tp_dim is None),
        "parameter_with_row_parallelism_patterns": _patterns(p for p in table if p.tp_dim == 1),
        "parameter_with_2_sub_params_cat_dim_0": _patterns(p for p in table if p.tp_stride == 2),
    }


def _patterns(table: Any) -> list[str]:
    """Regular expressions of names, one for all layers."""
    found = (re.escape(p.template).replace(re.escape("{}"), r"\d+") + "$" for p in table)
    return list(dict.fromkeys(found))


def _write_parameters(
    folder: Path, export: UniversalExport, whole: Callable[[Parameter, str], Tensor],
    advance: Callable[[int, int], None],
) -> None:  # fmt: skip
    table = parameters(export.shape)
    total, done = sum(p.numel for p in table) * len(export.keys), 0
    for parameter in table:
        (folder / parameter.name).mkdir(parents=True)
        for key in export.keys:
            _save(_entry(parameter, whole(parameter, key)), folder / parameter.name / FILES[key])
            done += parameter.numel
            advance(done, total)
        if len(export.keys) > 1:
            _save(torch.tensor(float(export.adam_step)), folder / parameter.name / STEP)
        sync_directory(folder / parameter.name)


def _entry(parameter: Parameter, value: Tensor) -> dict[str, Any]:
    """A tensor with what a loading rank needs to cut its own slice out of it."""
    found: dict[str, Any] = {"param": value}
    if parameter.tp_dim is not None:
        found["cat_dim"] = parameter.tp_dim
    if parameter.tp_stride > 1:
        found["param_n_sub_params"] = parameter.tp_stride
    if parameter.dims[0].axis == "vocab":
        # Without pad rows, which the loading rank appends: zeros, as many as its own padded vocabulary has. It can do
        # so with matrices only, so a bias is given as a column.
        found |= {"vocab_tensor": True, "param": value.view(-1, 1) if value.dim() == 1 else value}
    return found


def _write_rest(staging: Path, export: UniversalExport) -> None:
    folder = staging / export.tag
    release = version("deepspeed")
    # Groups without settings: the loading engine keeps its own learning rate, betas and weight decay.
    groups = [{"params": [index]} for index in range(_GROUPS)]
    _save({"param_groups": groups, "ds_version": release}, folder / ZERO / OPTIMIZER_STATE)
    counters = {key: export.counters.get(key, 0) for key in ("global_steps", "global_samples", "skipped_steps")}
    model = {
        **counters,
        "iteration": counters["global_steps"],
        "module": {},
        "lr_scheduler": None,
        "dp_world_size": 1,
        "mp_world_size": export.tp,
        "ds_version": release,
        "universal_checkpoint_info": universal_checkpoint_info(export.shape),
    }
    for rank in range(export.tp):
        _save(model, folder / f"mp_rank_{rank:02d}_model_states.pt")
    with (staging / LATEST_UNIVERSAL).open("w") as file:
        file.write(export.tag)
        file.flush()
        os.fsync(file.fileno())
    for directory in (folder / ZERO, folder, staging):
        sync_directory(directory)


def _save(value: Any, path: Path) -> None:
    with path.open("xb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
