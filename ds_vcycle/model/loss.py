"""Cross entropy over a vocabulary that is split over tensor-parallel ranks and padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_vcycle.levels import ModelShape
from ds_vcycle.parallel import Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabShard:
    """This rank's slice of the padded vocabulary: ids [start, start + real) are tokens, what follows is padding."""

    start: int
    real: int
    size: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, shape: ModelShape, mesh: Mesh) -> VocabShard:
        """The slice of ``mesh``'s rank."""
        size = shape.padded_vocab // mesh.tp_size
        start = mesh.tp_rank * size
        return cls(start=start, real=min(max(shape.vocab_size - start, 0), size), size=size, group=mesh.tp_group)


def weighted_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, vocab: VocabShard
) -> torch.Tensor:
    """Sum over positions of weight x cross entropy; pad logits have no part in it and get no gradient.

    Args:
        logits: [..., vocab.size], this rank's columns; overwritten.
        labels: int64 [...], token ids over the whole vocabulary.
        weights: float32 [...]; no gradient flows to them.
        vocab: which columns these are.

    Returns:
        float32 scalar, equal on all ranks of ``vocab.group``.
    """
    flat = logits.view(-1, vocab.size)
    total: torch.Tensor = _WeightedCrossEntropy.apply(flat, labels.reshape(-1), weights.reshape(-1), vocab)
    return total


class _WeightedCrossEntropy(torch.autograd.Function):
    """Keeps one [n, vocab] fp32 buffer for the backward pass: log-probabilities, or probabilities of this slice.

    With p = softmax(logits): d loss_i / d logit_ij = p_ij - [j = label_i].
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, vocab: VocabShard
    ) -> torch.Tensor:
        scores = logits.float()
        scores[:, vocab.real :] = float("-inf")
        ctx.dtype, ctx.whole = logits.dtype, vocab.group.size() == 1
        if ctx.whole:
            kept = torch.log_softmax(scores, dim=-1)
            column, mine = labels[:, None], weights
            losses = -kept.gather(1, column)[:, 0]
        else:
            inside = (labels >= vocab.start) & (labels < vocab.start + vocab.real)
            column, mine = (labels - vocab.start).where(inside, 0)[:, None], weights * inside
            kept, losses = _split_softmax(scores, column, inside, vocab.group)
        ctx.save_for_backward(kept, column, mine, weights)
        return (losses * weights).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        kept, column, mine, weights = ctx.saved_tensors
        kept = kept.exp_() if ctx.whole else kept
        kept.mul_((weights * grad)[:, None])
        kept.scatter_add_(1, column, -(mine * grad)[:, None])
        return kept.to(ctx.dtype), None, None, None


def _split_softmax(
    scores: torch.Tensor, column: torch.Tensor, inside: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of this slice and the losses; ``scores`` is overwritten. A slice may be all padding (-inf)."""
    top = scores.amax(dim=-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    scores.sub_(top[:, None])
    label_score = scores.gather(1, column)[:, 0].where(inside, 0)
    scores.exp_()
    sums = torch.stack((scores.sum(dim=-1), label_score))
    dist.all_reduce(sums, group=group)
    return scores.div_(sums[0][:, None]), sums[0].log() - sums[1]
