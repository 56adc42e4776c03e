"""The cycle as a list of phases, expanded before anything runs. Imports no torch.

``expand`` turns the configuration into the list that ``plan`` prints, ``train`` walks through and the run directory
and every checkpoint record. Phases without steps are left out of it; ``index`` counts what is left, from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ds_vcycle.baselines.growth import Growth, grows_by
from ds_vcycle.baselines.inheritance import as_teacher
from ds_vcycle.baselines.learned import check_learnable
from ds_vcycle.config import ConfigError, OperatorsConfig, PhaseConfig, PhaseEntry, RunConfig
from ds_vcycle.cycle.phases import Coalesce, Grow, LevelChange, Phase, Refine, Train, last_level
from ds_vcycle.levels import Level, resolve_levels
from ds_vcycle.train.lr import LrSchedule


def expand(config: RunConfig) -> tuple[Phase, ...]:
    """The phases of a run in order.

    A training phase's learning rate comes from the phase, else from its level, else from ``lr``. Its steps come from
    the phase; ``levels.N.steps`` overrides them in a V cycle's coarse and final phases.

    Raises:
        ConfigError: steps are missing, a learning rate contradicts itself, or an explicit list goes to a level it
            cannot reach.
    """
    levels = resolve_levels(config)
    kind = config.cycle.kind
    if kind == "phases":
        phases = _explicit(config, levels)
    else:
        walk = {"flat": _flat, "V": _v_cycle, "W": _w_cycle, "F": _f_cycle, "growth": _growth}[kind]
        phases = walk(config, levels)
    kept = [phase for phase in phases if not (isinstance(phase, Train) and phase.steps == 0)]
    if not any(isinstance(phase, Train) for phase in kept):
        raise ConfigError(f"cycle: kind={config.cycle.kind} trains no step at all; set steps of one phase above 0")
    return tuple(replace(phase, index=index) for index, phase in enumerate(kept))


def mapping_of(
    change: LevelChange, levels: Sequence[Level], operators: OperatorsConfig
) -> tuple[Level, OperatorsConfig] | None:
    """What maps the two levels of a change: the coarse one with the groupings that hold, and the policies.

    None where no weight of the one is made of one of the other by a fixed map.

    Raises:
        ConfigError: a growth method cannot make the one of the other.
    """
    coarse = levels[change.coarse - 1]
    if isinstance(change, Grow) and change.method in ("knowledge_inheritance", "ligo"):
        return None
    if isinstance(change, Grow):
        growth = Growth(method=change.method, arrangement=change.arrangement, seed=change.seed)
        return grows_by(growth, levels[change.fine - 1], coarse)
    return coarse, operators


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
    at = last_level(phases)
    if at != 1:
        warnings.append(f"the cycle ends at level {at}, not at the target model; add refine phases up to level 1")
    return tuple(warnings)


def _flat(config: RunConfig, levels: Sequence[Level]) -> list[Phase]:
    return [_train(config, levels[0], config.cycle.flat, "cycle.flat")]


def _v_cycle(config: RunConfig, levels: Sequence[Level]) -> list[Phase]:
    return _cycle_from(config, levels, 1, gamma=1, moved=False)


def _w_cycle(config: RunConfig, levels: Sequence[Level]) -> list[Phase]:
    return _cycle_from(config, levels, 1, gamma=config.cycle.gamma, moved=False)


def _f_cycle(config: RunConfig, levels: Sequence[Level]) -> list[Phase]:
    """Full multigrid: from the coarsest level up, each new level with a V cycle of its own."""
    phases: list[Phase] = [_coarse(config, levels[-1], moved=False)]
    for level in reversed(levels[:-1]):
        phases.append(_refine(config, level.index, kept="seed"))
        phases += _cycle_from(config, levels, level.index, gamma=1, moved=True)
    return phases


def _growth(config: RunConfig, levels: Sequence[Level]) -> list[Phase]:
    """From the coarsest level up, once."""
    growth = config.cycle.growth
    averaged = growth.ema_decay if growth.method == "network_expansion" else None
    phases: list[Phase] = [replace(_coarse(config, levels[-1], moved=False), ema_decay=averaged)]
    for level in reversed(levels[:-1]):
        if growth.method == "ligo":
            check_learnable(level)
        phases.append(_grow(config, level.index))
        after = _taught(config, _after_going_up(config, level), levels)
        phases.append(replace(after, ema_decay=averaged) if level.index > 1 else after)
    return phases


def _grow(config: RunConfig, fine: int) -> Refine | Grow:
    growth = config.cycle.growth
    if growth.method == "decoalesce":
        return _refine(config, fine, kept="seed")
    learned = growth.method == "ligo"
    return Grow(
        index=0,
        fine=fine,
        coarse=fine + 1,
        method=growth.method,
        arrangement=growth.arrangement if growth.method == "network_expansion" else None,
        seed=config.training.seed if growth.method in ("fpi", "aki", "ligo") else None,
        map_steps=growth.ligo_steps if learned else 0,
        map_lr=growth.ligo_lr if learned else None,
    )


def _taught(config: RunConfig, phase: Train, levels: Sequence[Level]) -> Train:
    """The phase with the coarser level as its teacher, where the method wants it."""
    growth = config.cycle.growth
    if growth.method != "knowledge_inheritance":
        return phase
    assert growth.distill_steps is not None
    teacher = as_teacher(levels[phase.level], levels[phase.level - 1])
    return replace(phase, teacher=teacher.index, distill_steps=growth.distill_steps, temperature=growth.temperature)


def _cycle_from(config: RunConfig, levels: Sequence[Level], top: int, *, gamma: int, moved: bool) -> list[Phase]:
    """A cycle that starts and ends at level ``top``: its coarser part ``gamma`` times, the coarsest level once."""
    level = levels[top - 1]
    down = Coalesce(index=0, fine=top, coarse=top + 1, coarse_from=config.cycle.coarse_from)
    phases: list[Phase] = [_train(config, level, config.cycle.initial, "cycle.initial", moved=moved), down]
    if top + 1 == len(levels):
        phases.append(_coarse(config, levels[-1], moved=True))
    else:
        below = _cycle_from(config, levels, top + 1, gamma=gamma, moved=True)
        again = below[1:]  # it has just been trained there
        phases += below + again * (gamma - 1)
    return [*phases, _refine(config, top), _after_going_up(config, level)]


def _coarse(config: RunConfig, level: Level, *, moved: bool) -> Train:
    return _train(config, level, config.cycle.coarse, "cycle.coarse", level_steps=True, moved=moved)


def _after_going_up(config: RunConfig, level: Level) -> Train:
    if level.index > 1:
        return _coarse(config, level, moved=True)
    return _train(config, level, config.cycle.final, "cycle.final", level_steps=True, moved=True)


def _explicit(config: RunConfig, levels: Sequence[Level]) -> list[Phase]:
    """The phases of an explicit list; the run starts at the level that the first of them names."""
    for position, level in enumerate(config.levels):
        if level.steps is not None:
            raise ConfigError(
                f"levels.{position}.steps={level.steps} is set but cycle.kind=phases gives each train phase its steps; "
                "remove it"
            )
    first = config.cycle.phases[0]
    at = first.train or first.coalesce or (first.refine or 0) + 1
    phases: list[Phase] = []
    parked: set[int] = set()
    for position, entry in enumerate(config.cycle.phases):
        key = f"cycle.phases.{position}"
        _check_reachable(entry, at, key)
        if entry.train is not None:
            moved = bool(phases) and not isinstance(phases[-1], Train)
            phases.append(_train(config, levels[at - 1], entry, key, moved=moved))
        elif entry.coalesce is not None:
            phases.append(Coalesce(index=0, fine=at, coarse=at + 1, coarse_from=entry.coarse_from or "fine"))
            parked.add(at)
            at += 1
        else:
            at -= 1
            phases.append(_refine(config, at, entry, kept="parked" if at in parked else "seed"))
            parked.discard(at)
    return phases


def _check_reachable(entry: PhaseEntry, at: int, key: str) -> None:
    """The walk stands at level ``at``: it is trained or coalesced, or the level above is refined."""
    if entry.refine is not None:
        if entry.refine == at - 1:
            return
        target = f"level {at - 1}" if at > 1 else "none: nothing is above level 1"
        raise ConfigError(f"{key}.refine={entry.refine}: the cycle is at level {at} there and can refine only {target}")
    kind, level = ("train", entry.train) if entry.train is not None else ("coalesce", entry.coalesce)
    if level == at:
        return
    raise ConfigError(
        f"{key}.{kind}={level}: the cycle is at level {at} there; set {kind}: {at} or add the coalesce or refine "
        "phases that lead there"
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


def _refine(
    config: RunConfig, fine: int, entry: PhaseEntry | None = None, *, kept: Literal["parked", "seed"] = "parked"
) -> Refine:
    alpha = config.operators.alpha if entry is None or entry.alpha is None else entry.alpha
    beta = config.operators.beta if entry is None or entry.beta is None else entry.beta
    return Refine(index=0, fine=fine, coarse=fine + 1, alpha=alpha, beta=beta, kept=kept)
