"""metrics.jsonl: one JSON object per line for every step, evaluation, transition and save. Imports no torch.

Costs (tokens, FLOPs, seconds) are cumulative over the whole run, from the first step of the first phase. Seconds are
wall time with transitions and saves inside and evaluation outside. Work that a crash threw away is not in them:
a resumed run goes on from the costs its checkpoint recorded, and the records after that point are cut off.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ds_vcycle.config import UserError
from ds_vcycle.train.flops import Flops

TransitionKind: TypeAlias = Literal["coalesce", "refine", "grow"]


class MetricsError(UserError):
    """metrics.jsonl cannot be read, or would be overwritten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What a run has cost so far. Checkpoints record it (``dataclasses.asdict``), so that a resumed run counts on."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    flops: int = 0
    flops_blocks: int = 0
    seconds: float = 0.0

    def after_step(self, *, samples: int, tokens: int, flops: Flops, seconds: float) -> Totals:
        """The totals after one more step with its own cost."""
        return Totals(
            steps=self.steps + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            flops=self.flops + flops.total,
            flops_blocks=self.flops_blocks + flops.blocks,
            seconds=self.seconds + seconds,
        )

    def after_seconds(self, seconds: float) -> Totals:
        """The totals after a transition or a save."""
        return replace(self, seconds=self.seconds + seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where in the run: phase ``index``, level trained, steps of the run and of the phase that are done.

    A transition has no steps; done, it counts as ``phase_step`` 1. One that is learned has its steps.
    """

    phase: int
    level: int
    step: int
    phase_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord(Place):
    """One step: its values, the run's costs after it (cumulative) and its own costs (``step_``)."""

    loss: float
    lr: float
    grad_norm: float
    tokens: int
    flops: int
    flops_blocks: int
    seconds: float
    step_tokens: int
    step_flops: int
    step_flops_blocks: int
    step_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord(Place):
    """Held-out loss over ``samples`` fixed sequences, with the training costs so far."""

    loss: float
    samples: int
    tokens: int
    flops: int
    flops_blocks: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionRecord(Place):
    """A change of level that took ``own_seconds``; ``level`` is where it led to, alpha and beta are refine's."""

    kind: TransitionKind
    fine: int
    coarse: int
    alpha: float | None
    beta: float | None
    tokens: int
    flops: int
    flops_blocks: int
    seconds: float
    own_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionLossRecord(Place):
    """Held-out loss along a change of level: ``before`` it, and ``after``.

    ``decoalesced``: of a refine, the coarse model on the fine level as it is (alpha 1, beta 0), before the blend; None
    where it was not asked for (``evaluation.transitions``).
    """

    kind: TransitionKind
    fine: int
    coarse: int
    before: float
    decoalesced: float | None
    after: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRecord(Place):
    """A checkpoint that took ``own_seconds`` until it was on the disk, for ``stall_seconds`` of which training stood.

    It may be recorded later than its place says, when a later step has been done (``saving.background``).
    """

    path: str
    seconds: float
    own_seconds: float
    stall_seconds: float | None = None  # records of older versions have none


Record: TypeAlias = StepRecord | EvaluationRecord | TransitionRecord | TransitionLossRecord | SaveRecord
_EVENTS: dict[str, type[Record]] = {
    "step": StepRecord,
    "evaluation": EvaluationRecord,
    "transition": TransitionRecord,
    "transition_loss": TransitionLossRecord,
    "save": SaveRecord,
}
_NAMES = {kind: name for name, kind in _EVENTS.items()}


def step_record(place: Place, *, loss: float, lr: float, grad_norm: float, before: Totals, after: Totals) -> StepRecord:
    """The record of a step from the totals before and after it."""
    tokens, seconds = after.tokens - before.tokens, after.seconds - before.seconds
    return StepRecord(
        **asdict(place),
        **_costs(after),
        loss=loss,
        lr=lr,
        grad_norm=grad_norm,
        step_tokens=tokens,
        step_flops=after.flops - before.flops,
        step_flops_blocks=after.flops_blocks - before.flops_blocks,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds if seconds > 0 else math.nan,
    )


def evaluation_record(place: Place, *, loss: float, samples: int, totals: Totals) -> EvaluationRecord:
    """The record of an evaluation over ``samples`` held-out sequences."""
    return EvaluationRecord(**asdict(place), **_costs(totals), loss=loss, samples=samples)


def transition_record(
    place: Place,
    *,
    kind: TransitionKind,
    fine: int,
    coarse: int,
    before: Totals,
    after: Totals,
    alpha: float | None = None,
    beta: float | None = None,
) -> TransitionRecord:
    """The record of a transition from the totals before and after it."""
    return TransitionRecord(
        **asdict(place),
        **_costs(after),
        kind=kind,
        fine=fine,
        coarse=coarse,
        alpha=alpha,
        beta=beta,
        own_seconds=after.seconds - before.seconds,
    )


def save_record(place: Place, *, path: str, totals: Totals, own_seconds: float, stall_seconds: float) -> SaveRecord:
    """The record of a checkpoint; ``totals``: when it was on the disk."""
    return SaveRecord(
        **asdict(place), path=path, seconds=totals.seconds, own_seconds=own_seconds, stall_seconds=stall_seconds
    )


class MetricsWriter:
    """Appends records to metrics.jsonl, each flushed at once so that a killed run keeps them. Rank 0 only."""

    def __init__(self, path: Path, *, resume_at: tuple[int, int] | None = None) -> None:
        """Open the file for appending.

        Args:
            path: the run directory's metrics.jsonl.
            resume_at: (phase, phase_step) of the checkpoint resumed from; records beyond it are cut off, so that the
                steps made again are not there twice. None: a new run, the file must not exist.

        Raises:
            MetricsError: a new run's file is there already, or an old one cannot be read.
        """
        if resume_at is not None:
            _truncate(path, resume_at)
        elif path.exists() and path.stat().st_size:
            raise MetricsError(
                f"{path}: holds the metrics of an earlier run; train with --resume or set another run_dir"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one record (values that are not finite are written as null)."""
        values = {key: None if _not_finite(value) else value for key, value in asdict(record).items()}
        self._file.write(json.dumps({"event": _NAMES[type(record)], **values}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> tuple[Record, ...]:
    """All records of a metrics.jsonl in order; a last line cut short by a crash is left out.

    Raises:
        MetricsError: the file is missing, or a line is not a record (named by its number).
    """
    return tuple(record for record, _ in _read_lines(path))


def _read_lines(path: Path) -> list[tuple[Record, str]]:
    if not path.is_file():
        raise MetricsError(f"{path}: no such file; is {path.parent} a run directory, and has the run begun?")
    lines = path.read_bytes().split(b"\n")
    complete, rest = lines[:-1], lines[-1]
    records = [(_parse(line, path, number), line.decode()) for number, line in enumerate(complete, 1)]
    if rest:
        with contextlib.suppress(MetricsError):  # it was being written when the run was killed
            records.append((_parse(rest, path, len(lines)), rest.decode()))
    return records


def _parse(line: bytes, path: Path, number: int) -> Record:
    try:
        values: dict[str, Any] = json.loads(line)
        kind = _EVENTS[values.pop("event")]
        floats = {field.name for field in fields(kind) if field.type == "float"}
        filled: dict[str, Any] = {k: math.nan if v is None and k in floats else v for k, v in values.items()}
        return kind(**filled)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MetricsError(f"{path}:{number}: not a metrics record ({error}); the file is damaged") from error


def _truncate(path: Path, resume_at: tuple[int, int]) -> None:
    if not path.exists():
        return
    kept = [line for record, line in _read_lines(path) if (record.phase, record.phase_step) <= resume_at]
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def last_of_each_place(records: Sequence[EvaluationRecord]) -> tuple[EvaluationRecord, ...]:
    """Evaluations in order; where a place was evaluated twice (again after a resume), the later one."""
    return tuple({(record.phase, record.phase_step): record for record in records}.values())


def _costs(totals: Totals) -> dict[str, Any]:
    return {
        "tokens": totals.tokens,
        "flops": totals.flops,
        "flops_blocks": totals.flops_blocks,
        "seconds": totals.seconds,
    }


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
