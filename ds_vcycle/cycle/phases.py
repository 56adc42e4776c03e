"""The phases of a cycle, and the list of them as a run directory and a checkpoint record it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

from ds_vcycle.config import Arrangement, ConfigError, GrowthMethod
from ds_vcycle.train.lr import LrSchedule
from ds_vcycle.train.metrics import TransitionKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Train ``level`` for ``steps``, or until the held-out loss is at or below ``until_loss``.

    ``ema_decay``: of a moving average of the weights that is kept meanwhile, for the growth that follows.
    ``teacher``: the level whose predictions, at ``temperature``, have a part in the loss of the first
    ``distill_steps`` steps (baselines/inheritance.py).
    """

    index: int
    level: int
    steps: int
    lr: LrSchedule
    until_loss: float | None = None
    ema_decay: float | None = None
    teacher: int | None = None
    distill_steps: int = 0
    temperature: float | None = None

    def __str__(self) -> str:
        taught = "" if self.teacher is None else f", taught by level {self.teacher}"
        return f"train level {self.level}{taught}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Coalesce:
    """Go down: level ``fine`` -> level ``coarse``; the fine level is parked.

    ``coarse_from``: ``seed`` if the coarse level starts anew, and nothing is coalesced.
    """

    index: int
    fine: int
    coarse: int
    coarse_from: Literal["fine", "seed"] = "fine"

    def __str__(self) -> str:
        anew = ", the coarse level anew" if self.coarse_from == "seed" else ""
        return f"coalesce level {self.fine} -> {self.coarse}{anew}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Refine:
    """Go up: level ``coarse`` is de-coalesced and blended into what is kept of level ``fine``.

    ``kept``: ``parked`` where the cycle has come down from there; ``seed`` where it has never been: then the fine
    level's initial weights are what the coarse level is blended with.
    """

    index: int
    fine: int
    coarse: int
    alpha: float
    beta: float
    kept: Literal["parked", "seed"] = "parked"

    def __str__(self) -> str:
        new = ", which is new" if self.kept == "seed" else ""
        return f"refine level {self.coarse} -> {self.fine}{new}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grow:
    """Go up from level ``coarse`` to ``fine``, where the cycle has never been, as another paper does (baselines/).

    ``arrangement``: Network Expansion's. ``seed``: draws what bert2BERT copies, and the beginning of LiGO's maps.
    ``map_steps``, ``map_lr``: how long LiGO learns its maps, on the fine level's loss, and how fast.
    """

    index: int
    fine: int
    coarse: int
    method: GrowthMethod
    arrangement: Arrangement | None = None
    seed: int | None = None
    map_steps: int = 0
    map_lr: float | None = None

    def __str__(self) -> str:
        return f"grow level {self.coarse} -> {self.fine} ({self.method})"


LevelChange: TypeAlias = Coalesce | Refine | Grow
Phase: TypeAlias = Train | LevelChange
_KINDS: dict[str, type[Phase]] = {"train": Train, "coalesce": Coalesce, "refine": Refine, "grow": Grow}


def kind_of(phase: LevelChange) -> TransitionKind:
    """What the records call a change of level."""
    if isinstance(phase, Coalesce):
        return "coalesce"
    return "refine" if isinstance(phase, Refine) else "grow"


def steps_at(phase: Phase) -> tuple[int, int]:
    """The level that a phase's steps run through, and how many they are at most; a growth method may learn, too."""
    if isinstance(phase, Train):
        return phase.level, phase.steps
    return phase.fine, phase.map_steps if isinstance(phase, Grow) else 0


def first_level(phases: Sequence[Phase]) -> int:
    """The level that a run starts at."""
    first = phases[0]
    if isinstance(first, Train):
        return first.level
    return first.fine if isinstance(first, Coalesce) else first.coarse


def last_level(phases: Sequence[Phase]) -> int:
    """The level that a run ends at."""
    last = phases[-1]
    if isinstance(last, Train):
        return last.level
    return last.coarse if isinstance(last, Coalesce) else last.fine


def to_records(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """The phase list as plain values for JSON, each with its ``kind``."""
    return [{"kind": type(phase).__name__.lower(), **asdict(phase)} for phase in phases]


def from_records(records: Sequence[Mapping[str, Any]]) -> tuple[Phase, ...]:
    """The phase list from what :func:`to_records` wrote; what an older version did not record has its default.

    Raises:
        ConfigError: an entry is not a phase.
    """
    return tuple(_from_record(record, index) for index, record in enumerate(records))


def first_difference(recorded: Sequence[Phase], wanted: Sequence[Phase]) -> str | None:
    """The first difference between a recorded phase list and the configuration's, in words; None if there is none."""
    for index, (old, new) in enumerate(zip(recorded, wanted)):
        if str(old) != str(new):
            return f"phase {index} is '{old}' in the run and '{new}' in the configuration"
        before, now = _flat_values(old), _flat_values(new)
        for key, value in before.items():
            if value != now[key]:
                return f"phase {index} ({old}): {key} is {value} in the run and {now[key]} in the configuration"
    if len(recorded) != len(wanted):
        longer, where = (recorded, "run") if len(recorded) > len(wanted) else (wanted, "configuration")
        shorter = min(len(recorded), len(wanted))
        return f"phase {shorter} ('{longer[shorter]}') is only in the {where}"
    return None


def _from_record(record: Mapping[str, Any], index: int) -> Phase:
    kind = _KINDS.get(record.get("kind", ""))
    values = {key: value for key, value in record.items() if key != "kind"}
    if kind is None or not _required(kind) <= set(values) <= {field.name for field in fields(kind)}:
        raise ConfigError(f"phase {index} of the recorded list is not a phase: {dict(record)}")
    if kind is Train:
        values["lr"] = LrSchedule(**values["lr"])
    return kind(**values)


def _required(kind: type[Phase]) -> set[str]:
    return {field.name for field in fields(kind) if field.default is MISSING}


def _flat_values(phase: Phase) -> dict[str, Any]:
    values = asdict(phase)
    schedule = values.pop("lr", {})
    return values | {f"lr.{key}": value for key, value in schedule.items()}
