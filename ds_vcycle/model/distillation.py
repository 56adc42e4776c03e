"""What a student learns from a teacher's predictions, over a vocabulary that is split over ranks and padded.

Knowledge distillation as in Hinton, Vinyals, Dean (arXiv 1503.02531), mixed with the cross entropy as in Knowledge
Inheritance (Qin et al., NAACL 2022): ``(1 - share) CE + share temperature^2 KL(teacher || student)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_vcycle.model.loss import VocabShard, weighted_cross_entropy


@dataclass(frozen=True, kw_only=True, slots=True)
class Teaching:
    """What a teacher says of a micro-batch, and how much it counts.

    ``logits``: [..., vocab.size], this rank's columns, at the predicted positions; no gradient flows to them.
    ``share``: of the divergence in the loss, in (0, 1]. ``temperature``: both sides' logits are divided by it.
    """

    logits: torch.Tensor
    share: float
    temperature: float


def token_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    vocab: VocabShard,
    teaching: Teaching | None = None,
) -> torch.Tensor:
    """Sum over the predicted positions of weight x loss: the cross entropy, mixed with a teacher's if there is one.

    Args:
        logits: [..., vocab.size], this rank's columns; overwritten.
        labels: int64 [...], token ids over the whole vocabulary.
        weights: float32 [...]; no gradient flows to them.
        vocab: which columns these are.
        teaching: the teacher's logits at the same positions.

    Returns:
        float32 scalar, equal on all ranks of ``vocab.group``.
    """
    if teaching is None:
        return weighted_cross_entropy(logits, labels, weights, vocab)
    soft = weighted_divergence(logits, teaching.logits, weights, vocab, teaching.temperature)
    hard = weighted_cross_entropy(logits, labels, weights, vocab)  # overwrites the logits, so it comes last
    return (1 - teaching.share) * hard + teaching.share * teaching.temperature**2 * soft


def weighted_divergence(
    logits: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor, vocab: VocabShard, temperature: float
) -> torch.Tensor:
    """Sum over positions of weight x KL(softmax(teacher / temperature) || softmax(logits / temperature)).

    Args:
        logits: the student's [..., vocab.size], this rank's columns; pad columns have no part and get no gradient.
        teacher: of the same shape; it gets no gradient.
        weights: float32 [...]; no gradient flows to them.
        vocab: which columns these are.
        temperature: above 0.

    Returns:
        float32 scalar, equal on all ranks of ``vocab.group``.
    """
    student, taught = logits.view(-1, vocab.size), teacher.reshape(-1, vocab.size)
    total: torch.Tensor = _WeightedDivergence.apply(student, taught, weights.reshape(-1), vocab, temperature)
    return total


class _WeightedDivergence(torch.autograd.Function):
    """Keeps one [n, real] fp32 buffer for the backward pass: p - q.

    With p = softmax(s / t), q = softmax(z / t) over the whole vocabulary:
    KL(q || p) = sum_j q_j (z_j - s_j) / t - log sum exp(z / t) + log sum exp(s / t); d KL / d s_j = (p_j - q_j) / t.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        teacher: torch.Tensor,
        weights: torch.Tensor,
        vocab: VocabShard,
        temperature: float,
    ) -> torch.Tensor:
        scores = torch.stack([_scaled(logits, vocab, temperature), _scaled(teacher, vocab, temperature)])
        top = scores.new_full(scores.shape[:2], float("-inf"))  # a slice may be all padding
        if vocab.real:
            top = scores.amax(dim=-1)
        split = vocab.group.size() > 1
        if split:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=vocab.group)
        scores.sub_(top[:, :, None])
        difference = scores[1] - scores[0]
        scores.exp_()
        crossed = (scores[1] * difference).sum(dim=-1)
        sums = torch.stack([*scores.sum(dim=-1), crossed])
        if split:
            dist.all_reduce(sums, group=vocab.group)
        student, taught, crossed = sums.unbind()
        divergence = crossed / taught - taught.log() + student.log()
        kept = scores[0].div_(student[:, None]).sub_(scores[1].div_(taught[:, None]))
        ctx.save_for_backward(kept.clone(), weights)
        ctx.dtype, ctx.columns, ctx.temperature = logits.dtype, logits.shape[1], temperature
        return (divergence * weights).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weights = ctx.saved_tensors
        real = kept * (weights * (grad / ctx.temperature))[:, None]
        padded: torch.Tensor = torch.nn.functional.pad(real, (0, ctx.columns - real.shape[1])).to(ctx.dtype)
        return padded, None, None, None, None


def _scaled(logits: torch.Tensor, vocab: VocabShard, temperature: float) -> torch.Tensor:
    return logits[:, : vocab.real].detach().float() / temperature
