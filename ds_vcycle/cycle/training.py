"""A training phase: steps until its end, with what is measured, recorded and saved between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from ds_vcycle.baselines.average import following
from ds_vcycle.cycle.costs import step_cost
from ds_vcycle.cycle.live import LiveRun
from ds_vcycle.cycle.pending import PendingStep, read_back
from ds_vcycle.cycle.phases import Train
from ds_vcycle.cycle.stopping import Stopped
from ds_vcycle.cycle.teaching import Lessons, dismiss_teacher
from ds_vcycle.data.batches import Batch, Prefetcher
from ds_vcycle.levels import Level
from ds_vcycle.sharding.zero import fragments
from ds_vcycle.train.flops import Flops
from ds_vcycle.train.loop import AfterStep, LossFunction, StepResult, language_model_loss, train_step
from ds_vcycle.train.lr import learning_rate

StepFunctions: TypeAlias = tuple[LossFunction, AfterStep | None]


def train(run: LiveRun, phase: Train) -> None:
    """Train the live level to the phase's end, its ``until_loss``, or until asked to stop.

    Raises:
        Stopped: after the step in hand, with the state saved.
        TrainingError: the loss or the gradient norm is not finite.
    """
    config = run.plan.config
    pending: list[PendingStep] = []
    run.progress.phase(phase.index, str(phase), phase.steps, run.position.phase_step)
    functions = step_functions(run, phase)
    with coming_batches(run, run.plan.level(run.position.level)) as coming:
        while run.position.phase_step < phase.steps:
            done = _step(run, phase, next(coming), functions)
            pending.append(done)
            stop = done.result.stop
            run.poll_saves()
            step = run.position.phase_step
            last = step == phase.steps
            evaluating = last or step % config.evaluation.every_steps == 0
            saving = config.saving.every_steps and step % config.saving.every_steps == 0
            if stop or saving or evaluating or step % config.logging.every_steps == 0:
                record_steps(run, pending)
            if evaluating:
                run.evaluate()
                if phase.until_loss is not None and run.held_out <= phase.until_loss:
                    break
            if not last and (stop or saving):
                run.save()
            if stop and not last:
                raise Stopped
    dismiss_teacher(run, phase)


def coming_batches(run: LiveRun, level: Level) -> Prefetcher:
    """The batches of a level's coming steps, made ahead of time; they depend on the data position only."""
    return Prefetcher(
        run.plan.training,
        position=run.position.totals.samples,
        global_batch=run.plan.config.training.global_batch,
        micro_batch=level.micro_batch,
        dp_rank=run.mesh.dp_rank,
        dp_size=run.mesh.dp_size,
    )


def _step(run: LiveRun, phase: Train, batches: Sequence[Batch], functions: StepFunctions) -> PendingStep:
    """One optimizer step; its values stay on the device."""
    done = run.position.phase_step
    lr = learning_rate(phase.lr, done)
    loss, after_step = functions
    result = train_step(
        run.live(), batches, lr=lr, mesh=run.mesh, loss=loss, after_step=after_step, stop=bool(run.flag)
    )
    return count_step(run, result, lr=lr, flops=step_cost(phase, done, run.plan.levels, run.plan.config))


def count_step(run: LiveRun, result: StepResult, *, lr: float, flops: Flops) -> PendingStep:
    """A step has been done at the run's level: its costs are counted, its values stay on the device."""
    config, level = run.plan.config, run.plan.level(run.position.level)
    before, samples = run.position.totals, config.training.global_batch
    after = before.after_step(
        samples=samples, tokens=samples * level.shape.sequence_length, flops=flops, seconds=run.seconds()
    )
    run.position = replace(run.position, phase_step=run.position.phase_step + 1, totals=after)
    run.reporter.step(level.index, after.seconds - before.seconds)
    run.beat()
    return PendingStep(place=run.position.place, result=result, lr=lr, before=before, after=after)


def step_functions(run: LiveRun, phase: Train) -> StepFunctions:
    """What the steps of a phase minimise, and what follows each: a rival's phases have their own (baselines/)."""
    loss = language_model_loss if phase.teacher is None else Lessons(run, phase).loss
    if phase.ema_decay is None:
        return loss, None
    if run.average is None:
        run.average = {f.name: f.master.clone() for f in fragments(run.live())}
    return loss, following(run.average, phase.ema_decay)


def record_steps(run: LiveRun, pending: list[PendingStep]) -> None:
    """Read the pending steps back from the device, refuse what is not finite, record them, and empty the list.

    Raises:
        TrainingError: naming the step and the last good checkpoint.
    """
    records = read_back(pending)
    for record in records:
        if not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
            raise run.not_finite(record, f"loss {record.loss}, gradient norm {record.grad_norm}")
        run.records.write(record)
        events = {"loss": record.loss, "lr": record.lr, "grad_norm": record.grad_norm}
        events["tokens_per_second"] = record.tokens_per_second
        run.records.show([(f"train/{name}", value, record.step) for name, value in events.items()])
    if records:
        run.reporter.loss(records[-1].loss)
        held_out = f" held-out {run.held_out:.4f}" if math.isfinite(run.held_out) else ""
        speed = f"{records[-1].tokens_per_second:,.0f} tok/s"
        run.progress.update(run.position.phase_step, f"loss {records[-1].loss:.4f}{held_out} {speed}")
        run.records.settle()
