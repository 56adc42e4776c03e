"""config.json of a Hugging Face model and our model section, each from the other. Imports no torch.

A setting that our models do not have is refused by key and value; so is one of ours that transformers does not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vcycle.checkpoint.huggingface.json_files import (
    NAME,
    NAME_OR_NULL,
    POSITIVE,
    RATE,
    SIZE,
    SIZE_OR_NULL,
    SWITCH,
    Kind,
    read_json,
    require_kinds,
)
from ds_vcycle.checkpoint.huggingface.megatron_options import changing
from ds_vcycle.checkpoint.huggingface.tensors import ModelType, model_type
from ds_vcycle.checkpoint.huggingface.token_ids import TOKENS, TokenId, beyond, token_ids, within
from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.config import ConfigError, ModelConfig, RunConfig, load_config, parse_config
from ds_vcycle.levels import ModelShape

CONFIG = "config.json"
_GPT2 = {
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "ffn": "n_inner", "sequence_length": "n_positions",
    "vocab_size": "vocab_size", "tied_embeddings": "tie_word_embeddings", "norm_eps": "layer_norm_epsilon",
    "activation": "activation_function", "dropout": "resid_pdrop", "attention_dropout": "attn_pdrop",
    "init_std": "initializer_range",
}  # fmt: skip
_BERT = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "ffn": "intermediate_size",
    "sequence_length": "max_position_embeddings", "vocab_size": "vocab_size", "tied_embeddings": "tie_word_embeddings",
    "norm_eps": "layer_norm_eps", "activation": "hidden_act", "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob", "init_std": "initializer_range",
}  # fmt: skip
_KEYS: dict[ModelType, dict[str, str]] = {"gpt2": _GPT2, "megatron-bert": _BERT, "bert": _BERT}
# What transformers takes for a key that is not there; sizes must be there.
_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "layer_norm_eps": 1e-12, "initializer_range": 0.02,
    "activation_function": "gelu_new", "hidden_act": "gelu", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
_ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
_ANY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,), "quantization_config": (None,), "pruned_heads": (None, {}),
    "per_layer_config": (None, {}),
}  # fmt: skip
_ONLY: dict[ModelType, dict[str, tuple[Any, ...]]] = {
    "gpt2": _ANY | {
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,),
    },
    "megatron-bert": _ANY | {
        "is_decoder": (False,), "position_embedding_type": (None, "absolute"), "type_vocab_size": (2,),
    },
    "bert": _ANY | {
        "is_decoder": (False,), "position_embedding_type": (None, "absolute"), "type_vocab_size": (2,),
    },
}  # fmt: skip
# Names by which transformers' GPT-2 takes these settings too, and then prefers them
_ALIASES = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
_BY_OURS = {
    "tied_embeddings": SWITCH, "norm_eps": POSITIVE, "activation": NAME, "dropout": RATE, "attention_dropout": RATE,
    "init_std": POSITIVE,
}  # fmt: skip
_FURTHER: dict[str, Kind] = {"type_vocab_size": SIZE, "position_embedding_type": NAME_OR_NULL}
_FURTHER_GPT2: dict[str, Kind] = {"n_inner": SIZE_OR_NULL, "embd_pdrop": RATE, **dict.fromkeys(_ALIASES, SIZE)}
# What a run's configuration may say otherwise: it does not belong to the weights, or leaves some of them out.
_FREE = ("dropout", "attention_dropout", "init_std", "sentence_order")
SHORTER = ("vocab_size", "sequence_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What config.json says: our model section but for ``sentence_order``, which the tensors decide."""

    path: Path
    model_type: ModelType
    section: Mapping[str, Any]
    tokens: Mapping[str, TokenId]

    def key(self, ours: str) -> str:
        """Hugging Face's name of a key of the model section."""
        return _KEYS[self.model_type].get(ours, "model_type")


