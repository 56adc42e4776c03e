"""Held-out loss before and after each change of level, for every policy and blend: what each choice costs.

``python -m tests.bench.transitions`` (``make transitions``): the demo GPT and the demo BERT on their real corpora, one
process, the demo configurations with shortened phases. One table per architecture; ``--out`` writes them as Markdown.

Computed once where the mathematics is the same: level 1 does not depend on any policy; ``split`` and ``first`` go down
alike (both sum the residual writers), and with ``moments=reset`` the coarse training then starts from the same bits, so
they share it. Only Adam's moments would tell the two apart, and no loss of a transition depends on them.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ds_vcycle.config import DepthPolicy, EmbeddingPolicy, OperatorsConfig, RunConfig, load_config
from ds_vcycle.cycle.checks import RunPlan, check_run
from ds_vcycle.cycle.phases import Train
from ds_vcycle.cycle.transition import Fragments, Staged, fill, masters, refine_into, stage_down, stage_up
from ds_vcycle.data.batches import evaluation_batches, step_batches
from ds_vcycle.evaluate.heldout import held_out_loss
from ds_vcycle.levels import Level
from ds_vcycle.model.build import build_model
from ds_vcycle.operators.plan import plan_transition
from ds_vcycle.parallel import Mesh, init_distributed, mesh_for, shutdown
from ds_vcycle.random_states import seed_ranks
from ds_vcycle.sharding.geometry import Geometry
from ds_vcycle.sharding.placement import layout_of
from ds_vcycle.sharding.release import release
from ds_vcycle.sharding.zero import Engine
from ds_vcycle.train.engine import build_engine
from ds_vcycle.train.loop import train_step
from ds_vcycle.train.lr import learning_rate

EMBEDDINGS: tuple[EmbeddingPolicy, ...] = ("reference", "lossless")
GOING_UP: dict[DepthPolicy, tuple[DepthPolicy, ...]] = {"copy": ("copy",), "first": ("split", "first")}
BLENDS = {
    "de-coalesced": (1.0, 0.0),
    "interpolate": (0.25, 0.75),  # the paper ties beta = 1 - alpha
    "correct": (1.0, 1.0),  # multigrid's correction
    "in between": (1.0, 0.25),  # the demo's setting
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Held-out losses (nats) of one pair of policies, in the order in which a cycle meets them; ``up`` by blend."""

    embedding: EmbeddingPolicy
    depth: DepthPolicy
    before: float
    coalesced: float
    trained: float
    up: dict[str, float]


@dataclass(kw_only=True)
class _Bench:
    """One architecture: its run, its mesh, and when it began."""

    plan: RunPlan
    mesh: Mesh
    begun: float

    def engine(self, level: Level, seed: int | None = None) -> Engine:
        config = self.plan.config
        model = build_model(level, config.model, mesh=self.mesh, seed=seed)
        return build_engine(model, level, config, self.mesh)

    def geometry(self, embedding: EmbeddingPolicy, depth: DepthPolicy) -> Geometry:
        fine, coarse = self.plan.levels
        layouts = {"fine": layout_of(fine, self.plan.config, 1), "coarse": layout_of(coarse, self.plan.config, 1)}
        policies = OperatorsConfig(embedding=embedding, depth_residual=depth)
        return Geometry(plan=plan_transition(fine, coarse, policies), **layouts)

    def train(self, engine: Engine, phase: Train, first: int) -> None:
        """All steps of a phase, on the samples from step ``first`` of the run on."""
        batch, level = self.plan.config.training.global_batch, self.plan.level(phase.level)
        for step in range(phase.steps):
            batches = step_batches(
                self.plan.training, position=(first + step) * batch, global_batch=batch, micro_batch=level.micro_batch,
                dp_rank=0, dp_size=1,
            )  # fmt: skip
            train_step(engine, batches, lr=learning_rate(phase.lr, step), mesh=self.mesh)

    def held_out(self, engine: Engine) -> float:
        """On the same samples, masked alike, at every level."""
        config = self.plan.config
        micro_batch = config.evaluation.micro_batch or config.training.micro_batch
        batches = evaluation_batches(
            self.plan.held_out, count=config.evaluation.samples, micro_batch=micro_batch, dp_rank=0, dp_size=1
        )
        return held_out_loss(engine, batches, self.mesh)

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begun:4.0f} s] {self.plan.config.model.architecture}: {text}", flush=True)


