"""What LiGO's learned maps may be used for. Imports no torch."""

from __future__ import annotations

from ds_vcycle.config import ConfigError
from ds_vcycle.levels import Level
from ds_vcycle.schema import parameter_count

MOST_PARAMETERS = 400_000_000  # of the fine level: BERT-Large is below


def check_learnable(fine: Level) -> None:
    """Refuse what LiGO is not made for here.

    Raises:
        ConfigError: the fine level is too large to lie whole on every rank.
    """
    count = parameter_count(fine.shape)
    if count > MOST_PARAMETERS:
        raise ConfigError(
            f"cycle.growth.method=ligo: level {fine.index} has {count:,} parameters, and every rank holds all of them "
            f"while the maps are learned, at most {MOST_PARAMETERS:,}; choose another method or a smaller model"
        )
