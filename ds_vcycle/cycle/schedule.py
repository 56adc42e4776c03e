"""The cycle as a list of phases, expanded before anything runs. Imports no torch.

``expand`` turns the configuration into the list that ``plan`` prints, ``train`` walks through and the run directory
and every checkpoint record. Phases without steps are left out of it; ``index`` counts what is left, from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

from ds_vcycle.config import ConfigError, PhaseConfig, PhaseEntry, RunConfig
from ds_vcycle.levels import Level, resolve_levels
from ds_vcycle.train.lr import LrSchedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Train ``level`` for ``steps``, or until the held-out loss is at or below ``until_loss``."""

    index: int
    level: int
    steps: int
    lr: LrSchedule
    until_loss: float | None = None

    def __str__(self) -> str:
        return f"train level {self.level}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Coalesce:
    """Go down: level ``fine`` -> level ``coarse``; the fine level is parked."""

    index: int
    fine: int
    coarse: int

    def __str__(self) -> str:
        return f"coalesce level {self.fine} -> {self.coarse}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Refine:
    """Go up: level ``coarse`` is de-coalesced and blended into the parked level ``fine``."""

    index: int
    fine: int
    coarse: int
    alpha: float
    beta: float

    def __str__(self) -> str:
        return f"refine level {self.coarse} -> {self.fine}"


Phase: TypeAlias = Train | Coalesce | Refine
_KINDS: dict[str, type[Train] | type[Coalesce] | type[Refine]] = {
    "train": Train,
    "coalesce": Coalesce,
    "refine": Refine,
}


def expand(config: RunConfig) -> tuple[Phase, ...]:
    """The phases of a run in order.

    A training phase's learning rate comes from the phase, else from its level, else from ``lr``. Its steps come from
    the phase; ``levels.N.steps`` overrides them in a V cycle's coarse and final phases.

    Raises:
        ConfigError: steps are missing, a learning rate contradicts itself, or an explicit list goes to a level it
            cannot reach.
    """
    levels = resolve_levels(config)
    phases: list[Phase]
    if config.cycle.kind == "flat":
        phases = [_train(config, levels[0], config.cycle.flat, "cycle.flat")]
    elif config.cycle.kind == "V":
        phases = _v_cycle(config, levels)
    else:
        phases = _explicit(config, levels)
    kept = [phase for phase in phases if not (isinstance(phase, Train) and phase.steps == 0)]
    if not any(isinstance(phase, Train) for phase in kept):
        raise ConfigError(f"cycle: kind={config.cycle.kind} trains no step at all; set steps of one phase above 0")
    return tuple(replace(phase, index=index) for index, phase in enumerate(kept))


