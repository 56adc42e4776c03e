"""What a run will do and cost, known from its configuration alone: ``ds-vcycle plan``. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ds_vcycle.config import Grouping, MomentPolicy, Precision, RunConfig
from ds_vcycle.cycle.costs import level_cost, phase_cost
from ds_vcycle.cycle.phases import Coalesce, Grow, Phase, Refine, Train, steps_at
from ds_vcycle.cycle.schedule import expand, mapping_of, warnings_for
from ds_vcycle.levels import Level, data_parallel, resolve_levels
from ds_vcycle.operators.axes import plan_axes
from ds_vcycle.operators.maps import AxisMap
from ds_vcycle.schema import parameter_count
from ds_vcycle.train.deepspeed_config import check_extras
from ds_vcycle.train.flops import Flops, predicted_positions, recompute_flops
from ds_vcycle.train.lr import LrSchedule

if TYPE_CHECKING:
    from ds_vcycle.sharding.traffic import ParameterTraffic


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelOverview:
    """One level: sizes, parameters as built (padded vocabulary included), layout, cost of a step.

    ``data_parallel`` and ``micro_batches`` (of one step on one rank) are known only for a given number of ranks.
    """

    index: int
    layers: int
    hidden: int
    heads: int
    kv_groups: int
    head_dim: int
    ffn: int
    parameters: int
    tensor_parallel: int
    zero_stage: int
    micro_batch: int
    precision: Precision
    data_parallel: int | None
    micro_batches: int | None
    step_flops: int
    step_flops_blocks: int
    step_recompute_flops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupingOverview:
    """How one axis is grouped between two levels; ``group_sizes``: size -> how many groups have it."""

    axis: str
    grouping: str
    fine: int
    coarse: int
    group_sizes: dict[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionOverview:
    """Two adjacent levels: groupings, and whether de-coalescing keeps the coarse model's function (if not, why).

    ``traffic``: bytes sent per coarse parameter and rank, known only for a given number of ranks.
    """

    fine: int
    coarse: int
    groupings: tuple[GroupingOverview, ...]
    lossless: bool
    notes: tuple[str, ...]
    moments: MomentPolicy
    traffic: tuple[ParameterTraffic, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseOverview:
    """One phase and its cost; ``share`` is its part of the cycle's FLOPs (head included). Transitions cost none."""

    index: int
    phase: str
    detail: str
    steps: int
    samples: int
    tokens: int
    flops: int
    flops_blocks: int
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """The whole run. ``flat_*``: plain training of level 1 for ``cycle.flat.steps``, None if that is not set.

    ``flat_steps_at_equal_flops``: how many steps plain training would get for the cycle's FLOPs.
    """

    architecture: str
    sequence_length: int
    vocab_size: int
    padded_vocab: int
    global_batch: int
    predicted_positions: int
    ranks: int | None
    levels: tuple[LevelOverview, ...]
    transitions: tuple[TransitionOverview, ...]
    phases: tuple[PhaseOverview, ...]
    samples: int
    tokens: int
    flops: int
    flops_blocks: int
    flat_steps: int | None
    flat_flops: int | None
    flat_flops_blocks: int | None
    flat_steps_at_equal_flops: float
    warnings: tuple[str, ...]


def overview(config: RunConfig, *, ranks: int | None = None, traffic: bool = True) -> Overview:
    """Work out levels, transitions, phases and costs; with ``ranks`` also the data-parallel layout.

    ``traffic``: with ``ranks``, whether also what each transition sends, which takes seconds for hundreds of them.

    Raises:
        UserError: whatever in the configuration cannot be run, ranks that do not divide included.
    """
    levels, phases = resolve_levels(config), expand(config)
    for level in levels:
        check_extras(level, config)
    positions = predicted_positions(levels[0].shape, config.data.mask_probability)
    batch = config.training.global_batch
    costs = {level.index: level_cost(level, config) for level in levels}
    spent = [phase_cost(phase, levels, config) for phase in phases]
    flops, blocks = sum(cost.total for cost in spent), sum(cost.blocks for cost in spent)
    rows = tuple(_phase(phase, config, cost, flops) for phase, cost in zip(phases, spent, strict=True))
    flat = config.cycle.flat.steps
    return Overview(
        architecture=config.model.architecture,
        sequence_length=config.model.sequence_length,
        vocab_size=config.model.vocab_size,
        padded_vocab=levels[0].shape.padded_vocab,
        global_batch=batch,
        predicted_positions=positions,
        ranks=ranks,
        levels=tuple(_level(level, config, costs[level.index], ranks) for level in levels),
        transitions=_transitions(config, levels, phases, ranks if traffic else None),
        phases=rows,
        samples=sum(row.samples for row in rows),
        tokens=sum(row.tokens for row in rows),
        flops=flops,
        flops_blocks=blocks,
        flat_steps=flat,
        flat_flops=None if flat is None else flat * costs[1].total,
        flat_flops_blocks=None if flat is None else flat * costs[1].blocks,
        flat_steps_at_equal_flops=flops / costs[1].total,
        warnings=warnings_for(config),
    )


