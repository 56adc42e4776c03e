"""A run in progress: the one live engine, the parked levels, the position, and what every phase does with them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ds_vcycle.checkpoint.store import CheckpointError, find_latest
from ds_vcycle.cycle.checks import RunPlan
from ds_vcycle.cycle.phases import first_level
from ds_vcycle.cycle.position import Position
from ds_vcycle.cycle.progress import RunProgress
from ds_vcycle.cycle.records import RunRecords
from ds_vcycle.cycle.reporting import Reporter
from ds_vcycle.cycle.saves import Saved, Saves, record_saves
from ds_vcycle.cycle.saving import Restored, all_finite, save_parked
from ds_vcycle.cycle.stopping import StopFlag
from ds_vcycle.cycle.transition import Fragments, Staged, fill, masters
from ds_vcycle.data.batches import evaluation_batches
from ds_vcycle.evaluate.heldout import held_out_loss
from ds_vcycle.levels import Level
from ds_vcycle.model.build import build_model
from ds_vcycle.parallel import any_rank, mesh_for
from ds_vcycle.random_states import seed_ranks, set_rng_state
from ds_vcycle.sharding.placement import Layout, layout_of
from ds_vcycle.sharding.release import release as free
from ds_vcycle.sharding.zero import Engine, set_counters
from ds_vcycle.train.engine import build_engine
from ds_vcycle.train.loop import TrainingError
from ds_vcycle.train.metrics import Place, evaluation_record


class LiveRun:
    """The state of a run on this rank. ``engine`` is the only engine; parked levels are fragments on the host.

    ``average``: the moving average of the live weights where a phase keeps one, fragments on the device.
    """

    def __init__(self, plan: RunPlan, flag: StopFlag) -> None:
        self.plan = plan
        self.position = Position()
        self.parked: dict[int, Fragments] = {}
        self.average: Fragments | None = None
        self.mesh = mesh_for(plan.level(first_level(plan.phases)).tensor_parallel)
        self.engine: Engine | None = None
        self.progress = RunProgress(enabled=self.mesh.rank == 0, phases=len(plan.phases))
        self.reporter = Reporter(plan, rank=self.mesh.rank)
        self.flag = flag
        self._saves = Saves(plan.config, plan.phases)
        self._records: RunRecords | None = None
        self.held_out: float = math.nan
        self._lap = time.perf_counter()

    # --- beginning and end ---------------------------------------------------------------------------------------

    def begin(self, initial: Staged | None = None) -> None:
        """Start at the first phase's level, initialised from the seed, or from another checkpoint's weights."""
        config, level = self.plan.config, self.plan.level(first_level(self.plan.phases))
        self.position = replace(self.position, level=level.index)
        seed_ranks(config.training.seed, self.mesh)
        self._open_records(resume_at=(-1, 0) if (config.run_dir / "metrics.jsonl").exists() else None)
        self.reporter.event("started", self.position, ranks=self.mesh.world_size)
        self.engine = self.build(level, seed=config.training.seed if initial is None else None)
        self._lap = time.perf_counter()
        if initial is not None:
            fill(self.engine, initial)
            self.evaluate()
            self.progress.note(f"level 1 starts from {config.training.init_from}, held-out loss {self.held_out:.4f}")

    def restore(self, held: Restored) -> None:
        """Go on from what a checkpoint held (:func:`ds_vcycle.cycle.saving.read_run`)."""
        self.position, self.parked = held.position, held.parked
        self._open_records(resume_at=(held.position.phase, held.position.phase_step))
        seed_ranks(self.plan.config.training.seed + held.position.totals.steps, self.mesh)  # kept if none are stored
        self.engine = self.build(self.plan.level(held.position.level))
        fill(self.engine, held.staged)
        set_counters(self.engine, held.counters)
        if held.average is not None:
            self.average = {name: value.to(self.mesh.device) for name, value in held.average.items()}
        if held.random_states is not None:
            set_rng_state(held.random_states)
        else:
            change = "another number of ranks or tensor-parallel degree than before"
            self.progress.note(f"warning: {change}: random generators are seeded anew")
        self.progress.note(f"resumed from {held.directory}")
        resumed = {"ranks": self.mesh.world_size, "checkpoint": held.directory.name}
        self.reporter.event("resumed", self.position, **resumed)
        self._lap = time.perf_counter()

    @property
    def summary(self) -> str:
        """Where the run stands, in words."""
        held_out = f", held-out loss {self.held_out:.4f}" if math.isfinite(self.held_out) else ""
        return f"step {self.position.totals.steps:,}{held_out}, {self.plan.config.run_dir}"

    def close(self) -> None:
        """Let go of the engine, the progress bar and the files."""
        self.progress.close()
        self._saves.close()
        if self._records is not None:
            self._records.close()
        if self.engine is not None:
            self.release()

    # --- what every phase does -----------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Record the held-out loss here; its time is not counted.

        Raises:
            TrainingError: it is not finite, so the weights are worth no checkpoint.
        """
        self.count_seconds()
        loss, samples = self.measure(self.plan.level(self.position.level)), self.plan.config.evaluation.samples
        place, totals = self.position.place, self.position.totals
        if not math.isfinite(loss):
            raise self.not_finite(place, f"held-out loss {loss}")
        self.held_out = loss
        self.beat(at_once=True)
        self.records.write(evaluation_record(place, loss=loss, samples=samples, totals=totals))
        self.records.show([("evaluation/loss", loss, totals.steps)])
        self.records.settle()
        self._lap = time.perf_counter()

    def save(self) -> None:
        """Write a checkpoint of this position, the latest, and remove old ones; or begin to (``saving.background``).

        Raises:
            CheckpointError: it cannot be written; the earlier ones are as they were.
            TrainingError: weights or moments are not finite; nothing is written.
        """
        if any_rank(not all_finite(self.live())):
            raise self.not_finite(self.position.place, "weights or Adam's moments that are not finite")
        self.count_seconds()
        level = self.plan.level(self.position.level)
        self._record_saves(self._saves.save(self.position, self.live(), level, self.mesh, self.average))

    def park(self) -> tuple[str, Fragments]:
        """Write the live level's masters to the disk; the name that checkpoints refer to, and what was written."""
        level, parked = self.plan.level(self.position.level), masters(self.live())
        name = f"parked-{self.position.phase:02d}-level-{level.index}"
        save_parked(self.checkpoints / name, parked, level, self.layout(level), self.mesh)
        return name, parked

    def finish_save(self) -> None:
        """Wait until the save under way in the background, if there is one, is the latest checkpoint.

        Raises:
            CheckpointError: it cannot be written; the earlier ones are as they were.
        """
        self._record_saves(self._saves.finish())

    def poll_saves(self) -> None:
        """At a step boundary: commit the save under way if it is on the disk on every rank."""
        self._record_saves(self._saves.poll())

    def beat(self, *, at_once: bool = False) -> None:
        """Let others see where the run is: every few seconds, or ``at_once``."""
        self.reporter.beat(self.position, self.held_out, at_once=at_once)

    # --- parts ---------------------------------------------------------------------------------------------------

    def measure(self, level: Level) -> float:
        """The held-out loss of the live engine; it starts a new lap, so that its time is not counted."""
        config, mesh = self.plan.config, self.mesh
        batches = evaluation_batches(
            self.plan.held_out,
            count=config.evaluation.samples,
            micro_batch=config.evaluation.micro_batch or level.micro_batch,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
        )
        loss = held_out_loss(self.live(), batches, mesh)
        self._lap = time.perf_counter()
        return loss

    def known_loss(self) -> float:
        """The held-out loss before a change of level: that of the phase before, measured again after a resume."""
        if not math.isfinite(self.held_out):
            self.count_seconds()
            self.held_out = self.measure(self.plan.level(self.position.level))
        return self.held_out

    def _record_saves(self, done: Sequence[Saved]) -> None:
        if done:
            self.count_seconds()
            record_saves(done, self.records, self.position.totals)
            for saved in done:
                self.reporter.saved(saved.position, saved.own_seconds)
            self.beat(at_once=True)

    def build(self, level: Level, seed: int | None = None) -> Engine:
        """The level's engine; without a seed its weights are to be filled."""
        config = self.plan.config
        self.enter(level)
        model = build_model(level, config.model, mesh=self.mesh, seed=seed)
        return build_engine(model, level, config, self.mesh)

    def enter(self, level: Level) -> None:
        """Take the mesh of a level; ranks that are another's tensor-parallel peers now draw the same dropout."""
        mesh = mesh_for(level.tensor_parallel)
        if mesh is not self.mesh:
            seed_ranks(self.plan.config.training.seed + 1 + self.position.phase, mesh)
        self.mesh = mesh

    def release(self) -> None:
        """Free the engine, before another is built."""
        engine, self.engine = self.live(), None
        free(engine)

    @property
    def records(self) -> RunRecords:
        """What the run writes down; open once it has begun."""
        assert self._records is not None
        return self._records

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints and parked levels lie."""
        return self.plan.config.run_dir / "checkpoints"

    def live(self) -> Engine:
        """The engine, which is there."""
        assert self.engine is not None
        return self.engine

    def layout(self, level: Level) -> Layout:
        """How a level's weights lie on the ranks of this launch."""
        return layout_of(level, self.plan.config, self.mesh.world_size)

    def _open_records(self, *, resume_at: tuple[int, int] | None) -> None:
        self._records = RunRecords(self.plan.config, self.mesh.rank, resume_at=resume_at)

    def not_finite(self, place: Place, problem: str) -> TrainingError:
        """The error that ends a run whose values are not finite; a save under way is finished first."""
        with suppress(CheckpointError):  # the weights' fault comes first
            self.finish_save()
        return TrainingError(place, problem, find_latest(self.checkpoints))

    def seconds(self) -> float:
        """Wall time since the last call or evaluation."""
        now = time.perf_counter()
        seconds, self._lap = now - self._lap, now
        return seconds

    def count_seconds(self) -> None:
        """Charge the wall time since the last call or evaluation to the run."""
        self.position = replace(self.position, totals=self.position.totals.after_seconds(self.seconds()))
