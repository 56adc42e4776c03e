"""The JSON files of a Hugging Face directory: read as objects, and what kind of value a key must have. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vcycle.checkpoint.manifest import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What a key's value must be, in words and as a test. JSON's types are kept apart: 12.0 and "12" are no sizes."""

    expected: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_token_id(value: Any) -> bool:
    """Whether it is a whole number; older files have -1 for none."""
    return type(value) is int


SIZE = Kind(expected="a whole number above 0", fits=lambda value: type(value) is int and value > 0)
SIZE_OR_NULL = Kind(expected="a whole number above 0, or null", fits=lambda value: value is None or SIZE.fits(value))
SWITCH = Kind(expected="true or false", fits=lambda value: type(value) is bool)
RATE = Kind(expected="a number from 0 to below 1", fits=lambda value: _is_number(value) and 0 <= value < 1)
POSITIVE = Kind(expected="a number above 0", fits=lambda value: _is_number(value) and value > 0)
NAME = Kind(expected="a name in quotes", fits=lambda value: isinstance(value, str))
NAME_OR_NULL = Kind(expected="a name in quotes, or null", fits=lambda value: value is None or NAME.fits(value))
TOKEN = Kind(expected="a token id or null", fits=lambda value: value is None or is_token_id(value))
TOKENS_OR_NULL = Kind(
    expected="a token id, a list of token ids, or null",
    fits=lambda value: TOKEN.fits(value) or (isinstance(value, list) and all(map(is_token_id, value))),
)


def require_kinds(path: Path, tree: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Refuse a value of another kind than its key must have; keys that are not there may be missing.

    Args:
        path: of the file, for the message.
        tree: its content.
        kinds: by key.

    Raises:
        CheckpointError: names file, key, value and what is expected.
    """
    for key, kind in kinds.items():
        if key in tree and not kind.fits(tree[key]):
            raise CheckpointError(f"{path}: {key}={shown(tree[key])}; expected {kind.expected}: correct it there")


def shown(value: Any) -> str:
    """A value as JSON has it, so that "12" is not taken for 12; a long one is cut."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: the file cannot be read, or is something else.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); give a Hugging Face directory") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy it again") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} is no JSON object; copy it again")
    return tree
