"""A run on so many nodes of so many GPUs: memory, time and traffic by formula: ``plan --nodes``. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ds_vcycle.baselines.inheritance import as_teacher
from ds_vcycle.config import ConfigError, LevelConfig, RunConfig
from ds_vcycle.cycle.activations import ELEMENT_BYTES
from ds_vcycle.cycle.costs import level_cost, phase_cost
from ds_vcycle.cycle.gpu import Gpu
from ds_vcycle.cycle.memory import MASTER_BYTES, RankMemory, local_elements, rank_memory
from ds_vcycle.cycle.network import Nodes, TransitionBytes, step_bytes, sums_bytes, transition_bytes
from ds_vcycle.cycle.phases import Coalesce, Phase, Refine, Train, steps_at
from ds_vcycle.cycle.remedies import Room, changes_that_fit
from ds_vcycle.cycle.schedule import expand, mapping_of
from ds_vcycle.levels import Level, data_parallel, lowered_micro_batch, resolve_levels
from ds_vcycle.schema import parameter_count
from ds_vcycle.train.flops import predicted_positions, recompute_flops

_LAUNCH_SECONDS = 5e-4  # a layer, forward and backward: some hundred kernels, about five microseconds each


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelOnCluster:
    """One level on the cluster. Times are computing alone: they hold while the network keeps up.

    ``teacher_bytes``: of a GPU, on top of ``memory``, while a coarser level teaches this one (0 without).

    ``launch_bound``: whether a step's products take less time than launching its kernels, so that it will last longer.

    ``fits``: whether the peak is within the GPU's memory less :data:`~ds_vcycle.cycle.gpu.RESERVE`; if not,
    ``changes`` says what would make it fit. ``parked_bytes``: of a node's host memory, for kept finer levels while this
    one trains. ``sent_bytes``: leaves each node in a step, and ``sent_rate`` how many a second that is.
    ``summed_bytes``: leaves each GPU in a step for the sums of tensor parallelism. ``checkpoint_bytes``: of one
    checkpoint, all ranks together.
    """

    index: int
    tensor_parallel: int
    zero_stage: int
    micro_batch: int
    data_parallel: int
    micro_batches: int
    within_node: bool
    memory: RankMemory
    teacher_bytes: int
    fits: bool
    changes: tuple[str, ...]
    steps: int
    tokens: int
    step_flops: int
    step_seconds: float
    launch_bound: bool
    hours: float
    parked_bytes: int
    sent_bytes: int
    sent_rate: float
    summed_bytes: int
    checkpoint_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionOnCluster:
    """One kind of change of level: ``bytes`` leave all nodes together at most."""

    fine: int
    coarse: int
    coarse_bytes: int
    bytes: TransitionBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOverview:
    """The whole run. ``hours``: of computing; ``flat_hours``: of level 1 for ``cycle.flat.steps``, None if not set."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu
    mfu: tuple[float, ...]
    levels: tuple[LevelOnCluster, ...]
    transitions: tuple[TransitionOnCluster, ...]
    hours: float
    flat_hours: float | None

    @property
    def fits(self) -> bool:
        """Whether every level fits."""
        return all(level.fits for level in self.levels)


def on_cluster(config: RunConfig, nodes: Nodes, gpu: Gpu, mfu: Sequence[float]) -> ClusterOverview:
    """Work out what the run needs and takes on ``nodes``.

    Args:
        config: the run.
        nodes: the cluster, all of whose GPUs are ranks.
        gpu: one of them.
        mfu: share of its peak that matrix products reach, recomputed ones included: one for all levels or one each.

    Raises:
        UserError: whatever in the configuration cannot be run, ranks that do not divide included.
    """
    levels, phases = resolve_levels(config), expand(config)
    if len(mfu) not in (1, len(levels)):
        raise ConfigError(f"--mfu has {len(mfu)} values for {len(levels)} levels; give one, or one for each level")
    shares = tuple(mfu) * (len(levels) if len(mfu) == 1 else 1)
    parked = _parked(config, levels, phases, nodes)
    spent = {level.index: _flops(phases, levels, config, level) for level in levels}
    rows = tuple(
        _level(
            level, config, nodes, gpu, mfu=shares[level.index - 1], steps=_steps(phases, level),
            spent=spent[level.index], parked=parked.get(level.index, 0), taught=_teacher(phases, levels, config, level),
        )
        for level in levels
    )  # fmt: skip
    flat = config.cycle.flat.steps
    return ClusterOverview(
        nodes=nodes.count,
        gpus_per_node=nodes.gpus,
        gpu=gpu,
        mfu=shares,
        levels=rows,
        transitions=_transitions(config, levels, phases, nodes),
        hours=sum(row.hours for row in rows),
        flat_hours=None if flat is None else flat * rows[0].step_seconds / 3600,
    )


