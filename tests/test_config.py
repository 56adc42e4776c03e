"""The configuration: defaults < file < overrides, values as users mean them, and what would be silently ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ds_vcycle import config as configuration
from ds_vcycle.config import ConfigError, RunConfig, Section, load_config, parse_config

FILE = """
model: {architecture: gpt, layers: 4, hidden: 64, heads: 4, sequence_length: 32, vocab_size: 500}
levels: [{}, {lr: 2e-3}]
cycle:
  initial: {steps: 10}
  coarse: {steps: 20}
  final: {steps: 30}
lr: {peak: 1e-3, minimum: 2.0e-4}
training: {global_batch: 8, micro_batch: 2}
data: {path: data/x}
"""


def load(tmp_path: Path, *overrides: str, text: str = FILE) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, list(overrides))


def refusal(tmp_path: Path, *overrides: str, text: str = FILE) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides, text=text)
    return str(caught.value)


def test_defaults_then_the_file_then_overrides(tmp_path: Path) -> None:
    plain = load(tmp_path)
    assert (plain.optimizer.weight_decay, plain.training.micro_batch, plain.saving.keep_last) == (0.1, 2, 2)
    changed = load(tmp_path, "training.micro_batch=4", "saving.keep_last=5", "training.micro_batch=8")
    assert (changed.training.micro_batch, changed.saving.keep_last) == (8, 5)
    untouched = {"model", "levels", "cycle", "operators", "optimizer", "lr", "data", "evaluation", "run_dir"}
    assert changed.model_dump(include=untouched) == plain.model_dump(include=untouched)


def test_overrides_reach_into_lists_and_replace_them(tmp_path: Path) -> None:
    assert load(tmp_path, "levels.1.hidden=16").levels[1].model_dump(exclude_none=True) == {"lr": 2e-3, "hidden": 16}
    assert load(tmp_path, "levels=[{}, {layers: 1}]").levels[1].model_dump(exclude_none=True) == {"layers": 1}
    blend = load(tmp_path, "data.path=[{path: a}, {path: b, weight: 3}]").data.blend
    assert [(str(part.path), part.weight) for part in blend] == [("a", 1.0), ("b", 3.0)]
    assert load(tmp_path, "operators.groupings.head=[[0,3],[1,2]]").operators.groupings.head == [[0, 3], [1, 2]]


def test_an_empty_section_of_the_file_can_be_filled_by_overrides(tmp_path: Path) -> None:
    assert load(tmp_path, "evaluation.samples=9", text=FILE + "evaluation:\n").evaluation.samples == 9


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 1e-3), ("2.0e-4", 2e-4), ("1E+2", 100.0), ("5e8", 5e8), (".5e1", 5.0), ("3", 3.0), ("1_000.5", 1000.5),
        ("'1e-3'", 1e-3),
    ],
)  # fmt: skip
def test_numbers_mean_the_same_in_the_file_and_in_overrides(tmp_path: Path, written: str, value: float) -> None:
    in_file = FILE.replace("peak: 1e-3, minimum: 2.0e-4", f"peak: {written}")
    assert load(tmp_path, text=in_file).lr.peak == load(tmp_path, f"lr.peak={written}").lr.peak == value


def test_numbers_are_numbers_where_nothing_says_their_type(tmp_path: Path) -> None:
    zero = load(tmp_path, "deepspeed.zero_optimization.reduce_bucket_size=5e8").deepspeed["zero_optimization"]
    assert zero == {"reduce_bucket_size": 5e8}
    in_file = load(tmp_path, text=FILE + "deepspeed: {zero_optimization: {reduce_bucket_size: 5e8}}\n")
    assert in_file.deepspeed["zero_optimization"] == zero


def test_integers(tmp_path: Path) -> None:
    for written in ("16", "'16'", "1.6e1", "16.0"):
        assert load(tmp_path, f"training.global_batch={written}").training.global_batch == 16
    for written in ("16.5", "true", "no", "sixteen", "", "[16]", ".inf"):
        assert "training.global_batch" in refusal(tmp_path, f"training.global_batch={written}")


def test_switches_and_null(tmp_path: Path) -> None:
    for written, value in (("true", True), ("no", False), ("off", False), ("1", True)):
        assert load(tmp_path, f"model.bias={written}").model.bias is value
    assert load(tmp_path, "model.ffn=null").model.ffn is None
    assert "model.bias" in refusal(tmp_path, "model.bias=perhaps")
    assert "lr.peak" in refusal(tmp_path, "lr.peak=null")


def test_names_that_look_like_something_else(tmp_path: Path) -> None:
    assert load(tmp_path, "run_dir=2024-01-31").run_dir == Path("2024-01-31")
    assert load(tmp_path, 'run_dir="2024"').run_dir == Path("2024")
    assert "quotes" in refusal(tmp_path, "run_dir=2024")


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path, text=FILE + "lr: {peak: 3}\n")
    assert "'lr' is given twice" in text and "line 11" in text
    merged = FILE.replace("levels: [{}, {lr: 2e-3}]", "levels: [{}, &base {lr: 2e-3}]")
    merged += "saving: {<<: {keep_last: 3}, keep_last: 4}\n"  # a merge is not a second time
    assert load(tmp_path, text=merged).saving.keep_last == 4


@pytest.mark.parametrize(
    "overrides", [(), ("cycle.kind=flat", "cycle.flat.steps=5"), ("levels.1.groupings.head=stack",)]
)
def test_the_resolved_configuration_loads_as_itself(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = load(tmp_path, *overrides)
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert load_config(tmp_path / "resolved.yaml") == config


def test_every_shipped_configuration_resolves_to_itself() -> None:
    for path in sorted(Path(__file__).parent.parent.glob("configs/*.yaml")):
        config = load_config(path)
        assert parse_config(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_one_misspelt_key_is_one_error(tmp_path: Path) -> None:
    text = refusal(tmp_path, text=FILE.replace("micro_batch: 2", "mirco_batch: 2"))
    assert text.splitlines() == [
        f"{tmp_path}/run.yaml: unknown key 'training.mirco_batch'; did you mean 'micro_batch'?"
    ]


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    lines = refusal(tmp_path, "model.layers=0", "lr.minimum=-1", "data.path=[]").splitlines()
    assert [line.partition(": ")[2].partition("=")[0] for line in lines] == ["model.layers", "lr.minimum", "data.path"]


IGNORED = {
    "sentence order of a gpt": ("model.sentence_order=true", "sentence_order=true is for bert"),
    "masking of a gpt": ("data.mask_probability=0.2", "data.mask_probability=0.2 is for model.architecture=bert"),
    "phases beside V": ("cycle.phases=[{train: 1, steps: 2}]", "phases is given but kind=V"),
    "levels of phases": (
        "cycle={kind: phases, levels: 4, phases: [{train: 1, steps: 2}]}",
        "levels=4 but the phases visit 1",
    ),
    "steps of a coalesce": ("cycle={kind: phases, phases: [{coalesce: 1, steps: 2}]}", "coalesce takes no steps"),
    "alpha of a training": (
        "cycle={kind: phases, phases: [{train: 1, steps: 2, alpha: 1}]}",
        "train takes no alpha or beta",
    ),
    "another optimizer": ("optimizer.kind=sgd", "optimizer.kind='sgd'"),
    "momenta beyond 1": ("optimizer.betas=[0.9, 1.5]", "optimizer.betas.1=1.5"),
    "an odd head under rope": ("model={position: rope, architecture: gpt, layers: 2, hidden: 6, heads: 2, "
                               "sequence_length: 8, vocab_size: 9}", "even head_dim"),
    "rope in bert": ("model.position=rope model.architecture=bert", "position=rope is not supported for bert"),
    "one level of a V": ("cycle.levels=1", "kind=V needs levels >= 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", IGNORED)
def test_what_would_have_no_effect_or_make_no_sense_is_refused(tmp_path: Path, name: str) -> None:
    words, part = IGNORED[name]
    given = words.split(" ") if words.count("=") > 1 else [words]
    assert part in refusal(tmp_path, *given)


def test_what_another_kind_of_cycle_uses_may_stay_in_the_file(tmp_path: Path) -> None:
    """One file serves the V cycle and the flat run it is compared with."""
    assert load(tmp_path, "cycle.flat.steps=9").cycle.visited == 2
    assert load(tmp_path, "cycle.flat.steps=9", "cycle.kind=flat").cycle.visited == 1


def test_every_setting_is_named_outside_the_configuration() -> None:
    """A key that is accepted and then never looked at would be silently ignored."""
    package = Path(__file__).parent.parent / "ds_vcycle"
    code = "\n".join(path.read_text() for path in package.rglob("*.py") if path.name != "config.py")
    sections = [value for value in vars(configuration).values() if isinstance(value, type)]
    names = {key for section in sections if issubclass(section, Section) for key in section.model_fields}
    assert len(names) > 60
    assert [key for key in sorted(names) if f".{key}" not in code and f'"{key}"' not in code] == []
