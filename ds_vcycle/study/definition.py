"""A study's YAML file: groups of runs, each a base with overrides, over the same seeds. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from ds_vcycle.config import ConfigError, RunConfig, load_config
from ds_vcycle.config.section import Section
from ds_vcycle.explain import explain
from ds_vcycle.yaml_tree import TreeError, apply_override, read_tree

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+=-]*")
_OWN_KEYS = ("run_dir", "training.seed", "data.seed")  # what a study sets itself


class VariantConfig(Section):
    """One variant: what it overrides, of the group's base or of a base of its own. A list is its overrides alone."""

    base: Path | None = None
    overrides: list[str] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        if isinstance(value, list):
            return {"overrides": value}
        if not isinstance(value, dict):
            raise ValueError(f"{value!r}: expected a list of overrides, e.g. [lr.peak=2e-3], or base: and overrides:")
        return value

    @property
    def words(self) -> tuple[str, ...]:
        """What it sets, for a report."""
        return (*(() if self.base is None else (f"base {self.base}",)), *self.overrides)


class GroupConfig(Section):
    """Runs that are compared with one of them: each is ``base`` with ``overrides`` and the variant's own."""

    base: Path = Field(description="a run's YAML file, as `ds-vcycle train --config` takes it")
    overrides: list[str] = Field(default_factory=list)
    baseline: str = "flat"
    variants: dict[str, VariantConfig]

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.baseline not in self.variants:
            raise ValueError(
                f"baseline={self.baseline} is no variant ({', '.join(self.variants)}); add it, or set baseline"
            )
        for name, variant in self.variants.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"variants.{name}: a name becomes a directory; use letters, digits and _ . + = -")
            for override in (*self.overrides, *variant.overrides):
                if override.partition("=")[0] in _OWN_KEYS:
                    raise ValueError(
                        f"variants.{name}: {override}: the study sets this itself; remove it (seeds: [...])"
                    )
        return self


class Study(Section):
    """What is run and compared.

    ``budget_minutes`` is wall time of the whole study: runs that would begin after it are not begun, the one under way
    is stopped with its state saved, and the same command goes on later.
    """

    title: str
    about: str = ""
    out: Path
    budget_minutes: float = Field(gt=0)
    seeds: list[int] = Field(default_factory=lambda: [1234], min_length=1)
    ranks: int = Field(1, ge=1, description="of each run; above 1 under the deepspeed launcher")
    at_once: int = Field(1, ge=1, description="runs at a time; wall times are then those of shared cores")
    groups: dict[str, GroupConfig] = Field(min_length=1)

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ValueError(f"seeds={seeds}: expected different numbers from 0 up")
        return seeds

    @field_validator("out")
    @classmethod
    def _out(cls, out: Path) -> Path:
        if out == Path():
            raise ValueError("names no directory of its own; set one, e.g. out: runs/studies/mine")
        return out

    @field_validator("groups")
    @classmethod
    def _groups(cls, groups: dict[str, GroupConfig]) -> dict[str, GroupConfig]:
        for name in groups:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name}: a name becomes a directory; use letters, digits and _ . + = -")
        return groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One run of a study. ``arguments``: what ``ds-vcycle train`` gets after its verb."""

    group: str
    variant: str
    seed: int
    config: RunConfig
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """``group/variant seed N``, as messages have it."""
        return f"{self.group}/{self.variant} seed {self.seed}"


def load_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study's file, apply dotted overrides and validate it.

    Raises:
        ConfigError: naming the file or key, the value and what to change.
    """
    if not path.is_file():
        raise ConfigError(f"--config {path}: no such file; give a study's YAML file, e.g. configs/studies/savings.yaml")
    try:
        tree = read_tree(path)
        for override in overrides:
            apply_override(tree, override)
        return Study.model_validate(tree)
    except TreeError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    except ValidationError as error:
        lines = (f"{path}: {explain(entry, Study)}" for entry in error.errors())
        raise ConfigError("\n".join(lines)) from error


def tasks_of(study: Study) -> tuple[Task, ...]:
    """Every run of a study, seed by seed, so that an interrupted one has whole comparisons; all validated.

    Raises:
        ConfigError: a variant's configuration is wrong; names the variant.
    """
    tasks = tuple(
        _task(study, group, variant, seed)
        for seed in study.seeds
        for group in study.groups
        for variant in _baseline_first(study.groups[group])
    )
    _refuse_twins(tasks)
    return tasks


def _refuse_twins(tasks: Sequence[Task]) -> None:
    seen: dict[str, Task] = {}
    for task in tasks:
        settings = task.group + task.config.model_copy(update={"run_dir": Path()}).model_dump_json()
        twin = seen.setdefault(settings, task)
        if twin is not task:
            raise ConfigError(
                f"groups.{task.group}.variants: {twin.variant} and {task.variant} are the same run; remove one"
            )


def _baseline_first(group: GroupConfig) -> list[str]:
    return sorted(group.variants, key=lambda name: name != group.baseline)


def _task(study: Study, group: str, variant: str, seed: int) -> Task:
    settings = study.groups[group]
    own = settings.variants[variant]
    base = own.base or settings.base
    overrides = [
        *settings.overrides,
        *own.overrides,
        f"training.seed={seed}",
        f"data.seed={seed}",
        f"run_dir={study.out / 'runs' / group / f'{variant}-seed-{seed}'}",
    ]
    try:
        config = load_config(base, overrides)
    except ConfigError as error:
        raise ConfigError(f"groups.{group}.variants.{variant}: {error}") from error
    return Task(group=group, variant=variant, seed=seed, config=config, arguments=("--config", str(base), *overrides))
