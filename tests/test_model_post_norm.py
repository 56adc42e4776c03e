"""Post-LN BERT against transformers' BERT with the same weights, on one rank and split over two; its dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from ds_vcycle import parallel, random_states
from ds_vcycle.model.build import build_model
from ds_vcycle.model.initial import initial_slice
from ds_vcycle.schema import parameters
from tests.dist.ranks import values
from tests.model_level import batch_for, tiny
from tests.sharded import local_slice

LAYERS, HEADS, HEAD_DIM, VOCAB = 2, 4, 8, 101
LAYER_NAMES = {
    "attention.output.dense": "self_attention.linear_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.linear_fc1",
    "output.dense": "mlp.linear_fc2",
    "output.LayerNorm": "post_mlp_layernorm",
}
NAMES = {
    "bert.embeddings.LayerNorm": "embedding.layernorm",
    "bert.pooler.dense": "pooler.dense",
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "cls.seq_relationship": "binary_head",
}


def transformers_bert(options: dict[str, Any]) -> torch.nn.Module:
    """A BERT of transformers in which every parameter is random, norms and biases too."""
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=128,
        max_position_embeddings=16, tie_word_embeddings=options.get("tied_embeddings", True),
    )  # fmt: skip
    assert config.hidden_act == "gelu" and config.layer_norm_eps == 1e-12
    model: torch.nn.Module = (BertForPreTraining if options["sentence_order"] else BertForMaskedLM)(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def renamed(state: dict[str, torch.Tensor], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights under our names; the vocabulary without pad rows."""
    embeddings = "bert.embeddings.{}_embeddings.weight"
    ours = {
        "embedding.word_embeddings.weight": state[embeddings.format("word")],
        "embedding.position_embeddings.weight": state[embeddings.format("position")],
        "embedding.tokentype_embeddings.weight": state[embeddings.format("token_type")],
        "output_layer.weight": state["cls.predictions.decoder.weight"],
        "output_layer.bias": state["cls.predictions.decoder.bias"],
    }
    for kind in ("weight", "bias"):
        for theirs, name in NAMES.items():
            if f"{theirs}.{kind}" in state:
                ours[f"{name}.{kind}"] = state[f"{theirs}.{kind}"]
        for layer in range(LAYERS):
            prefix = f"bert.encoder.layer.{layer}."
            for theirs, name in LAYER_NAMES.items():
                ours[f"encoder.layers.{layer}.{name}.{kind}"] = state[f"{prefix}{theirs}.{kind}"]
            parts = [state[f"{prefix}attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            per_head = torch.stack([part.view(HEADS, HEAD_DIM, *part.shape[1:]) for part in parts], dim=1)
            ours[f"encoder.layers.{layer}.self_attention.linear_qkv.{kind}"] = per_head.flatten(0, 2)
    if options.get("tied_embeddings", True):
        del ours["output_layer.weight"]
    return ours


def compared(tp: int, options: dict[str, Any]) -> dict[str, float]:
    """Largest differences between transformers' outputs and ours on this rank's slices."""
    parallel.init_distributed("cpu")
    mesh = parallel.mesh_for(tp)
    level, model = tiny(tp, architecture="bert", norm_placement="post", norm_eps=1e-12, **options)
    module: Any = build_model(level, model, mesh=mesh, seed=None).eval()
    other = transformers_bert(options)
    ours, named = renamed(other.state_dict(), options), dict(module.named_parameters())
    assert ours.keys() == named.keys()
    for parameter in parameters(level.shape):
        whole = torch.zeros(parameter.shape)
        whole[: parameter.dims[0].real] = ours[parameter.name]
        with torch.no_grad():
            named[parameter.name].copy_(local_slice(parameter, whole, tp, mesh.tp_rank))
    return differences(module, other, batch_for(level), mesh)


@torch.no_grad()
def differences(module: Any, other: torch.nn.Module, batch: dict[str, torch.Tensor], mesh: Any) -> dict[str, float]:
    real = batch["padding_mask"]
    theirs = other(batch["tokens"], attention_mask=real.long(), token_type_ids=batch["token_types"])
    logits = theirs.prediction_logits if "sentence_order" in batch else theirs.logits
    hidden = module.encode(batch["tokens"], batch["token_types"], real)
    own = module.logits(hidden).transpose(0, 1).contiguous()
    parts = [torch.empty_like(own) for _ in range(mesh.tp_size)]
    dist.all_gather(parts, own, group=mesh.tp_group)
    lm_sum, order_sum = module(**batch)
    picked = logits.gather(1, batch["masked_positions"][:, :, None].expand(-1, -1, VOCAB))
    losses = cross_entropy(picked.double().flatten(0, 1), batch["labels"].flatten(), reduction="none")
    found = {
        "spread": logits.std().item(),
        "logits": (torch.cat(parts, dim=-1)[..., :VOCAB] - logits)[real].abs().max().item(),
        "loss": abs(lm_sum.item() / (losses * batch["weights"].flatten()).sum().item() - 1),
    }
    if "sentence_order" in batch:
        wanted = cross_entropy(theirs.seq_relationship_logits, batch["sentence_order"], reduction="sum").item()
        found["order"] = abs(order_sum.item() / wanted - 1)
    return found


CASES = [{"sentence_order": True}, {"sentence_order": False}, {"sentence_order": True, "tied_embeddings": False}]


def all_of_them() -> list[dict[str, float]]:
    return [compared(tp, options) for tp in (1, 2) for options in CASES]


def test_logits_and_losses_are_those_of_transformers_bert() -> None:
    for found in values(2, "tests.test_model_post_norm:all_of_them"):
        for difference in found:
            assert difference.pop("spread") > 0.5
            assert max(difference.values()) < 1e-5, difference


def test_every_weight_is_drawn_alike_and_norms_change_nothing_at_first() -> None:
    level, _ = tiny(1, architecture="bert", norm_placement="post", hidden=64, layers=8)
    for parameter in parameters(level.shape):
        value = initial_slice(parameter, seed=3, std=0.02, layers=8, tp_size=1, tp_rank=0)
        if "norm" in parameter.name or value.dim() == 1:
            assert value.unique().tolist() == [1.0 if parameter.name.endswith("norm.weight") else 0.0], parameter.name
        elif value.numel() > 4000:
            assert abs(value[:101].std().item() / 0.02 - 1) < 0.05, parameter.name


def dropped() -> dict[str, torch.Tensor]:
    """What enters the first layer, with and without dropout, and what leaves the last."""
    parallel.init_distributed("cpu")
    mesh = parallel.mesh_for(2)
    random_states.seed_ranks(3, mesh)
    level, model = tiny(2, architecture="bert", norm_placement="post", dropout=0.25, attention_dropout=0.25)
    module: Any = build_model(level, model, mesh=mesh, seed=1)
    batch = batch_for(level)
    inputs: list[torch.Tensor] = []
    module.encoder.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(kwargs["hidden_states"].detach()), with_kwargs=True
    )
    with torch.no_grad():
        hidden = module.encode(batch["tokens"], batch["token_types"], batch["padding_mask"])
        module.eval().encode(batch["tokens"], batch["token_types"], batch["padding_mask"])
    return {"train": inputs[0], "eval": inputs[1], "hidden": hidden}


def test_dropout_follows_the_norm_of_the_embeddings_and_agrees_over_ranks() -> None:
    first, second = values(2, "tests.test_model_post_norm:dropped")
    kept = first["train"] != 0
    assert 0.6 < kept.float().mean().item() < 0.9
    torch.testing.assert_close(first["train"][kept], first["eval"][kept] / 0.75)
    torch.testing.assert_close(first["eval"].mean(-1), torch.zeros(first["eval"].shape[:2]), rtol=0, atol=1e-5)
    assert torch.equal(first["train"], second["train"]) and torch.equal(first["hidden"], second["hidden"])
