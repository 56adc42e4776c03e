"""Runs that are stopped, poisoned or starved on the ranks of a launch, and the whole command line on each of them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ds_vcycle import cli
from ds_vcycle.config import RunConfig, UserError
from ds_vcycle.cycle import level_changes, live, runner, saves, training
from ds_vcycle.cycle.runner import Resume, run_training
from ds_vcycle.sharding.zero import fragments
from ds_vcycle.train.metrics import MetricsWriter

# Where a run can be disturbed: the function that is about to be called
_POINTS: dict[str, tuple[Any, str]] = {
    "begin": (live.LiveRun, "begin"),
    "step": (training, "train_step"),
    "evaluation": (live, "held_out_loss"),
    "coalesce": (level_changes, "stage_down"),
    "park": (live, "save_parked"),
    "refine": (level_changes, "refine_into"),
    "save": (saves, "begin_save"),
    "record": (MetricsWriter, "write"),
    "describe": (runner, "_open"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One call of ``run_training``, disturbed at ``POINT@COUNT:RANK:WHAT`` if given.

    WHAT: a signal's name; ``hang``: for ever; ``poison``: a weight becomes NaN; ``full``: no file can grow beyond 1,000 bytes any more.
    """

    config: RunConfig
    resume: Resume = "never"
    disturb: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """``finished``, ``stopped``, or the kind and text of the user's error; and what status.json says then."""

    text: str
    status: dict[str, Any]


def command_line(arguments: Sequence[str], log: str, disturb: str = "") -> None:
    """``ds-vcycle ARGUMENTS`` on this rank; what it prints to stderr goes to LOG.RANK."""
    sys.argv = ["ds-vcycle", *arguments]
    with Path(f"{log}.{os.environ['RANK']}").open("w") as file, contextlib.redirect_stderr(file), _disturbed(disturb):
        cli.main()


def attempts(todo: Sequence[Attempt]) -> list[Outcome]:
    """Each attempt's outcome, one after another in one job."""
    return [_attempt(attempt) for attempt in todo]


def _attempt(attempt: Attempt) -> Outcome:
    with _disturbed(attempt.disturb):
        try:
            text: str = run_training(attempt.config, resume=attempt.resume)
        except UserError as error:
            text = f"{type(error).__name__}: {error}"
    torch.distributed.barrier()
    path = attempt.config.run_dir / "status.json"
    return Outcome(text=text, status=json.loads(path.read_text()) if path.exists() else {})


@contextlib.contextmanager
def _disturbed(what: str) -> Iterator[None]:
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
        if calls == int(count) and rank == os.environ["RANK"]:
            _act(action, args)
        return original(*args, **kwargs)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with mock.patch.object(owner, name, replacement):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _act(action: str, args: Sequence[Any]) -> None:
    if action == "poison":
        with torch.no_grad():
            fragments(args[0])[-1].master[0] = torch.nan
    elif action == "hang":
        time.sleep(1000)
    elif action == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    else:
        os.kill(os.getpid(), signal.Signals[action])