def divided(config: RunConfig, nodes: Nodes) -> RunConfig:
    """The run with every level's micro-batch lowered, where it must be, to divide the batch over the ranks.

    Raises:
        ConfigError: there are more data-parallel ranks than samples, or they do not divide the batch.
    """
    batch = config.training.global_batch
    levels = resolve_levels(config)
    overrides = [*config.levels, *[LevelConfig()] * len(levels)]
    for level in levels:
        ranks = nodes.ranks // level.tensor_parallel
        if nodes.ranks % level.tensor_parallel or batch % ranks:
            raise ConfigError(
                f"level {level.index}: training.global_batch={batch} is not a multiple of {ranks} data-parallel ranks; "
                "raise it, or raise tensor_parallel"
            )
        lowered = lowered_micro_batch(level.micro_batch, batch // ranks)
        overrides[level.index - 1] = overrides[level.index - 1].model_copy(update={"micro_batch": lowered})
    kept = max(len(config.levels), len(levels))  # a flat run of a cycle's file has more entries than it visits
    return config.model_copy(update={"levels": overrides[:kept]})


def to_json(found: ClusterOverview) -> dict[str, Any]:
    """The overview as plain values for ``--json``."""
    return asdict(found)


def _level(
    level: Level,
    config: RunConfig,
    nodes: Nodes,
    gpu: Gpu,
    *,
    mfu: float,
    steps: int,
    spent: int,
    parked: int,
    taught: int,
) -> LevelOnCluster:
    batch = config.training.global_batch
    ranks, micro_batches = data_parallel(level, world_size=nodes.ranks, global_batch=batch)
    memory = rank_memory(level, config, data_parallel=ranks, micro_batches=micro_batches)
    flops = level_cost(level, config).total
    again = recompute_flops(level.shape, config.model.recompute, samples=batch)
    rate = nodes.ranks * gpu.peak(level.precision) * mfu
    seconds = (flops + again) / rate
    sent = step_bytes(level, config, nodes, micro_batches=micro_batches)
    room = gpu.usable - taught
    fits = memory.peak <= room
    return LevelOnCluster(
        index=level.index,
        tensor_parallel=level.tensor_parallel,
        zero_stage=level.zero_stage,
        micro_batch=level.micro_batch,
        data_parallel=ranks,
        micro_batches=micro_batches,
        within_node=nodes.hold(level.tensor_parallel),
        memory=memory,
        teacher_bytes=taught,
        fits=fits,
        changes=() if fits else changes_that_fit(level, config, Room(nodes=nodes, bytes=room)),
        steps=steps,
        tokens=steps * batch * level.shape.sequence_length,
        step_flops=flops,
        step_seconds=seconds,
        launch_bound=seconds < _LAUNCH_SECONDS * level.shape.layers * micro_batches,
        hours=(steps * seconds + (spent - steps * flops) / rate) / 3600,
        parked_bytes=parked,
        sent_bytes=sent,
        sent_rate=sent / seconds,
        summed_bytes=sums_bytes(level, config, micro_batches=micro_batches),
        checkpoint_bytes=3 * MASTER_BYTES * parameter_count(level.shape),
    )


def _teacher(phases: Sequence[Phase], levels: Sequence[Level], config: RunConfig, level: Level) -> int:
    """What a level's teacher takes of a GPU: its weights, and five fp32 copies of both levels' logits at most."""
    taught = (phase for phase in phases if isinstance(phase, Train) and phase.level == level.index)
    most = 0
    for index in {phase.teacher for phase in taught if phase.teacher is not None}:
        teacher = as_teacher(levels[index - 1], level)
        positions = level.micro_batch * predicted_positions(level.shape, config.data.mask_probability)
        logits = positions * level.shape.padded_vocab // level.tensor_parallel
        most = max(most, ELEMENT_BYTES[teacher.precision] * local_elements(teacher) + 5 * MASTER_BYTES * logits)
    return most


def _flops(phases: Sequence[Phase], levels: Sequence[Level], config: RunConfig, level: Level) -> int:
    """Of all steps at the level, what a teacher's forward passes cost included."""
    return sum(phase_cost(phase, levels, config).total for phase in phases if steps_at(phase)[0] == level.index)


def _steps(phases: Sequence[Phase], level: Level) -> int:
    return sum(steps for at, steps in map(steps_at, phases) if at == level.index)


def _parked(config: RunConfig, levels: Sequence[Level], phases: Sequence[Phase], nodes: Nodes) -> Mapping[int, int]:
    """By level, the most of a node's host memory that parked levels take while it trains: their masters."""
    if config.cycle.park == "disk":
        return {}
    kept: dict[int, int] = {}
    most: dict[int, int] = {}
    for phase in phases:
        if isinstance(phase, Coalesce):
            kept[phase.fine] = _host_bytes(levels[phase.fine - 1], nodes)
        elif isinstance(phase, Refine):
            kept.pop(phase.fine, None)
        elif isinstance(phase, Train):
            most[phase.level] = max(most.get(phase.level, 0), sum(kept.values()))
    return most


def _host_bytes(level: Level, nodes: Nodes) -> int:
    """A level's masters on one node: split over all ranks by ZeRO, else whole for each data-parallel rank there."""
    whole = MASTER_BYTES * parameter_count(level.shape)
    if level.zero_stage == 0:
        return whole * nodes.gpus // level.tensor_parallel
    return -(-whole // nodes.count)


def _transitions(
    config: RunConfig, levels: Sequence[Level], phases: Sequence[Phase], nodes: Nodes
) -> tuple[TransitionOnCluster, ...]:
    found = []
    for index, change in sorted({phase.fine: phase for phase in phases if not isinstance(phase, Train)}.items()):
        fine, mapping = levels[index - 1], mapping_of(change, levels, config.operators)
        if mapping is None:
            continue
        coarse = mapping[0]
        refines = [phase for phase in phases if isinstance(phase, Refine) and phase.fine == index]
        again = any(abs(1 - phase.alpha - phase.beta) > 1e-12 for phase in refines)
        found.append(
            TransitionOnCluster(
                fine=index,
                coarse=index + 1,
                coarse_bytes=MASTER_BYTES * parameter_count(coarse.shape),
                bytes=transition_bytes(fine, coarse, config, nodes, cx_again=again),
            )
        )
    return tuple(found)
