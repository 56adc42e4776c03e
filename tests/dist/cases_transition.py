"""Transitions on live, partitioned engines, against the operators on whole tensors gathered by the test itself."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_vcycle.config import RunConfig
from ds_vcycle.cycle import transition
from ds_vcycle.data.batches import evaluation_batches, step_batches
from ds_vcycle.data.samples import Samples, open_samples
from ds_vcycle.evaluate.heldout import held_out_loss
from ds_vcycle.levels import Level, resolve_levels
from ds_vcycle.model.build import build_model
from ds_vcycle.operators import apply
from ds_vcycle.operators.plan import TransitionPlan, plan_transition
from ds_vcycle.parallel import Mesh, init_distributed, mesh_for
from ds_vcycle.schema import Parameter, parameters
from ds_vcycle.sharding.exchange import Exchange
from ds_vcycle.sharding.geometry import Geometry
from ds_vcycle.sharding.placement import layout_of
from ds_vcycle.sharding.release import release
from ds_vcycle.sharding.traffic import traffic
from ds_vcycle.sharding.zero import Engine, adam_step, fragments
from ds_vcycle.train.engine import build_engine
from ds_vcycle.train.loop import train_step
from tests.dist.cases_zero import low_precision
from tests.sharded import local_slice

BLENDS = ((0.0, 1.0), (1.0, 0.25), (0.5, 0.5), (0.3, 0.3))
QUANTITIES = ("master", "exp_avg", "exp_avg_sq")
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "broadcast", "gather", "isend", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip
Whole = dict[str, Tensor]


@dataclass(kw_only=True)
class Setting:
    """One case on this rank: its levels, plan and data."""

    config: RunConfig
    mesh: Mesh
    fine: Level
    coarse: Level
    plan: TransitionPlan
    training: Samples
    validation: Samples
    problems: list[str] = field(default_factory=list)

    @property
    def geometry(self) -> Geometry:
        fine, coarse = (layout_of(level, self.config, self.mesh.world_size) for level in (self.fine, self.coarse))
        return Geometry(plan=self.plan, fine=fine, coarse=coarse)

    def engine(self, level: Level, seed: int | None = None) -> Engine:
        """The level's engine; from here on the mesh is the level's."""
        self.mesh = mesh_for(level.tensor_parallel)
        model = build_model(level, self.config.model, mesh=self.mesh, seed=seed)
        return build_engine(model, level, self.config, self.mesh)

    def train(self, engine: Engine, level: Level, first: int, steps: int) -> None:
        settings, mesh = self.config.training, self.mesh
        for step in range(first, first + steps):
            batches = step_batches(
                self.training, position=step * settings.global_batch, global_batch=settings.global_batch,
                micro_batch=level.micro_batch, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size,
            )  # fmt: skip
            train_step(engine, batches, lr=1e-2, mesh=mesh)

    def held_out(self, engine: Engine) -> float:
        batches = evaluation_batches(
            self.validation, count=4, micro_batch=2, dp_rank=self.mesh.dp_rank, dp_size=self.mesh.dp_size
        )
        return held_out_loss(engine, batches, self.mesh)

    def gathered(self, engine: Engine, level: Level) -> dict[str, Whole]:
        """Every quantity the engine holds as whole tensors, put together from all ranks' fragments."""
        held = fragments(engine)
        ranges = [(f.name, f.start, f.length) for f in held]
        values = {
            quantity: torch.cat([getattr(f, quantity) for f in held]).numpy()
            for quantity in QUANTITIES
            if all(getattr(f, quantity) is not None for f in held)
        }
        ranks: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(ranks, (ranges, values))
        return {quantity: self._whole(level, ranks, quantity) for quantity in values}

    def _whole(self, level: Level, ranks: list[Any], quantity: str) -> Whole:
        table = {p.name: p for p in parameters(level.shape)}
        whole = {name: torch.full((p.numel,), torch.nan) for name, p in table.items()}
        for rank, (ranges, values) in enumerate(ranks):
            flat = torch.from_numpy(values[quantity]).split([length for _, _, length in ranges])
            for (name, start, length), part in zip(ranges, flat, strict=True):
                index = _flat_index(table[name], self.mesh.tp_size, rank % self.mesh.tp_size)[start : start + length]
                before = whole[name][index]
                if not ((before == part) | before.isnan()).all():
                    self.problems.append(f"{quantity} of {name}: replicas differ on rank {rank}")
                whole[name][index] = part
        missing = [name for name, values in whole.items() if values.isnan().any()]
        if missing:
            self.problems.append(f"{quantity}: not all elements are held by a rank of {missing}")
        return {name: values.view(table[name].shape) for name, values in whole.items()}

    def same(self, what: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        """Note every parameter whose bits differ."""
        if found.keys() != wanted.keys():
            self.problems.append(f"{what}: other parameters: {sorted(found.keys() ^ wanted.keys())}")
            return
        for name, value in wanted.items():
            if not torch.equal(found[name], value):
                worst = float((found[name] - value).abs().max())
                self.problems.append(f"{what}: {name} differs by up to {worst}")

    def pushed(self, what: str, engine: Engine, level: Level, masters: Whole) -> None:
        """The weights computed with are the masters, rounded."""
        dtype = torch.bfloat16 if level.precision == "bf16" else torch.float32
        wanted = {
            p.name: local_slice(p, masters[p.name], self.mesh.tp_size, self.mesh.tp_rank).to(dtype).float()
            for p in parameters(level.shape)
        }
        self.same(f"{what}: weights computed with", low_precision(engine), wanted)


def round_trip(config: RunConfig) -> dict[str, Any]:
    """Down and up on live engines; every difference from the whole-tensor operators, and what crossed ranks."""
    init_distributed("cpu")
    fine, coarse = resolve_levels(config)[:2]
    plan = plan_transition(fine, coarse, config.operators)
    case = Setting(
        config=config, mesh=mesh_for(fine.tensor_parallel), fine=fine, coarse=coarse, plan=plan,
        training=open_samples(config.data, config.model, "train"),
        validation=open_samples(config.data, config.model, "validation"),
    )  # fmt: skip
    engine = case.engine(fine, seed=7)
    case.train(engine, fine, 0, 2)
    x, before = case.gathered(engine, fine), case.held_out(engine)
    parked, down = transition.masters(engine), {}
    staged = {}
    for moments in ("reset", "map"):
        with watched() as down[moments]:
            staged[moments] = transition.stage_down(engine, case.geometry, case.mesh, moments)
    case.same("the fine level is not changed by going down", case.gathered(engine, fine)["master"], x["master"])
    release(engine)

    engine = case.engine(coarse)
    _coarse_is(case, engine, "reset", staged["reset"], x)
    _coarse_is(case, engine, "map", staged["map"], x)
    case.train(engine, coarse, 2, 1)
    y = case.gathered(engine, coarse)
    up, watch = {}, {}
    for blend in BLENDS:
        moments = "reset" if blend == BLENDS[0] else "map"
        with watched() as watch[blend]:
            up[blend] = transition.stage_up(
                engine, parked, case.geometry, case.mesh, alpha=blend[0], beta=blend[1], moments=moments
            )
    release(engine)

    engine = case.engine(fine)
    after = _fine_is(case, engine, parked, up, x, y)
    case.train(engine, fine, 3, 1)
    if adam_step(engine) != 4:
        case.problems.append(f"Adam's step is {adam_step(engine)} after 2 + 1 + 1 steps")
    release(engine)
    rows, rank = traffic(case.geometry), case.mesh.rank
    planned = sum(row.coalesce[rank] for row in rows), sum(row.refine[rank] for row in rows)
    coarse_elements = sum(p.numel for p in parameters(coarse.shape))
    crossed = {
        "down": {moments: watch_.exchanged for moments, watch_ in down.items()},
        "up": {blend: watch_.exchanged for blend, watch_ in watch.items()},
        "into": after["exchanged"],
    }
    collectives = [call for seen in (*down.values(), *watch.values()) for call in seen.calls]
    return {
        "problems": case.problems, "before": before, "after": after["held_out"], "crossed": crossed,
        "coarse_elements": coarse_elements, "collectives": collectives, "planned": planned,
    }  # fmt: skip


def _coarse_is(case: Setting, engine: Engine, moments: str, staged: transition.Staged, x: dict[str, Whole]) -> None:
    """Fill the coarse engine and compare it with the coalesced whole tensors."""
    transition.fill(engine, staged)
    found = case.gathered(engine, case.coarse)
    wanted = {"master"} if moments == "reset" else set(QUANTITIES)
    if set(found) != wanted or adam_step(engine) != (0 if moments == "reset" else 2):
        case.problems.append(f"coalesced, {moments}: the engine holds {sorted(found)} at step {adam_step(engine)}")
    for quantity in wanted & set(found):
        expected = apply.coalesce(case.plan, x[quantity], quantity)
        case.same(f"coalesced, {moments}, {quantity}", found[quantity], expected)
    if moments == "map":
        case.pushed("coalesced", engine, case.coarse, found["master"])


def _fine_is(
    case: Setting,
    engine: Engine,
    parked: dict[str, Tensor],
    up: dict[tuple[float, float], transition.Staged],
    x: dict[str, Whole],
    y: dict[str, Whole],
) -> dict[str, Any]:
    """Refine into the fine engine with every blend and compare it with the refined whole tensors."""
    result: dict[str, Any] = {"exchanged": {}}
    for blend, staged in up.items():
        alpha, beta = blend
        with watched() as seen:
            transition.refine_into(engine, parked, staged, case.geometry, case.mesh, alpha=alpha, beta=beta)
        result["exchanged"][blend] = seen.exchanged
        found = case.gathered(engine, case.fine)
        expected = apply.refine(case.plan, x["master"], y["master"], alpha=alpha, beta=beta)
        case.same(f"refined {blend}", found["master"], expected)
        if blend in (BLENDS[0], BLENDS[-1]):
            case.pushed(f"refined {blend}", engine, case.fine, found["master"])
        if blend == BLENDS[0]:
            result["held_out"] = case.held_out(engine)
            if set(found) != {"master"} or adam_step(engine) != 0:
                case.problems.append(f"refined, reset: the engine holds {sorted(found)} at step {adam_step(engine)}")
            continue
        for quantity in QUANTITIES[1:]:
            expected = apply.decoalesce(case.plan, y[quantity], quantity)
            case.same(f"refined {blend}, {quantity}", found.get(quantity, {}), expected)
        if adam_step(engine) != 3:
            case.problems.append(f"refined {blend}: Adam's step is {adam_step(engine)}, not 3")
    return result


@dataclass(kw_only=True)
class Watch:
    """Bytes that exchanges handed to other ranks, each, and every collective called: name, bytes."""

    exchanged: list[int] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Watch the exchanges of transitions and all collectives of torch."""
    seen, originals = Watch(), {name: getattr(dist, name) for name in COLLECTIVES}
    exchange = Exchange.__call__

    def counted(self: Exchange, *args: Any) -> list[Tensor]:
        before = self.sent_bytes
        received = exchange(self, *args)
        seen.exchanged.append(self.sent_bytes - before)
        return received

    def noted(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            size = sum(a.numel() * a.element_size() for a in args if isinstance(a, Tensor))
            seen.calls.append((name, size))
            return originals[name](*args, **options)

        return call

    Exchange.__call__ = counted
    for name in COLLECTIVES:
        setattr(dist, name, noted(name))
    try:
        yield seen
    finally:
        Exchange.__call__ = exchange
        for name, original in originals.items():
            setattr(dist, name, original)


def run(configs: dict[str, RunConfig]) -> dict[str, Any]:
    """Several cases in one process group; a case that raises is its own result."""
    init_distributed("cpu")
    gc.freeze()  # each collection would otherwise walk everything torch and Megatron have imported
    return {name: round_trip(config) for name, config in configs.items()}


def _flat_index(parameter: Parameter, tp: int, tp_rank: int) -> Tensor:
    """The flat index in the whole tensor of each element of a rank's slice."""
    return local_slice(parameter, torch.arange(parameter.numel).view(parameter.shape), tp, tp_rank).reshape(-1)
