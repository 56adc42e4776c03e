"""LiGO's change of level: maps from the coarse weights to the fine ones are learned, then the fine level is filled.

Its steps take data, FLOPs and time like any other, and are recorded as steps of the growth phase, at the fine level.
There is no checkpoint within: killed, the growth starts again from the last one, with the same bits; asked to stop, the
run stops at its end.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ds_vcycle.baselines.ligo_steps import begin_learning, learned_weights, learning_step
from ds_vcycle.cycle.costs import level_cost
from ds_vcycle.cycle.live import LiveRun
from ds_vcycle.cycle.pending import PendingStep
from ds_vcycle.cycle.phases import Grow
from ds_vcycle.cycle.saving import fragments_of, read_parked
from ds_vcycle.cycle.training import coming_batches, count_step, record_steps
from ds_vcycle.cycle.transition import Fragments, Staged, fill
from ds_vcycle.faults import fault_point


def grow_learned(run: LiveRun, phase: Grow) -> None:
    """Exchange the coarse engine for the fine one, whose weights are made by learned maps; moments anew.

    Raises:
        TrainingError: a loss or a gradient norm is not finite.
    """
    fine = run.plan.level(phase.fine)
    weights = _whole_coarse(run, phase)
    run.release()
    run.enter(fine)
    run.position = replace(run.position, level=fine.index)
    slices = _learn(run, phase, weights)
    fault_point("grow.learned")
    run.engine = run.build(fine)
    fill(run.engine, Staged(master=fragments_of(slices, fine, run.layout(fine), run.mesh)))


def _whole_coarse(run: LiveRun, phase: Grow) -> Fragments:
    """Every coarse parameter, whole, on every rank: through the disk, which knows all layouts."""
    coarse = run.plan.level(phase.coarse)
    name, _ = run.park()  # nothing refers to it, so it goes
    fault_point("grow.parked")
    return read_parked(run.checkpoints / name, run.plan.config, replace(coarse, tensor_parallel=1, zero_stage=0))


def _learn(run: LiveRun, phase: Grow, weights: Fragments) -> dict[str, Tensor]:
    """This rank's slices of the fine weights after ``phase.map_steps`` steps of the maps."""
    config, fine, coarse = run.plan.config, run.plan.level(phase.fine), run.plan.level(phase.coarse)
    assert phase.map_lr is not None
    learner = begin_learning(fine, coarse, weights, config, run.mesh, lr=phase.map_lr)
    pending: list[PendingStep] = []
    with coming_batches(run, fine) as coming:
        for step in range(1, phase.map_steps + 1):
            result = learning_step(learner, next(coming))
            fault_point("grow.step")
            pending.append(count_step(run, result, lr=phase.map_lr, flops=level_cost(fine, config)))
            if step == phase.map_steps or step % config.logging.every_steps == 0:
                record_steps(run, pending)
    return learned_weights(learner)