def read_settings(directory: Path) -> Settings:
    """Read config.json.

    Raises:
        CheckpointError: it cannot be read, is of another model, lacks a size, or has a setting ours have no counterpart
            of; names file, key and value.
    """
    path = directory / CONFIG
    tree = read_json(path)
    kind = tree.get("model_type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise CheckpointError(
            f"{path}: model_type={_text(kind)} cannot be converted; possible: {', '.join(_KEYS)}, pretrained with a "
            "language-model or masked-token head"
        )
    require_kinds(path, tree, _kinds(kind))
    for key, allowed in _ONLY[kind].items():
        if key in tree and tree[key] not in allowed:
            raise CheckpointError(
                f"{path}: {key}={_text(tree[key])} has no counterpart here; only models with {key}="
                f"{_text(allowed[-1])} can be converted"
            )
    return Settings(
        path=path, model_type=kind, section=_section(path, kind, tree), tokens=token_ids(path, tree)
    )  # fmt: skip


def run_config(settings: Settings, *, sentence_order: bool, config: Path | None, overrides: Sequence[str]) -> RunConfig:
    """The configuration a converted model is recorded with: of a file, or a flat run of the model alone.

    Args:
        settings: of config.json.
        sentence_order: whether the tensors have a pooler or a sentence-order head.
        config: a run's YAML file; its model must be this one.
        overrides: of either.

    Raises:
        UserError: the configuration is wrong by itself, or of another model; names key and values.
    """
    if config is not None:
        found = load_config(config, list(overrides))
    else:
        tree: dict[str, Any] = {
            "model": {**settings.section, "sentence_order": sentence_order},
            "cycle": {"kind": "flat"},
            "training": {"global_batch": 1, "micro_batch": 1},
            "data": {"path": str(settings.path.parent.resolve())},  # the tokenizer's files lie there
        }
        found = parse_config(tree, source=str(settings.path), overrides=overrides)
    _check_same(settings, found.model, str(config or "the overrides"))
    _check_tokens(settings, found.model, str(config or "the overrides"))
    return found


def write_settings(shape: ModelShape, model: ModelConfig, architecture: str, tokens: Mapping[str, TokenId]) -> str:
    """config.json of a level.

    Args:
        shape: of the level, one that :func:`require_counterpart` took.
        model: what is the same at every level.
        architecture: transformers' class.
        tokens: ids by Hugging Face's key; those beyond the level's vocabulary are left out.
    """
    kind = model_type(shape)
    values = {key: getattr(model, key) for key in _KEYS[kind]}
    values |= {key: getattr(shape, key) for key in ("layers", "hidden", "heads", "ffn", *SHORTER)}
    values["activation"] = "gelu" if shape.activation == "gelu" else "gelu_new"
    tree: dict[str, Any] = {"architectures": [architecture], "model_type": kind}
    tree |= {theirs: values[ours] for ours, theirs in _KEYS[kind].items()}
    tree |= {"embd_pdrop": model.dropout} if kind == "gpt2" else {"type_vocab_size": 2}
    kept = within(tokens, shape.vocab_size)
    tree |= {"dtype": "float32", **{key: kept.get(key) for key in TOKENS}}
    return json.dumps(tree, indent=2) + "\n"


def require_counterpart(shape: ModelShape, model: ModelConfig) -> None:
    """Refuse a level that transformers' GPT-2 and BERT cannot compute.

    Raises:
        CheckpointError: names the key and the value.
    """
    wanted = {"position": "learned", "normalization": "layernorm", "bias": True, "qk_norm": False}
    for key, value in wanted.items():
        if getattr(shape, key) != value:
            _refuse(f"model.{key}={_text(getattr(shape, key))}", f"only {key}={_text(value)} has one")
    if shape.activation not in ("gelu", "gelu_tanh"):
        _refuse(f"model.activation={shape.activation}", "gelu and gelu_tanh have one")
    if shape.kv_groups != shape.heads:
        _refuse(f"kv_groups={shape.kv_groups} with heads={shape.heads}", "every head needs a key and a value")
    if shape.heads * shape.head_dim != shape.hidden:
        _refuse(
            f"hidden={shape.hidden} with heads={shape.heads} of head_dim={shape.head_dim}",
            "hidden must be heads x head_dim; choose such sizes for the level",
        )
    for key, value in changing(model).items():
        _refuse(f"model.megatron.{key}={_text(value)}", "it changes, or may change, what the model computes")


