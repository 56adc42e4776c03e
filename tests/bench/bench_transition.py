"""What a transition costs: a BERT-Large-sized state to half its width and depth and back, against one ``copy_``.

``python -m tests.bench.bench_transition`` (``make bench-transition``). Every figure is taken in one run and given as a
ratio: the copy of the same rank's fp32 masters, with the same threads, alternates with the transition. No model and no
engine: fragments as ZeRO 1 holds them, random values (the cost does not depend on them).
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console

from ds_vcycle.config import parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.operators.plan import plan_transition
from ds_vcycle.parallel import Mesh, init_distributed, mesh_for
from ds_vcycle.sharding.exchange import Exchange
from ds_vcycle.sharding.geometry import Geometry
from ds_vcycle.sharding.placement import layout_of
from ds_vcycle.sharding.transfer import coalesce_fragments, refine_fragments
from tests.dist.ranks import values

LARGE = {"layers": 24, "hidden": 1024, "heads": 16, "sequence_length": 512, "vocab_size": 30522}
SETTINGS = {
    "1 rank": (1, 1, {}),
    "2 ranks, ZeRO 1": (2, 1, {}),
    "2 ranks, TP 2": (2, 2, {}),
    "2 ranks, TP 2, stack": (2, 2, {"groupings": {"head": "stack", "ffn": "stack"}}),
}


def geometry_of(world: int, tp: int, operators: dict, model: dict) -> Geometry:
    """The transition of the first two levels."""
    config = parse_config(
        {
            "model": {"architecture": "bert", **model, "tensor_parallel": tp},
            "operators": operators,
            "cycle": {"kind": "V", "levels": 2},
            "training": {"global_batch": 4, "micro_batch": 1, "zero_stage": 1},
            "data": {"path": "unused"},
        }
    )
    fine, coarse = resolve_levels(config)
    layouts = {"fine": layout_of(fine, config, world), "coarse": layout_of(coarse, config, world)}
    return Geometry(plan=plan_transition(fine, coarse), **layouts)


def measure(cases: dict, model: dict, rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """All settings of one world size on this rank: medians over the rounds."""
    torch.set_num_threads(threads)
    init_distributed("cpu")
    return {
        name: _measure(geometry_of(world, tp, operators, model), mesh_for(tp), rounds)
        for name, (world, tp, operators) in cases.items()
    }


def _measure(geometry: Geometry, mesh: Mesh, rounds: int) -> dict[str, float]:
    held = geometry.fine_placements(mesh.rank)
    flat = torch.randn(sum(placement.length for placement in held.values()))
    fine = dict(zip(held, flat.split([placement.length for placement in held.values()]), strict=True))
    other = flat.clone()
    exchange, coarse = Exchange(mesh=mesh), {}
    seconds: dict[str, list[float]] = {"copy": [], "coalesce": [], "refine": []}
    grown, sent = 0.0, {"coalesce": 0, "refine": 0}

    def down() -> None:
        nonlocal coarse
        coarse = coalesce_fragments(geometry, fine, "master", exchange)

    def up() -> None:
        refine_fragments(geometry, coarse, fine, "master", exchange, beta=0.25)

    for turn in range(rounds + 1):  # the first warms up
        before, resident = exchange.sent_bytes, _peak()
        for name, work in (("copy", lambda: other.copy_(flat)), ("coalesce", down), ("refine", up)):
            if name == "refine":
                sent["coalesce"] = exchange.sent_bytes - before
            seconds[name].append(_timed(work))
        sent["refine"] = exchange.sent_bytes - before - sent["coalesce"]
        grown = _peak() - resident if turn == 0 else grown
    middle = {name: median(taken[1:]) for name, taken in seconds.items()}
    elements = sum(p.coarse.numel for p in geometry.plan.maps)
    return {
        **middle,
        **{f"{name}_sent": float(value) for name, value in sent.items()},
        "bytes": float(4 * flat.numel()),
        "extra_bytes": grown,
        "coarse_bytes": float(4 * sum(v.numel() for v in coarse.values())),
        "coarse_model_bytes": float(4 * elements),
    }


def _timed(work: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()  # the slowest rank counts
    return time.perf_counter() - start


def _peak() -> float:
    """Peak resident memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def report(found: dict[str, list[dict[str, float]]]) -> str:
    """Every setting as a row of a Markdown table; seconds are rank 0's, bytes sent and memory the largest rank's."""
    heading = ["setting", "copy_ s", "coalesce s", "refine s", "both / copy_", "GB/s", "sent down", "sent up"]
    heading += ["extra memory", "/ coarse held"]
    lines = [" | ".join(heading), " | ".join(["---"] + ["---:"] * (len(heading) - 1))]
    for name, ranks in found.items():
        row = ranks[0]
        both = row["coalesce"] + row["refine"]
        most = {key: max(rank[key] for rank in ranks) for key in ("coalesce_sent", "refine_sent", "extra_bytes")}
        cells = [name, *(f"{row[key]:.3f}" for key in ("copy", "coalesce", "refine")), f"{both / row['copy']:.1f}"]
        cells += [f"{2 * row['bytes'] / both / 1e9:.2f}"]  # each fine master is read once down and once up
        cells += [f"{most[key] / 1e6:.0f} MB" for key in most]
        cells += [f"{most['extra_bytes'] / max(rank['coarse_bytes'] for rank in ranks):.2f}"]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LARGE["layers"], help="fewer layers for a quick look")
    parser.add_argument("--out", type=Path, help="also write the table there")
    options = parser.parse_args()
    model = LARGE | {"layers": options.layers}
    cores = os.cpu_count() or 1
    found: dict[str, list[dict[str, float]]] = {}
    for name, case in SETTINGS.items():  # each in processes of its own: peak memory never falls again
        arguments = [{name: case}, model, options.rounds, max(1, cores // case[0])]
        ranks = values(case[0], "tests.bench.bench_transition:measure", arguments, timeout_s=900)
        found[name] = [rank[name] for rank in ranks]
    table = report(found)
    Console().print(
        f"BERT, {model['layers']} x {model['hidden']}, vocabulary {model['vocab_size']:,}, to half its width and depth "
        "and back; weights only, fp32",
        highlight=False,
    )
    print(table)
    if options.out is not None:
        options.out.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
