"""The shipped studies: each is valid; every control, cycle and rival runs to its end under tensor parallelism 2."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_vcycle import cli
from ds_vcycle.config import RunConfig, load_config, parse_config
from ds_vcycle.cycle.overview import overview
from ds_vcycle.levels import resolve_levels
from ds_vcycle.study.definition import Study, load_study, tasks_of
from ds_vcycle.study.summary import read_summary
from tests.dist.ranks import values
from tests.tiny import VOCABULARY, tiny_corpus

ROOT = Path(__file__).parents[1]
STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
RIVALS = sorted((ROOT / "configs" / "rivals").glob("*.yaml"))
RUN = ("controls", "cycles", "rivals")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies name their bases as a user at the repository's root does."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_shipped_studies_are_valid_and_plan(path: Path) -> None:
    study = load_study(path)
    assert study.out == Path("runs/studies") / path.stem
    for task in tasks_of(study):
        assert overview(task.config).flops > 0


def test_every_rival_is_in_the_study_of_them() -> None:
    (group,) = load_study(ROOT / "configs/studies/rivals.yaml").groups.values()
    bases = {variant.base for variant in group.variants.values() if variant.base}
    assert bases == {path.relative_to(ROOT) for path in RIVALS}
    for path in RIVALS:
        assert load_config(path).run_dir == Path("runs/rivals") / path.stem


def shrunk(config: RunConfig) -> dict[str, Any]:
    """A demo configuration at a quarter of its width and a few steps, under TP 2 where a level has heads enough."""
    tree = config.model_dump(mode="json")
    tree["model"] |= {"hidden": 32, "sequence_length": 32, "vocab_size": VOCABULARY, "tensor_parallel": 2}
    for level in tree["levels"]:
        for key in ("hidden", "ffn"):
            level[key] = level[key] and level[key] // 4
    for index, level in enumerate(resolve_levels(config)[1:], 1):
        if level.shape.heads % 2:
            while len(tree["levels"]) <= index:
                tree["levels"].append({})
            tree["levels"][index]["tensor_parallel"] = 1
    few = {"flat": 4, "initial": 1, "coarse": 3, "final": 2}
    for kind, steps in few.items():
        if tree["cycle"][kind]["steps"] is not None:
            tree["cycle"][kind] |= {"steps": steps, "warmup_steps": 0}
    for level in tree["levels"]:
        level["steps"] = level.get("steps") and 2
    growth = tree["cycle"]["growth"]
    for method, key in (("knowledge_inheritance", "distill_steps"), ("ligo", "ligo_steps")):
        if growth["method"] == method:
            growth[key] = 2
    tree["training"] |= {"global_batch": 4, "micro_batch": 2, "device": "cpu"}
    tree["data"]["path"] = str(tiny_corpus("gpt"))
    tree["evaluation"] |= {"every_steps": 2, "samples": 8, "micro_batch": 4}
    tree["logging"]["tensorboard"] = False
    tree["lr"]["warmup_steps"] = 0
    return tree


def shrunk_study(folder: Path, name: str) -> Study:
    """The study with every variant shrunk, a base of its own each."""
    study = load_study(ROOT / "configs/studies" / f"{name}.yaml")
    tree = study.model_dump(mode="json") | {"out": str(folder / name)}
    for task in tasks_of(study):
        base = folder / f"{name}-{task.variant}.yaml"
        base.write_text(yaml.safe_dump(shrunk(task.config)))
        tree["groups"][task.group]["variants"][task.variant] = {"base": str(base), "overrides": []}
        tree["groups"][task.group]["overrides"] = []
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_study(path)


def test_every_control_cycle_and_rival_ends_under_tp_2_and_is_in_the_report(tmp_path: Path) -> None:
    studies = {name: shrunk_study(tmp_path, name) for name in RUN}
    configs = {task.name + name: task.config for name, study in studies.items() for task in tasks_of(study)}
    assert all(config.model.tensor_parallel == 2 for config in configs.values())
    ranks = values(2, "tests.dist.cases_cycle:runs", [configs], timeout_s=900)
    assert {outcome.ended for rank in ranks for outcome in rank.values()} == {"finished"}
    assert not any(outcome.unlike for rank in ranks for outcome in rank.values())
    for name, study in studies.items():
        assert cli.run(["study", "--config", str(tmp_path / f"{name}.yaml"), "--report"]) == 0
        summary = read_summary(study.out / "results.json")
        assert not summary.missing
        page, table = (study.out / "report.html").read_text(), (study.out / "report.md").read_text()
        for variant in study.groups["gpt"].variants:
            assert len(summary.groups[0].of(variant)) == 1
            assert f"<td>{variant}</td>" in page and f"| {variant} |" in table


def test_the_page_of_savings_is_what_its_command_writes() -> None:
    spec = importlib.util.spec_from_file_location("savings_page", ROOT / "docs" / "savings_page.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "savings.md").read_text(encoding="utf-8") == module.page()


def test_a_shrunk_configuration_is_valid() -> None:
    assert parse_config(shrunk(load_config(ROOT / "configs/demo_gpt.yaml"))).model.hidden == 32
