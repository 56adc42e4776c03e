"""DeepSpeed's native files put together by hand, so that any of their variants, and any damage, costs no engine."""

from __future__ import annotations

import argparse
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from ds_vcycle.config import parse_config
from ds_vcycle.schema import Parameter, parameters
from ds_vcycle.sharding.placement import Layout
from tests.deepspeed_case import Case
from tests.sharded import local_slice
from tests.stored import store_wholes

KEYS = ("master", "exp_avg", "exp_avg_sq")
ODD = {"layers": 1, "hidden": 20, "ffn": 26}
PLAIN = Case(name="plain", model=ODD)
SPLIT = Case(name="split", tp=2, stage=3, model=ODD)
GATED = Case(name="gated", tp=2, model=ODD | {"activation": "swiglu", "bias": False})
Wholes = dict[str, dict[str, Tensor]]


class LossScaler:
    """Of a class that nobody who reads the file can import."""

    def __init__(self) -> None:
        self.cur_scale = 1.0


@dataclass(frozen=True, kw_only=True)
class Written:
    """How the files are written.

    ``step_in_groups``: as DeepSpeed's fused Adam counts. ``elastic``: of ``elastic_checkpoint``. ``padded``: the fp32
    partitions keep their padding, as BF16_Optimizer's do. ``prefix``: of all names. ``empty``: a parameter without
    elements lies among the others.
    """

    case: Case
    dp: int = 2
    step: int = 7
    step_in_groups: bool = False
    elastic: bool = False
    padded: bool = False
    prefix: str = ""
    file_prefix: str = ""
    empty: bool = False

    @property
    def table(self) -> tuple[Parameter, ...]:
        return parameters(self.case.level.shape)


def wholes(case: Case, *, trained_padding: bool = False) -> Wholes:
    """Random masters and moments; pad rows zero, unless they were trained."""
    found: Wholes = {}
    for seed, key in enumerate(KEYS):
        generator = torch.Generator().manual_seed(seed)
        found[key] = {}
        for parameter in parameters(case.level.shape):
            whole = torch.randn(parameter.shape, generator=generator)
            if not trained_padding:
                whole[parameter.dims[0].real :] = 0
            found[key][parameter.name] = whole
    return found


def write_native(root: Path, written: Written, values: Wholes) -> Path:
    """The directory above the tag ``global_step7``, with ``latest``."""
    folder = root / "global_step7"
    folder.mkdir(parents=True)
    (root / "latest").write_text("global_step7")
    split = written.case.stage == 3
    for tp_rank in range(written.case.tp):
        groups = _groups(written)
        shapes = [OrderedDict((written.prefix + p, torch.Size(size)) for p, size in group) for group in groups]
        model = {
            "module": {"decoder._extra_state": None}, "param_shapes": shapes, "dp_world_size": written.dp,
            "mp_world_size": written.case.tp, "global_steps": 7, "global_samples": 28, "ds_version": "0.19.8",
            "args": argparse.Namespace(lr=0.1), "ds_config": {"zero_optimization": {"stage": written.case.stage}},
        }  # fmt: skip
        for dp_rank in range(written.dp if split else 1):
            prefix = f"zero_pp_rank_{dp_rank}_" if split else ""
            torch.save(model, folder / f"{prefix}mp_rank_{tp_rank:02d}_model_states.pt")
        flats = {key: _flats(written, values[key], groups, tp_rank) for key in KEYS}
        for dp_rank in range(written.dp):
            name = f"{written.file_prefix}zero_pp_rank_{dp_rank}_mp_rank_{tp_rank:02d}_optim_states.pt"
            mine = {key: [group[dp_rank] for group in flats[key]] for key in KEYS}
            torch.save(_optimizer(written, groups, mine, dp_rank), folder / name)
    return root


def _groups(written: Written) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Matrices, then vectors, each with its shape on a tensor-parallel rank."""
    sized = [(p.name, p.local_shape(written.case.tp)) for p in written.table]
    groups = [[item for item in sized if len(item[1]) > 1], [item for item in sized if len(item[1]) == 1]]
    if written.empty:
        groups[1].insert(1, ("decoder.unused", (0,)))
        groups[0].append(("decoder.unused_matrix", (0, 4)))
    return groups


def _flats(written: Written, values: dict[str, Tensor], groups: Sequence[Any], tp_rank: int) -> list[list[Tensor]]:
    """Of each group, the flat tensor of each data-parallel rank, padding (of sevens) included."""
    table = {p.name: p for p in written.table}
    found = []
    for group in groups:
        local = [
            local_slice(table[name], values[name], written.case.tp, tp_rank).reshape(-1)
            if name in table else torch.zeros(0) for name, _ in group
        ]  # fmt: skip
        if written.case.stage == 3:
            cut = [_filled(flat, math.ceil(flat.numel() / written.dp) * written.dp).chunk(written.dp) for flat in local]
            found.append([torch.cat([part[rank] for part in cut if part[0].numel()]) for rank in range(written.dp)])
        else:
            flat, unit = torch.cat(local), 2 * written.dp
            found.append(list(_filled(flat, math.ceil(flat.numel() / unit) * unit).chunk(written.dp)))
    return found


def _filled(flat: Tensor, size: int) -> Tensor:
    return torch.cat([flat, torch.full((size - flat.numel(),), 7.0)])


def _optimizer(written: Written, groups: Sequence[Any], mine: dict[str, list[Tensor]], dp_rank: int) -> dict[str, Any]:
    moments = [{key: mine[key][g].clone() for key in KEYS[1:]} for g in range(len(groups))]
    settings: list[dict[str, Any]] = [{"lr": 0.1, "params": [g]} for g in range(len(groups))]
    for place in settings if written.step_in_groups else moments:
        place["step"] = written.step if written.step_in_groups else torch.tensor(float(written.step))
    adam: Any = moments if written.elastic else {"state": dict(enumerate(moments)), "param_groups": settings}
    masters = [flat.clone() for flat in mine["master"]]
    if written.case.stage == 3:
        state = {"zero_stage": 3, "fp32_flat_groups": masters, "optimizer_state_dict": adam}
    else:
        if not written.padded:
            masters = [flat[: _real(group, written.dp, dp_rank)] for group, flat in zip(groups, masters)]
        state = {"single_partition_of_fp32_groups": masters, "base_optimizer_state": adam}
    return {"optimizer_state_dict": {**state, "loss_scaler": LossScaler()}, "ds_version": "0.19.8"}


def _real(group: Sequence[Any], dp: int, dp_rank: int) -> int:
    total = sum(math.prod(size) for _, size in group)
    run = math.ceil(total / (2 * dp)) * 2
    return min(max(total - dp_rank * run, 0), run)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Load a file, change what is in it, and save it again."""
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)


def config_file(case: Case, path: Path, **model: Any) -> Path:
    tree = case.config.model_dump(mode="json")
    tree["model"] |= model
    path.write_text(yaml.safe_dump(tree))
    return path


def stored(root: Path, case: Case, dp: int = 1, **changes: Any) -> Path:
    """A checkpoint of ours; ``changes`` of its configuration, whole sections."""
    config = parse_config(case.config.model_dump(mode="json") | changes)
    state = {"level": 1, "config": config.model_dump(mode="json"), "adam_step": 7}
    layout = Layout(world_size=dp * case.tp, tp=case.tp, zero_stage=1)
    store_wholes(root, wholes(case), case.level.shape, layout, state)
    return root
