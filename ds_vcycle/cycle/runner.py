"""The composition root: one run from its configuration to its last checkpoint, straight down.

``run_training`` checks everything, opens or resumes the run directory, and walks through the phases. Each phase ends
in a checkpoint; a run killed anywhere goes on from the last one with the same bits (CPU, same layout).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch.distributed as dist
import yaml
from ds_vcycle_kernels.implementation import resolve

from ds_vcycle import parallel
from ds_vcycle.checkpoint.recorded import locate_checkpoint, missing_parameters, require_shape
from ds_vcycle.checkpoint.store import Checkpoint, find_latest, open_checkpoint
from ds_vcycle.config import RunConfig, UserError
from ds_vcycle.cycle import level_changes, training
from ds_vcycle.cycle.checks import RunPlan, check_models, check_run, check_run_dir
from ds_vcycle.cycle.live import LiveRun
from ds_vcycle.cycle.lock import locked
from ds_vcycle.cycle.phases import Coalesce, Phase, Refine, Train, first_level, to_records
from ds_vcycle.cycle.position import Position, position_from
from ds_vcycle.cycle.pulse import LostRankError, Pulse
from ds_vcycle.cycle.resumable import check_resumable
from ds_vcycle.cycle.saving import Restored, gather_objects, read_initial, read_run, versions
from ds_vcycle.cycle.schedule import warnings_for
from ds_vcycle.cycle.stopping import Status, Stopped, read_status, stop_signals, write_status
from ds_vcycle.cycle.transition import Staged

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
    parallel.init_distributed(config.training.device, config.training.rank_timeout_seconds)
    plan, checkpoint, source = _checked(config, resume)
    if checkpoint is not None and _ended(plan, checkpoint):
        return "finished"
    held = None if checkpoint is None else read_run(checkpoint, config, plan.levels)
    initial = None if source is None else read_initial(source, config, plan.level(1))
    with ExitStack() as stack:
        read = None if checkpoint is None else checkpoint.directory
        parallel.together(lambda: _open(plan, read, stack) if dist.get_rank() == 0 else None)
        return _run(plan, held, initial, () if source is None else missing_parameters(source))


def _run(
    plan: RunPlan, held: Restored | None, initial: Staged | None, drawn: Sequence[str]
) -> Literal["finished", "stopped"]:
    """Begin, or go on, and do the phases that are left.

    Args:
        plan: a run that has been checked.
        held: what is resumed.
        initial: what a run starts from that resumes nothing and does not start from the seed.
        drawn: parameters that were not there, and so are drawn from the seed.
    """
    with stop_signals() as flag, closing(LiveRun(plan, flag)) as run, _pulse(plan) as pulse:
        if dist.get_rank() == 0:
            flag.watch(plan.config.run_dir)
        try:
            if held is None:
                run.begin(initial)
                if drawn:
                    run.progress.note(f"not there, and so from the seed: {', '.join(drawn)}")
            else:
                run.restore(held)
            _walk(run)
            run.finish_save()
        except Stopped:
            run.finish_save()
            asked = [reason for reason in gather_objects(run.mesh, flag.reason) if reason is not None]
            _status(run, "stopped", {"reason": asked[0]})
            flag.heeded()
            run.reporter.event("stopped", run.position, reason=asked[0])
            run.progress.note(f"stopped ({asked[0]}), state saved: {run.summary}; go on with --resume")
            return "stopped"
        except Exception as error:
            lost = pulse.culprit(error)
            if lost is not None:  # not this run's fault: it is still `running`, and can go on
                run.reporter.event("lost", run.position, culprit=lost)
                raise LostRankError(f"{lost}; go on with --resume") from error
            with suppress(OSError):  # what ended the run is what the user must see
                _write_status(plan, run.position, "failed", {"error": f"{type(error).__name__}: {error}"})
            run.reporter.event("failed", run.position, error=f"{type(error).__name__}: {error}")
            raise
        _status(run, "finished", {})
        run.reporter.event("finished", run.position, held_out=run.held_out)
        run.beat(at_once=True)
        run.progress.note(f"finished: {run.summary}")
    return "finished"


def _pulse(plan: RunPlan) -> Pulse:
    timeout = plan.config.training.rank_timeout_seconds
    return Pulse(dist.get_rank(), dist.get_world_size(), timeout_seconds=timeout)


def _ended(plan: RunPlan, checkpoint: Checkpoint) -> bool:
    """Whether nothing is left to do; says so. All stays as it is, but for a mark that a kill at the very end spared."""
    position = position_from(checkpoint.state["position"])
    if position.next_phase < len(plan.phases):
        return False
    checkpoint.close()
    if dist.get_rank() == 0:
        print(f"{plan.config.run_dir} holds a finished run ({checkpoint.directory}): nothing to do", file=sys.stderr)
        if read_status(plan.config.run_dir) != "finished":
            _write_status(plan, position, "finished", {})
    return True


def _checked(config: RunConfig, resume: Resume) -> tuple[RunPlan, Checkpoint | None, Checkpoint | None]:
    """Check on every rank, then agree: all go on, or all raise the same error. Nothing is written.

    Returns:
        The plan; the checkpoint to resume from; the one to start from (``training.init_from``) if none is resumed.
    """

    def check() -> tuple[RunPlan, Checkpoint | None, Checkpoint | None]:
        check_run_dir(config.run_dir, resuming=resume != "never")
        plan = check_run(config, dist.get_world_size())
        checkpoint = _checkpoint(plan, resume)
        return plan, checkpoint, None if checkpoint else _source(plan)

    plan, checkpoint, source = parallel.together(check)
    meshes = {level.tensor_parallel: parallel.mesh_for(level.tensor_parallel) for level in plan.levels}
    parallel.together(lambda: check_models(plan, meshes))
    return plan, checkpoint, source


def _checkpoint(plan: RunPlan, resume: Resume) -> Checkpoint | None:
    if resume == "never":
        return None
    root = plan.config.run_dir / "checkpoints"
    latest = find_latest(root)
    if latest is None:
        if resume == "always":
            raise UserError(f"--resume: {root} holds no checkpoint; start anew with --resume auto")
        return None
    checkpoint = open_checkpoint(latest)
    check_resumable(checkpoint, plan.config, plan.phases)
    return checkpoint


def _source(plan: RunPlan) -> Checkpoint | None:
    path = plan.config.training.init_from
    if path is None:
        return None
    start = first_level(plan.phases)
    if start != 1:
        raise UserError(
            f"training.init_from={path} gives level 1 its weights, but this cycle starts at level {start}; remove it, "
            "or start the cycle at level 1 (cycle.kind=V)"
        )
    try:
        checkpoint = open_checkpoint(locate_checkpoint(path))
        require_shape(checkpoint, plan.level(1).shape, whose="level 1 of this run", partly=True)
    except UserError as error:
        raise UserError(f"training.init_from={path}: {error}") from error
    return checkpoint


def _open(plan: RunPlan, read: Path | None, stack: ExitStack) -> None:
    """Hold the run directory, and write what the run is: the resolved configuration, the phase list, the versions.

    ``read``: the checkpoint that has been read, which must be the latest still: a run that was waited for here may have
    gone on meanwhile.
    """
    run_dir: Path = plan.config.run_dir
    texts = {
        "config.yaml": yaml.safe_dump(plan.config.model_dump(mode="json"), sort_keys=False),
        "phases.json": json.dumps(to_records(plan.phases), indent=1) + "\n",
        "versions.json": json.dumps(versions(), indent=1) + "\n",
    }
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(run_dir))
        latest = find_latest(run_dir / "checkpoints")
        if latest != read:
            raise UserError(f"run_dir={run_dir}: another run has just written {latest} there; go on with --resume")
        for name, text in texts.items():
            (run_dir / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"run_dir={run_dir} cannot be written ({error.strerror}); set another run_dir") from error


def _walk(run: LiveRun) -> None:
    """Do the phases that are left, each followed by a checkpoint."""
    phases = run.plan.phases
    for warning in warnings_for(run.plan.config):
        run.progress.note(f"warning: {warning}")
    if any(not isinstance(phase, Train) for phase in phases[run.position.next_phase :]):
        run.progress.note(f"transitions: kernels {_kernels(run)}")
    for phase in phases[run.position.next_phase :]:
        run.position = run.position.entering(phase.index)
        _status(run, "running", {})
        run.reporter.event("phase_begun", run.position, title=str(phase))
        run.beat(at_once=True)
        _do(run, phase)
        run.position = replace(run.position, done=True)
        run.reporter.event("phase_ended", run.position, title=str(phase), held_out=run.held_out)
        run.save()
        if phase is not phases[-1] and parallel.any_rank(bool(run.flag)):
            raise Stopped


def _do(run: LiveRun, phase: Phase) -> None:
    if isinstance(phase, Train):
        training.train(run, phase)
    elif isinstance(phase, Coalesce):
        level_changes.coalesce(run, phase)
    elif isinstance(phase, Refine):
        level_changes.refine(run, phase)
    else:
        level_changes.grow(run, phase)


def _kernels(run: LiveRun) -> str:
    """What computes the transitions of the run, and where: ``torch (cpu)``."""
    device = run.mesh.device
    try:
        return f"{resolve(run.plan.config.operators.kernels, device)} ({device.type})"
    except ValueError as error:
        raise UserError(f"operators.{error}") from error


def _status(run: LiveRun, status: Status, details: Mapping[str, object]) -> None:
    """Write RUN/status.json on rank 0; all ranks return, or all raise."""
    try:
        _write_status(run.plan, run.position, status, details)
    except OSError as error:
        problem = f"{run.plan.config.run_dir}/status.json cannot be written ({error.strerror}); free space"
        parallel.raise_together(UserError(problem))
    parallel.raise_together(None)


def _write_status(plan: RunPlan, position: Position, status: Status, details: Mapping[str, object]) -> None:
    if dist.get_rank() == 0:
        place = {"phase": position.phase, "of": len(plan.phases), "level": position.level}
        write_status(plan.config.run_dir, status, {**place, "step": position.totals.steps, **details})
