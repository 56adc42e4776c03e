"""What a checkpoint costs: a GPT-Base-sized state (124 M weights, masters and moments) against ``torch.save`` of it.

``python -m tests.bench.bench_checkpoint`` (``make bench-checkpoint``). One rank, random numbers, no model. All is taken
in one run, each round one after the other, and given as a ratio: ``torch.save`` and ``torch.load`` of the same tensors
in one file, synced to the disk as ours are; ours also compares checksums. The resharding is ``ds-vcycle convert`` from
two tensor-parallel ranks to one, its memory that of the whole process; a second table gives it beside DeepSpeed's
``ds_to_universal`` (:mod:`tests.bench.against_universal`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_vcycle.checkpoint.offline.relayout import TargetLayout
from ds_vcycle.checkpoint.offline.reshard import reshard
from ds_vcycle.checkpoint.store import StoredFragment, find_latest, open_checkpoint, save, set_latest
from ds_vcycle.config import RunConfig, parse_config
from ds_vcycle.cycle import saves
from ds_vcycle.cycle.position import Position
from ds_vcycle.cycle.saving import run_state
from ds_vcycle.cycle.schedule import expand
from ds_vcycle.levels import resolve_levels
from ds_vcycle.parallel import init_distributed, mesh_for
from ds_vcycle.schema import Parameter, parameters
from ds_vcycle.sharding.placement import Layout, rank_placements
from ds_vcycle.train.metrics import Totals
from tests.bench.against_universal import compare, comparison_table
from tests.dist.ranks import values

BASE = {"layers": 12, "hidden": 768, "heads": 12, "sequence_length": 1024, "vocab_size": 50257}
KEYS = ("master", "exp_avg", "exp_avg_sq")


def run_config(run_dir: Path, layers: int, tp: int = 1) -> RunConfig:
    """A flat run of the model."""
    return parse_config(
        {
            "model": {"architecture": "gpt", **BASE, "layers": layers, "tensor_parallel": tp},
            "cycle": {"kind": "flat", "flat": {"steps": 10}},
            "training": {"global_batch": 8, "micro_batch": 1},
            "data": {"path": "unused"},
            "run_dir": str(run_dir),
        }
    )


def fragments_of(config: RunConfig, layout: Layout, rank: int) -> list[StoredFragment]:
    """Random fragments of one rank under ZeRO 1, pad rows zero."""
    table: dict[str, Parameter] = {p.name: p for p in parameters(resolve_levels(config)[0].shape)}
    found = []
    for held in rank_placements(tuple(table.values()), layout, rank):
        parameter = table[held.name]
        if parameter.tp_dim is None and rank:
            continue
        tensors = {key: torch.randn(held.length) for key in KEYS}
        if parameter.dims[0].pad:
            for tensor in tensors.values():
                _clear_pad(tensor, parameter, layout.tp, rank)
        found.append(
            StoredFragment(
                parameter=parameter, tp=layout.tp, tp_rank=rank, start=held.start, length=held.length, tensors=tensors
            )
        )
    return found


def _clear_pad(tensor: Tensor, parameter: Parameter, tp: int, rank: int) -> None:
    rows = tensor.view(parameter.local_shape(tp))
    rows[max(parameter.dims[0].real - rank * len(rows), 0) :] = 0


def in_one_process(folder: str, layers: int, rounds: int, threads: int) -> dict[str, float]:
    """Saves, loads and reshardings: medians over the rounds, in seconds."""
    torch.set_num_threads(threads)
    init_distributed("cpu")
    root = Path(folder)
    config = run_config(root / "run", layers)
    held = fragments_of(config, Layout(world_size=1, zero_stage=1), 0)
    flat = {f"{f.parameter.name}/{key}": tensor for f in held for key, tensor in f.tensors.items()}
    path = root / "state.pt"

    def load() -> None:
        with open_checkpoint(root / "checkpoint") as checkpoint:
            for f in held:
                for key in KEYS:
                    checkpoint.read(f.parameter, tp=1, tp_rank=0, start=0, length=f.length, key=key)

    written_by_two_ranks(folder, layers)
    work: dict[str, Callable[[], object]] = {
        "torch.save": lambda: _torch_save(flat, path),
        "save": lambda: _save(root / "checkpoint", held),
        "torch.load": lambda: torch.load(path, weights_only=True),
        "load": load,
        "reshard TP 2 -> 1": lambda: reshard(root / "two", root / "one", TargetLayout(tp=1), overwrite=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*work, "blocking", "background", "background stall")}
    for _ in range(rounds):
        for name, call in work.items():
            seconds[name].append(_timed(call))
        for name, took in _stalls(config, held).items():
            seconds[name].append(took)
    bytes_held = float(sum(tensor.nbytes for tensor in flat.values()))
    return {name: median(taken) for name, taken in seconds.items()} | {"bytes": bytes_held}


def written_by_two_ranks(folder: str, layers: int) -> None:
    """A run's checkpoint by two tensor-parallel ranks, in FOLDER/two."""
    config = run_config(Path(folder, "two"), layers, tp=2)
    root = config.run_dir / "checkpoints"
    position = Position(phase_step=5, totals=Totals(steps=5, samples=40))
    state = run_state(config, expand(config), position) | {"adam_step": 5, "counters": {}}
    layout = Layout(world_size=2, tp=2, zero_stage=1)
    _save_ranks(root / position.name, [fragments_of(config, layout, rank) for rank in (0, 1)], state)
    set_latest(root, position.name)


