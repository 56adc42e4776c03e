"""Command lines given to every rank of one job, the process group staying between them."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from ds_vcycle import cli
from ds_vcycle.config import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one command line did on one rank. ``changed``: files written, changed or removed below the root."""

    code: int
    errors: str
    output: str
    changed: tuple[str, ...]


def run_command_lines(root: str, setup: Sequence[str], commands: dict[str, Sequence[str]]) -> dict[str, Outcome]:
    """First the setup, a run that is broken off where it would refine; then each command, the tree compared around it.

    The first commands find no process group; the first that needs one makes it.
    """
    with mock.patch("ds_vcycle.cycle.level_changes.refine", _break_off) if setup else contextlib.nullcontext():
        prepared = _run(Path(root), setup) if setup else None
    assert prepared is None or "broken off" in prepared.errors, prepared
    return {name: _run(Path(root), arguments) for name, arguments in commands.items()}


def _break_off(*_: object) -> None:
    raise UserError("broken off")


def _run(root: Path, arguments: Sequence[str]) -> Outcome:
    before = tree(root)
    _meet()  # no rank begins before all have looked
    errors, output = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        code = cli.run(arguments)
    _meet()
    after = tree(root)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return Outcome(code=code, errors=errors.getvalue(), output=output.getvalue(), changed=tuple(changed))


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def tree(root: Path) -> dict[str, str]:
    """Every file and directory below ``root`` with a hash of what it holds."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
        for path in root.rglob("*")
    }
