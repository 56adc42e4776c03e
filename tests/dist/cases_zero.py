"""Cases for the DeepSpeed adapter, run in every rank: a stand-in model with the schema's names and slices."""

from __future__ import annotations

import gc
import math
import os
import weakref
from dataclasses import replace
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ds_vcycle.config import RunConfig, UserError, parse_config
from ds_vcycle.levels import Level, ModelShape, resolve_levels
from ds_vcycle.model.build import build_model
from ds_vcycle.parallel import Mesh, init_distributed, mesh_for
from ds_vcycle.schema import Parameter, parameters
from ds_vcycle.sharding import zero
from ds_vcycle.sharding.placement import Layout
from ds_vcycle.sharding.release import release
from ds_vcycle.sharding.self_test import self_test
from ds_vcycle.train.engine import build_engine, gradient_norm, set_lr
from tests.memory import resident_bytes, return_what_is_freed
from tests.model_level import batch_for

ODD = ModelShape(
    architecture="bert", layers=2, hidden=6, heads=2, kv_groups=2, head_dim=3, ffn=10, sequence_length=5, vocab_size=13,
    padded_vocab=14, tied_embeddings=True, position="learned", normalization="layernorm", norm_placement="pre",
    activation="gelu", bias=True, qk_norm=False, sentence_order=True,
)  # fmt: skip
TABLE = parameters(ODD)
WIDE_FFN = 60_000  # with it an engine holds about 20 MB, so that one that stays alive shows in the resident memory


def level_of(case: dict[str, Any]) -> Level:
    config = config_of(case)
    return Level(
        index=1,
        shape=replace(ODD, ffn=WIDE_FFN) if case.get("wide") else ODD,
        tensor_parallel=case.get("tp", 1),
        zero_stage=case["stage"],
        micro_batch=1,
        precision=case["precision"],
        lr=None,
        steps=None,
        groupings=config.operators.groupings,
    )


def config_of(case: dict[str, Any]) -> RunConfig:
    sizes = {"layers": 2, "hidden": 6, "heads": 2, "ffn": 10, "sequence_length": 5, "vocab_size": 13}
    return parse_config(
        {
            "model": {"architecture": "bert", "sentence_order": True, **sizes},
            "training": {"global_batch": case.get("batch", 6), "micro_batch": 1, "precision": case["precision"]},
            "optimizer": {"grad_clip": case.get("clip", 1.0)},
            "deepspeed": case.get("extras", {}),
            "data": {"path": "nowhere"},
        }
    )


def full_weight(parameter: Parameter, salt: int = 0) -> Tensor:
    """A global weight whose elements all differ, between parameters too (fp32)."""
    order = [p.name for p in TABLE].index(parameter.name)
    values = torch.sin(torch.arange(parameter.numel, dtype=torch.float64) * 0.37 + order + salt)
    return values.float().view(parameter.shape)


def local_weight(parameter: Parameter, tp: int, tp_rank: int, salt: int = 0, *, whole: Tensor | None = None) -> Tensor:
    """A tensor-parallel rank's slice of the weight (or of ``whole``)."""
    whole = full_weight(parameter, salt) if whole is None else whole
    if parameter.tp_dim is None:
        return whole
    index = [torch.arange(a, b) for a, b in parameter.global_ranges(parameter.tp_dim, tp, tp_rank)]
    return whole.index_select(parameter.tp_dim, torch.cat(index)).contiguous()


class Leaf(nn.Module):
    """Adds scale x sum(sin(weight)), so that a weight's gradient is scale x cos(weight) and nothing else."""

    def forward(self, total: Tensor, scale: Tensor) -> Tensor:
        for weight in self.parameters(recurse=False):
            total = total + scale * torch.sin(weight.float()).sum()
        return total


class StandIn(nn.Module):
    """Modules nested as the schema's names are."""

    def __init__(self, level: Level, mesh: Mesh, precision: str) -> None:
        super().__init__()
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for parameter in parameters(level.shape):
            *path, last = parameter.name.split(".")
            node: nn.Module = self
            for part in path:
                if part not in node._modules:
                    node.add_module(part, Leaf())
                node = node._modules[part]
            weight = nn.Parameter(local_weight(parameter, mesh.tp_size, mesh.tp_rank).to(dtype))
            weight.tensor_model_parallel = parameter.tp_dim is not None
            node.register_parameter(last, weight)

    def forward(self, scale: Tensor) -> Tensor:
        total = torch.zeros((), device=scale.device)
        for module in self.modules():
            if isinstance(module, Leaf) and module._parameters:
                total = module(total, scale)
        return total


def build(case: dict[str, Any]) -> tuple[DeepSpeedEngine, Mesh]:
    init_distributed("cpu")
    mesh = mesh_for(case.get("tp", 1))
    level, config = level_of(case), config_of(case)
    return build_engine(StandIn(level, mesh, case["precision"]), level, config, mesh), mesh


