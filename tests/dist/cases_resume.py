"""Runs that are stopped, poisoned or starved on the ranks of a launch, and the whole command line on each of them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ds_vcycle import cli, parallel
from ds_vcycle.checkpoint import store
from ds_vcycle.config import RunConfig, UserError
from ds_vcycle.cycle import live, runner
from ds_vcycle.cycle.runner import Resume, run_training
from ds_vcycle.sharding.zero import fragments


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One call of ``run_training``; ``disturb`` is ``POINT@COUNT:RANK:WHAT`` (see :func:`_disturbed`)."""

    config: RunConfig
    resume: Resume = "never"
    disturb: str = ""


def command_line(arguments: Sequence[str], log: str) -> None:
    """``ds-vcycle ARGUMENTS`` on this rank; what it prints to stderr goes to LOG.RANK."""
    sys.argv = ["ds-vcycle", *arguments]
    with Path(f"{log}.{os.environ['RANK']}").open("w") as file, contextlib.redirect_stderr(file):
        cli.main()


def attempts(todo: Sequence[Attempt]) -> list[str]:
    """Each attempt's outcome, one after another in one job: ``finished``, ``stopped`` or the error's kind and text."""
    return [_attempt(attempt) for attempt in todo]


def _attempt(attempt: Attempt) -> str:
    with _disturbed(attempt.disturb):
        try:
            return run_training(attempt.config, resume=attempt.resume)
        except UserError as error:
            return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _disturbed(what: str) -> Iterator[None]:
    """Do ``WHAT`` on rank RANK when POINT is reached for the COUNT-th time.

    POINT is one of :data:`_POINTS`. WHAT: a signal's name; ``poison`` a weight with NaN; ``full``: the disk is.
    """
    if not what:
        yield
        return
    point, _, rest = what.partition("@")
    count, rank, action = rest.split(":")
    owner, name = _POINTS[point]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def replacement(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(count) and int(rank) == int(os.environ["RANK"]):
            _act(action, args)
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, replacement):
        yield


_POINTS: dict[str, tuple[Any, str]] = {
    "start": (runner.LiveRun, "begin"),
    "step": (live, "train_step"),
    "evaluation": (live, "held_out_loss"),
    "down": (live, "stage_down"),
    "up": (live, "refine_into"),
    "save": (live, "save_engine"),
    "write": (store, "write_shard"),
    "park": (live, "save_parked"),
    "metrics": (live.MetricsWriter, "write"),
    "latest": (live, "set_latest"),
    "describe": (runner, "_describe"),
}


def _act(action: str, args: Sequence[Any]) -> None:
    if action == "poison":
        with torch.no_grad():
            fragments(args[0])[-1].master[0] = torch.nan
    elif action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
    else:
        os.kill(os.getpid(), signal.Signals[action])


def other_ranks_layout(config: RunConfig, resume: Resume) -> str:
    """One attempt, then leave the process group: for launches of unlike sizes on one run directory."""
    outcome = _attempt(Attempt(config=config, resume=resume))
    parallel.shutdown()
    return outcome
