"""What a model must not see, what padding must not change, and options that are refused."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import torch

from ds_vcycle import parallel, random_states
from ds_vcycle.config import ConfigError
from ds_vcycle.model.build import build_model
from ds_vcycle.model.initial import initial_slice
from ds_vcycle.schema import parameters
from tests.dist.ranks import values
from tests.model_level import batch_for, is_vocabulary, tiny


def built(precision: str = "fp32", **options: Any) -> tuple[Any, Any]:
    parallel.init_distributed("cpu")
    mesh = parallel.mesh_for(1)
    random_states.seed_ranks(1, mesh)
    level, model = tiny(1, init_std=0.2, **options)
    level = dataclasses.replace(level, precision=precision)
    return level, build_model(level, model, mesh=mesh, seed=3)


def visibility() -> dict[str, Any]:
    level, gpt = built()
    tokens = batch_for(level)["tokens"]
    later = tokens.clone()
    later[:, 10:] = (later[:, 10:] + 1) % 101
    with torch.no_grad():
        change = (gpt.logits(tokens) - gpt.logits(later)).abs().amax(dim=(1, 2))
    level, bert = built(architecture="bert")
    batch = batch_for(level)
    tokens, types, real = batch["tokens"], batch["token_types"], batch["padding_mask"]
    other = tokens.where(real, (tokens + 1) % 101)
    with torch.no_grad():
        before, after = bert.encode(tokens, types, real), bert.encode(other, types, real)
        float_mask = bert.encode(tokens, types, real.float())
        unmasked = bert.encode(other, types, torch.ones_like(real))
    seen = real.t()
    return {
        "past": change[:10].max().item(),
        "future": change[10:].min().item(),
        "hidden_pads": (before - after)[seen].abs().max().item(),
        "float_mask": (before - float_mask).abs().max().item(),
        "shown_pads": (before - unmasked)[:, -1][seen[:, -1]].abs().max().item(),
    }


def test_gpt_sees_no_later_token_and_bert_no_padding() -> None:
    (found,) = values(1, "tests.test_model_behaviour:visibility")
    assert found["past"] == 0 and found["future"] > 1e-3
    assert found["hidden_pads"] == 0 and found["float_mask"] == 0 and found["shown_pads"] > 1e-3


def padding(options: dict[str, Any]) -> dict[str, Any]:
    level, module = built(**options)
    batch = batch_for(level)
    plain = sum(module(**batch)).item()
    split = [p for name, p in module.named_parameters() if is_vocabulary(name)]
    with torch.no_grad():
        for parameter in split:
            parameter[101:] += 50
    loss = sum(module(**batch))
    loss.backward()
    pads = [p.grad[101:].abs().max().item() for p in split]
    used = [p.grad[:101].abs().max().item() for p in split]
    return {"plain": plain, "shifted": loss.item(), "pads": max(pads), "used": min(used), "count": len(pads)}


def test_pad_rows_change_nothing_and_get_no_gradient() -> None:
    cases = [({}, 1), ({"tied_embeddings": False}, 2), ({"architecture": "bert"}, 2)]
    for options, count in cases:
        (found,) = values(1, "tests.test_model_behaviour:padding", (options,))
        assert found["plain"] == found["shifted"] and found["count"] == count, options
        assert found["pads"] == 0 and found["used"] > 0, options


def low_precision() -> list[tuple[float, float, str, str]]:
    found = []
    for options in ({}, {"architecture": "bert", "sentence_order": True}):
        level, single = built(**options)
        _, half = built("bf16", **options)
        batch = batch_for(level)
        exact, rounded = sum(single(**batch)), sum(half(**batch))
        rounded.backward()
        dtypes = {str(p.dtype) for p in half.parameters()} | {str(p.grad.dtype) for p in half.parameters()}
        found.append((exact.item(), rounded.item(), str(rounded.dtype), ",".join(dtypes)))
    return found


def test_bf16_keeps_the_loss_in_fp32() -> None:
    (found,) = values(1, "tests.test_model_behaviour:low_precision")
    for exact, rounded, loss_dtype, dtypes in found:
        assert abs(exact / rounded - 1) < 0.02 and exact != rounded
        assert loss_dtype == "torch.float32" and dtypes == "torch.bfloat16"


def refused() -> list[str]:
    parallel.init_distributed("cpu")
    mesh = parallel.mesh_for(1)
    cases: list[dict[str, Any]] = [
        {"megatron": {"softmax_scal": 1.0}},
        {"megatron": {"num_layers": 3}},
        {"megatron": {"layernorm_zero_centered_gamma": True}},
        {"megatron": {"fp8": "hybrid"}},
        {"megatron": {"num_moe_experts": 4}},
        {"megatron": {"recompute_method": "nonsense"}, "recompute": "full"},
        {"sequence_parallel": True},
        {"transformer_engine": "always"},
        {"megatron": {"bias_activation_fusion": True}},
        {
            "architecture": "bert",
            "norm_placement": "post",
            "recompute": "selective",
            "megatron": {"recompute_modules": ["core_attn", "layernorm"]},
        },
    ]
    messages = []
    for options in cases:
        level, model = tiny(1, **options)
        try:
            build_model(level, model, mesh=mesh, seed=1)
            messages.append("accepted")
        except ConfigError as error:
            messages.append(str(error))
    level, model = tiny(1, megatron={"softmax_scale": 0.5})
    scaled: Any = build_model(level, model, mesh=mesh, seed=1)
    messages.append(str(scaled.decoder.layers[0].self_attention.core_attention.scale))
    return messages


def test_megatron_options_that_cannot_be_had_are_named() -> None:
    (messages,) = values(1, "tests.test_model_behaviour:refused")
    expected = [
        ("model.megatron.softmax_scal", "did you mean 'softmax_scale'"),
        ("model.megatron.num_layers=3", "set model.layers"),
        ("layernorm_zero_centered_gamma", "zero-centred"),
        ("model.megatron.fp8", "Transformer Engine only"),
        ("model.megatron.num_moe_experts=4", "experts have no mapping"),
        ("model.megatron.recompute_method='nonsense'", "refuses"),
        ("model.sequence_parallel=true", "CPU"),
        ("model.transformer_engine=always", "not installed"),
        ("model.megatron.bias_activation_fusion=true", "set model.activation=gelu_tanh"),
        ("model.megatron.recompute_modules=", "layernorm", "model.recompute=full"),
        ("0.5", ""),
    ]
    for message, parts in zip(messages, expected, strict=True):
        assert all(part in message for part in parts), message


def activations() -> dict[str, list[torch.Tensor]]:
    """Outputs of the first layer's MLP, and of BERT's head, by activation."""
    parallel.init_distributed("cpu")
    mesh = parallel.mesh_for(1)
    found: dict[str, list[torch.Tensor]] = {}
    x = torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(3)) * 20
    for key, options in {
        "gelu": {"activation": "gelu"},
        "gelu_tanh": {"activation": "gelu_tanh"},
        "fused": {"activation": "gelu_tanh", "megatron": {"bias_activation_fusion": True}},
    }.items():
        level, model = tiny(1, architecture="bert", **options)
        module: Any = build_model(level, model, mesh=mesh, seed=1)
        with torch.no_grad():
            found[key] = [module.encoder.layers[0].mlp(x)[0], module.lm_head(x)]
    return found


def test_the_tanh_approximation_is_told_from_the_exact_gelu() -> None:
    (found,) = values(1, "tests.test_model_behaviour:activations")
    for exact, tanh, fused in zip(found["gelu"], found["gelu_tanh"], found["fused"], strict=True):
        assert (exact - tanh).abs().max() > 1e-5
        torch.testing.assert_close(tanh, fused, rtol=1e-5, atol=1e-6)


def test_initial_weights_are_drawn_over_the_real_shape() -> None:
    level, _ = tiny(2, hidden=64, layers=8)
    table = {p.name: p for p in parameters(level.shape)}
    wider = {p.name: p for p in parameters(dataclasses.replace(level.shape, padded_vocab=512))}

    def slices(p: Any, tp: int = 1) -> torch.Tensor:
        return torch.cat(
            [initial_slice(p, seed=9, std=0.02, layers=8, tp_size=tp, tp_rank=r) for r in range(tp)], p.tp_dim or 0
        )

    words = "embedding.word_embeddings.weight"
    assert torch.equal(slices(table[words])[:101], slices(wider[words])[:101])
    assert slices(wider[words], 2)[101:].abs().max() == 0
    proj, qkv = (table[f"decoder.layers.3.self_attention.linear_{kind}.weight"] for kind in ("proj", "qkv"))
    assert torch.equal(slices(proj, 2), slices(proj)) and torch.equal(slices(qkv, 2), slices(qkv))
    assert abs(slices(qkv).std().item() / 0.02 - 1) < 0.05
    assert abs(slices(proj).std().item() / (0.02 / 4) - 1) < 0.05
    assert not torch.equal(slices(qkv), slices(table["decoder.layers.4.self_attention.linear_qkv.weight"]))
    assert slices(table["decoder.layers.0.input_layernorm.weight"]).unique().tolist() == [1]


def survivors() -> list[str]:
    """Names of what is still alive of two levels that nobody holds any more."""
    references = []
    for options in ({"position": "rope"}, {"architecture": "bert", "norm_placement": "post", "sentence_order": True}):
        level, module = built(**options)
        sum(module(**batch_for(level))).backward()
        references += [(type(part).__name__, weakref.ref(part)) for part in module.modules()]
        references += [(name, weakref.ref(p)) for name, p in module.named_parameters()]
        del module
    gc.collect()
    return [name for name, reference in references if reference() is not None]


def test_nothing_keeps_a_past_level_alive() -> None:
    (found,) = values(1, "tests.test_model_behaviour:survivors")
    assert found == []
