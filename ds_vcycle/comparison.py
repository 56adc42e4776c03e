"""What runs cost to reach the baseline's final held-out loss. Imports no torch.

Costs count from the first step of the first phase, coarse levels, transitions and saves included; only level 1 can
reach the loss. Every run, the baseline too, is charged up to where it first reaches it, so a baseline that was there
before its end gains nothing by going on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ds_vcycle.config import UserError
from ds_vcycle.cycle.phases import Train
from ds_vcycle.cycle.schedule import expand
from ds_vcycle.rundir import Cost, Run, read_run
from ds_vcycle.train.metrics import EvaluationRecord

COMPARED_SECTIONS = ("model", "data", "optimizer", "training", "evaluation")


class ReportError(UserError):
    """The runs cannot be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run in the comparison. ``reached``: its cost to the baseline's final loss, None if it never got there.

    Savings are 1 - cost / baseline's cost (0.25 = a quarter saved; negative = it cost more).
    """

    run: Run
    final_loss: float
    best_loss: float
    reached: Cost | None
    saved_flops: float | None
    saved_flops_blocks: float | None
    saved_tokens: float | None
    saved_seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All runs against the baseline (a row as well). ``notes``: what the reader has to know to trust the numbers."""

    baseline: str
    loss: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def compare(directories: Sequence[Path], *, baseline: Path | None = None) -> Comparison:
    """Compare runs with a baseline, the first of them unless ``baseline`` names another directory.

    Raises:
        UserError: a directory cannot be read.
    """
    return compare_runs(read_runs(directories, baseline=baseline))


