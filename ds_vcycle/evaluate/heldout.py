"""Held-out loss on a fixed set of sequences: the same ones at every level, in every run, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_vcycle.parallel import Mesh


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Iterable[Mapping[str, Tensor]], mesh: Mesh) -> float:
    """Mean language-model loss over all predicted positions of the set, in nats. Collective over all ranks.

    Args:
        model: an engine or a model with the forward interface of :mod:`ds_vcycle.model`; left in training mode.
        batches: this data-parallel rank's share, as many batches on every rank (padding has weight 0).
        mesh: of the level.
    """
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for batch in batches:
        placed = {name: tensor.to(mesh.device, non_blocking=True) for name, tensor in batch.items()}
        loss, _ = model(**placed)
        sums += torch.stack([loss.double(), placed["weights"].double().sum()])
    model.train()
    dist.all_reduce(sums)  # tensor-parallel copies count alike in both, and every rank decides from the same bits
    total, weight = sums.tolist()
    return float(total / weight)
