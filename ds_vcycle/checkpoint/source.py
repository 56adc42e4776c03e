"""What the offline verbs read weights from: a checkpoint of ours, or a Hugging Face directory. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ds_vcycle.schema import Parameter

if TYPE_CHECKING:
    from torch import Tensor


class WeightSource(Protocol):
    """Weights of one level with what is recorded about them (:func:`ds_vcycle.checkpoint.recorded.recorded`)."""

    @property
    def directory(self) -> Path:
        """Where it lies."""

    @property
    def identity(self) -> str:
        """Tells it from others."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The configuration, the level, Adam's step (0 or none: no moments), what is missing."""

    def expect(self, parameters: Iterable[Parameter]) -> None:
        """Refuse to be anything but these parameters."""

    def read(self, parameter: Parameter, *, tp: int, tp_rank: int, start: int, length: int, key: str) -> Tensor:
        """A flat range of a parameter as fp32 [length] on the CPU, pad rows zero."""
