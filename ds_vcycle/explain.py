"""What is wrong with a tree of settings, in its user's words rather than pydantic's."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel


def explain(error: Any, root: type[BaseModel]) -> str:
    """One line for one pydantic error of a tree of settings: key, value, remedy.

    Args:
        error: an entry of ``ValidationError.errors()``.
        root: the model that was validated; parts of a location that begin with ``#`` are its tags of unions.
    """
    loc = [str(part) for part in error["loc"] if not str(part).startswith("#")]
    key = ".".join(loc)
    if error["type"] == "extra_forbidden":
        if ":" in loc[-1]:
            return f"unknown key {key!r}; YAML wants a space after the colon inside braces: {{key: value}}"
        known = _known_keys(root, loc[:-1])
        close = difflib.get_close_matches(loc[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys here: {', '.join(sorted(known))}"
        return f"unknown key {key!r}; {hint}"
    if error["type"] == "missing":
        return f"key {key!r} is missing; add it"
    if error["type"] == "value_error":
        return f"{key or 'config'}: {error['msg'].removeprefix('Value error, ')}"
    return f"{key}={error['input']!r}: {_remedy(error['type'], error['msg'])}"


def _remedy(kind: str, message: str) -> str:
    """Pydantic's sentence, or ours where its words are a programmer's."""
    if kind in ("model_type", "dict_type"):
        return "expected a section of keys; give its keys, or remove it"
    if kind == "path_type":
        return "expected a path (a name that reads as a number wants quotes)"
    text = message.removeprefix("Input ")
    return text[0].lower() + text[1:] + "; change the value"


def _known_keys(root: type[BaseModel], path: list[str]) -> list[str]:
    model: Any = root
    for part in path:
        if part in model.model_fields:  # else an index of a list, or a name in a mapping of sections
            model = _section_in(model.model_fields[part].annotation)
    return list(model.model_fields) if model else []


def _section_in(annotation: Any) -> Any:
    """The section a field's annotation names, however deep in lists and unions; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(inner) for inner in getattr(annotation, "__args__", ()))
    return next((section for section in found if section), None)
