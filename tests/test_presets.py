"""What ``preset: paper`` stands for, and who wins where something else is given too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_vcycle.config import ConfigError, RunConfig, load_config, parse_config
from tests.test_report import CONFIG

PAPER: dict[str, Any] = {
    "alpha": 0.25, "beta": 0.75, "embedding": "reference", "depth_residual": "copy", "moments": "reset",
    "groupings": {"hidden": "stack", "head": "stack", "ffn": "stack", "layer": "adjacent"}, "kernels": "auto",
}  # fmt: skip


def operators(config: RunConfig) -> dict[str, Any]:
    return config.operators.model_dump()


def write(path: Path, **sections: Any) -> Path:
    path.write_text(yaml.safe_dump({**copy.deepcopy(CONFIG), **sections}))
    return path


def test_in_a_file_it_stands_under_what_else_is_given(tmp_path: Path) -> None:
    assert operators(load_config(write(tmp_path / "a.yaml", preset="paper"))) == PAPER
    own = {"alpha": 0.5, "moments": "map"}
    found = operators(load_config(write(tmp_path / "b.yaml", preset="paper", operators=own)))
    assert found == {**PAPER, **own, "beta": 0.5}  # the paper ties beta to alpha
    assert operators(load_config(write(tmp_path / "c.yaml")))["embedding"] == "lossless"


def test_on_the_command_line_it_stands_over_the_file_and_under_what_follows(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", operators={"alpha": 1.0, "beta": 0.25, "kernels": "torch"})
    assert operators(load_config(path, ["preset=paper"])) == {**PAPER, "kernels": "torch"}
    found = operators(load_config(path, ["preset=paper", "operators.depth_residual=split"]))
    assert found == {**PAPER, "kernels": "torch", "depth_residual": "split"}


def test_over_a_recorded_configuration_it_decides_too() -> None:
    """As where an offline verb or a conversion is given it: what is recorded spells every operator out."""
    recorded = parse_config(copy.deepcopy(CONFIG)).model_dump(mode="json")
    assert operators(parse_config(recorded, overrides=["preset=paper"])) == PAPER


def test_bert_has_its_own_alpha() -> None:
    model = {**CONFIG["model"], "architecture": "bert"}  # type: ignore[dict-item]
    found = operators(parse_config({**copy.deepcopy(CONFIG), "model": model, "preset": "paper"}))
    assert (found["alpha"], found["beta"]) == (0.5, 0.5)


def test_what_is_recorded_says_the_same_again(tmp_path: Path) -> None:
    config = load_config(write(tmp_path / "run.yaml", preset="paper", operators={"beta": 1.0}))
    again = parse_config(config.model_dump(mode="json"))
    assert again == config and again.operators.beta == 1.0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"preset": "papper"}, r"preset='papper'.*'paper'"),
        ({"preset": "paper", "operators": {"alpha": "x"}}, r"operators.alpha='x'"),
        ({"preset": "paper", "operators": {"alpha": 2}}, r"operators.alpha=2"),
        ({"preset": "paper", "operators": 5}, r"operators=5"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path / "run.yaml", **sections))