def to_records(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """The phase list as plain values for JSON, each with its ``kind``."""
    return [{"kind": type(phase).__name__.lower(), **asdict(phase)} for phase in phases]


def from_records(records: Sequence[Mapping[str, Any]]) -> tuple[Phase, ...]:
    """The phase list from what :func:`to_records` wrote.

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


def warnings_for(config: RunConfig) -> tuple[str, ...]:
    """What is allowed but seldom meant, one sentence each."""
    phases = expand(config)
    warnings = []
    refines = [phase for phase in phases if isinstance(phase, Refine)]
    for phase in refines:
        if phase.beta == 0:
            warnings.append(
                f"phase {phase.index} ({phase}): with beta=0 nothing breaks the symmetry of the copies, which then get "
                "equal gradients and stay equal; set operators.beta above 0"
            )
        if phase.alpha == 0:
            warnings.append(
                f"phase {phase.index} ({phase}): with alpha=0 nothing that level {phase.coarse} learned reaches level "
                f"{phase.fine}; set operators.alpha above 0"
            )
    model = config.model
    normed_embeddings = model.norm_placement == "post" and config.operators.embedding == "reference"
    if refines and normed_embeddings and model.norm_eps > 1e-8:
        warnings.append(
            f"model.norm_eps={model.norm_eps:g} with operators.embedding=reference: embeddings divided by m meet their "
            "norm, whose eps then weighs m^2 times as much, so that the function is kept only as far as eps is nothing "
            "beside their variance; set model.norm_eps=1e-12"
        )
    at = _last_level(phases)
    if at != 1:
        warnings.append(f"the cycle ends at level {at}, not at the target model; add refine phases up to level 1")
    return tuple(warnings)


def _v_cycle(config: RunConfig, levels: tuple[Level, ...]) -> list[Phase]:
    cycle = config.cycle
    phases: list[Phase] = []
    for level in levels[:-1]:
        phases.append(_train(config, level, cycle.initial, "cycle.initial", moved=bool(phases)))
        phases.append(Coalesce(index=0, fine=level.index, coarse=level.index + 1))
    phases.append(_train(config, levels[-1], cycle.coarse, "cycle.coarse", level_steps=True, moved=True))
    for level in reversed(levels[:-1]):
        phases.append(_refine(config, level.index))
        section, key = (cycle.final, "cycle.final") if level.index == 1 else (cycle.coarse, "cycle.coarse")
        phases.append(_train(config, level, section, key, level_steps=True, moved=True))
    return phases


def _explicit(config: RunConfig, levels: tuple[Level, ...]) -> list[Phase]:
    _refuse_unused(config)
    phases: list[Phase] = []
    at = 1
    for position, entry in enumerate(config.cycle.phases):
        key = f"cycle.phases.{position}"
        _check_reachable(entry, at, key)
        if entry.train is not None:
            moved = bool(phases) and not isinstance(phases[-1], Train)
            phases.append(_train(config, levels[at - 1], entry, key, moved=moved))
        elif entry.coalesce is not None:
            phases.append(Coalesce(index=0, fine=at, coarse=at + 1))
            at += 1
        else:
            at -= 1
            phases.append(_refine(config, at, entry))
    return phases


def _refuse_unused(config: RunConfig) -> None:
    """With an explicit list, the settings that only the V cycle reads would be silently ignored."""
    for name in ("initial", "coarse", "final"):
        if getattr(config.cycle, name) != PhaseConfig():
            raise ConfigError(f"cycle.{name} is set but cycle.kind=phases lists its own phases; remove cycle.{name}")
    for position, level in enumerate(config.levels):
        if level.steps is not None:
            raise ConfigError(
                f"levels.{position}.steps={level.steps} is set but cycle.kind=phases gives each train phase its steps; "
                "remove it"
            )


def _check_reachable(entry: PhaseEntry, at: int, key: str) -> None:
    """The walk stands at level ``at``, and all finer levels are parked: only their neighbour can be refined."""
    if entry.refine is not None:
        if entry.refine == at - 1:
            return
        target = f"level {at - 1}, which is parked" if at > 1 else "none: no level is parked; coalesce before"
        raise ConfigError(f"{key}.refine={entry.refine}: the cycle is at level {at} there and can refine only {target}")
    kind, level = ("train", entry.train) if entry.train is not None else ("coalesce", entry.coalesce)
    if level == at:
        return
    start = " (a cycle starts at level 1)" if key.endswith("phases.0") else ""
    raise ConfigError(
        f"{key}.{kind}={level}: the cycle is at level {at} there{start}; set {kind}: {at} or add the coalesce or "
        "refine phases that lead there"
    )


def _train(
    config: RunConfig, level: Level, phase: PhaseConfig, key: str, *, level_steps: bool = False, moved: bool = False
) -> Train:
    """A training phase; ``moved``: a change of level comes right before it."""
    steps = level.steps if level_steps and level.steps is not None else phase.steps
    if steps is None:
        either = f" or levels.{level.index - 1}.steps" if level_steps else ""
        raise ConfigError(f"{key}.steps is missing; set {key}.steps{either} (level {level.index} is trained there)")
    rewarmup = config.lr.rewarmup_steps if moved else None
    lr = LrSchedule(
        peak=phase.lr or level.lr or config.lr.peak,
        minimum=config.lr.minimum if phase.minimum_lr is None else phase.minimum_lr,
        warmup_steps=_first_given(phase.warmup_steps, rewarmup, config.lr.warmup_steps),
        kind=phase.schedule or config.lr.schedule,
        steps=steps,
    )
    if steps:
        _check_lr(lr, key, level.index)
    return Train(index=0, level=level.index, steps=steps, lr=lr, until_loss=phase.until_loss)


def _first_given(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _check_lr(lr: LrSchedule, key: str, level: int) -> None:
    if lr.warmup_steps > lr.steps:
        raise ConfigError(
            f"{key} (level {level}): warmup_steps={lr.warmup_steps} exceeds its {lr.steps} steps, so the peak is never "
            f"reached; lower {key}.warmup_steps (default lr.warmup_steps)"
        )
    if lr.minimum > lr.peak:
        raise ConfigError(
            f"{key} (level {level}): the minimum learning rate {lr.minimum} exceeds the peak {lr.peak}; lower "
            f"{key}.minimum_lr (default lr.minimum)"
        )


def _refine(config: RunConfig, fine: int, entry: PhaseEntry | None = None) -> Refine:
    alpha = config.operators.alpha if entry is None or entry.alpha is None else entry.alpha
    beta = config.operators.beta if entry is None or entry.beta is None else entry.beta
    return Refine(index=0, fine=fine, coarse=fine + 1, alpha=alpha, beta=beta)


def _last_level(phases: Sequence[Phase]) -> int:
    last = phases[-1]
    if isinstance(last, Train):
        return last.level
    return last.coarse if isinstance(last, Coalesce) else last.fine


def _from_record(record: Mapping[str, Any], index: int) -> Phase:
    kind = _KINDS.get(record.get("kind", ""))
    if kind is None or set(record) != {"kind", *(field.name for field in fields(kind))}:
        raise ConfigError(f"phase {index} of the recorded list is not a phase: {dict(record)}")
    values = {key: value for key, value in record.items() if key != "kind"}
    if kind is Train:
        values["lr"] = LrSchedule(**values["lr"])
    return kind(**values)


def _flat_values(phase: Phase) -> dict[str, Any]:
    values = asdict(phase)
    schedule = values.pop("lr", {})
    return values | {f"lr.{key}": value for key, value in schedule.items()}
