"""Steps whose values are still on the device, so that the host waits for it once in many steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_vcycle.train.loop import StepResult
from ds_vcycle.train.metrics import Place, StepRecord, Totals, step_record


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingStep:
    """A step that is done; its loss and gradient norm have not been read back."""

    place: Place
    result: StepResult
    lr: float
    before: Totals
    after: Totals


def read_back(pending: list[PendingStep]) -> list[StepRecord]:
    """The records of the steps, in order, by one transfer from the device; the list is emptied."""
    if not pending:
        return []
    results = [step.result for step in pending]
    values = torch.stack([torch.stack([r.loss, r.grad_norm.to(r.loss.device)]) for r in results]).tolist()
    records = [
        step_record(step.place, loss=loss, lr=step.lr, grad_norm=norm, before=step.before, after=step.after)
        for step, (loss, norm) in zip(pending, values, strict=True)
    ]
    pending.clear()
    return records
