"""A run in progress: the one live engine, the parked levels, the position, and the phases as methods."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from ds_vcycle.checkpoint.store import find_latest, prune, set_latest
from ds_vcycle.cycle.checks import RunPlan
from ds_vcycle.cycle.position import Position
from ds_vcycle.cycle.progress import RunProgress
from ds_vcycle.cycle.saving import Restored, all_finite, run_state, save_engine, save_parked
from ds_vcycle.cycle.schedule import Coalesce, Refine, Train
from ds_vcycle.cycle.stopping import StopFlag, Stopped
from ds_vcycle.cycle.transition import Fragments, Staged, fill, masters, refine_into, stage_down, stage_up
from ds_vcycle.data.batches import Batch, Prefetcher, evaluation_batches
from ds_vcycle.evaluate.heldout import held_out_loss
from ds_vcycle.faults import fault_point
from ds_vcycle.levels import Level
from ds_vcycle.model.build import build_model
from ds_vcycle.parallel import any_rank, mesh_for, raise_together, seed_ranks, set_rng_state
from ds_vcycle.sharding.geometry import Geometry
from ds_vcycle.sharding.placement import Layout, layout_of
from ds_vcycle.sharding.release import release
from ds_vcycle.sharding.zero import Engine, set_counters
from ds_vcycle.train.engine import Monitor, build_engine, build_monitor
from ds_vcycle.train.flops import predicted_positions, step_flops
from ds_vcycle.train.loop import StepResult, TrainingError, train_step
from ds_vcycle.train.lr import learning_rate
from ds_vcycle.train.metrics import (
    MetricsError,
    MetricsWriter,
    Place,
    Record,
    Totals,
    evaluation_record,
    save_record,
    step_record,
    transition_record,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """A step whose values are still on the device."""

    place: Place
    result: StepResult
    lr: float
    before: Totals
    after: Totals


class LiveRun:
    """The state of a run on this rank. ``engine`` is the only engine; parked levels are fragments on the host."""

    def __init__(self, plan: RunPlan, flag: StopFlag) -> None:
        self.plan = plan
        self.position = Position()
        self.parked: dict[int, Fragments] = {}
        self.mesh = mesh_for(plan.level(1).tensor_parallel)
        self.engine: Engine | None = None
        self.progress = RunProgress(enabled=self.mesh.rank == 0, phases=len(plan.phases))
        self.flag = flag
        self._metrics: MetricsWriter | None = None
        self._monitor: Monitor | None = None
        self._unwritten: MetricsError | None = None
        self._pending: list[_Measured] = []
        self._held_out: float = math.nan
        self._lap = time.perf_counter()

    # --- beginning and end ---------------------------------------------------------------------------------------

    def begin(self, initial: Staged | None = None) -> None:
        """Start at the first phase with level 1 initialised from the seed, or from another checkpoint's weights."""
        config = self.plan.config
        seed_ranks(config.training.seed, self.mesh)
        self._open_records(resume_at=(-1, 0) if (config.run_dir / "metrics.jsonl").exists() else None)
        self.engine = self._build(self.plan.level(1), seed=config.training.seed if initial is None else None)
        if initial is not None:
            fill(self.engine, initial)
            self.progress.note(f"level 1 starts from {config.training.init_from}")
        self._lap = time.perf_counter()

    def restore(self, held: Restored) -> None:
        """Go on from what a checkpoint held (:func:`ds_vcycle.cycle.saving.read_run`)."""
        self.position, self.parked = held.position, held.parked
        self._open_records(resume_at=(held.position.phase, held.position.phase_step))
        seed_ranks(self.plan.config.training.seed + held.position.totals.steps, self.mesh)  # kept if none are stored
        self.engine = self._build(self.plan.level(held.position.level))
        fill(self.engine, held.staged)
        set_counters(self.engine, held.counters)
        if held.random_states is not None:
            set_rng_state(held.random_states)
        else:
            self.progress.note(
                "warning: another number of ranks or tensor-parallel degree than before: random generators are seeded "
                "anew"
            )
        self.progress.note(f"resumed from {held.directory}")
        self._lap = time.perf_counter()

    @property
    def summary(self) -> str:
        """Where the run stands, in words."""
        held_out = f", held-out loss {self._held_out:.4f}" if math.isfinite(self._held_out) else ""
        return f"step {self.position.totals.steps:,}{held_out}, {self.plan.config.run_dir}"

    def close(self) -> None:
        """Let go of the engine, the progress bar and the files."""
        self.progress.close()
        if self._metrics is not None:
            with suppress(OSError):  # what a full disk refused is reported by :meth:`_write`
                self._metrics.close()
        if self.engine is not None:
            self._release()

    # --- phases --------------------------------------------------------------------------------------------------

    def train(self, phase: Train) -> None:
        """Train the live level to the phase's end, its ``until_loss``, or until asked to stop.

        Raises:
            Stopped: after the step in hand, with the state saved.
            TrainingError: the loss or the gradient norm is not finite.
        """
        config = self.plan.config
        self.progress.phase(phase.index, str(phase), phase.steps, self.position.phase_step)
        with self._coming_batches() as coming:
            while self.position.phase_step < phase.steps:
                stop = self._step(phase, next(coming))
                step = self.position.phase_step
                last = step == phase.steps
                evaluating = last or step % config.evaluation.every_steps == 0
                saving = config.saving.every_steps and step % config.saving.every_steps == 0
                if stop or saving or evaluating or step % config.logging.every_steps == 0:
                    self._flush()
                if evaluating:
                    self.evaluate()
                    if phase.until_loss is not None and self._held_out <= phase.until_loss:
                        break
                if not last and (stop or saving):
                    self.save()
                if stop and not last:
                    raise Stopped

    def coalesce(self, phase: Coalesce) -> None:
        """Go down one level; the fine one is parked on the host and, once, on the disk."""
        self.progress.phase(phase.index, str(phase), 1)
        before = self.position.totals
        fine, coarse = self.plan.level(phase.fine), self.plan.level(phase.coarse)
        engine = self._live()
        fault_point("coalesce.begin")
        staged = stage_down(engine, self._geometry(phase), self.mesh, self.plan.config.operators.moments)
        parked = masters(engine)
        name = f"parked-{phase.index:02d}-level-{phase.fine}"
        directory = self.plan.config.run_dir / "checkpoints" / name
        save_parked(directory, parked, fine, self._layout(fine), self.mesh)
        fault_point("coalesce.parked")
        self._release()
        self.engine = self._build(coarse)
        fill(self.engine, staged)
        fault_point("coalesce.filled")
        self.parked[phase.fine] = parked
        self.position = replace(self.position, parked={**self.position.parked, phase.fine: name})
        self._arrived(phase, coarse, before)

    def refine(self, phase: Refine) -> None:
        """Go up one level: de-coalesce and blend into the parked fine level, which is parked no more."""
        self.progress.phase(phase.index, str(phase), 1)
        before = self.position.totals
        moments = self.plan.config.operators.moments
        parked, geometry = self.parked[phase.fine], self._geometry(phase)
        blend = {"alpha": phase.alpha, "beta": phase.beta}
        fault_point("refine.begin")
        staged = stage_up(self._live(), parked, geometry, self.mesh, **blend, moments=moments)
        self._release()
        fine = self.plan.level(phase.fine)
        self.engine = self._build(fine)
        refine_into(self.engine, parked, staged, geometry, self.mesh, **blend)
        fault_point("refine.done")
        del self.parked[phase.fine]
        left = {level: name for level, name in self.position.parked.items() if level != phase.fine}
        self.position = replace(self.position, parked=left)
        self._arrived(phase, fine, before)

    def evaluate(self) -> None:
        """Record the held-out loss here; its time is not counted.

        Raises:
            TrainingError: it is not finite, so the weights are worth no checkpoint.
        """
        self._count_seconds()
        config, level = self.plan.config, self.plan.level(self.position.level)
        batches = evaluation_batches(
            self.plan.held_out,
            count=config.evaluation.samples,
            micro_batch=config.evaluation.micro_batch or level.micro_batch,
            dp_rank=self.mesh.dp_rank,
            dp_size=self.mesh.dp_size,
        )
        self._held_out = held_out_loss(self._live(), batches, self.mesh)
        place, totals = self.position.place, self.position.totals
        if not math.isfinite(self._held_out):
            raise self._not_finite(place, f"held-out loss {self._held_out}")
        self._write(evaluation_record(place, loss=self._held_out, samples=config.evaluation.samples, totals=totals))
        self._show([("evaluation/loss", self._held_out, totals.steps)])
        raise_together(self._unwritten)
        self._lap = time.perf_counter()

    def save(self) -> None:
        """Write a checkpoint of this position, make it the latest, and remove what is no longer needed.

        Raises:
            CheckpointError: it cannot be written; the earlier ones are as they were.
            TrainingError: weights or moments are not finite; nothing is written.
        """
        if any_rank(not all_finite(self._live())):
            raise self._not_finite(self.position.place, "weights or Adam's moments that are not finite")
        self._count_seconds()
        before, name = self.position.totals, self.position.name
        root = self.plan.config.run_dir / "checkpoints"
        level = self.plan.level(self.position.level)
        state = run_state(self.plan.config, self.plan.phases, self.position)
        references = tuple(self.position.parked.values())
        save_engine(
            root / name, self._live(), level, self._layout(level), self.mesh, state=state, references=references
        )
        error = None
        if self.mesh.rank == 0:
            try:
                set_latest(root, name)
                prune(root, self.plan.config.saving.keep_last)
            except ValueError as problem:
                error = problem
        raise_together(error)
        self._count_seconds()
        place, after = self.position.place, self.position.totals
        self._write(save_record(place, path=f"checkpoints/{name}", before=before, after=after))
        raise_together(self._unwritten)

    # --- parts ---------------------------------------------------------------------------------------------------

    def _coming_batches(self) -> Prefetcher:
        """The batches of the live level's coming steps, made ahead of time; they depend on the data position only."""
        level = self.plan.level(self.position.level)
        return Prefetcher(
            self.plan.training,
            position=self.position.totals.samples,
            global_batch=self.plan.config.training.global_batch,
            micro_batch=level.micro_batch,
            dp_rank=self.mesh.dp_rank,
            dp_size=self.mesh.dp_size,
        )

    def _step(self, phase: Train, batches: Sequence[Batch]) -> bool:
        """One optimizer step; True if any rank was asked to stop."""
        config, level = self.plan.config, self.plan.level(self.position.level)
        before, done = self.position.totals, self.position.phase_step
        lr = learning_rate(phase.lr, done)
        result = train_step(self._live(), batches, lr=lr, mesh=self.mesh, stop=bool(self.flag))
        samples = config.training.global_batch
        positions = predicted_positions(level.shape, config.data.mask_probability)
        after = before.after_step(
            samples=samples,
            tokens=samples * level.shape.sequence_length,
            flops=step_flops(level.shape, samples=samples, predicted_positions=positions),
            seconds=self._seconds(),
        )
        self.position = replace(self.position, phase_step=done + 1, totals=after)
        self._pending.append(_Measured(place=self.position.place, result=result, lr=lr, before=before, after=after))
        return result.stop

    def _flush(self) -> None:
        """Read the pending steps back from the device, refuse what is not finite, and record them.

        Raises:
            TrainingError: naming the step and the last good checkpoint.
        """
        if not self._pending:
            return
        results = [measured.result for measured in self._pending]
        values = torch.stack([torch.stack([r.loss, r.grad_norm.to(r.loss.device)]) for r in results]).tolist()
        events: list[tuple[str, float, int]] = []
        for measured, (loss, norm) in zip(self._pending, values, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise self._not_finite(measured.place, f"loss {loss}, gradient norm {norm}")
            record = step_record(
                measured.place, loss=loss, lr=measured.lr, grad_norm=norm, before=measured.before, after=measured.after
            )
            self._write(record)
            step = measured.place.step
            events += [("train/loss", loss, step), ("train/lr", measured.lr, step), ("train/grad_norm", norm, step)]
            events.append(("train/tokens_per_second", record.tokens_per_second, step))
        self._show(events)
        held_out = f" held-out {self._held_out:.4f}" if math.isfinite(self._held_out) else ""
        speed = f"{record.tokens_per_second:,.0f} tok/s"
        self.progress.update(self.position.phase_step, f"loss {loss:.4f}{held_out} {speed}")
        self._pending.clear()
        raise_together(self._unwritten)

    def _arrived(self, phase: Coalesce | Refine, level: Level, before: Totals) -> None:
        """A change of level is done: record its cost and the held-out loss after it."""
        self.position = replace(self.position, level=level.index, phase_step=1)
        self._count_seconds()
        place, after = self.position.place, self.position.totals
        blend = {"alpha": phase.alpha, "beta": phase.beta} if isinstance(phase, Refine) else {}
        kind: Literal["coalesce", "refine"] = "refine" if blend else "coalesce"
        self._write(
            transition_record(
                place, kind=kind, fine=phase.fine, coarse=phase.coarse, before=before, after=after, **blend
            )
        )
        self.evaluate()
        self.progress.update(1, f"held-out {self._held_out:.4f}")

    def _build(self, level: Level, seed: int | None = None) -> Engine:
        """The level's engine; without a seed its weights are to be filled."""
        config = self.plan.config
        mesh = mesh_for(level.tensor_parallel)
        if mesh is not self.mesh:  # other ranks than before must draw the same dropout now
            seed_ranks(config.training.seed + 1 + self.position.phase, mesh)
        self.mesh = mesh
        model = build_model(level, config.model, precision=config.training.precision, mesh=self.mesh, seed=seed)
        return build_engine(model, level, config, self.mesh)

    def _release(self) -> None:
        engine, self.engine = self._live(), None
        release(engine)

    def _live(self) -> Engine:
        assert self.engine is not None
        return self.engine

    def _layout(self, level: Level) -> Layout:
        return layout_of(level, self.plan.config, self.mesh.world_size)

    def _geometry(self, phase: Coalesce | Refine) -> Geometry:
        transition = self.plan.transitions[phase.fine]
        return Geometry(plan=transition, fine=self._layout(transition.fine), coarse=self._layout(transition.coarse))

    def _open_records(self, *, resume_at: tuple[int, int] | None) -> None:
        self._monitor = build_monitor(self.plan.config, self.plan.config.run_dir)
        error = None
        if self.mesh.rank == 0:
            try:
                self._metrics = MetricsWriter(self.plan.config.run_dir / "metrics.jsonl", resume_at=resume_at)
            except ValueError as problem:
                error = problem
        raise_together(error)

    def _write(self, record: Record) -> None:
        """Record on rank 0. A failure is kept for the next point where all ranks can raise it together."""
        if self._metrics is not None and self._unwritten is None:
            try:
                self._metrics.write(record)
            except OSError as error:
                self._unwritten = _cannot_write(self.plan.config.run_dir / "metrics.jsonl", error)

    def _show(self, events: list[tuple[str, float, int]]) -> None:
        """Give values to the monitor; failures as in :meth:`_write`."""
        if self._monitor is not None and self._unwritten is None:
            try:
                self._monitor.write_events(events)
            except OSError as error:
                self._unwritten = _cannot_write(self.plan.config.run_dir / "tensorboard", error)

    def _not_finite(self, place: Place, problem: str) -> TrainingError:
        root = self.plan.config.run_dir / "checkpoints"
        return TrainingError(place, problem, find_latest(root) if root.is_dir() else None)

    def _seconds(self) -> float:
        """Wall time since the last call or evaluation."""
        now = time.perf_counter()
        seconds, self._lap = now - self._lap, now
        return seconds

    def _count_seconds(self) -> None:
        self.position = replace(self.position, totals=self.position.totals.after_seconds(self._seconds()))


def _cannot_write(path: Path, error: OSError) -> MetricsError:
    return MetricsError(
        f"{path} cannot be written ({error.strerror or error}); free space or mend the permissions, then go on with "
        "--resume"
    )
