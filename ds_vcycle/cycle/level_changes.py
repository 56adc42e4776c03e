"""Changes of level as phases: the engine is exchanged, the fine level parked or taken back, and the loss recorded."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TypedDict

from ds_vcycle.baselines.growth import second_source
from ds_vcycle.cycle.learned_growth import grow_learned
from ds_vcycle.cycle.live import LiveRun
from ds_vcycle.cycle.phases import Coalesce, Grow, LevelChange, Refine, kind_of
from ds_vcycle.cycle.saving import initial_fragments, read_parked
from ds_vcycle.cycle.transition import (
    Blend,
    Fragments,
    Staged,
    decoalesce_into,
    fill,
    masters,
    refine_into,
    stage_down,
    stage_up,
    take_copies,
)
from ds_vcycle.faults import fault_point
from ds_vcycle.levels import Level
from ds_vcycle.sharding.copies import from_next_layer, new_layers, new_outputs
from ds_vcycle.sharding.geometry import Geometry
from ds_vcycle.train.metrics import Totals, TransitionKind, TransitionLossRecord, transition_record


class Change(TypedDict):
    """What a record says of which change of level it was."""

    kind: TransitionKind
    fine: int
    coarse: int


def coalesce(run: LiveRun, phase: Coalesce) -> None:
    """Go down one level; the fine one is parked on the disk and, unless ``cycle.park=disk``, on the host."""
    run.progress.phase(phase.index, str(phase), 1)
    run.finish_save()
    before, loss = run.position.totals, run.known_loss()
    operators = run.plan.config.operators
    fault_point("coalesce.begin")
    staged = None
    if phase.coarse_from == "fine":
        staged = stage_down(run.live(), _geometry(run, phase), run.mesh, operators.moments, kernels=operators.kernels)
    name, parked = run.park()
    fault_point("coalesce.parked")
    if run.plan.config.cycle.park == "host":
        run.parked[phase.fine] = parked
    del parked
    run.release()
    run.engine = run.build(run.plan.level(phase.coarse), seed=run.plan.config.training.seed if staged is None else None)
    if staged is not None:
        fill(run.engine, staged)
    fault_point("coalesce.filled")
    run.position = replace(run.position, parked={**run.position.parked, phase.fine: name})
    _arrived(run, phase, before, loss, None)


def refine(run: LiveRun, phase: Refine) -> None:
    """Go up one level: de-coalesce and blend into the parked fine level, which is parked no more, or into a new one."""
    run.progress.phase(phase.index, str(phase), 1)
    run.finish_save()
    before, loss = run.position.totals, run.known_loss()
    operators, fine = run.plan.config.operators, run.plan.level(phase.fine)
    kept, geometry = _kept(run, phase, fine), _geometry(run, phase)
    blend: Blend = {"alpha": phase.alpha, "beta": phase.beta, "kernels": operators.kernels}
    fault_point("refine.begin")
    staged = stage_up(run.live(), kept, geometry, run.mesh, **blend, moments=operators.moments)
    run.release()
    run.engine = run.build(fine)
    decoalesced = _decoalesced_loss(run, fine, staged, geometry)
    refine_into(run.engine, kept, staged, geometry, run.mesh, **blend)
    fault_point("refine.done")
    run.parked.pop(phase.fine, None)
    left = {level: name for level, name in run.position.parked.items() if level != phase.fine}
    run.position = replace(run.position, parked=left)
    _arrived(run, phase, before, loss, decoalesced)


def grow(run: LiveRun, phase: Grow) -> None:
    """Go up one level as a rival does it (baselines/): weights by its own plan, Adam's moments anew."""
    run.progress.phase(phase.index, str(phase), max(phase.map_steps, 1))
    run.finish_save()
    before, loss = run.position.totals, run.known_loss()
    fault_point("grow.begin")
    if phase.method == "knowledge_inheritance":
        _begin_taught(run, phase)
    elif phase.method == "ligo":
        grow_learned(run, phase)
    else:
        _gather(run, phase)
    fault_point("grow.done")
    _arrived(run, phase, before, loss, None)


def _gather(run: LiveRun, phase: Grow) -> None:
    geometry, kernels = _geometry(run, phase), run.plan.config.operators.kernels
    staged = Staged(master=masters(run.live()))
    average = None if run.average is None else {name: value.cpu() for name, value in run.average.items()}
    run.average = None
    run.release()
    run.engine = run.build(run.plan.level(phase.fine))
    decoalesce_into(run.engine, staged, geometry, run.mesh, kernels=kernels)
    second = second_source(phase.method)
    if second is not None:
        if second.weights == "next_layer":
            source = replace(geometry, plan=from_next_layer(geometry.plan))
        else:
            assert average is not None
            source, staged = geometry, Staged(master=average)
        taken = new_outputs if second.elements == "new_outputs" else new_layers
        take_copies(run.engine, staged, source, run.mesh, taken, kernels=kernels)


def _begin_taught(run: LiveRun, phase: Grow) -> None:
    """Knowledge Inheritance: the fine level starts from the seed; the coarse one is parked, to teach it."""
    name, _ = run.park()
    fault_point("grow.parked")
    run.release()
    run.engine = run.build(run.plan.level(phase.fine), seed=run.plan.config.training.seed)
    run.position = replace(run.position, parked={**run.position.parked, phase.coarse: name})


def _decoalesced_loss(run: LiveRun, fine: Level, staged: Staged, geometry: Geometry) -> float | None:
    """The held-out loss of what was trained, as it is on the fine level: alpha 1, beta 0."""
    if not run.plan.config.evaluation.transitions:
        return None
    run.count_seconds()
    decoalesce_into(run.live(), staged, geometry, run.mesh, kernels=run.plan.config.operators.kernels)
    return run.measure(fine)


def _kept(run: LiveRun, phase: Refine, level: Level) -> Fragments:
    """The fine level's fragments: parked, from the disk where they are not held, or as they begin from the seed."""
    if phase.kept == "seed":
        return initial_fragments(run.plan.config, level)
    if level.index in run.parked:
        return run.parked[level.index]
    directory = run.checkpoints / run.position.parked[level.index]
    return read_parked(directory, run.plan.config, level)


def _arrived(run: LiveRun, phase: LevelChange, before: Totals, loss: float, decoalesced: float | None) -> None:
    """A change of level is done: record its cost, and the held-out loss before, within and after it."""
    level = phase.coarse if isinstance(phase, Coalesce) else phase.fine
    run.position = replace(run.position, level=level, phase_step=max(run.position.phase_step, 1))
    run.count_seconds()
    place, after = run.position.place, run.position.totals
    change: Change = {"kind": kind_of(phase), "fine": phase.fine, "coarse": phase.coarse}
    blend = {"alpha": phase.alpha, "beta": phase.beta} if isinstance(phase, Refine) else {}
    run.records.write(transition_record(place, **change, before=before, after=after, **blend))
    run.evaluate()
    run.records.write(
        TransitionLossRecord(
            **asdict(place), **change, before=loss, decoalesced=decoalesced, after=run.held_out, seconds=after.seconds
        )
    )
    run.records.settle()
    within = "" if decoalesced is None else f" -> {decoalesced:.4f} de-coalesced"
    run.progress.update(1, f"held-out {loss:.4f}{within} -> {run.held_out:.4f}")


def _geometry(run: LiveRun, phase: LevelChange) -> Geometry:
    transition = run.plan.transitions[phase.fine]
    return Geometry(plan=transition, fine=run.layout(transition.fine), coarse=run.layout(transition.coarse))
