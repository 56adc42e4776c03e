"""What a finished or running run's directory says about it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from ds_vcycle.config import RunConfig, UserError, parse_config
from ds_vcycle.train.metrics import (
    EvaluationRecord,
    Record,
    StepRecord,
    TransitionLossRecord,
    TransitionRecord,
    last_of_each_place,
    read_metrics,
)

METRICS_NAME = "metrics.jsonl"
CONFIG_NAMES = ("config.yaml", "config.json")


class RunDirError(UserError):
    """A run directory lacks what is to be read from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cumulative cost at one point of a run; wall time without evaluation."""

    tokens: float
    flops: float
    flops_blocks: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run directory records. ``evaluations`` are of all levels, each place once."""

    name: str
    directory: Path
    config: RunConfig
    evaluations: tuple[EvaluationRecord, ...]
    transitions: tuple[TransitionRecord, ...]
    transition_losses: tuple[TransitionLossRecord, ...]
    steps: int
    total: Cost

    @property
    def target_evaluations(self) -> tuple[EvaluationRecord, ...]:
        """The evaluations of level 1."""
        return tuple(record for record in self.evaluations if record.level == 1)


def read_run(directory: Path) -> Run:
    """Read a run directory (resolved configuration and metrics.jsonl).

    Raises:
        UserError: naming the directory and what is missing or damaged.
    """
    if not directory.is_dir():
        raise RunDirError(f"{directory}: no such run directory; give the run_dir of a finished `ds-vcycle train`")
    config = recorded_config(directory)
    records = read_metrics(directory / METRICS_NAME)
    evaluations = last_of_each_place([record for record in records if isinstance(record, EvaluationRecord)])
    if not any(record.level == 1 for record in evaluations):
        raise RunDirError(
            f"{directory}: metrics.jsonl has no evaluation of level 1; let the run reach one (evaluation.every_steps)"
        )
    return Run(
        name=directory.name,
        directory=directory,
        config=config,
        evaluations=evaluations,
        transitions=tuple(record for record in records if isinstance(record, TransitionRecord)),
        transition_losses=tuple(record for record in records if isinstance(record, TransitionLossRecord)),
        steps=max(record.step for record in records),
        total=_total(records),
    )


def recorded_config(directory: Path) -> RunConfig:
    """The resolved configuration that a run directory holds.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    for name in CONFIG_NAMES:
        path = directory / name
        if path.is_file():
            try:
                tree = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise RunDirError(f"{path}: not readable: {error}") from error
            if not isinstance(tree, dict):
                raise RunDirError(f"{path}: not a run's configuration")
            return parse_config(tree, source=str(path))
    raise RunDirError(f"{directory}: no {CONFIG_NAMES[0]} in it; is it the run_dir of `ds-vcycle train`?")


def _total(records: Sequence[Record]) -> Cost:
    last = [record for record in records if isinstance(record, StepRecord | EvaluationRecord | TransitionRecord)][-1]
    return Cost(
        tokens=last.tokens,
        flops=last.flops,
        flops_blocks=last.flops_blocks,
        seconds=max(record.seconds for record in records),
    )
