"""The ids of the special tokens that config.json and generation_config.json name. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_vcycle.checkpoint.huggingface.json_files import TOKEN, TOKENS_OR_NULL, Kind, require_kinds

TokenId = int | list[int]
TOKENS: dict[str, Kind] = {"bos_token_id": TOKEN, "eos_token_id": TOKENS_OR_NULL, "pad_token_id": TOKEN}
_DEFAULTS: dict[str, dict[str, TokenId]] = {  # what transformers takes for a key that config.json does not have
    "gpt2": {"bos_token_id": 50256, "eos_token_id": 50256},
    "megatron-bert": {"pad_token_id": 0},
    "bert": {"pad_token_id": 0},
}


def token_ids(path: Path, tree: Mapping[str, Any]) -> dict[str, TokenId]:
    """The ids that a file names, by its keys; an id may be one of several.

    Raises:
        CheckpointError: one is neither a token id nor null; names file, key and value.
    """
    require_kinds(path, tree, TOKENS)
    return {key: tree[key] for key in TOKENS if tree.get(key) is not None and tree[key] != []}


def default_token_ids(tree: Mapping[str, Any]) -> dict[str, TokenId]:
    """Those that transformers takes for keys config.json lacks, where the vocabulary has them."""
    defaults = _DEFAULTS.get(str(tree.get("model_type")), {})
    absent = {key: value for key, value in defaults.items() if key not in tree}
    size = tree.get("vocab_size")
    return within(absent, size) if type(size) is int else {}


def within(ids: Mapping[str, TokenId], vocabulary: int) -> dict[str, TokenId]:
    """What of the ids a vocabulary of so many tokens has."""
    kept: dict[str, TokenId] = {}
    for key, value in ids.items():
        several = [token for token in _listed(value) if 0 <= token < vocabulary]
        if several:
            kept[key] = several if isinstance(value, list) else several[0]
    return kept


def beyond(ids: Mapping[str, TokenId], vocabulary: int) -> dict[str, list[int]]:
    """What of the ids a vocabulary of so many tokens does not have."""
    outside = {key: [token for token in _listed(value) if not 0 <= token < vocabulary] for key, value in ids.items()}
    return {key: tokens for key, tokens in outside.items() if tokens}


def _listed(value: TokenId) -> list[int]:
    return value if isinstance(value, list) else [value]
