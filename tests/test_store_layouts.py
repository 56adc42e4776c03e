"""One checkpoint, any layout: what one layout wrote, another reads bit for bit, masters and moments, and so on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_vcycle.checkpoint import store
from ds_vcycle.checkpoint.reader import Checkpoint
from ds_vcycle.checkpoint.shard_reader import ShardReader
from ds_vcycle.checkpoint.store import CheckpointError, FlatRange, StoredFragment, open_checkpoint
from ds_vcycle.levels import resolve_levels
from ds_vcycle.schema import Dim, Parameter, parameters
from ds_vcycle.sharding.placement import Layout, placements
from tests.dist.cases_store import KEYS, on_threads
from tests.operator_cases import config_for
from tests.sharded import cut

# A vocabulary of 61 is padded to 128 x TP: no two degrees agree about the shape of the embeddings.
_SIZES = {"layers": 2, "hidden": 12, "heads": 8, "head_dim": 2, "ffn": 20, "vocab_size": 61}
_MODELS: dict[str, dict[str, int]] = {"llama_tied": {"kv_groups": 4}, "bert_order": {}, "gpt_untied": {}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout's parameters and what every rank holds of each kind of tensor, cut by the tests' own rule."""

    layout: Layout
    table: tuple[Parameter, ...]
    held: dict[str, list[dict[str, Tensor]]]


def _table(model: str, tp: int) -> tuple[Parameter, ...]:
    sizes = {**_SIZES, **_MODELS[model], "tensor_parallel": tp}
    same = {key: sizes[key] for key in ("heads", "ffn", "kv_groups") if key in sizes}  # TP 4 divides no half of them
    level, _ = resolve_levels(config_for(model, coarse=same, sizes=sizes))
    return parameters(level.shape)


def _case(model: str, layout: Layout) -> Case:
    """The same real rows under every layout, pad rows zero."""
    table = _table(model, layout.tp)
    generator = torch.Generator().manual_seed(7)
    wholes: dict[str, dict[str, Tensor]] = {key: {} for key in KEYS}
    for key in KEYS:
        for parameter in table:
            wholes[key][parameter.name] = whole = torch.zeros(parameter.shape)
            real = tuple(dim.real for dim in parameter.dims)
            whole[: real[0]] = torch.randn(real, generator=generator)
    return Case(layout=layout, table=table, held={key: cut(table, wholes[key], layout) for key in KEYS})


def _save(directory: Path, case: Case, tensors: dict[str, list[dict[str, Tensor]]]) -> None:
    """Every rank saves what it is the writer of, the ranks being threads."""
    layout, table = case.layout, {parameter.name: parameter for parameter in case.table}

    def work(rank: int, gather: Any, barrier: Any) -> None:
        dp_rank, tp_rank = layout.coordinates(rank)
        mine = [
            StoredFragment(
                parameter=table[p.name], tp=layout.tp, tp_rank=tp_rank, start=p.start, length=p.length,
                tensors={key: tensors[key][rank][p.name] for key in KEYS},
            )
            for p in placements(case.table, layout)[rank]
            if store.is_writer(table[p.name], tp_rank=tp_rank, dp_rank=dp_rank, zero_stage=layout.zero_stage)
        ]  # fmt: skip
        store.save(
            directory, fragments=mine, extras={}, state={}, rank=rank, world_size=layout.world_size, gather=gather,
            barrier=barrier,
        )  # fmt: skip

    assert on_threads(layout.world_size, work) == [None] * layout.world_size


def _read(checkpoint: Checkpoint, case: Case) -> dict[str, list[dict[str, Tensor]]]:
    """What every rank of the layout reads, its checksums verified first."""
    table = {parameter.name: parameter for parameter in case.table}
    checkpoint.expect(case.table)
    read: dict[str, list[dict[str, Tensor]]] = {key: [] for key in KEYS}
    for rank, held in enumerate(placements(case.table, case.layout)):
        at = {"tp": case.layout.tp, "tp_rank": case.layout.coordinates(rank)[1]}
        checkpoint.verify(FlatRange(parameter=table[p.name], start=p.start, length=p.length, **at) for p in held)
        with mock.patch.object(ShardReader, "check", _unchecked):
            for key in KEYS:
                found = {
                    p.name: checkpoint.read(table[p.name], start=p.start, length=p.length, key=key, **at) for p in held
                }
                read[key].append(found)
    return read


def _unchecked(reader: ShardReader, name: str) -> None:
    assert name in reader._checked, f"{name} is read but was not verified"