def read_runs(directories: Sequence[Path], *, baseline: Path | None = None) -> list[Run]:
    """The runs in these directories, the baseline first, by names that tell them apart.

    Raises:
        UserError: a directory cannot be read.
    """
    first = baseline or directories[0]
    others = [directory for directory in directories if directory.resolve() != first.resolve()]
    runs = [read_run(directory) for directory in (first, *others)]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(run.directory)) for run in runs]
    return runs


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Compare runs with the first of them.

    Raises:
        ReportError: the baseline's loss is not a number or never fell, or another run's measures something else.
    """
    base = runs[0]
    for run in runs[1:]:
        _check_comparable(base, run)
    loss = base.target_evaluations[-1].loss
    paid = cost_to_reach(base, loss)
    if paid is None:
        raise ReportError(
            f"{base.directory}: the baseline's final held-out loss is {loss}; choose another with --baseline"
        )
    if paid.flops == 0:
        raise ReportError(
            f"{base.directory}: the baseline was at its final held-out loss {loss:.4f} before its first step, so there "
            "is no cost to save; choose another with --baseline"
        )
    return Comparison(
        baseline=base.name, loss=loss, rows=tuple(_row(run, loss, paid) for run in runs), notes=_notes(runs, loss, paid)
    )


def _check_comparable(base: Run, run: Run) -> None:
    """Held-out losses of another task or vocabulary are other quantities."""
    for key in ("architecture", "vocab_size"):
        a, b = getattr(base.config.model, key), getattr(run.config.model, key)
        if a != b:
            raise ReportError(
                f"{run.directory}: model.{key} is {b}, the baseline's ({base.directory}) is {a}: their held-out losses "
                "are not comparable; leave one of them out"
            )


def cost_to_reach(run: Run, loss: float) -> Cost | None:
    """The run's cost when level 1's held-out loss is first at or below ``loss``, None if it never is.

    Linear between two evaluations of a phase, and from a refine's to the first of the phase after it. At any other
    first evaluation the whole cost up to it counts: what lies before is another level, and a line through it would
    claim steps that level 1 never made.
    """
    previous: EvaluationRecord | None = None
    for record in run.target_evaluations:
        if record.loss <= loss:
            if previous is None or record.phase - previous.phase > 1 or not math.isfinite(previous.loss):
                return _cost(record)
            return _between(previous, record, (previous.loss - loss) / (previous.loss - record.loss))
        previous = record
    return None


def _cost(record: EvaluationRecord) -> Cost:
    return Cost(tokens=record.tokens, flops=record.flops, flops_blocks=record.flops_blocks, seconds=record.seconds)


def _between(a: EvaluationRecord, b: EvaluationRecord, share: float) -> Cost:
    return Cost(
        tokens=a.tokens + share * (b.tokens - a.tokens),
        flops=a.flops + share * (b.flops - a.flops),
        flops_blocks=a.flops_blocks + share * (b.flops_blocks - a.flops_blocks),
        seconds=a.seconds + share * (b.seconds - a.seconds),
    )


def _row(run: Run, loss: float, paid: Cost) -> Row:
    reached = cost_to_reach(run, loss)
    losses = [record.loss for record in run.target_evaluations]
    return Row(
        run=run,
        final_loss=losses[-1],
        best_loss=min((value for value in losses if math.isfinite(value)), default=math.nan),
        reached=reached,
        saved_flops=None if reached is None else 1 - reached.flops / paid.flops,
        saved_flops_blocks=None if reached is None else 1 - reached.flops_blocks / paid.flops_blocks,
        saved_tokens=None if reached is None else 1 - reached.tokens / paid.tokens,
        saved_seconds=None if reached is None else 1 - reached.seconds / paid.seconds,
    )


def _notes(runs: Sequence[Run], loss: float, paid: Cost) -> tuple[str, ...]:
    base = runs[0]
    peak = max(phase.lr.peak for phase in expand(base.config) if isinstance(phase, Train) and phase.level == 1)
    notes = [
        f"Saved = 1 - cost / baseline's cost to level 1's held-out loss {loss:.4f}, the baseline's last, linear "
        "between evaluations; negative: it cost more. Coarse levels, transitions and saves count, evaluation does not. "
        "Wall time is as measured, with whatever else the machine did.",
        "One run each: a difference within the spread of seeds means nothing. The baseline's peak learning rate is "
        f"{peak:g}; a saving counts for as much as that baseline was tuned.",
    ]
    if paid.flops < base.total.flops * 0.999:
        notes.append(
            f"The baseline first reached its last loss after {paid.flops / base.total.flops:.1%} of its FLOPs; it is "
            "charged for those."
        )
    differences = [note for run in runs[1:] for note in _differences(run, base)]
    same = f"All runs have the same settings under {', '.join(COMPARED_SECTIONS)} (seeds, data and batch among them)."
    notes += differences or ([same] if len(runs) > 1 else [])
    notes += [note for run in runs for note in _smaller_would_do(run, loss, paid)]
    return (*notes, *(note for run in runs for note in _unfinished(run)))


def _differences(run: Run, base: Run) -> list[str]:
    """A note naming every setting outside the schedule that differs: then not only the schedules are compared."""
    found = []
    for section in COMPARED_SECTIONS:
        mine, theirs = getattr(run.config, section), getattr(base.config, section)
        for key in type(mine).model_fields:
            a, b = getattr(mine, key), getattr(theirs, key)
            if a != b:
                found.append(f"{section}.{key} ({a}; baseline {b})")
    return [f"{run.name} differs from the baseline in {', '.join(found)}."] if found else []


def _smaller_would_do(run: Run, loss: float, paid: Cost) -> list[str]:
    """A note where a coarse level alone was at the baseline's loss: so early, the target model's size buys nothing."""
    for record in run.evaluations:
        if record.level > 1 and record.loss <= loss:
            return [
                f"{run.name}: level {record.level} alone was at {loss:.4f} after {record.flops / paid.flops:.1%} of "
                "the baseline's FLOPs, so the baseline stops where a smaller model would do; a longer one asks more."
            ]
    return []


def _unfinished(run: Run) -> list[str]:
    planned = sum(phase.steps for phase in expand(run.config) if isinstance(phase, Train))
    if run.steps >= planned:
        return []
    return [f"{run.name} made {run.steps:,} of {planned:,} planned steps (unfinished, or ended by until_loss)."]
