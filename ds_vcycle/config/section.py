"""What every part of a run's configuration is made of: a strict section, and the types that several parts share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator


class UserError(ValueError):
    """Something the user can mend: the command line prints it without a traceback and exits with 2."""


class ConfigError(UserError):
    """A key of the run's configuration is unknown, out of range or contradicts another."""


def _kind(value: object) -> str:
    return "#list" if isinstance(value, list) else "#one"


# A list or something else, decided before it is validated: a wrong value is then one error, not one per possibility.
list_or_one = Discriminator(_kind)
Grouping = Annotated[
    Annotated[Literal["adjacent", "stack", "local_stack"], Tag("#one")]
    | Annotated[list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]], Tag("#list")],
    list_or_one,
]
EmbeddingPolicy = Literal["lossless", "reference"]
DepthPolicy = Literal["copy", "split", "first"]
MomentPolicy = Literal["reset", "map"]


def _no_fp16(value: object) -> object:
    if value == "fp16":
        raise ValueError(
            "fp16 is refused: its loss scaler skips steps, so a phase's step count, learning rate and Adam's step "
            "would no longer be functions of the position; use bf16 or fp32"
        )
    return value


Precision = Annotated[Literal["fp32", "bf16"], BeforeValidator(_no_fp16)]


class Section(BaseModel):
    """A part of the tree: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Without this, pydantic takes ``layers: yes`` for one layer."""
        if isinstance(value, bool) and info.field_name and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError(
                f"{str(value).lower()} is a switch to YAML, and a value is expected; give one, or remove the key"
            )
        return value
