"""What rank 0 tells others of a run in progress: events, and a heartbeat with the place, the losses and the ETA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ds_vcycle.cycle.checks import RunPlan
from ds_vcycle.cycle.costs import level_cost
from ds_vcycle.cycle.journal import Journal, Pace
from ds_vcycle.cycle.phases import Phase, steps_at
from ds_vcycle.cycle.position import Position


class Reporter:
    """Events and heartbeat of a run; silent on the other ranks."""

    def __init__(self, plan: RunPlan, *, rank: int) -> None:
        config = plan.config
        self._phases = plan.phases
        self._journal = Journal(config.run_dir, enabled=rank == 0)
        self._pace = Pace({level.index: level_cost(level, config).total for level in plan.levels})
        self._loss = math.nan
        self._checkpoint: str | None = None

    def event(self, name: str, position: Position, **values: Any) -> None:
        """One line of events.jsonl, with where the run is."""
        self._journal.event(name, **_where(position), of=len(self._phases), **values)

    def saved(self, position: Position, own_seconds: float) -> None:
        """A checkpoint is on the disk."""
        self._checkpoint = position.name
        self.event("saved", position, checkpoint=position.name, own_seconds=own_seconds)

    def loss(self, loss: float) -> None:
        """A step's loss, read back."""
        self._loss = loss

    def step(self, level: int, seconds: float) -> None:
        """A step was done."""
        self._pace.add(level, seconds)

    def beat(self, position: Position, held_out: float, *, at_once: bool = False) -> None:
        """Write the heartbeat if it is due, or ``at_once``."""
        if not (at_once or self._journal.due()):
            return
        phase = self._phases[position.phase]
        _, steps = steps_at(phase)
        self._journal.beat(
            {
                **_where(position),
                "of": len(self._phases),
                "title": str(phase),
                "phase_steps": max(steps, 1),
                "steps": sum(steps_at(each)[1] for each in self._phases),
                "loss": self._loss,
                "held_out": held_out,
                "step_seconds": self._pace.seconds(position.level),
                "eta_seconds": self._pace.remaining(remaining_steps(self._phases, position)),
                "checkpoint": self._checkpoint,
            }
        )


def remaining_steps(phases: Sequence[Phase], position: Position) -> dict[int, int]:
    """Steps left to do by level, the most there can be (``until_loss`` may end a phase before)."""
    left: dict[int, int] = {}
    for phase in phases[position.next_phase :]:
        level, steps = steps_at(phase)
        if steps:
            done = position.phase_step if phase.index == position.phase else 0
            left[level] = left.get(level, 0) + steps - done
    return left


def _where(position: Position) -> dict[str, int]:
    return {
        "phase": position.phase,
        "level": position.level,
        "phase_step": position.phase_step,
        "step": position.totals.steps,
    }