def _save(directory: Path, held: list[StoredFragment]) -> None:
    _save_ranks(directory, [held], {})


def _save_ranks(directory: Path, ranks: list[list[StoredFragment]], state: dict[str, Any]) -> None:
    """Save as the ranks would, one after the other in one thread each."""
    from tests.dist.cases_store import on_threads

    def work(rank: int, gather: Any, barrier: Any) -> None:
        save(
            directory, fragments=ranks[rank], extras={}, state=state, rank=rank, world_size=len(ranks), gather=gather,
            barrier=barrier,
        )  # fmt: skip

    assert on_threads(len(ranks), work, patience_s=600) == [None] * len(ranks)


def _stalls(config: RunConfig, held: list[StoredFragment]) -> dict[str, float]:
    """How long training stands still for a save, as a run makes it: blocking, and in the background."""
    found = {}
    mesh, level = mesh_for(1), resolve_levels(config)[0]
    simulated = {"engine_fragments": lambda *_: held, "engine_state": lambda *_: {}}
    for name, background in (("blocking", False), ("background", True)):
        tree = config.model_dump(mode="json") | {"saving": {"background": background, "keep_last": 1}}
        chosen = parse_config(tree)
        made = saves.Saves(chosen, expand(chosen))
        with mock.patch.multiple(saves, **simulated):
            for step in (1, 2):  # the first makes the memory of the copy
                done = made.save(Position(phase_step=step, totals=Totals(steps=step)), mock.Mock(), level, mesh)
                while not done:
                    time.sleep(0.01)
                    done = made.poll()
        found[name] = done[0].own_seconds
        made.close()
        if background:
            found["background stall"] = done[0].stall_seconds
    return found


def _torch_save(tensors: dict[str, Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def reshard_memory(folder: Path) -> float:
    """Peak resident bytes of ``ds-vcycle convert`` from TP 2 to TP 1, from its start to its end."""
    command = [sys.executable, "-m", "ds_vcycle", "convert", "--from", str(folder / "two"), "--to"]
    process = subprocess.Popen([*command, str(folder / "peak"), "--tp", "1"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert find_latest(folder / "peak" / "checkpoints") is not None
    return usage.ru_maxrss * 1024.0


def report(found: dict[str, float], peak: float) -> str:
    """A Markdown table: seconds, GB/s, and the ratio to what is compared with."""
    against = {
        "save": "torch.save", "load": "torch.load", "reshard TP 2 -> 1": "torch.save", "background stall": "blocking"
    }  # fmt: skip
    lines = ["| | s | GB/s | ratio |", "| --- | ---: | ---: | ---: |"]
    for name in ("torch.save", "save", "torch.load", "load", "reshard TP 2 -> 1", "blocking", "background"):
        lines.append(_row(name, found, against.get(name)))
    lines.append(_row("background stall", found, "blocking"))
    lines.append(
        f"\nPeak memory of the resharding process: {peak / 1e6:,.0f} MB (state: {found['bytes'] / 1e9:.2f} GB)"
    )
    return "\n".join(lines) + "\n"


def _row(name: str, found: dict[str, float], other: str | None) -> str:
    speed = f"{found['bytes'] / found[name] / 1e9:.2f}"
    ratio = f"{found[name] / found[other]:.2f} x {other}" if other else ""
    return f"| {name} | {found[name]:.2f} | {speed} | {ratio} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=BASE["layers"], help="fewer layers for a quick look")
    parser.add_argument("--out", type=Path, help="also write the table there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
        arguments = [folder, options.layers, options.rounds, os.cpu_count() or 1]
        (found,) = values(1, "tests.bench.bench_checkpoint:in_one_process", arguments, timeout_s=1800)
        table = report(found, reshard_memory(Path(folder)))
        two = run_config(Path(folder, "two"), options.layers, tp=2)
        table += "\n" + comparison_table(compare(Path(folder), two, options.rounds), two)
    print(table)
    if options.out is not None:
        options.out.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