def _kinds(kind: ModelType) -> dict[str, Kind]:
    """What kind of value each key of config.json must have."""
    found = {theirs: _BY_OURS.get(ours, SIZE) for ours, theirs in _KEYS[kind].items()}
    found |= {key: SWITCH for key, allowed in _ONLY[kind].items() if isinstance(allowed[-1], bool)}
    return found | (_FURTHER_GPT2 if kind == "gpt2" else _FURTHER)


def _section(path: Path, kind: ModelType, tree: Mapping[str, Any]) -> dict[str, Any]:
    missing = [key for key in _KEYS[kind].values() if key not in tree and key not in _DEFAULTS and key != "n_inner"]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}; copy it again from where the model comes from")
    for alias, own in _ALIASES.items() if kind == "gpt2" else ():
        if alias in tree and tree[alias] != tree.get(own):
            raise CheckpointError(
                f"{path}: {alias}={_text(tree[alias])} and {own}={_text(tree.get(own))} are the same setting; remove "
                f"{alias}, or make them equal"
            )
    found: dict[str, Any] = {"architecture": "gpt" if kind == "gpt2" else "bert"}
    found |= {ours: tree.get(theirs, _DEFAULTS.get(theirs)) for ours, theirs in _KEYS[kind].items()}
    activation = found["activation"]
    if activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"{path}: {_KEYS[kind]['activation']}={_text(activation)} has no counterpart here; possible: "
            f"{', '.join(_ACTIVATIONS)}"
        )
    if kind == "gpt2" and tree.get("embd_pdrop", 0.1) != found["dropout"]:
        raise CheckpointError(
            f"{path}: embd_pdrop={_text(tree.get('embd_pdrop', 0.1))} and resid_pdrop={_text(found['dropout'])} "
            "are one dropout here; make them equal there"
        )
    found |= {"activation": _ACTIVATIONS[activation], "ffn": found["ffn"] or 4 * found["hidden"]}
    found["norm_placement"] = "post" if kind == "bert" else "pre"
    return found


def _check_same(settings: Settings, model: ModelConfig, whose: str) -> None:
    """The model section is that of config.json, but for what it may say otherwise."""
    derived = {"ffn": model.ffn or 4 * model.hidden}
    wanted = {**settings.section, "position": "learned", "normalization": "layernorm", "bias": True, "qk_norm": False}
    for key, theirs in wanted.items():
        ours = derived.get(key, getattr(model, key))
        if key in _FREE or ours == theirs or (key in SHORTER and ours < theirs):
            continue
        raise ConfigError(
            f"{whose}: model.{key}={_text(ours)}, but {settings.path} is of a model with {_text(theirs)} "
            f"({settings.key(key)}); set model.{key}={_text(theirs)}"
        )
    for key, value in (("kv_groups", model.heads), ("head_dim", model.hidden // model.heads)):
        if getattr(model, key) not in (None, value):
            raise ConfigError(
                f"{whose}: model.{key}={getattr(model, key)}, but {settings.path} is of a model with {value}; remove it"
            )
    for key, value in changing(model).items():
        raise ConfigError(
            f"{whose}: model.megatron.{key}={_text(value)} changes, or may change, what the model of {settings.path} "
            "computes; remove it"
        )


def _check_tokens(settings: Settings, model: ModelConfig, whose: str) -> None:
    """A shorter vocabulary keeps the special tokens; those that config.json's own does not have are no tokens."""
    real = within(settings.tokens, settings.section["vocab_size"])
    for key, cut in beyond(real, model.vocab_size).items():
        raise ConfigError(
            f"{whose}: model.vocab_size={model.vocab_size} leaves out {', '.join(map(str, cut))}, {key} in "
            f"{settings.path}; keep at least model.vocab_size={max(cut) + 1}, or set {key}=null there"
        )


def _refuse(what: str, why: str) -> None:
    raise CheckpointError(f"{what} has no counterpart in transformers' GPT-2 and BERT: {why}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