def to_json(plan: Overview) -> dict[str, Any]:
    """The overview as plain values for ``--json``."""
    return asdict(plan)


def _level(level: Level, config: RunConfig, cost: Flops, ranks: int | None) -> LevelOverview:
    batch = config.training.global_batch
    dp = None if ranks is None else data_parallel(level, world_size=ranks, global_batch=batch)
    shape = level.shape
    return LevelOverview(
        index=level.index,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_groups=shape.kv_groups,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        parameters=parameter_count(shape),
        tensor_parallel=level.tensor_parallel,
        zero_stage=level.zero_stage,
        micro_batch=level.micro_batch,
        precision=level.precision,
        data_parallel=dp[0] if dp else None,
        micro_batches=dp[1] if dp else None,
        step_flops=cost.total,
        step_flops_blocks=cost.blocks,
        step_recompute_flops=recompute_flops(shape, config.model.recompute, samples=batch),
    )


def _transitions(
    config: RunConfig, levels: Sequence[Level], phases: Sequence[Phase], ranks: int | None
) -> tuple[TransitionOverview, ...]:
    changes = {phase.fine: phase for phase in phases if not isinstance(phase, Train)}
    rows = []
    for fine, change in sorted(changes.items()):
        mapping = mapping_of(change, levels, config.operators)
        if mapping is None:
            continue
        coarse, operators = mapping
        plan = plan_axes(levels[fine - 1], coarse, operators)
        groupings = coarse.groupings
        rows.append(
            TransitionOverview(
                fine=fine,
                coarse=fine + 1,
                groupings=tuple(_grouping(axis, getattr(groupings, axis.axis)) for axis in plan.axes.values()),
                lossless=plan.lossless,
                notes=plan.notes,
                moments=operators.moments,
                traffic=None if ranks is None else _traffic(config, levels[fine - 1], coarse, ranks),
            )
        )
    return tuple(rows)


def _traffic(config: RunConfig, fine: Level, coarse: Level, ranks: int) -> tuple[ParameterTraffic, ...]:
    from ds_vcycle.sharding.traffic import transition_traffic  # brings numpy, which a plan without ranks does not need

    return transition_traffic(config, fine, coarse, ranks)


def _grouping(axis: AxisMap, grouping: Grouping) -> GroupingOverview:
    return GroupingOverview(
        axis=axis.axis,
        grouping="explicit list" if isinstance(grouping, list) else grouping,
        fine=axis.fine,
        coarse=axis.coarse,
        group_sizes=dict(sorted(Counter(axis.sizes).items())),
    )


def _phase(phase: Phase, config: RunConfig, cost: Flops, total: int) -> PhaseOverview:
    _, steps = steps_at(phase)
    samples = steps * config.training.global_batch
    return PhaseOverview(
        index=phase.index,
        phase=str(phase),
        detail=_detail(phase),
        steps=steps,
        samples=samples,
        tokens=samples * config.model.sequence_length,
        flops=cost.total,
        flops_blocks=cost.blocks,
        share=cost.total / total,
    )


def _detail(phase: Phase) -> str:
    if isinstance(phase, Coalesce):
        return f"level {phase.fine} is parked"
    if isinstance(phase, Refine):
        return f"alpha {phase.alpha:g}, beta {phase.beta:g}"
    if isinstance(phase, Grow):
        if phase.map_lr is not None:
            return f"maps learned at lr {phase.map_lr:g}"
        return "from the seed" if phase.method == "knowledge_inheritance" else "moments anew"
    until = "" if phase.until_loss is None else f", until loss {phase.until_loss:g}"
    taught = "" if phase.teacher is None else f", distilled for {phase.distill_steps:,} steps at {phase.temperature:g}"
    return _lr_text(phase.lr) + taught + until


def _lr_text(lr: LrSchedule) -> str:
    warmup = f"{lr.warmup_steps:,} warm-up, " if lr.warmup_steps else ""
    decay = "constant" if lr.kind == "constant" else f"{lr.kind} to {lr.minimum:g}"
    return f"lr {lr.peak:g}, {warmup}{decay}"
