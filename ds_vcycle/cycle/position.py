"""Where a run stands, and what of it a checkpoint records beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ds_vcycle.train.metrics import Place, Totals


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Phase ``phase`` with ``phase_step`` steps done (a transition has one); the model is at ``level``.

    ``done``: the phase has ended, early perhaps. ``parked``: checkpoint name of each parked level.
    The data position is ``totals.samples``.
    """

    phase: int = 0
    phase_step: int = 0
    done: bool = False
    level: int = 1
    totals: Totals = field(default_factory=Totals)
    parked: Mapping[int, str] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """The position as the metrics record it."""
        return Place(phase=self.phase, level=self.level, step=self.totals.steps, phase_step=self.phase_step)

    @property
    def next_phase(self) -> int:
        """Index of the phase to go on with."""
        return self.phase + 1 if self.done else self.phase

    @property
    def name(self) -> str:
        """Name of the checkpoint of this position."""
        return f"step-{self.totals.steps:08d}-phase-{self.phase:02d}"

    def entering(self, phase: int) -> Position:
        """The position at the beginning of a phase; unchanged when it is in the midst of it."""
        return self if not self.done and self.phase == phase else replace(self, phase=phase, phase_step=0, done=False)

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"parked": {str(level): name for level, name in self.parked.items()}}


def position_from(record: Mapping[str, Any]) -> Position:
    """The position that :meth:`Position.record` gave."""
    parked = {int(level): name for level, name in record["parked"].items()}
    return Position(**{**record, "totals": Totals(**record["totals"]), "parked": parked})
