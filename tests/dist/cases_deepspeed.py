"""Cases for DeepSpeed's own checkpoints, run in every rank: engines that save them natively, engines that load them."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_vcycle import parallel, random_states
from ds_vcycle.checkpoint import store
from ds_vcycle.checkpoint.deepspeed.universal_writing import universal_checkpoint_info
from ds_vcycle.checkpoint.store import StoredFragment
from ds_vcycle.model.build import build_model
from ds_vcycle.parallel import Mesh
from ds_vcycle.schema import parameters
from ds_vcycle.sharding import zero
from ds_vcycle.sharding.placement import layout_of, optimizer_groups
from ds_vcycle.sharding.release import release
from ds_vcycle.train.deepspeed_config import deepspeed_config
from ds_vcycle.train.engine import build_engine, set_lr
from tests.deepspeed_case import Case
from tests.model_level import batch_for


def train_and_save(root: str, cases: list[Case]) -> list[list[float]]:
    """Per case: train, save with DeepSpeed (``native``) and in our store (``ours``), go on; the losses from there."""
    parallel.init_distributed("cpu")
    found = []
    for case in cases:
        engine, mesh = _engine(case)
        for step in range(case.steps):
            _train_step(engine, case, mesh, step)
        directory = Path(root, case.name)
        # what Megatron's jobs hand to DeepSpeed: a namespace, states of generators
        client = {
            "args": argparse.Namespace(lr=0.1, activation=torch.nn.functional.gelu),
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "iteration": case.steps,
        }
        client["universal_checkpoint_info"] = universal_checkpoint_info(case.level.shape)
        engine.save_checkpoint(str(directory / "native"), tag="last", client_state=client)
        _save_ours(engine, case, mesh, directory / "ours")
        found.append([_train_step(engine, case, mesh, step) for step in (2, 3)])
        release(engine)
    return found


def load_and_train(
    root: str, cases: list[tuple[str, Case]], theirs: list[str]
) -> list[tuple[list[str], int, list[float]]]:
    """Engines that load the universal checkpoint of a case: differing tensors, Adam's step, the next losses.

    The native checkpoints of ``theirs`` are converted by DeepSpeed's own tool besides (``theirs``).
    """
    parallel.init_distributed("cpu")
    if dist.get_rank() == 0:
        for name in theirs:
            _convert_by_deepspeed(Path(root, name, "native", "last"), Path(root, name, "theirs", "last"))
    found = []
    for source, case in cases:
        engine, mesh = _loading_engine(case)
        path, _ = engine.load_checkpoint(str(Path(root, source, "universal")), load_lr_scheduler_states=False)
        assert path is not None
        differing = _differing(engine, case, mesh, Path(root, source, "ours"))
        step = zero.adam_step(engine)
        found.append((differing, step, [_train_step(engine, case, mesh, step) for step in (2, 3)]))
        release(engine)
    return found


def _convert_by_deepspeed(native: Path, universal: Path) -> None:
    """ds_to_universal; Megatron's empty extra states, which it trips over, are taken out first."""
    for path in native.glob("mp_rank_*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        assert None in state["module"].values()
        state["module"] = {name: value for name, value in state["module"].items() if value is not None}
        torch.save(state, path)
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(native), output_folder=str(universal), inject_missing_state=False, **options
        )
    )


def _engine(case: Case) -> tuple[DeepSpeedEngine, Mesh]:
    mesh = parallel.mesh_for(case.tp)
    random_states.seed_ranks(1, mesh)
    module = build_model(case.level, case.config.model, mesh=mesh, seed=4)
    return build_engine(module, case.level, case.config, mesh), mesh


def _loading_engine(case: Case) -> tuple[DeepSpeedEngine, Mesh]:
    """As a user's own script builds one: our model under another seed, AdamW in two groups, ``load_universal``."""
    mesh = parallel.mesh_for(case.tp)
    module = build_model(case.level, case.config.model, mesh=mesh, seed=99)
    held = dict(module.named_parameters())
    groups = [
        {"params": [held[p.name] for p in group], "weight_decay": 0.1 if len(group[0].dims) > 1 else 0.0}
        for group in optimizer_groups(parameters(case.level.shape))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    settings = deepspeed_config(case.level, case.config, mesh.world_size) | {"checkpoint": {"load_universal": True}}
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=settings, mpu=mesh.mpu, dist_init_required=False
    )
    return engine, mesh


def _train_step(engine: DeepSpeedEngine, case: Case, mesh: Mesh, step: int) -> float:
    """One step on the same four samples whatever the layout is; their mean loss."""
    set_lr(engine, 1e-2)
    engine.train()
    total = torch.zeros(1)
    accumulation = engine.gradient_accumulation_steps()
    for micro in range(accumulation):
        batch = batch_for(case.level, samples=2, seed=100 * step + mesh.dp_rank * accumulation + micro)
        loss = sum(engine(**batch)) / 10
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() / accumulation
    dist.all_reduce(total)
    return float(total) / mesh.world_size


def _save_ours(engine: DeepSpeedEngine, case: Case, mesh: Mesh, directory: Path) -> None:
    table = {parameter.name: parameter for parameter in parameters(case.level.shape)}
    held = [
        StoredFragment(
            parameter=table[f.name], tp=case.tp, tp_rank=mesh.tp_rank, start=f.start, length=f.length,
            tensors={"master": f.master}
            | ({} if f.exp_avg is None or f.exp_avg_sq is None else {"exp_avg": f.exp_avg, "exp_avg_sq": f.exp_avg_sq}),
        )
        for f in zero.fragments(engine)
        if store.is_writer(table[f.name], tp_rank=mesh.tp_rank, dp_rank=mesh.dp_rank, zero_stage=case.stage)
    ]  # fmt: skip

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(values, value)
        return values

    state = {
        "level": 1, "config": case.config.model_dump(mode="json"), "adam_step": zero.adam_step(engine),
        "counters": zero.counters(engine),
    }  # fmt: skip
    store.save(
        directory, fragments=held, extras={}, state=state, rank=mesh.rank, world_size=mesh.world_size, gather=gather,
        barrier=dist.barrier,
    )  # fmt: skip


def _differing(engine: DeepSpeedEngine, case: Case, mesh: Mesh, ours: Path) -> list[str]:
    """The tensors of this rank whose bits are not those of the checkpoint; pad rows are zero there."""
    table = {parameter.name: parameter for parameter in parameters(case.level.shape)}
    assert layout_of(case.level, case.config, mesh.world_size).tp == mesh.tp_size
    differing = []
    with store.open_checkpoint(ours) as checkpoint:
        for f in zero.fragments(engine):
            for key, held in (("master", f.master), ("exp_avg", f.exp_avg), ("exp_avg_sq", f.exp_avg_sq)):
                if held is None:
                    assert key not in checkpoint.keys(table[f.name])
                    continue
                wanted = checkpoint.read(
                    table[f.name], tp=case.tp, tp_rank=mesh.tp_rank, start=f.start, length=f.length, key=key
                )
                if not torch.equal(held, wanted):
                    differing.append(f"{f.name} {key}")
    return differing