def train_steps(engine: DeepSpeedEngine, mesh: Mesh, steps: int, lr: float = 1e-2) -> list[float]:
    """Steps whose micro-batches carry the scales 1, 2, ... over (micro-step, data-parallel rank); gradient norms."""
    norms = []
    for _ in range(steps):
        set_lr(engine, lr)
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(torch.tensor(float(1 + micro * mesh.dp_size + mesh.dp_rank)))
            engine.backward(loss)
            engine.step()
        norms.append(float(gradient_norm(engine)))
    return norms


def low_precision(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """The weights the model computes with, whole local slices, read by DeepSpeed's own gather."""
    found = {}
    for weight, name in engine.param_names.items():
        with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")):
            found[name] = weight.detach().clone().float()
    return found


def masters(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    return {f.name: f.master.clone() for f in zero.fragments(engine)}


def moments(engine: DeepSpeedEngine) -> dict[str, tuple[Tensor, Tensor]]:
    return {f.name: (f.exp_avg.clone(), f.exp_avg_sq.clone()) for f in zero.fragments(engine)}


def write_masters(engine: DeepSpeedEngine, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for fragment in zero.fragments(engine):
            fragment.master.copy_(values[fragment.name])
    zero.push(engine)


def place_and_edit(case: dict[str, Any]) -> dict[str, Any]:
    """Where fragments are, what they hold, whether an edit reaches the weights and outlives two steps."""
    engine, mesh = build(case)
    by_name = {p.name: p for p in TABLE}
    rounding = torch.bfloat16 if case["precision"] == "bf16" else torch.float32
    held = zero.fragments(engine)
    content = all(
        torch.equal(f.master, _slice(by_name[f.name], mesh, f.start, f.length).to(rounding).float()) for f in held
    )
    edited = {f.name: _slice(by_name[f.name], mesh, f.start, f.length, salt=5) for f in held}
    write_masters(engine, edited)
    read = low_precision(engine)
    pushed = all(
        torch.equal(read[p.name].view(-1), _slice(p, mesh, 0, None, salt=5).to(rounding).float()) for p in TABLE
    )
    norms = train_steps(engine, mesh, 2)
    after, read, state = masters(engine), low_precision(engine), moments(engine)
    agree = all(
        torch.equal(read[f.name].view(-1)[f.start : f.start + f.length], after[f.name].to(rounding).float())
        for f in held
    )
    result = {
        "class": type(engine.optimizer).__name__, "fragments": [(f.name, f.start, f.length) for f in held],
        "content": content, "pushed": pushed, "agree": agree, "norms": norms, "adam_step": zero.adam_step(engine),
        "after": {f.name: (f.start, after[f.name], state[f.name][0]) for f in held},
        "tp_rank": mesh.tp_rank, "dp_rank": mesh.dp_rank,
        "counters": zero.counters(engine),
    }  # fmt: skip
    release(engine)
    return result


def _slice(parameter: Parameter, mesh: Mesh, start: int, length: int | None, salt: int = 0) -> Tensor:
    flat = local_weight(parameter, mesh.tp_size, mesh.tp_rank, salt).view(-1)
    return flat[start:] if length is None else flat[start : start + length]


def resume(case: dict[str, Any]) -> dict[str, bool]:
    """Masters, moments and step moved into a new engine, and Adam's state emptied, against uninterrupted runs."""
    engine, mesh = build(case)
    first = train_steps(engine, mesh, 1) and masters(engine)
    train_steps(engine, mesh, 1)
    kept, state, step, count = masters(engine), moments(engine), zero.adam_step(engine), zero.counters(engine)
    train_steps(engine, mesh, 1)
    wanted, wanted_state = masters(engine), moments(engine)
    del engine
    other, _ = build(case)
    write_masters(other, kept)
    zero.set_moments(other, state, step)
    zero.set_counters(other, count)
    train_steps(other, mesh, 1)
    found, found_state = masters(other), moments(other)
    result = {
        "same_masters": all(torch.equal(wanted[name], found[name]) for name in wanted),
        "same_moments": all(
            torch.equal(a, b) for name in wanted for a, b in zip(wanted_state[name], found_state[name], strict=True)
        ),
        "step": step == 2 and zero.adam_step(other) == 3,
        "counted": zero.counters(other) == {"global_steps": 3, "global_samples": 18, "skipped_steps": 0},
    }
    fresh, _ = build(case)
    start = masters(fresh)
    write_masters(other, start)
    zero.reset_moments(other)
    result["emptied"] = zero.adam_step(other) == 0 and all(f.exp_avg is None for f in zero.fragments(other))
    train_steps(other, mesh, 1)
    found = masters(other)
    result["as_fresh"] = all(torch.equal(first[name], found[name]) for name in first)
    return result


def cycles(case: dict[str, Any]) -> dict[str, Any]:
    """Build, step and release over and over: what stays alive, and descriptors, threads, resident bytes per round."""
    return_what_is_freed()
    alive, early, rounds = [], [], []
    for _ in range(case["rounds"]):
        engine, mesh = build(case)
        train_steps(engine, mesh, 2)
        low_precision(engine)
        references = [weakref.ref(x) for x in (engine, engine.module, engine.optimizer, engine.basic_optimizer)]
        references += [weakref.ref(f.master) for f in zero.fragments(engine)]
        references += [weakref.ref(p) for p in engine.module.parameters()]
        release(engine)
        dead = [reference() is None for reference in references[1:]]  # all but the engine, of which we hold the shell
        early.append(all(dead))
        del engine
        gc.collect()
        alive.append(sum(reference() is not None for reference in references))
        rounds.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident_bytes()))
    return {"alive": alive, "early": early, "rounds": rounds}


def run(jobs: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Several cases in one process group."""
    gc.freeze()  # each collection would otherwise walk everything torch and Megatron have imported: a second
    return [globals()[name](case) for name, case in jobs]


def reference_steps(
    scales: list[float], clip: float, steps: int = 2
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights, first moments and gradient norms of the same steps on whole fp64 weights, by plain formulas.

    Adam with decoupled decay; gradients clipped by their global norm, which shows in the moments only.
    """
    weights = {p.name: full_weight(p, salt=5).double() for p in TABLE}
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    norms = []
    for step in range(1, steps + 1):
        gradients = {name: sum(scales) / len(scales) * w.cos() for name, w in weights.items()}
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients.values())))
        factor = min(1.0, clip / (norms[-1] + 1e-6))
        for name, w in weights.items():
            g = gradients[name] * factor
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            decay = 0.1 if w.dim() > 1 else 0.0
            update = first[name] / (1 - 0.9**step) / ((second[name] / (1 - 0.95**step)).sqrt() + 1e-8)
            weights[name] = w * (1 - 1e-2 * decay) - 1e-2 * update
    return weights, first, norms


