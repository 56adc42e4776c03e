"""Named sets of settings: what ``preset:`` stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Preset = Literal["paper"]

_PAPER_ALPHA = {"bert": 0.5, "gpt": 0.25}


def with_preset(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A run's tree with what its ``preset`` stands for; what is given besides stays.

    ``paper``: the operators of "A Multi-Level Framework for Accelerating Training Transformer Models" (ICLR 2024,
    section 3 and the authors' code): heads, features and neurons i and i + n/2 merged, adjacent layers merged and
    copied, embeddings by the authors' rule, Adam's moments anew, alpha 0.5 for BERT and 0.25 for GPT, beta = 1 - alpha.
    """
    preset, operators, model = tree.get("preset"), tree.get("operators") or {}, tree.get("model")
    if preset != "paper" or not isinstance(operators, Mapping) or not isinstance(model, Mapping):
        return dict(tree)
    return {**tree, "operators": {**_paper(str(model.get("architecture")), operators), **operators}}


def without_what_it_sets(tree: dict[str, Any]) -> None:
    """Remove from the tree what a preset given over it decides; what is not one of its keys stays."""
    operators = tree.get("operators")
    if isinstance(operators, dict):
        for key in _paper("gpt", {}):
            operators.pop(key, None)


def _paper(architecture: str, given: Mapping[str, Any]) -> dict[str, Any]:
    alpha = given.get("alpha", _PAPER_ALPHA.get(architecture, 0.5))
    return {
        "alpha": alpha,
        "beta": 1 - alpha if isinstance(alpha, int | float) else None,
        "embedding": "reference",
        "depth_residual": "copy",
        "moments": "reset",
        "groupings": {"hidden": "stack", "head": "stack", "ffn": "stack", "layer": "adjacent"},
    }
