"""The loss of a training phase that has a teacher: read when first needed, also by a resumed run, gone when done."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from ds_vcycle.baselines.distillation import build_teacher, distillation_loss
from ds_vcycle.baselines.inheritance import as_teacher, teachers_share
from ds_vcycle.cycle.live import LiveRun
from ds_vcycle.cycle.phases import Train
from ds_vcycle.cycle.saving import read_parked
from ds_vcycle.sharding.zero import Engine
from ds_vcycle.train.loop import Batch, LossScale, language_model_loss


class Lessons:
    """A taught phase. ``phase.teacher`` is parked on the disk until the phase is past ``distill_steps``."""

    def __init__(self, run: LiveRun, phase: Train) -> None:
        self._run, self._phase = run, phase
        self._teacher: nn.Module | None = None

    def loss(self, engine: Engine, batch: Batch, scale: LossScale) -> Tensor:
        """The loss of a micro-batch of the step that the run is in. Collective where the teacher is read.

        Raises:
            CheckpointError: on every rank, if the teacher's weights cannot be read.
        """
        phase = self._phase
        share = teachers_share(self._run.position.phase_step, phase.distill_steps)
        if share == 0:
            self._teacher = None
            dismiss_teacher(self._run, phase)
            return language_model_loss(engine, batch, scale)
        if self._teacher is None:
            self._teacher = _read_teacher(self._run, phase)
        assert phase.temperature is not None
        return distillation_loss(self._teacher, share=share, temperature=phase.temperature)(engine, batch, scale)


def dismiss_teacher(run: LiveRun, phase: Train) -> None:
    """Checkpoints from here on need the weights of the phase's teacher no more, if it had one."""
    if phase.teacher in run.position.parked:
        left = {level: name for level, name in run.position.parked.items() if level != phase.teacher}
        run.position = replace(run.position, parked=left)


def _read_teacher(run: LiveRun, phase: Train) -> nn.Module:
    assert phase.teacher is not None
    level = as_teacher(run.plan.level(phase.teacher), run.plan.level(phase.level))
    weights = read_parked(run.checkpoints / run.position.parked[level.index], run.plan.config, level)
    return build_teacher(level, run.plan.config.model, run.mesh, weights)