CHAIN = [
    Layout(world_size=1, tp=1),
    Layout(world_size=6, tp=2, zero_stage=1),
    Layout(world_size=4, tp=4, zero_stage=3),
    Layout(world_size=3, tp=1, zero_stage=2, round_robin=True),
    Layout(world_size=12, tp=4, zero_stage=1, alignment=4),
    Layout(world_size=4, tp=2, zero_stage=0),
    Layout(world_size=5, tp=1, zero_stage=3),
]


@pytest.mark.parametrize("model", _MODELS)
def test_every_layout_reads_what_another_wrote(tmp_path: Path, model: str) -> None:
    """TP 1 -> 2 -> 4 -> 1 -> 4 -> 2 -> 1 through ZeRO 0 to 3, each step saving what the one before it read."""
    first = _case(model, CHAIN[0])
    tensors = first.held
    for number, (written, wanted) in enumerate(zip(CHAIN, [*CHAIN[1:], CHAIN[0]])):
        _save(tmp_path / f"step-{number}", _case(model, written), tensors)
        case = _case(model, wanted)
        with open_checkpoint(tmp_path / f"step-{number}") as checkpoint:
            assert checkpoint.tensor_parallel == written.tp
            tensors = _read(checkpoint, case)
        for key in KEYS:
            for mine, right in zip(tensors[key], case.held[key], strict=True):
                assert mine.keys() == right.keys()
                assert [n for n in right if not torch.equal(mine[n], right[n])] == [], (written, wanted, key)


@pytest.mark.parametrize(("stored_tp", "wanted_tp"), [(1, 4), (4, 1), (2, 4), (4, 2)])
def test_columns_are_copied_as_rectangles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored_tp: int, wanted_tp: int
) -> None:
    """A matrix split by columns is read with one copy per pair of slices (and one for a part of a row), not per row."""
    dims = (Dim(axis="hidden", role="produces", length=500), Dim(axis="ffn", role="consumes", length=16))
    parameter = Parameter(template="fc2.weight", layer=None, dims=dims, tp_dim=1)
    whole = torch.randn(500, 16)

    def work(rank: int, gather: Any, barrier: Any) -> None:
        part = whole.chunk(stored_tp, 1)[rank].reshape(-1)
        fragment = StoredFragment(
            parameter=parameter, tp=stored_tp, tp_rank=rank, start=0, length=part.numel(), tensors={"master": part}
        )
        store.save(
            tmp_path / "step", fragments=[fragment], extras={}, state={}, rank=rank, world_size=stored_tp,
            gather=gather, barrier=barrier,
        )  # fmt: skip

    assert on_threads(stored_tp, work) == [None] * stored_tp
    copies: list[tuple[Any, ...]] = []
    copy_rows = ShardReader.copy_rows

    def counted(reader: ShardReader, *args: Any) -> None:
        copies.append(args)
        copy_rows(reader, *args)

    monkeypatch.setattr(ShardReader, "copy_rows", counted)
    with open_checkpoint(tmp_path / "step") as checkpoint:
        for rank, right in enumerate(whole.chunk(wanted_tp, 1)):
            copies.clear()
            length = right.numel() - 1
            read = checkpoint.read(parameter, tp=wanted_tp, tp_rank=rank, start=1, length=length, key="master")
            assert torch.equal(read, right.reshape(-1)[1:])
            assert len(copies) <= 2 * max(stored_tp // wanted_tp, 1)


def test_damage_is_found_through_another_layout(tmp_path: Path) -> None:
    """Only the shards that a rank of the new layout reads are verified, and those are."""
    case, wanted = (_case("gpt_untied", Layout(world_size=tp, tp=tp)) for tp in (4, 2))
    _save(tmp_path / "step", case, case.held)
    path = tmp_path / "step" / "rank-00003.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    fc2 = next(parameter for parameter in wanted.table if parameter.name.endswith("linear_fc2.weight"))
    with open_checkpoint(tmp_path / "step") as checkpoint:
        numel = fc2.numel // 2
        ranges = [
            FlatRange(parameter=p, tp=2, tp_rank=0, start=0, length=p.numel // (1 if p.tp_dim is None else 2))
            for p in wanted.table
        ]
        checkpoint.verify(ranges)
        with pytest.raises(CheckpointError, match=r"rank-00003\.safetensors is damaged"):
            checkpoint.verify(
                FlatRange(parameter=r.parameter, tp=2, tp_rank=1, start=0, length=r.length) for r in ranges
            )
        assert checkpoint.read(fc2, tp=2, tp_rank=0, start=0, length=numel, key="master").any()
