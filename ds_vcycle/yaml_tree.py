"""A YAML file and dotted overrides as one tree of plain values; nothing is known here of what the keys mean."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml


class TreeError(ValueError):
    """A file is no YAML mapping, or an override does not fit it; says where, and what to change."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but ``1e-3`` is a number, dates are text, and a key given twice is an error.

    PyYAML takes 1e-3 and 5e8 for text, and lets the second of two equal keys win without a word.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own table, without dates
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of a node (raises ConstructorError at a key that came before)."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice; keep one", key.start_mark
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def read_tree(path: Path) -> dict[str, Any]:
    """The mapping a YAML file holds.

    Raises:
        TreeError: it cannot be read, or is something else.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise TreeError(f"cannot be read ({error.strerror}); check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise TreeError(f"not readable as YAML: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except yaml.YAMLError as error:
        raise TreeError(f"not readable as YAML: {_explain(error)}") from error
    if not isinstance(tree, dict):
        raise TreeError("expected a mapping of sections (model, training, data, ...)")
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set ``key.sub=value`` in the tree, the value in YAML; a number stands for an entry of a list, counting from 0.

    Raises:
        TreeError: it is no such text, or leads into a value or past a list's end.
    """
    key, separator, text = override.partition("=")
    *parents, last = key.split(".")
    if not separator or not all((*parents, last)):
        raise TreeError(f"override {override!r}: expected key.sub=value, e.g. model.tensor_parallel=2")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise TreeError(f"override {override!r}: the value is not YAML: {_explain(error)}") from error
    node: Any = tree
    for depth, part in enumerate(parents):
        where = ".".join(parents[: depth + 1])
        node = _child(node, part, [*parents[depth + 1 :], last][0], where, override)
    if isinstance(node, list):
        node[_index(node, last, ".".join(parents), override)] = value
    else:
        node[last] = value


def _child(node: Any, part: str, following: str, where: str, override: str) -> Any:
    """The section or list under ``part``, an empty section if there is none yet."""
    if isinstance(node, list):
        at = _index(node, part, where.rpartition(".")[0], override)
        if node[at] is None:
            node[at] = {}
        child = node[at]
    else:
        if node.get(part) is None:
            node[part] = [] if following.isdigit() else {}
        child = node[part]
    if not isinstance(child, dict | list):
        raise TreeError(f"override {override!r}: {where} is a value, not a section; set {where}=... itself")
    return child


def _index(node: list[Any], part: str, where: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise TreeError(
            f"override {override!r}: {part!r} is not an index (from 0) of {where}, a list of {len(node)} entries here; "
            f"give an index it has, or the whole list as {where}=[...]"
        )
    return int(part)


def _explain(error: yaml.YAMLError) -> str:
    """One line out of PyYAML's several."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
