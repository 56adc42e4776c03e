"""A whole run, read from its YAML file and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from ds_vcycle.config.cycle import CycleConfig, LrConfig, OperatorsConfig
from ds_vcycle.config.model import LevelConfig, ModelConfig
from ds_vcycle.config.presets import Preset, with_preset, without_what_it_sets
from ds_vcycle.config.section import ConfigError, Section
from ds_vcycle.config.training import (
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    SavingConfig,
    TrainingConfig,
)
from ds_vcycle.explain import explain
from ds_vcycle.yaml_tree import TreeError, apply_override, read_tree


class RunConfig(Section):
    """A whole run."""

    preset: Preset | None = Field(None, description="paper: the paper's operators, but for what is given besides")
    model: ModelConfig
    levels: list[LevelConfig] = Field(default_factory=list, description="overrides of level 1, 2, ...")
    cycle: CycleConfig = CycleConfig()
    operators: OperatorsConfig = OperatorsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr: LrConfig = LrConfig()
    training: TrainingConfig
    data: DataConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    saving: SavingConfig = SavingConfig()
    logging: LoggingConfig = LoggingConfig()
    deepspeed: dict[str, Any] = Field(default_factory=dict, description="further DeepSpeed settings")
    run_dir: Path = Path("runs/run")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, tree: Any) -> Any:
        return with_preset(tree) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        share = DataConfig.model_fields["mask_probability"].default
        if self.model.architecture == "gpt" and self.data.mask_probability != share:
            raise ValueError(
                f"data.mask_probability={self.data.mask_probability} is for model.architecture=bert; remove it"
            )
        return self


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file, apply dotted overrides (``key.sub=value``, the value in YAML) and validate the whole.

    Raises:
        ConfigError: naming the file or key, the value and what to change.
    """
    if not path.is_file():
        raise ConfigError(
            f"--config {path}: no such file; give the path of a run's YAML file, e.g. configs/demo_gpt.yaml"
        )
    try:
        tree = read_tree(path)
    except TreeError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    return parse_config(tree, source=str(path), overrides=overrides or ())


def parse_config(tree: dict[str, Any], *, source: str = "config", overrides: Sequence[str] = ()) -> RunConfig:
    """Apply dotted overrides to a tree of plain values and validate it.

    Args:
        tree: as a YAML file or a checkpoint has it; overrides are written into it.
        source: what the tree is of, for messages.
        overrides: ``key.sub=value``, one after the other; a preset among them stands over what came before it.

    Raises:
        ConfigError: naming the key, the value and what to change.
    """
    try:
        for override in overrides:
            apply_override(tree, override)
            if override.startswith("preset="):
                without_what_it_sets(tree)
    except TreeError as error:
        raise ConfigError(str(error)) from error
    source += " and overrides" if overrides else ""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        errors = error.errors()
        unknown = [entry for entry in errors if entry["type"] == "extra_forbidden"]  # often the misspelt missing one
        raise ConfigError("\n".join(f"{source}: {explain(e, RunConfig)}" for e in unknown or errors)) from error
