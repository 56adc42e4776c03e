"""DeepSpeed's files read as data: tensors mapped, nothing in them run, classes replaced by what holds their fields."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from ds_vcycle.checkpoint.manifest import CheckpointError


class Opaque:
    """Stands in for an object of any class that a file names; that class is neither imported nor called."""

    def __new__(cls, *args: object, **keywords: object) -> Self:
        """Whatever it is made from is kept and not looked at."""
        found = super().__new__(cls)
        found.__dict__["args"] = args
        return found

    def __init__(self, *args: object, **keywords: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.__dict__["state"] = state


def load_value(path: Path) -> Any:
    """What ``torch.save`` wrote, its tensors mapped from the disk.

    ``torch.load(weights_only=True)`` with every further class the file names (DeepSpeed's loss scaler and fragment
    addresses, argparse's namespace, ...) allowed under its name as an :class:`Opaque`.

    Raises:
        CheckpointError: it is missing, damaged, or of an older format.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load compares no checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} does not match")
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        with torch.serialization.safe_globals([(Opaque, name) for name in foreign]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); copy the checkpoint again") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds objects that cannot be read without running what they name ({_reason(error)}); save it "
            "again without them (client_state of save_checkpoint)"
        ) from error
    except (zipfile.BadZipFile, RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise CheckpointError(
            f"{path} is damaged, or no file of torch.save ({_reason(error)}); copy it again"
        ) from error


def _reason(error: Exception) -> str:
    """What is wrong, without torch's advice around it, which is to run the file."""
    advice = ("Weights only load failed", "Please file an issue", "Check the documentation")
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(advice)]
    return (lines or [type(error).__name__])[0][:200]


def load_file(path: Path) -> dict[str, Any]:
    """As :func:`load_value`, and a dictionary (raises :class:`CheckpointError`)."""
    found = load_value(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a dictionary; it is no DeepSpeed checkpoint")
    return found


def entry(tree: Mapping[str, Any], *keys: str, path: Path) -> Any:
    """A value of nested dictionaries.

    Raises:
        CheckpointError: a key is not there; names the file and the keys.
    """
    node: Any = tree
    for key in keys:
        if not isinstance(node, Mapping) or key not in node:
            raise CheckpointError(
                f"{path} has no {'.'.join(keys)}: this DeepSpeed release writes other files than 0.19; load the "
                "checkpoint with DeepSpeed 0.19.8 and save it again"
            )
        node = node[key]
    return node
