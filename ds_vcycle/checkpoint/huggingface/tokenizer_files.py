"""The files beside the weights that say what the token ids mean. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_vcycle.checkpoint.huggingface.json_files import read_json
from ds_vcycle.checkpoint.huggingface.settings import CONFIG
from ds_vcycle.checkpoint.huggingface.token_ids import TokenId, default_token_ids, token_ids
from ds_vcycle.checkpoint.manifest import CheckpointError

_SETTINGS = "tokenizer_config.json"
_FILES = (
    "tokenizer.json", _SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt",
)  # fmt: skip
_PREPARED = "prepare.json"
GENERATION = "generation_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """``files`` to copy, and the ids that config.json names, by its keys. None of either: nothing is known.

    ``generation``: those that generation_config.json names, which may be others.
    """

    files: tuple[Path, ...] = ()
    ids: dict[str, TokenId]
    generation: dict[str, TokenId]


def find_tokenizer(directories: Sequence[Path]) -> TokenizerFiles:
    """The tokenizer of the first directory that has one: a prepared corpus, or a Hugging Face directory.

    Without any, the ids of the first directory that names some.

    Raises:
        CheckpointError: a file of it, or one that names the ids, is damaged.
    """
    held = [_held(directory) for directory in directories]
    found = [one for one in held if one.files] or [one for one in held if one.ids or one.generation]
    return found[0] if found else TokenizerFiles(ids={}, generation={})


def copy_tokenizer(tokenizer: TokenizerFiles, directory: Path, *, max_length: int) -> None:
    """Copy the files into a directory; where they do not say how long a text may be, say ``max_length`` (OSError)."""
    for path in tokenizer.files:
        shutil.copyfile(path, directory / path.name)
        if path.name == _SETTINGS:
            settings = read_json(path)
            if "model_max_length" not in settings:
                text = json.dumps({**settings, "model_max_length": max_length}, indent=2, ensure_ascii=False)
                (directory / path.name).write_text(text + "\n", encoding="utf-8")


def _held(directory: Path) -> TokenizerFiles:
    files = tuple(directory / name for name in _FILES if (directory / name).is_file())
    for path in files:
        if path.suffix == ".json":
            read_json(path)
    ids = _ids(directory)
    return TokenizerFiles(files=files, ids=ids, generation=_generation(directory, ids))


def _ids(directory: Path) -> dict[str, TokenId]:
    if (directory / _PREPARED).is_file():
        roles = read_json(directory / _PREPARED).get("role_ids")
        if not isinstance(roles, dict):
            raise CheckpointError(f"{directory / _PREPARED} is damaged: it has no role_ids; copy it again")
        wanted = {"bos_token_id": "eod", "eos_token_id": "eod", "pad_token_id": "pad"}
        return token_ids(directory / _PREPARED, {key: roles[role] for key, role in wanted.items() if role in roles})
    if not (directory / CONFIG).is_file():
        return {}
    tree = read_json(directory / CONFIG)
    return token_ids(directory / CONFIG, tree) | default_token_ids(tree)


def _generation(directory: Path, ids: dict[str, TokenId]) -> dict[str, TokenId]:
    """Those of generation_config.json; without that file, as transformers makes one of config.json's."""
    path = directory / GENERATION
    if (directory / _PREPARED).is_file() or not path.is_file():
        return {key: value for key, value in ids.items() if key != "pad_token_id"}
    return token_ids(path, read_json(path))
