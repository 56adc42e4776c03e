"""One YAML file per run: the tree of settings, its defaults, and what is refused.

Defaults < file < dotted overrides (``model.hidden=256``). Every key is checked before anything runs; an
error names the key, the value and the remedy. Imports no torch, so that ``ds-vcycle plan`` answers at once.
"""

from ds_vcycle.config.cycle import CycleConfig, OperatorsConfig, PhaseConfig, PhaseEntry
from ds_vcycle.config.growth import Arrangement, GrowthConfig, GrowthMethod
from ds_vcycle.config.model import GroupingsConfig, LevelConfig, ModelConfig
from ds_vcycle.config.run import RunConfig, load_config, parse_config
from ds_vcycle.config.section import (
    ConfigError,
    DepthPolicy,
    EmbeddingPolicy,
    Grouping,
    MomentPolicy,
    Precision,
    Section,
    UserError,
)
from ds_vcycle.config.training import DataConfig, TrainingConfig

__all__ = [
    "Arrangement",
    "ConfigError",
    "CycleConfig",
    "DataConfig",
    "DepthPolicy",
    "EmbeddingPolicy",
    "Grouping",
    "GroupingsConfig",
    "GrowthConfig",
    "GrowthMethod",
    "LevelConfig",
    "ModelConfig",
    "MomentPolicy",
    "OperatorsConfig",
    "PhaseConfig",
    "PhaseEntry",
    "Precision",
    "RunConfig",
    "Section",
    "TrainingConfig",
    "UserError",
    "load_config",
    "parse_config",
]
