"""Distillation: the split, padded divergence against torch's dense one, finite differences and whole models."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from ds_vcycle import parallel
from ds_vcycle.model.build import build_model
from ds_vcycle.model.distillation import Teaching, weighted_divergence
from ds_vcycle.model.loss import VocabShard
from tests.dist.ranks import values
from tests.model_level import batch_for, tiny

TEMPERATURE, SHARE = 2.0, 0.3
VOCABULARIES = (101, 200)  # of 256: the second of two ranks holds padding only, or some
MODELS: list[dict[str, Any]] = [
    {"vocab_size": 200},
    {"architecture": "bert", "vocab_size": 101, "sentence_order": True},
]


def dense(student: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of weight x KL(teacher || student) at the temperature, over logits without padding, by torch."""
    p, q = ((x / TEMPERATURE).log_softmax(-1) for x in (student, teacher))
    return (functional.kl_div(p, q, reduction="none", log_target=True).sum(-1) * weights).sum()


def drawn(vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the student and the teacher [2, 5, 256], wild in the pad columns, and weights with a zero."""
    generator = torch.Generator().manual_seed(vocab)
    student, teacher = (3 * torch.randn(2, 5, 256, generator=generator) for _ in range(2))
    student[..., vocab:], teacher[..., vocab:] = 50.0, -50.0
    weights = torch.rand(2, 5, generator=generator)
    weights[0, 0] = 0
    return student, teacher, weights


def divergences() -> dict[tuple[int, int], tuple[float, torch.Tensor, float]]:
    """By (degree, vocabulary): the value, this rank's gradient, and the slope along it by central differences."""
    parallel.init_distributed("cpu")
    found = {}
    for tp in (1, 2):
        mesh = parallel.mesh_for(tp)
        for vocab in VOCABULARIES:
            shape = tiny(2, vocab_size=vocab)[0].shape
            shard = VocabShard.of(shape, mesh)
            student, teacher, weights = drawn(vocab)
            columns = slice(shard.start, shard.start + shard.size)
            mine, taught = student[..., columns].clone().requires_grad_(), teacher[..., columns]

            value = partial(weighted_divergence, teacher=taught, weights=weights, vocab=shard, temperature=TEMPERATURE)
            total = value(mine)
            (7 * total).backward()
            assert mine.grad is not None
            step = 0.02 * mine.grad
            slope = (value(mine.detach() + step) - value(mine.detach() - step)) / 0.04
            found[tp, vocab] = (total.item(), mine.grad, slope.item())
    return found


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("tp", [1, 2])
def test_divergence_is_torchs_and_its_gradient_too(divergence: Any, tp: int, vocab: int) -> None:
    student, teacher, weights = drawn(vocab)
    student = student.double().requires_grad_()
    wanted = dense(student[..., :vocab], teacher[..., :vocab].double(), weights.double())
    (7 * wanted).backward()
    assert student.grad is not None and wanted.item() > 1
    for total, _, slope in (rank[tp, vocab] for rank in divergence):
        assert total == pytest.approx(wanted.item(), rel=1e-6)
        assert slope == pytest.approx((student.grad / 7 * student.grad).sum().item(), rel=1e-3)
    gradient = torch.cat([rank[tp, vocab][1] for rank in divergence[:tp]], dim=-1)
    assert torch.allclose(gradient.double(), student.grad, rtol=1e-5, atol=1e-6)
    assert (gradient[..., vocab:] == 0).all() and (gradient[0, 0] == 0).all()


@pytest.fixture(scope="module")
def divergence() -> Any:
    return values(2, "tests.test_distillation:divergences")


def taught() -> list[dict[str, Any]]:
    """Of each model under both degrees: the mixed loss, a gradient, and the dense reference of both."""
    parallel.init_distributed("cpu")
    found = []
    for options in MODELS:
        for tp in (1, 2):
            mesh = parallel.mesh_for(tp)
            level, model = tiny(tp, **options)
            student: Any = build_model(level, model, mesh=mesh, seed=1)
            teacher: Any = build_model(level, model, mesh=mesh, seed=2).eval()
            batch = batch_for(level)
            with torch.no_grad():
                theirs, ours = teacher.predictions(batch), student.predictions(batch)
            teaching = Teaching(logits=theirs, share=SHARE, temperature=TEMPERATURE)
            lm_sum, _ = student(**batch, teaching=teaching)
            lm_sum.backward()
            plain, _ = student(**batch)
            whole = []
            for logits in (ours, theirs):
                parts = [torch.empty_like(logits) for _ in range(tp)]
                dist.all_gather(parts, logits.contiguous(), group=mesh.tp_group)
                whole.append(torch.cat(parts, dim=-1)[..., : level.shape.vocab_size].double())
            labels, weights = batch["labels"].t(), batch["weights"].t().double()
            hard = functional.cross_entropy(whole[0].permute(0, 2, 1), labels, reduction="none")
            wanted = (1 - SHARE) * (hard * weights).sum() + SHARE * TEMPERATURE**2 * dense(*whole, weights)
            gradients = {name: p.grad for name, p in student.named_parameters() if "norm" in name}
            found.append(
                {"loss": lm_sum.item(), "wanted": wanted.item(), "plain": plain.item(), "gradients": gradients,
                 "hard": (hard * weights).sum().item()}
            )  # fmt: skip
    return found


def test_a_model_learns_from_its_teacher_at_the_predicted_positions_under_both_degrees() -> None:
    for found in values(2, "tests.test_distillation:taught"):
        for whole, split in zip(found[::2], found[1::2], strict=True):
            for one in (whole, split):
                assert one["loss"] == pytest.approx(one["wanted"], rel=1e-5)
                assert one["plain"] == pytest.approx(one["hard"], rel=1e-5)
                assert abs(one["plain"] - one["loss"]) > 1
            for name, gradient in whole["gradients"].items():
                if gradient is not None:  # the sentence-order head has no part
                    assert torch.allclose(split["gradients"][name], gradient, rtol=1e-3, atol=1e-4), name
            assert any(gradient is not None for gradient in whole["gradients"].values())
