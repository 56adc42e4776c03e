"""A run in progress: the one live engine, the parked levels, the position, and the phases as methods."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from ds_vcycle.checkpoint.store import CheckpointError, find_latest
from ds_vcycle.cycle.checks import RunPlan
from ds_vcycle.cycle.pending import PendingStep, read_back
from ds_vcycle.cycle.position import Position
from ds_vcycle.cycle.progress import RunProgress
from ds_vcycle.cycle.records import RunRecords
from ds_vcycle.cycle.saves import Saved, Saves, record_saves
from ds_vcycle.cycle.saving import Restored, all_finite, read_parked, save_parked
from ds_vcycle.cycle.schedule import Coalesce, Refine, Train
from ds_vcycle.cycle.stopping import StopFlag, Stopped
from ds_vcycle.cycle.transition import (
    Blend,
    Fragments,
    Staged,
    decoalesce_into,
    fill,
    masters,
    refine_into,
    stage_down,
    stage_up,
)
from ds_vcycle.data.batches import Batch, Prefetcher, evaluation_batches
from ds_vcycle.evaluate.heldout import held_out_loss
from ds_vcycle.faults import fault_point
from ds_vcycle.levels import Level
from ds_vcycle.model.build import build_model
from ds_vcycle.parallel import any_rank, mesh_for, seed_ranks, set_rng_state
from ds_vcycle.sharding.geometry import Geometry
from ds_vcycle.sharding.placement import Layout, layout_of
from ds_vcycle.sharding.release import release
from ds_vcycle.sharding.zero import Engine, set_counters
from ds_vcycle.train.engine import build_engine
from ds_vcycle.train.flops import predicted_positions, step_flops
from ds_vcycle.train.loop import TrainingError, train_step
from ds_vcycle.train.lr import learning_rate
from ds_vcycle.train.metrics import (
    Place,
    Totals,
    TransitionLossRecord,
    evaluation_record,
    transition_record,
)


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
        self._saves = Saves(plan.config, plan.phases)
        self._records: RunRecords | None = None
        self._pending: list[PendingStep] = []
        self._held_out: float = math.nan
        self._lap = time.perf_counter()

    # --- beginning and end ---------------------------------------------------------------------------------------

    def begin(self, initial: Staged | None = None) -> None:
        """Start at the first phase with level 1 initialised from the seed, or from another checkpoint's weights."""
        config = self.plan.config
        seed_ranks(config.training.seed, self.mesh)
        self._open_records(resume_at=(-1, 0) if (config.run_dir / "metrics.jsonl").exists() else None)
        self.engine = self._build(self.plan.level(1), seed=config.training.seed if initial is None else None)
        self._lap = time.perf_counter()
        if initial is not None:
            fill(self.engine, initial)
            self.evaluate()
            self.progress.note(f"level 1 starts from {config.training.init_from}, held-out loss {self._held_out:.4f}")

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
            change = "another number of ranks or tensor-parallel degree than before"
            self.progress.note(f"warning: {change}: random generators are seeded anew")
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
        self._saves.close()
        if self._records is not None:
            self._records.close()
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
                self._record_saves(self._saves.poll())
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
        """Go down one level; the fine one is parked on the disk and, unless ``cycle.park=disk``, on the host."""
        self.progress.phase(phase.index, str(phase), 1)
        self.finish_save()
        before, loss = self.position.totals, self._known_loss()
        operators, fine = self.plan.config.operators, self.plan.level(phase.fine)
        engine = self._live()
        fault_point("coalesce.begin")
        staged = stage_down(engine, self._geometry(phase), self.mesh, operators.moments, kernels=operators.kernels)
        parked = masters(engine)
        name = f"parked-{phase.index:02d}-level-{phase.fine}"
        save_parked(self._checkpoints / name, parked, fine, self._layout(fine), self.mesh)
        fault_point("coalesce.parked")
        if self.plan.config.cycle.park == "host":
            self.parked[phase.fine] = parked
        del parked
        self._release()
        self.engine = self._build(self.plan.level(phase.coarse))
        fill(self.engine, staged)
        fault_point("coalesce.filled")
        self.position = replace(self.position, parked={**self.position.parked, phase.fine: name})
        self._arrived(phase, before, loss, None)

    def refine(self, phase: Refine) -> None:
        """Go up one level: de-coalesce and blend into the parked fine level, which is parked no more."""
        self.progress.phase(phase.index, str(phase), 1)
        self.finish_save()
        before, loss = self.position.totals, self._known_loss()
        operators, fine = self.plan.config.operators, self.plan.level(phase.fine)
        parked, geometry = self._parked(fine), self._geometry(phase)
        blend: Blend = {"alpha": phase.alpha, "beta": phase.beta, "kernels": operators.kernels}
        fault_point("refine.begin")
        staged = stage_up(self._live(), parked, geometry, self.mesh, **blend, moments=operators.moments)
        self._release()
        self.engine = self._build(fine)
        decoalesced = self._decoalesced_loss(fine, staged, geometry)
        refine_into(self.engine, parked, staged, geometry, self.mesh, **blend)
        fault_point("refine.done")
        self.parked.pop(phase.fine, None)
        left = {level: name for level, name in self.position.parked.items() if level != phase.fine}
        self.position = replace(self.position, parked=left)
        self._arrived(phase, before, loss, decoalesced)

    def evaluate(self) -> None:
        """Record the held-out loss here; its time is not counted.

        Raises:
            TrainingError: it is not finite, so the weights are worth no checkpoint.
        """
        self._count_seconds()
        loss, samples = self._measure(self.plan.level(self.position.level)), self.plan.config.evaluation.samples
        place, totals = self.position.place, self.position.totals
        if not math.isfinite(loss):
            raise self._not_finite(place, f"held-out loss {loss}")
        self._held_out = loss
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
        if any_rank(not all_finite(self._live())):
            raise self._not_finite(self.position.place, "weights or Adam's moments that are not finite")
        self._count_seconds()
        level = self.plan.level(self.position.level)
        self._record_saves(self._saves.save(self.position, self._live(), level, self.mesh))

    def finish_save(self) -> None:
        """Wait until the save under way in the background, if there is one, is the latest checkpoint.

        Raises:
            CheckpointError: it cannot be written; the earlier ones are as they were.
        """
        self._record_saves(self._saves.finish())

    # --- parts ---------------------------------------------------------------------------------------------------

    def _measure(self, level: Level) -> float:
        """The held-out loss of the live engine; it starts a new lap, so that its time is not counted."""
        config, mesh = self.plan.config, self.mesh
        batches = evaluation_batches(
            self.plan.held_out,
            count=config.evaluation.samples,
            micro_batch=config.evaluation.micro_batch or level.micro_batch,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
        )
        loss = held_out_loss(self._live(), batches, mesh)
        self._lap = time.perf_counter()
        return loss

    def _record_saves(self, done: Sequence[Saved]) -> None:
        if done:
            self._count_seconds()
            record_saves(done, self.records, self.position.totals)

    def _known_loss(self) -> float:
        """The held-out loss before a change of level: that of the phase before, measured again after a resume."""
        if not math.isfinite(self._held_out):
            self._count_seconds()
            self._held_out = self._measure(self.plan.level(self.position.level))
        return self._held_out

    def _decoalesced_loss(self, fine: Level, staged: Staged, geometry: Geometry) -> float | None:
        """The held-out loss of what was trained, as it is on the fine level: alpha 1, beta 0."""
        if not self.plan.config.evaluation.transitions:
            return None
        self._count_seconds()
        decoalesce_into(self._live(), staged, geometry, self.mesh, kernels=self.plan.config.operators.kernels)
        return self._measure(fine)

    def _parked(self, level: Level) -> Fragments:
        """The parked fragments of a level, from the disk where they are not held."""
        if level.index in self.parked:
            return self.parked[level.index]
        directory = self._checkpoints / self.position.parked[level.index]
        return read_parked(directory, self.plan.config, level)

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
        self._pending.append(PendingStep(place=self.position.place, result=result, lr=lr, before=before, after=after))
        return result.stop

    def _flush(self) -> None:
        """Read the pending steps back from the device, refuse what is not finite, and record them.

        Raises:
            TrainingError: naming the step and the last good checkpoint.
        """
        records = read_back(self._pending)
        for record in records:
            if not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
                raise self._not_finite(record, f"loss {record.loss}, gradient norm {record.grad_norm}")
            self.records.write(record)
            events = {"loss": record.loss, "lr": record.lr, "grad_norm": record.grad_norm}
            events["tokens_per_second"] = record.tokens_per_second
            self.records.show([(f"train/{name}", value, record.step) for name, value in events.items()])
        if records:
            held_out = f" held-out {self._held_out:.4f}" if math.isfinite(self._held_out) else ""
            speed = f"{records[-1].tokens_per_second:,.0f} tok/s"
            self.progress.update(self.position.phase_step, f"loss {records[-1].loss:.4f}{held_out} {speed}")
            self.records.settle()

    def _arrived(self, phase: Coalesce | Refine, before: Totals, loss: float, decoalesced: float | None) -> None:
        """A change of level is done: record its cost, and the held-out loss before, within and after it."""
        going_up = isinstance(phase, Refine)
        level = self.plan.level(phase.fine if going_up else phase.coarse)
        self.position = replace(self.position, level=level.index, phase_step=1)
        self._count_seconds()
        place, after = self.position.place, self.position.totals
        blend = {"alpha": phase.alpha, "beta": phase.beta} if isinstance(phase, Refine) else {}
        kind: Literal["coalesce", "refine"] = "refine" if going_up else "coalesce"
        self.records.write(
            transition_record(
                place, kind=kind, fine=phase.fine, coarse=phase.coarse, before=before, after=after, **blend
            )
        )
        self.evaluate()
        self.records.write(
            TransitionLossRecord(
                **asdict(place), kind=kind, fine=phase.fine, coarse=phase.coarse, before=loss, decoalesced=decoalesced,
                after=self._held_out, seconds=after.seconds,
            )
        )  # fmt: skip
        self.records.settle()
        within = "" if decoalesced is None else f" -> {decoalesced:.4f} de-coalesced"
        self.progress.update(1, f"held-out {loss:.4f}{within} -> {self._held_out:.4f}")

    def _build(self, level: Level, seed: int | None = None) -> Engine:
        """The level's engine; without a seed its weights are to be filled."""
        config = self.plan.config
        mesh = mesh_for(level.tensor_parallel)
        if mesh is not self.mesh:  # other ranks than before must draw the same dropout now
            seed_ranks(config.training.seed + 1 + self.position.phase, mesh)
        self.mesh = mesh
        model = build_model(level, config.model, mesh=self.mesh, seed=seed)
        return build_engine(model, level, config, self.mesh)

    def _release(self) -> None:
        engine, self.engine = self._live(), None
        release(engine)

    @property
    def records(self) -> RunRecords:
        """What the run writes down; open once it has begun."""
        assert self._records is not None
        return self._records

    @property
    def _checkpoints(self) -> Path:
        return self.plan.config.run_dir / "checkpoints"

    def _live(self) -> Engine:
        assert self.engine is not None
        return self.engine

    def _layout(self, level: Level) -> Layout:
        return layout_of(level, self.plan.config, self.mesh.world_size)

    def _geometry(self, phase: Coalesce | Refine) -> Geometry:
        transition = self.plan.transitions[phase.fine]
        return Geometry(plan=transition, fine=self._layout(transition.fine), coarse=self._layout(transition.coarse))

    def _open_records(self, *, resume_at: tuple[int, int] | None) -> None:
        self._records = RunRecords(self.plan.config, self.mesh.rank, resume_at=resume_at)

    def _not_finite(self, place: Place, problem: str) -> TrainingError:
        with suppress(CheckpointError):  # the weights' fault comes first
            self.finish_save()
        root = self._checkpoints
        return TrainingError(place, problem, find_latest(root) if root.is_dir() else None)

    def _seconds(self) -> float:
        """Wall time since the last call or evaluation."""
        now = time.perf_counter()
        seconds, self._lap = now - self._lap, now
        return seconds

    def _count_seconds(self) -> None:
        self.position = replace(self.position, totals=self.position.totals.after_seconds(self._seconds()))
