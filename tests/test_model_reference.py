"""Our models against the independent forward passes of transformers, with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, MegatronBertConfig, MegatronBertForPreTraining

from ds_vcycle import parallel
from ds_vcycle.model.build import build_model
from tests.dist.ranks import values
from tests.model_level import batch_for, is_vocabulary, tiny

HEADS, HEAD_DIM, VOCAB = 4, 8, 101


def per_head(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Megatron's rows (per head: q, k, v) -> all q, all k, all v rows."""
    parts = rows.view(HEADS, 3, HEAD_DIM, *rows.shape[1:])
    return tuple(parts[:, i].flatten(0, 1) for i in range(3))


def randomized(options: dict[str, Any]) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A built level with every parameter random (norms and biases too), and its weights without pad rows."""
    parallel.init_distributed("cpu")
    level, model = tiny(1, **options)
    module = build_model(level, model, mesh=parallel.mesh_for(1), seed=None)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    return level, module, {n: w[:VOCAB] if is_vocabulary(n) else w for n, w in weights.items()}


def gpt2(tied: bool) -> dict[str, float]:
    level, module, ours = randomized({"tied_embeddings": tied})
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=HEADS, activation_function="gelu",
        tie_word_embeddings=tied, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, attn_implementation="eager",
    )  # fmt: skip
    state = {
        "wte.weight": ours["embedding.word_embeddings.weight"],
        "wpe.weight": ours["embedding.position_embeddings.weight"],
    }
    names = {
        "ln_1": "input_layernorm", "ln_2": "pre_mlp_layernorm", "attn.c_attn": "self_attention.linear_qkv",
        "attn.c_proj": "self_attention.linear_proj", "mlp.c_fc": "mlp.linear_fc1", "mlp.c_proj": "mlp.linear_fc2",
    }  # fmt: skip
    for layer in range(2):
        for theirs, megatron in names.items():
            for kind in ("weight", "bias"):
                value = ours[f"decoder.layers.{layer}.{megatron}.{kind}"]
                value = torch.cat(per_head(value)) if "qkv" in megatron else value
                state[f"h.{layer}.{theirs}.{kind}"] = value.t() if value.dim() == 2 else value  # Conv1D is [in, out]
    for kind in ("weight", "bias"):
        state[f"ln_f.{kind}"] = ours[f"decoder.final_layernorm.{kind}"]
    state = {f"transformer.{name}": value for name, value in state.items()}
    state["lm_head.weight"] = ours["embedding.word_embeddings.weight" if tied else "output_layer.weight"]
    other = GPT2LMHeadModel(config).eval()
    other.load_state_dict(state)
    batch = batch_for(level)
    with torch.no_grad():
        expected = other(batch["tokens"]).logits
        logits = module.logits(batch["tokens"]).transpose(0, 1)[..., :VOCAB]
        lm_sum, order_sum = module(**batch)
    losses = cross_entropy(expected.double().flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return {
        "logits": (logits - expected).abs().max().item(),
        "spread": expected.std().item(),
        "loss": abs(lm_sum.item() / (losses * batch["weights"].flatten()).sum().item() - 1),
        "order": order_sum.item(),
    }


def megatron_bert(tied: bool) -> dict[str, float]:
    options = {"architecture": "bert", "sentence_order": True, "tied_embeddings": tied}
    level, module, ours = randomized(options)
    config = MegatronBertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=128,
        hidden_act="gelu", max_position_embeddings=16, layer_norm_eps=1e-5, tie_word_embeddings=tied,
    )  # fmt: skip
    other = MegatronBertForPreTraining(config).eval()
    other.load_state_dict(bert_state(ours, tied))
    batch = batch_for(level)
    with torch.no_grad():
        theirs = other(
            batch["tokens"], attention_mask=batch["padding_mask"].long(), token_type_ids=batch["token_types"]
        )
        lm_sum, order_sum = module(**batch)
        encoded = module.encode(batch["tokens"], batch["token_types"], batch["padding_mask"])
        logits = module.logits(encoded).transpose(0, 1)[..., :VOCAB]
    real = batch["padding_mask"]
    picked = theirs.prediction_logits.gather(1, batch["masked_positions"][:, :, None].expand(-1, -1, VOCAB))
    losses = cross_entropy(picked.double().flatten(0, 1), batch["labels"].flatten(), reduction="none")
    order = cross_entropy(theirs.seq_relationship_logits.double(), batch["sentence_order"], reduction="sum").item()
    return {
        "logits": (logits - theirs.prediction_logits)[real].abs().max().item(),
        "spread": theirs.prediction_logits.std().item(),
        "loss": abs(lm_sum.item() / (losses * batch["weights"].flatten()).sum().item() - 1),
        "order": abs(order_sum.item() / order - 1),
    }


def bert_state(ours: dict[str, torch.Tensor], tied: bool) -> dict[str, torch.Tensor]:
    words = ours["embedding.word_embeddings.weight"]
    state = {
        "bert.embeddings.word_embeddings.weight": words,
        "bert.embeddings.position_embeddings.weight": ours["embedding.position_embeddings.weight"],
        "bert.embeddings.token_type_embeddings.weight": ours["embedding.tokentype_embeddings.weight"],
        "cls.predictions.bias": ours["output_layer.bias"],
        "cls.predictions.decoder.weight": words if tied else ours["output_layer.weight"],
        "cls.predictions.decoder.bias": ours["output_layer.bias"],
    }
    names = {
        "attention.ln": "input_layernorm", "attention.output.dense": "self_attention.linear_proj",
        "ln": "pre_mlp_layernorm", "intermediate.dense": "mlp.linear_fc1", "output.dense": "mlp.linear_fc2",
    }  # fmt: skip
    heads = {
        "bert.encoder.ln": "encoder.final_layernorm", "bert.pooler.dense": "pooler.dense",
        "cls.predictions.transform.dense": "lm_head.dense", "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
        "cls.seq_relationship": "binary_head",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        for layer in range(2):
            for theirs, megatron in names.items():
                state[f"bert.encoder.layer.{layer}.{theirs}.{kind}"] = ours[f"encoder.layers.{layer}.{megatron}.{kind}"]
            split = per_head(ours[f"encoder.layers.{layer}.self_attention.linear_qkv.{kind}"])
            for part, value in zip(("query", "key", "value"), split, strict=True):
                state[f"bert.encoder.layer.{layer}.attention.self.{part}.{kind}"] = value
        for theirs, megatron in heads.items():
            state[f"{theirs}.{kind}"] = ours[f"{megatron}.{kind}"]
    return state


def all_of_them() -> list[dict[str, float]]:
    return [gpt2(True), gpt2(False), megatron_bert(True), megatron_bert(False)]


def test_logits_and_losses_are_those_of_transformers() -> None:
    (found,) = values(1, "tests.test_model_reference:all_of_them")
    for difference in found:
        assert difference["spread"] > 0.5
        assert difference["logits"] < 1e-5 and difference["loss"] < 1e-5 and difference["order"] < 1e-5, difference
