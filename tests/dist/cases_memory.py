"""What engines really hold, run in every rank: bytes between steps, kept for backward, and at most within a step."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import profile

from ds_vcycle.config import RunConfig, parse_config
from ds_vcycle.levels import Level, resolve_levels
from ds_vcycle.model.build import build_model
from ds_vcycle.parallel import init_distributed, mesh_for
from ds_vcycle.random_states import seed_ranks
from ds_vcycle.sharding.release import release
from ds_vcycle.train.engine import build_engine, set_lr
from ds_vcycle.train.flops import predicted_positions
from tests.model_level import batch_for

BUCKET = 200_000  # elements: of the order of the model, so that the buckets show in the sums
SMALL_ZERO = {"reduce_bucket_size": BUCKET, "param_persistence_threshold": 1_000}


def config_of(case: dict[str, Any], data_parallel: int) -> RunConfig:
    """A level with as many bytes of weights as of activations; ``accumulate`` micro-batches a step."""
    zero = {"zero_optimization": SMALL_ZERO} if case["stage"] else {}
    micro_batch = case.get("micro_batch", 2)
    return parse_config(
        {
            "model": {
                "architecture": case["architecture"], "layers": 3, "hidden": 128, "heads": 4, "sequence_length": 64,
                "vocab_size": 1000, "dropout": 0.0, "attention_dropout": 0.0, "tensor_parallel": case.get("tp", 1),
                **case.get("model", {}),
            },
            "training": {
                "global_batch": data_parallel * micro_batch * case.get("accumulate", 2), "micro_batch": micro_batch,
                "zero_stage": case["stage"], "precision": case["precision"],
            },
            "deepspeed": zero | case.get("extras", {}),
            "cycle": {"kind": "flat"},
            "data": {"path": "nowhere"},
        }
    )  # fmt: skip


class Trained:
    """A level's engine and a batch of it."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.mesh = mesh_for(case.get("tp", 1))
        self.config = config_of(case, self.mesh.dp_size)
        self.level: Level = resolve_levels(self.config)[0]
        seed_ranks(1, self.mesh)
        model = build_model(self.level, self.config.model, mesh=self.mesh, seed=3)
        self.engine: DeepSpeedEngine = build_engine(model, self.level, self.config, self.mesh)
        self.batch = batch_for(self.level, samples=self.level.micro_batch)
        if self.level.shape.architecture == "bert":
            slots = predicted_positions(self.level.shape, self.config.data.mask_probability)
            for key in ("masked_positions", "labels", "weights"):
                self.batch[key] = self.batch[key][:, :1].expand(-1, slots).contiguous()
        for _ in range(2):
            self.step()
        gc.collect()

    def micro_batch(self) -> None:
        tokens, sentences = self.engine(**self.batch)
        self.engine.backward((tokens + sentences) / 100)
        self.engine.step()

    def step(self) -> None:
        set_lr(self.engine, 1e-3)
        for _ in range(self.engine.gradient_accumulation_steps()):
            self.micro_batch()


def storages() -> dict[int, int]:
    """Bytes of every storage that a tensor known to Python's collector or such a tensor's gradient lies in."""
    found = {}
    for held in gc.get_objects():
        if isinstance(held, torch.Tensor):
            for tensor in (held, held.grad if held.is_leaf else None):
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


def _held_outside(outside: set[int]) -> int:
    time.sleep(0.02)
    gc.collect()
    return sum(size for address, size in storages().items() if address not in outside)


class _Kept:
    """A saved tensor, alive as long as the backward pass will ask for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def saved_bytes(trained: Trained) -> int:
    """Bytes of what a forward pass leaves for the backward pass, weights and the batch itself left out."""
    kept: list[weakref.ref[_Kept]] = []

    def pack(tensor: torch.Tensor) -> _Kept:
        held = _Kept(tensor)
        kept.append(weakref.ref(held))
        return held

    own = [*trained.engine.module.parameters(), *trained.batch.values()]
    with saved_tensors_hooks(pack, lambda held: held.tensor):
        losses = trained.engine(**trained.batch)
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    alive = [held.tensor.untyped_storage() for reference in kept if (held := reference())]
    found = {storage.data_ptr(): storage.nbytes() for storage in alive if storage.data_ptr() not in known}
    trained.engine.backward(sum(losses) / 100)
    trained.engine.step()
    for _ in range(trained.engine.gradient_accumulation_steps() - 1):
        trained.micro_batch()
    return sum(found.values())


def peak_bytes(case: dict[str, Any]) -> tuple[int, int]:
    """(bytes before a step, the most within it), of all that torch has allocated since the engine was built."""
    with profile(profile_memory=True) as watched:
        trained = Trained(case)
        begin = time.time_ns()
        trained.step()
        end = time.time_ns()
    events = [event for event in watched.kineto_results.events() if event.name() == "[memory]"]
    now = before = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        if event.start_ns() < begin:
            before = most = now
        elif event.start_ns() <= end:
            most = max(most, now)
    release(trained.engine)
    return before, most


@contextmanager
def _silence() -> Any:
    """DeepSpeed's BF16_Optimizer prints its memory at every build."""
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(out, 1)


def measure(case: dict[str, Any]) -> dict[str, int]:
    """Bytes on this rank: between steps, of gradients between micro-batches, kept for backward, at most in a step."""
    outside = set(storages())
    trained = Trained(case)
    states = _held_outside(outside)
    set_lr(trained.engine, 1e-3)
    trained.micro_batch()
    accumulated = min(_held_outside(outside) for _ in range(3)) - states  # gloo lets go of a buffer a moment later
    for _ in range(trained.engine.gradient_accumulation_steps() - 1):
        trained.micro_batch()
    kept = saved_bytes(trained)
    dp = trained.mesh.dp_size
    release(trained.engine)
    del trained
    gc.collect()
    result = {"states": states, "between": accumulated, "kept": kept, "dp": dp}
    if case.get("peak"):
        before, most = peak_bytes(case)
        result |= {"before": before, "peak": most}
    return result


def run(cases: list[dict[str, Any]]) -> list[dict[str, int]]:
    """All cases in one process group."""
    init_distributed("cpu")
    gc.freeze()
    with _silence():
        return [measure(case) for case in cases]