def measure(config: RunConfig) -> list[Row]:
    """Every policy and blend of one configuration with two levels, in one process.

    Raises:
        UserError: the configuration or its data cannot be used.
    """
    init_distributed(config.training.device)
    bench = _Bench(plan=check_run(config, 1), mesh=mesh_for(1), begun=time.perf_counter())
    fine_level, coarse_level = bench.plan.levels
    first, last = (phase for phase in bench.plan.phases[:3] if isinstance(phase, Train))
    seed_ranks(config.training.seed, bench.mesh)

    engine = bench.engine(fine_level, seed=config.training.seed)
    bench.train(engine, first, 0)
    before, parked = bench.held_out(engine), masters(engine)
    bench.say(f"level 1, {first.steps} steps: {before:.3f}")
    down = {
        key: stage_down(engine, bench.geometry(*key), bench.mesh, "reset")
        for key in itertools.product(EMBEDDINGS, GOING_UP)
    }
    release(engine)

    losses: dict[tuple[EmbeddingPolicy, DepthPolicy], tuple[float, float]] = {}
    up: dict[tuple[EmbeddingPolicy, DepthPolicy], dict[str, Staged]] = {}
    for key, staged in down.items():
        engine = bench.engine(coarse_level)
        fill(engine, staged)
        coalesced = bench.held_out(engine)
        bench.train(engine, last, first.steps)
        losses[key] = coalesced, bench.held_out(engine)
        bench.say(f"{key[0]}, {' and '.join(GOING_UP[key[1]])}: {coalesced:.3f}, then {losses[key][1]:.3f}")
        for depth in GOING_UP[key[1]]:
            up[key[0], depth] = _stage_blends(bench, engine, parked, bench.geometry(key[0], depth))
        release(engine)

    engine, rows = bench.engine(fine_level), []
    for (embedding, depth), staged_blends in up.items():
        refined = _refined(bench, engine, parked, staged_blends, bench.geometry(embedding, depth))
        coalesced, trained = losses[embedding, "copy" if depth == "copy" else "first"]
        rows.append(
            Row(embedding=embedding, depth=depth, before=before, coalesced=coalesced, trained=trained, up=refined)
        )
    release(engine)
    bench.say("done")
    return rows


def _stage_blends(bench: _Bench, engine: Engine, parked: Fragments, geometry: Geometry) -> dict[str, Staged]:
    return {
        name: stage_up(engine, parked, geometry, bench.mesh, alpha=alpha, beta=beta, moments="reset")
        for name, (alpha, beta) in BLENDS.items()
    }


def _refined(
    bench: _Bench, engine: Engine, parked: Fragments, staged: dict[str, Staged], geometry: Geometry
) -> dict[str, float]:
    """The loss of each blend; every refine fills the engine anew from the parked level."""
    losses = {}
    for name, (alpha, beta) in BLENDS.items():
        refine_into(engine, parked, staged[name], geometry, bench.mesh, alpha=alpha, beta=beta)
        losses[name] = bench.held_out(engine)
    return losses


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table as text: a header, then a line per row."""
    blends = [f"{name} ({alpha:g}, {beta:g})" for name, (alpha, beta) in BLENDS.items()]
    header = ["embedding", "depth", "coalesced", "trained", *blends]
    return [header] + [
        [row.embedding, row.depth, *(f"{loss:.3f}" for loss in (row.coalesced, row.trained, *row.up.values()))]
        for row in rows
    ]


def caption(config: RunConfig, rows: Sequence[Row]) -> str:
    """What was measured, and the loss that all rows begin with."""
    model, cycle = config.model, config.cycle
    return (
        f"Demo {model.architecture.upper()} ({model.layers} layers x {model.hidden}, to half of both), seed "
        f"{config.training.seed}, {config.evaluation.samples} held-out samples: level 1 after {cycle.initial.steps} "
        f"steps {rows[0].before:.3f}; level 2 trained for {cycle.coarse.steps} steps; blends (alpha, beta)"
    )


def markdown(title: str, table: list[list[str]]) -> str:
    """A table with its caption in Markdown."""
    header, *body = table
    lines = [header, ["---", "---", *["---:"] * (len(header) - 2)], *body]
    return "\n".join([f"{title}:", "", *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


def _show(title: str, table: list[list[str]], console: Console) -> None:
    shown = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for position, name in enumerate(table[0]):
        shown.add_column(name, justify="left" if position < 2 else "right")
    for line in table[1:]:
        shown.add_row(*line)
    console.print(shown)


def main() -> None:
    """Measure both demo models, print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/demo"), help="holds the prepared corpora gpt and bert")
    parser.add_argument("--initial", type=int, default=20, help="steps of level 1")
    parser.add_argument("--coarse", type=int, default=120, help="steps of level 2")
    parser.add_argument("--samples", type=int, default=128, help="held-out samples")
    parser.add_argument("--out", type=Path, help="also write the tables there, in Markdown")
    options = parser.parse_args()
    written = []
    for architecture in ("gpt", "bert"):
        overrides = [f"data.path={options.data / architecture}", f"evaluation.samples={options.samples}"]
        overrides += [f"cycle.initial.steps={options.initial}", f"cycle.coarse.steps={options.coarse}"]
        config = load_config(Path(f"configs/demo_{architecture}.yaml"), overrides)
        rows = measure(config)
        title, table = caption(config, rows), cells(rows)
        _show(title, table, Console(width=100))  # narrower would cut names
        written.append(markdown(title, table))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(written), encoding="utf-8")
    shutdown()


if __name__ == "__main__":
    main()
