"""The composition root: one run from its configuration to its last checkpoint, straight down.

``run_training`` checks everything, opens or resumes the run directory, and walks through the phases. Each phase ends
in a checkpoint; a run killed anywhere goes on from the last one with the same bits (CPU, same layout).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch.distributed as dist
import yaml

from ds_vcycle import parallel
from ds_vcycle.checkpoint.store import Checkpoint, find_latest, open_checkpoint
from ds_vcycle.config import RunConfig, UserError
from ds_vcycle.cycle.checks import RunPlan, check_run, check_run_dir
from ds_vcycle.cycle.live import LiveRun
from ds_vcycle.cycle.position import position_from
from ds_vcycle.cycle.saving import check_resumable, versions
from ds_vcycle.cycle.schedule import Coalesce, Refine, Train, to_records, warnings_for
from ds_vcycle.cycle.stopping import Stopped, stop_signals, write_status

Resume = Literal["never", "always", "auto"]


def run_training(config: RunConfig, *, resume: Resume = "never") -> Literal["finished", "stopped"]:
    """Run or resume the whole cycle. Called by every rank.

    Args:
        config: the validated configuration.
        resume: ``never`` refuses a directory that holds a run, ``always`` wants a checkpoint there, ``auto`` takes one
            if there is any.

    Raises:
        UserError: on every rank, with the same text, before any long work; or when the loss is not finite.
    """
    parallel.init_distributed(config.training.device)
    plan, checkpoint = _checked(config, resume)
    rank = dist.get_rank()
    if rank == 0:
        _describe(plan)
    with stop_signals() as flag:
        run = LiveRun(plan, flag)
        try:
            if checkpoint is None:
                run.begin()
            else:
                run.restore(checkpoint, position_from(checkpoint.state["position"]))
            _walk(run)
        except Stopped:
            _status(run, "stopped", {"signal": flag.signal})
            return "stopped"
        except Exception as error:
            _status(run, "failed", {"error": f"{type(error).__name__}: {error}"})
            raise
        finally:
            run.close()
    _status(run, "finished", {})
    return "finished"


def _checked(config: RunConfig, resume: Resume) -> tuple[RunPlan, Checkpoint | None]:
    """Check on every rank, then agree: all go on, or all raise the same error."""
    plan, checkpoint, error = None, None, None
    try:
        check_run_dir(config.run_dir, resuming=resume != "never")
        plan = check_run(config, dist.get_world_size())
        checkpoint = _checkpoint(plan, resume)
    except UserError as problem:
        error = problem
    parallel.raise_together(error)
    assert plan is not None
    return plan, checkpoint


def _checkpoint(plan: RunPlan, resume: Resume) -> Checkpoint | None:
    if resume == "never":
        return None
    root = plan.config.run_dir / "checkpoints"
    latest = find_latest(root) if root.is_dir() else None
    if latest is None:
        if resume == "always":
            raise UserError(f"--resume: {root} holds no checkpoint; start without --resume, or with --resume auto")
        return None
    checkpoint = open_checkpoint(latest)
    check_resumable(checkpoint, plan.config, plan.phases)
    return checkpoint


def _describe(plan: RunPlan) -> None:
    """Write what the run is: the resolved configuration, the phase list, the versions."""
    run_dir: Path = plan.config.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_dump(plan.config.model_dump(mode="json"), sort_keys=False)
    (run_dir / "config.yaml").write_text(config, encoding="utf-8")
    (run_dir / "phases.json").write_text(json.dumps(to_records(plan.phases), indent=1) + "\n", encoding="utf-8")
    (run_dir / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n", encoding="utf-8")


def _walk(run: LiveRun) -> None:
    """Do the phases that are left, each followed by a checkpoint."""
    phases: Sequence[Train | Coalesce | Refine] = run.plan.phases
    for warning in warnings_for(run.plan.config):
        run.progress.note(f"warning: {warning}")
    for phase in phases[run.position.next_phase :]:
        run.position = run.position.entering(phase.index)
        _status(run, "running", {})
        if isinstance(phase, Train):
            run.train(phase)
        elif isinstance(phase, Coalesce):
            run.coalesce(phase)
        else:
            run.refine(phase)
        run.position = replace(run.position, done=True)
        run.save()
        if phase is not phases[-1] and parallel.any_rank(bool(run.flag)):
            raise Stopped


def _status(
    run: LiveRun, status: Literal["running", "stopped", "finished", "failed"], details: dict[str, object]
) -> None:
    if run.mesh.rank == 0:
        position = run.position
        place = {
            "phase": position.phase,
            "of": len(run.plan.phases),
            "level": position.level,
            "step": position.totals.steps,
        }
        write_status(run.plan.config.run_dir, status, {**place, **details})
