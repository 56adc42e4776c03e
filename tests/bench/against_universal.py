"""Our resharding beside DeepSpeed's ``ds_to_universal``: what two tensor-parallel ranks hold, made whole.

Part of ``make bench-checkpoint``. The native checkpoint (ZeRO 1, bf16 weights, fp32 masters and moments) is that of an
engine with the same model after one step. Each conversion runs in a process of its own whose imports are not counted,
its input in the page cache and nothing of another's left to be written to the disk; they take turns in one run.
Ours syncs what it wrote and checks and writes checksums, DeepSpeed's does neither.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ds_vcycle.checkpoint.deepspeed.universal_writing import universal_checkpoint_info
from ds_vcycle.checkpoint.store import find_latest, open_checkpoint
from ds_vcycle.config import RunConfig, parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.model.build import build_model
from ds_vcycle.parallel import init_distributed, mesh_for
from ds_vcycle.random_states import seed_ranks
from ds_vcycle.schema import parameters
from ds_vcycle.train.engine import build_engine, set_lr
from tests.dist.ranks import values

TAG = "global_step1"
TOKENS = 64  # of the one step: enough that Adam has moments
TRAINING = {"global_batch": 1, "micro_batch": 1, "zero_stage": 1, "precision": "bf16", "device": "cpu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """One way to make the checkpoint whole: median seconds, bytes written."""

    name: str
    seconds: float
    written: int


def compare(root: Path, config: RunConfig, rounds: int) -> list[Conversion]:
    """Ours first.

    Args:
        root: holds the run directory ``two`` with our checkpoint of the model at TP 2.
        config: of that run.
        rounds: conversions of each kind.
    """
    prepare(root / "native", config)
    native, whole = root / "native" / TAG, root / "whole"
    work: dict[str, tuple[object, ...]] = {
        "reshard TP 2 -> 1": (root / "two", whole),
        "ds_to_universal, 4 + 2 workers (its defaults)": (native, whole / TAG, 4, 2),
        "ds_to_universal, one process": (native, whole / TAG, 1, 1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    written = {}
    for _ in range(rounds):
        for name, arguments in work.items():
            seconds[name].append(_seconds(arguments))
            written[name] = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
            _check(whole, config)
            shutil.rmtree(whole)
    return [Conversion(name=name, seconds=median(seconds[name]), written=written[name]) for name in work]


def prepare(native: Path, config: RunConfig) -> None:
    """A native checkpoint of the model by two tensor-parallel ranks, without what ds_to_universal trips over."""
    arguments = [str(native), config.model_dump(mode="json") | {"training": TRAINING}]
    values(2, "tests.bench.against_universal:train_and_save", arguments, timeout_s=900)
    for path in (native / TAG).glob("mp_rank_*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        # Megatron's empty extra states are None
        state["module"] = {name: value for name, value in state["module"].items() if value is not None}
        torch.save(state, path)


def train_and_save(directory: str, tree: dict[str, Any]) -> None:
    """One step of the configured model, and DeepSpeed's own checkpoint after it. Run in every rank."""
    init_distributed("cpu")
    config = parse_config(tree)
    level = resolve_levels(config)[0]
    mesh = mesh_for(level.tensor_parallel)
    seed_ranks(1, mesh)
    engine = build_engine(build_model(level, config.model, mesh=mesh, seed=1), level, config, mesh)
    set_lr(engine, 1e-4)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(level.shape.vocab_size, (1, TOKENS + 1), generator=generator)
    loss, _ = engine(tokens=tokens[:, :-1], labels=tokens[:, 1:], weights=torch.ones(1, TOKENS))
    engine.backward(loss / TOKENS)
    engine.step()
    client = {"iteration": 1, "universal_checkpoint_info": universal_checkpoint_info(level.shape)}
    engine.save_checkpoint(directory, tag=TAG, client_state=client)


def comparison_table(found: Sequence[Conversion], config: RunConfig) -> str:
    """A Markdown table, each conversion as a multiple of ours."""
    shape = resolve_levels(config)[0].shape
    weights = sum(parameter.numel for parameter in parameters(shape))
    model = f"GPT of {shape.layers} layers, {weights / 1e6:.0f} M weights, masters and moments, TP 2 to whole"
    lines = [f"| {model} | s | GB written | x ours |", "| --- | ---: | ---: | ---: |"]
    for one in found:
        ratio = one.seconds / found[0].seconds
        lines.append(f"| {one.name} | {one.seconds:.2f} | {one.written / 1e9:.2f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def _seconds(arguments: Sequence[object]) -> float:
    """Of :mod:`tests.bench.conversion` with these arguments."""
    command = [sys.executable, "-m", "tests.bench.conversion", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


def _check(whole: Path, config: RunConfig) -> None:
    """All parameters are there, whole, with their moments."""
    table = parameters(resolve_levels(config)[0].shape)
    zero = whole / TAG / "zero"
    if zero.is_dir():
        assert {path.name for path in zero.iterdir() if path.is_dir()} == {p.name for p in table}
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            for p in table:
                state = torch.load(zero / p.name / f"{kind}.pt", mmap=True)
                real = (p.dims[0].real, *p.shape[1:])
                assert tuple(state["param"].shape) == real, f"{p.name} {kind}: {tuple(state['param'].shape)}"
    else:
        directory = find_latest(whole / "checkpoints")
        assert directory is not None
        with open_checkpoint(directory) as checkpoint:
            checkpoint.expect(table)
            assert checkpoint.tensor_parallel == 1
            assert all(set(checkpoint.keys(p)) == {"master", "exp_avg", "exp_avg_sq"} for p in table)
