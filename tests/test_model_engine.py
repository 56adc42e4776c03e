"""The models inside DeepSpeed's engine: ZeRO 3 gathers weights that are used outside their own module too."""

from __future__ import annotations

from typing import Any

import deepspeed

from ds_vcycle import parallel, random_states
from ds_vcycle.model.build import build_model
from ds_vcycle.train.engine import build_engine, set_lr
from tests.dist.ranks import values
from tests.model_level import batch_for, tiny, tiny_config
from tests.test_model_schema import MODERN

CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"recompute": "full"}),
    (1, {"architecture": "bert", "sentence_order": True}),
    (1, {"architecture": "bert", "norm_placement": "post", "recompute": "full"}),
    (2, {"qk_norm": True}),
    (2, MODERN | {"tied_embeddings": False}),
]


def curves(cases: list[tuple[int, dict[str, Any]]]) -> list[dict[int, list[float]]]:
    """Losses of four steps, per case and ZeRO stage."""
    parallel.init_distributed("cpu")
    found = []
    for tp, options in cases:
        losses = {}
        for stage in (0, 3):
            config = tiny_config(tp, **options)
            level, model = tiny(tp, zero_stage=stage, **options)
            mesh = parallel.mesh_for(tp)
            random_states.seed_ranks(1, mesh)
            module = build_model(level, model, mesh=mesh, seed=4)
            engine = build_engine(module, level, config, mesh)
            set_lr(engine, 1e-2)
            losses[stage] = [train_step(engine, batch_for(level, samples=2, seed=mesh.dp_rank)) for _ in range(4)]
            engine.destroy()
        found.append(losses)
    return found


def train_step(engine: deepspeed.DeepSpeedEngine, batch: dict[str, Any]) -> float:
    total = 0.0
    for _ in range(engine.gradient_accumulation_steps()):
        loss = sum(engine(**batch)) / 10
        engine.backward(loss)
        engine.step()
        total += loss.item()
    return total


def test_zero_3_trains_as_without_zero() -> None:
    for rank, found in enumerate(values(2, "tests.test_model_engine:curves", (CASES,))):
        for (tp, options), losses in zip(CASES, found, strict=True):
            assert losses[0][-1] < 0.9 * losses[0][0], (rank, tp, options)
            for plain, sharded in zip(losses[0], losses[3], strict=True):
                assert abs(plain / sharded - 1) < 1e-4, (rank, tp, options, losses)
