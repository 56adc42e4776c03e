"""One and two tensor-parallel ranks compute the same loss and gradients, from the same initial weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from ds_vcycle import parallel, random_states
from ds_vcycle.model.attention import CoreAttention
from ds_vcycle.model.build import build_model
from ds_vcycle.schema import Parameter, parameters
from tests.dist.ranks import values
from tests.model_level import batch_for, tiny
from tests.test_model_schema import MODERN

CASES: list[dict[str, Any]] = [
    {},  # 101 of 256 padded ids: the second rank's slice is padding only
    {"vocab_size": 200, "tied_embeddings": False},
    MODERN | {"kv_groups": 2, "qk_norm": True, "vocab_size": 200},
    {"qk_norm": True, "kv_groups": 2, "activation": "swiglu"},
    {"architecture": "bert", "vocab_size": 200},
    {"architecture": "bert", "sentence_order": True, "tied_embeddings": False},
    {"architecture": "bert", "normalization": "rmsnorm", "activation": "swiglu", "qk_norm": True, "bias": False},
    {"architecture": "bert", "norm_placement": "post", "sentence_order": True, "recompute": "full"},
]


def compared(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Largest differences per case between one rank alone and this rank of two."""
    parallel.init_distributed("cpu")
    found = []
    for options in cases:
        whole = outcome(1, options)
        split = outcome(2, options)
        table = parameters(tiny(2, **options)[0].shape)
        worst = {"loss": abs(whole["loss"] - split["loss"]), "weight": 0.0, "gradient": 0.0, "scale": 0.0, "pad": 0.0}
        for parameter in table:
            for kind in ("weight", "gradient"):
                expected = own_slice(parameter, whole[kind][parameter.name])
                difference = (expected - split[kind][parameter.name]).abs().max().item()
                worst[kind] = max(worst[kind], difference)
            worst["scale"] = max(worst["scale"], whole["gradient"][parameter.name].abs().max().item())
        found.append(worst | {"value": whole["loss"]})
    return found


def outcome(tp: int, options: dict[str, Any]) -> dict[str, Any]:
    level, model = tiny(tp, **options)
    mesh = parallel.mesh_for(tp)
    random_states.seed_ranks(1, mesh)
    module = build_model(level, model, mesh=mesh, seed=11)
    weight = {name: p.detach().clone() for name, p in module.named_parameters()}
    lm_sum, order_sum = module(**batch_for(level))
    ((lm_sum + 2 * order_sum) / 10).backward()
    gradient = {name: p.grad for name, p in module.named_parameters()}
    return {"loss": (lm_sum + 2 * order_sum).item() / 10, "weight": weight, "gradient": gradient}


def own_slice(parameter: Parameter, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of one rank's tensor; both are padded to different vocabulary sizes, with zeros."""
    real = whole[tuple(slice(0, dim.real) for dim in parameter.dims)]
    padded = torch.zeros(parameter.shape)
    padded[tuple(slice(0, size) for size in real.shape)] = real
    if parameter.tp_dim is None:
        return padded
    size = parameter.dims[parameter.tp_dim].size
    parts = padded.split(size // parameter.tp_stride, dim=parameter.tp_dim)
    return torch.cat([part.chunk(2, dim=parameter.tp_dim)[dist.get_rank()] for part in parts], dim=parameter.tp_dim)


def test_two_ranks_compute_what_one_does() -> None:
    for found in values(2, "tests.test_model_parallel:compared", (CASES,)):
        for options, worst in zip(CASES, found, strict=True):
            assert worst["weight"] == 0, options
            assert worst["value"] > 1 and worst["loss"] < 1e-5 * worst["value"], (options, worst)
            assert worst["gradient"] < 1e-5 * max(1, worst["scale"]), (options, worst)


def with_dropout() -> dict[str, Any]:
    """What must agree and what must differ over two tensor-parallel ranks under dropout."""
    parallel.init_distributed("cpu")
    mesh = parallel.mesh_for(2)
    random_states.seed_ranks(3, mesh)
    level, model = tiny(2, dropout=0.3, attention_dropout=0.3)
    module: Any = build_model(level, model, mesh=mesh, seed=1)
    tokens = batch_for(level)["tokens"]
    embedded = module.embedding(input_ids=tokens, position_ids=torch.arange(16)[None])
    hidden = module.decoder(hidden_states=embedded, attention_mask=None)
    heads = torch.ones(16, 1, 2, 8)
    attended = module.decoder.layers[0].self_attention.core_attention(heads, heads, heads, None)
    return {"embedded": embedded.detach(), "hidden": hidden.detach(), "attended": attended.detach()}


def test_dropout_agrees_on_replicated_activations_and_differs_over_heads() -> None:
    first, second = values(2, "tests.test_model_parallel:with_dropout")
    assert (first["embedded"] == 0).float().mean().item() > 0.2
    assert torch.equal(first["embedded"], second["embedded"])
    assert torch.equal(first["hidden"], second["hidden"])
    assert (first["attended"] == second["attended"]).float().mean().item() < 0.5


def recomputed(tp: int, options: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients with each kind of recomputation, from the same random state."""
    parallel.init_distributed("cpu")
    mesh = parallel.mesh_for(tp)
    found: dict[str, Any] = {}
    for kind in ("none", "selective", "full"):
        level, model = tiny(tp, dropout=0.2, attention_dropout=0.2, recompute=kind, **options)
        module: Any = build_model(level, model, mesh=mesh, seed=1)
        calls: list[int] = []
        for layer in module.modules():
            if isinstance(layer, CoreAttention):
                layer.register_forward_hook(functools.partial(count, calls))
        random_states.seed_ranks(3, mesh)
        for _ in range(2):
            sum(module(**batch_for(level))).backward()
        gradients = {name: p.grad for name, p in module.named_parameters()}
        found[kind] = (len(calls), gradients, torch.rand(2).tolist())
    return found


def count(calls: list[int], *_: Any) -> None:
    calls.append(1)


def test_recomputation_repeats_the_dropout_masks() -> None:
    for tp, options in ((1, {}), (2, {"architecture": "bert", "sentence_order": True})):
        for found in values(tp, "tests.test_model_parallel:recomputed", (tp, options)):
            calls, expected, after = found["none"]
            assert calls == 4
            for kind in ("selective", "full"):
                again, gradients, later = found[kind]
                assert again == 8 and later == after, kind
                for name, gradient in expected.items():
                    assert torch.equal(gradient, gradients[name]), (kind, name)