def self_test_says(case: dict[str, Any]) -> dict[str, Any]:
    """What the self-test says on this rank when the layout claims something else, or the last rank's push is lost."""
    engine, mesh = build(case)
    before = masters(engine)
    if case.get("lose_push") and mesh.rank == mesh.world_size - 1:
        push = engine.optimizer.update_lp_params

        def lost() -> None:
            kept = {name: weight.clone() for name, weight in engine.module.named_parameters()}
            push()
            for name, weight in engine.module.named_parameters():
                weight.data.copy_(kept[name])

        engine.optimizer.update_lp_params = lost
    said = ""
    try:
        self_test(engine, TABLE, Layout(world_size=mesh.world_size, zero_stage=case["stage"], **case["claimed"]))
    except UserError as error:
        said = str(error)
    after = masters(engine)
    return {"said": said, "unchanged": all(torch.equal(before[name], after[name]) for name in before)}


def real_model(case: dict[str, Any]) -> dict[str, Any]:
    """Gradient norms and the trained weights' norm of a small real level, whose batch is the same on every rank."""
    init_distributed("cpu")
    mesh = mesh_for(case["tp"])
    config = parse_config(
        {
            "model": {
                "architecture": case["architecture"], "layers": 2, "hidden": 16, "heads": 4, "sequence_length": 8,
                "vocab_size": 50, "dropout": 0.0, "attention_dropout": 0.0, "tensor_parallel": case["tp"],
                "qk_norm": case.get("qk_norm", False),
            },
            "training": {
                "global_batch": 2 * mesh.dp_size, "micro_batch": 2, "zero_stage": case["stage"],
                "precision": case["precision"],
            },
            "cycle": {"kind": "flat"},
            "data": {"path": "nowhere"},
        }
    )  # fmt: skip
    level = resolve_levels(config)[0]
    model = build_model(level, config.model, mesh=mesh, seed=3)
    engine = build_engine(model, level, config, mesh)
    norms, batch = [], batch_for(level, samples=2)
    for _ in range(3):
        set_lr(engine, 1e-2)
        losses, _sentence_order = engine(**batch)
        engine.backward(losses / batch["weights"].sum())
        engine.step()
        norms.append(float(gradient_norm(engine)))
    held = [weakref.ref(x) for x in (engine.optimizer, engine.module, *engine.module.parameters(), *batch.values())]
    release(engine)
    del model, losses, _sentence_order  # a loss holds its graph, and that the parameters
    gc.collect()
    return {"norms": norms, "alive": sum(reference() is not None for reference in held) - len(batch)}
