"""``ds-vcycle status``: where a run is, from the small files in its directory, also while it goes on. No torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.checkpoint.retention import find_latest
from ds_vcycle.config import UserError
from ds_vcycle.cycle.journal import HEARTBEAT_NAME
from ds_vcycle.cycle.json_files import read_json
from ds_vcycle.cycle.requeues import Requeues, read_requeues

_SILENT_SECONDS = 300.0  # more than a save or an evaluation usually takes
Process = Literal["there", "gone", "elsewhere"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """What a run directory says of its run.

    ``status`` and ``heartbeat`` are the two files, empty if they are not there yet; ``age_seconds`` is of the
    heartbeat; ``process``: whether rank 0 still is (``elsewhere``: on another machine, so nobody knows).
    """

    run_dir: Path
    status: Mapping[str, Any]
    heartbeat: Mapping[str, Any]
    age_seconds: float | None
    process: Process | None
    checkpoint: str | None
    requeues: Requeues

    @property
    def word(self) -> str:
        """The status in a word: as status.json has it, ``killed`` if it runs no more, ``begun`` before its first."""
        word = str(self.status.get("status", "begun"))
        return "killed" if word == "running" and self.process == "gone" else word


def read_run_status(run_dir: Path) -> RunStatus:
    """Read what is there; a file that is being replaced is whole before and after.

    Raises:
        UserError: it is no run directory.
    """
    status, heartbeat = read_json(run_dir / "status.json"), read_json(run_dir / HEARTBEAT_NAME)
    if not (status or heartbeat or (run_dir / "phases.json").is_file()):
        raise UserError(f"{run_dir}: no run has begun there; give the run_dir of `ds-vcycle train`")
    since = heartbeat.get("time")
    return RunStatus(
        run_dir=run_dir,
        status=status,
        heartbeat=heartbeat,
        age_seconds=max(0.0, time.time() - since) if isinstance(since, int | float) else None,
        process=_process(heartbeat),
        checkpoint=_latest(run_dir / "checkpoints"),
        requeues=read_requeues(run_dir),
    )


def render_status(found: RunStatus) -> str:
    """The status as lines for a person."""
    beat = found.heartbeat
    lines = [("", f"{found.run_dir}: {found.word}{_why(found)}")]
    if beat:
        lines.append(("phase", f"{beat['phase'] + 1} of {beat['of']}: {_in_phase(beat)}"))
        lines.append(("step", f"{beat['step']:,} of {beat['steps']:,}"))
        losses = [f"{label}{beat[key]:.4f}" for key, label in _LOSSES if beat.get(key) is not None]
        lines.append(("loss", ", ".join(losses) or "none yet"))
        if found.word == "running":
            lines.append(("eta", _eta(beat)))
    lines.append(("checkpoint", found.checkpoint or "none yet"))
    counts = found.requeues
    idle = f", the last {counts.idle} without progress" if counts.idle else ""
    lines.append(("requeues", f"{counts.count}{idle}"))
    return "\n".join(f"{name:<12}{text}" if name else text for name, text in lines)


def to_json(found: RunStatus) -> dict[str, Any]:
    """The status as plain values; what is not known is null."""
    beat, status = found.heartbeat, found.status
    keys = ("title", "level", "phase_step", "phase_steps", "steps", "loss", "held_out", "step_seconds", "eta_seconds")
    place = {key: beat.get(key, status.get(key)) for key in ("phase", "of", "step")}
    return {
        "run_dir": str(found.run_dir), "status": found.word, **place, **{key: beat.get(key) for key in keys},
        "reason": status.get("reason"), "error": status.get("error"), "checkpoint": found.checkpoint,
        "requeues": found.requeues.count, "requeues_without_progress": found.requeues.idle,
        "heartbeat_age_seconds": found.age_seconds, "process": found.process,
        **{key: beat.get(key) for key in ("host", "pid", "job")},
    }  # fmt: skip


_LOSSES = (("loss", ""), ("held_out", "held-out "))


def _process(heartbeat: Mapping[str, Any]) -> Process | None:
    pid = heartbeat.get("pid")
    if not isinstance(pid, int):
        return None
    if heartbeat.get("host") != socket.gethostname():
        return "elsewhere"
    return "there" if psutil.pid_exists(pid) else "gone"


def _latest(root: Path) -> str | None:
    try:
        found = find_latest(root)
    except CheckpointError as error:
        return f"({error})"
    return found.name if found else None


def _why(found: RunStatus) -> str:
    """What stands behind the word: the reason or error, or when the run was heard of last, and where."""
    status, beat = found.status, found.heartbeat
    if found.word in ("stopped", "failed", "finished"):
        detail = status.get("reason") or status.get("error")
        return f" ({detail})" if detail else ""
    if found.age_seconds is None:
        return ""
    job = f", Slurm job {beat['job']}" if beat.get("job") else ""
    heard = f" (heard of {found.age_seconds:.0f} s ago, {beat.get('host')}, process {beat.get('pid')}{job})"
    silent = found.word == "running" and found.age_seconds > _SILENT_SECONDS
    return f"{heard}\nNothing was heard for long: it was killed, hangs, or saves slowly." if silent else heard


def _in_phase(beat: Mapping[str, Any]) -> str:
    steps = f", step {beat['phase_step']:,} of {beat['phase_steps']:,}" if beat["phase_steps"] > 1 else ""
    return f"{beat['title']}{steps}"


def _eta(beat: Mapping[str, Any]) -> str:
    seconds, each = beat.get("eta_seconds"), beat.get("step_seconds")
    if seconds is None:
        return "not known yet"
    minutes = round(seconds / 60)
    shown = f"{seconds:.0f} s" if seconds < 120 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
    return f"{shown} of steps" + (f", now {each:.3g} s each" if each else "")
