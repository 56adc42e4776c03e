"""LiGO: the expansion against dense matrices written from the paper's formula, gradients, and steps on ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ds_vcycle import parallel
from ds_vcycle.baselines.ligo import LearnedMaps, expand, initial_maps
from ds_vcycle.baselines.ligo_steps import begin_learning, learned_weights, learning_step
from ds_vcycle.config import parse_config
from ds_vcycle.levels import Level, resolve_levels
from ds_vcycle.schema import Parameter, parameters
from tests.dist.ranks import values
from tests.model_level import SIZES, batch_for

Matrix = npt.NDArray[np.float64]
LLAMA = {
    "kv_groups": 2, "activation": "swiglu", "ffn": 48, "position": "rope", "normalization": "rmsnorm", "bias": False,
    "tied_embeddings": False, "qk_norm": True,
}  # fmt: skip
BERT = {"architecture": "bert", "sentence_order": True, "norm_placement": "post"}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"layers": 3}, {"layers": 2, "hidden": 16, "heads": 2, "ffn": 40}),
    (LLAMA, {"layers": 1, "hidden": 24, "heads": 2, "ffn": 32}),
    (BERT, {"layers": 2, "hidden": 20, "heads": 3}),
    ({"layers": 4}, {"layers": 2, "hidden": 32, "heads": 4, "ffn": 128}),  # depth alone
]


def configuration(model: dict[str, Any], coarse: dict[str, Any], tp: int = 1, **sections: Any) -> Any:
    tree = {
        "model": SIZES | {"tensor_parallel": tp, "init_std": 0.2} | model,
        "training": {"global_batch": 4, "micro_batch": 2},
        "data": {"path": "unused"},
        "cycle": {"kind": "growth", "levels": 2, "growth": {"method": "ligo"}, "coarse": {"steps": 1},
                  "final": {"steps": 1}},
        "levels": [{}, coarse],
        "optimizer": {"weight_decay": 0.0, "grad_clip": 0.0},
    }  # fmt: skip
    return parse_config(tree | sections)


def levels_of(model: dict[str, Any], coarse: dict[str, Any], tp: int = 1) -> tuple[Level, Level]:
    fine, small = resolve_levels(configuration(model, coarse, tp))
    return fine, small


def drawn(level: Level, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of a whole level, normal; pad rows are zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for parameter in parameters(level.shape):
        weights[parameter.name] = torch.zeros(parameter.shape)
        inner = weights[parameter.name][tuple(slice(dim.real) for dim in parameter.dims)]
        inner.copy_(0.2 * torch.randn(inner.shape, generator=generator))
    return weights


def stacked(extra: torch.Tensor) -> Matrix:
    """B = [I; M]."""
    m = extra.detach().numpy().astype(np.float64)
    return np.concatenate([np.eye(m.shape[1]), m])


def row_matrix(fine: Level, coarse: Level, maps: LearnedMaps, which: str, layer: int) -> Matrix:
    """The dense map of linear_qkv's rows (``which`` = qkv) or of linear_proj's columns (v), entry by entry."""
    a, b = fine.shape, coarse.shape
    q, k, v = (stacked(maps.widths[f"{name}.{layer}"]) for name in "qkv")
    n, d = a.heads_per_group, a.head_dim
    per = n + 2 if which == "qkv" else n
    found = np.zeros((a.kv_groups * per * d, b.kv_groups * per * d))
    for g in range(a.kv_groups):
        for h in range(b.kv_groups):
            for r in range(d):
                for s in range(d):
                    for i in range(n):
                        if which == "v":
                            found[(g * n + i) * d + r, (h * n + i) * d + s] = v[g * d + r, h * d + s]
                            continue
                        for j in range(n):
                            value = q[(g * n + i) * d + r, (h * n + j) * d + s]
                            found[(g * per + i) * d + r, (h * per + j) * d + s] = value
                    if which == "qkv":
                        found[(g * per + n) * d + r, (h * per + n) * d + s] = k[g * d + r, h * d + s]
                        found[(g * per + n + 1) * d + r, (h * per + n + 1) * d + s] = v[g * d + r, h * d + s]
    return found


def dense_map(parameter: Parameter, position: int, fine: Level, coarse: Level, maps: LearnedMaps) -> Matrix:
    """What one dim of a parameter is multiplied by, told from its name."""
    name, layer = parameter.name, parameter.layer
    size = parameter.dims[position].size
    if layer is not None:
        if "linear_qkv" in name and position == 0:
            return row_matrix(fine, coarse, maps, "qkv", layer)
        if "linear_proj.weight" in name and position == 1:
            return row_matrix(fine, coarse, maps, "v", layer)
        if "linear_fc1" in name and position == 0:
            one = stacked(maps.widths[f"ffn.{layer}"])
            gated = fine.shape.activation == "swiglu"
            return np.kron(np.eye(2), one) if gated else one
        if "linear_fc2.weight" in name and position == 1:
            return stacked(maps.widths[f"ffn.{layer}"])
        if "q_layernorm" in name or "k_layernorm" in name:
            return np.eye(size)
    if size == fine.shape.padded_vocab or name == "output_layer.bias":
        return np.eye(size)
    if "position_embeddings" in name and position == 0:
        return np.eye(size)
    if ("tokentype" in name or "binary_head" in name) and position == 0:
        return np.eye(2)
    return stacked(maps.widths["hidden"])


def combined(parameter: Parameter, weights: dict[str, torch.Tensor], coarse: Level, maps: LearnedMaps) -> Matrix:
    """sum_j w_j W_j, row by row: a row of linear_qkv has the w of the module it is of."""
    held = {name: weight.numpy().astype(np.float64) for name, weight in weights.items()}
    if parameter.layer is None:
        return held[parameter.name]
    rows = maps.depths[parameter.template].detach().numpy().astype(np.float64)[parameter.layer]
    sources = np.stack([held[parameter.template.format(j)] for j in range(coarse.shape.layers)])
    if len(rows) == 1:
        return np.asarray(np.tensordot(rows[0], sources, axes=1))
    n, d = coarse.shape.heads_per_group, coarse.shape.head_dim
    part = [min(max((row // d) % (n + 2) - n + 1, 0), 2) for row in range(sources.shape[1])]
    return np.stack([np.tensordot(rows[part[row]], sources[:, row], axes=1) for row in range(sources.shape[1])])


@pytest.mark.parametrize(("model", "coarse"), CASES)
def test_expansion_is_the_papers_formula(model: dict[str, Any], coarse: dict[str, Any]) -> None:
    """vec(W') = (A kron B) vec(sum_j w_j W_j), column by column, in fp64 from the same maps."""
    fine, small = levels_of(model, coarse)
    maps, weights = initial_maps(fine.shape, small.shape, seed=7), drawn(small)
    found = expand(fine.shape, small.shape, weights, maps)
    assert [(p.name, p.shape) for p in parameters(fine.shape)] == [(n, tuple(w.shape)) for n, w in found.items()]
    for parameter in parameters(fine.shape):
        middle = combined(parameter, weights, small, maps)
        factors = [dense_map(parameter, at, fine, small, maps) for at in range(middle.ndim)]
        if middle.ndim == 1:
            wanted = factors[0] @ middle
        elif parameter.layer is not None and middle.size < 3000:
            vector = np.kron(factors[1], factors[0]) @ middle.reshape(-1, order="F")
            wanted = vector.reshape(parameter.shape, order="F")
        else:
            wanted = factors[0] @ middle @ factors[1].T
        assert np.abs(found[parameter.name].detach().numpy() - wanted).max() < 2e-6, parameter.name


def test_maps_begin_as_the_paper_says() -> None:
    fine, small = levels_of({"layers": 3}, {"layers": 2, "hidden": 16, "heads": 2})
    maps = initial_maps(fine.shape, small.shape, seed=7)
    for extra in maps.widths.values():
        assert (extra >= 0).all() and torch.allclose(extra.sum(1), torch.ones(len(extra)))
    for rows in maps.depths.values():
        assert torch.allclose(rows.sum(-1), torch.ones(rows.shape[:2]))
        assert rows.argmax(-1).tolist() == [[layer % 2] * rows.shape[1] for layer in range(3)]
        assert rows.max(-1).values.min() > 0.97 / 1.06 and 0 < rows.min(-1).values.max() < 0.03
    assert maps.depths["decoder.layers.{}.self_attention.linear_qkv.weight"].shape == (3, 3, 2)
    again, other = initial_maps(fine.shape, small.shape, seed=7), initial_maps(fine.shape, small.shape, seed=8)
    assert all(torch.equal(a, b) for a, b in zip(maps.tensors(), again.tensors(), strict=True))
    assert not torch.equal(maps.widths["hidden"], other.widths["hidden"])
    first, second = maps.widths["q.0"], maps.widths["q.1"]
    assert not torch.equal(first, second)


def test_gradients_of_the_expansion_are_its_finite_differences() -> None:
    fine, small = levels_of(LLAMA | {"hidden": 8, "heads": 4, "kv_groups": 2, "ffn": 6, "vocab_size": 5},
                            {"layers": 1, "hidden": 4, "heads": 2, "kv_groups": 1, "ffn": 3})  # fmt: skip
    fine, small = (replace(level, shape=replace(level.shape, padded_vocab=5)) for level in (fine, small))
    maps = initial_maps(fine.shape, small.shape, seed=7)
    names = [*maps.widths, *maps.depths]
    weights = {name: weight.double() for name, weight in drawn(small).items()}
    given = [tensor.detach().double().requires_grad_() for tensor in maps.tensors()]

    def whole(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held = dict(zip(names, tensors, strict=True))
        own = LearnedMaps(widths={n: held[n] for n in maps.widths}, depths={n: held[n] for n in maps.depths})
        return tuple(expand(fine.shape, small.shape, weights, own).values())

    assert torch.autograd.gradcheck(whole, [g for g in given if g.numel()], fast_mode=True)


LEARNED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"layers": 3, "vocab_size": 200}, {"layers": 2, "hidden": 16, "heads": 2}),
    (LLAMA | {"hidden": 32, "heads": 4}, {"layers": 1, "hidden": 16, "heads": 4, "ffn": 32}),
    ({"architecture": "bert"}, {"layers": 1, "hidden": 16, "heads": 2}),
]
STEPS = 12


def learned() -> list[dict[str, Any]]:
    """Each case under degrees 1 (two data-parallel ranks) and 2: losses, the maps' gradients, this rank's slices."""
    parallel.init_distributed("cpu")
    found = []
    for model, coarse in LEARNED:
        for tp in (1, 2):
            mesh = parallel.mesh_for(tp)
            config = configuration(model, coarse, tp)
            fine, small = resolve_levels(config)
            weights = drawn(small)
            learner = begin_learning(fine, small, weights, config, mesh, lr=2e-2)
            every = [batch_for(fine, samples=2, seed=seed) for seed in (1, 2)]
            mine = every if tp == 2 else [every[mesh.dp_rank]]
            losses = [learning_step(learner, mine)]
            gradients = [None if t.grad is None else t.grad.clone() for t in learner.maps.tensors()]
            losses += [learning_step(learner, mine) for _ in range(STEPS - 1)]
            found.append(
                {"losses": [float(result.loss) for result in losses], "norm": float(losses[0].grad_norm),
                 "gradients": gradients, "maps": [t.detach() for t in learner.maps.tensors()],
                 "slope": slope(begin_learning(fine, small, weights, config, mesh, lr=1e-9), mine, gradients),
                 "weights": learned_weights(learner)}
            )  # fmt: skip
    return found


def slope(learner: Any, batches: Any, gradients: list[Any]) -> tuple[float, float]:
    """(gradient times itself, what central differences along it say) of the loss as a function of the maps."""
    held = [(t, g) for t, g in zip(learner.maps.tensors(), gradients, strict=True) if g is not None and t.numel()]
    square = float(torch.stack([g.square().sum() for _, g in held]).sum())
    step = 0.02 / square**0.5
    found = []
    for sign in (1, -2):
        with torch.no_grad():
            for tensor, gradient in held:
                tensor.add_(gradient, alpha=sign * step)
        found.append(float(learning_step(learner, batches).loss))
    return square, (found[0] - found[1]) / (2 * step)


@pytest.fixture(scope="module")
def steps() -> list[list[dict[str, Any]]]:
    return values(2, "tests.test_ligo:learned")


@pytest.mark.parametrize("case", range(len(LEARNED)))
def test_steps_lower_the_loss_and_are_the_same_under_every_layout(steps: Any, case: int) -> None:
    one, two = (rank[2 * case : 2 * case + 2] for rank in steps)
    for ours, theirs in zip(one, two, strict=True):  # the ranks of one layout: the same bits
        assert all(torch.equal(a, b) for a, b in zip(ours["maps"], theirs["maps"], strict=True))
        assert ours["losses"] == theirs["losses"]
    data, tensor = one
    assert data["losses"] == pytest.approx(tensor["losses"], abs=2e-4)
    assert data["norm"] == pytest.approx(tensor["norm"], rel=1e-3)
    assert data["losses"][-1] < data["losses"][0] - 0.1
    for key in ("gradients", "maps"):
        for a, b in zip(data[key], tensor[key], strict=True):
            assert a is None or torch.allclose(a, b, atol=2e-3), key


@pytest.mark.parametrize("case", range(2 * len(LEARNED)))
def test_the_maps_gradients_are_finite_differences_of_the_loss(steps: Any, case: int) -> None:
    wanted, found = steps[0][case]["slope"]
    assert wanted > 1e-3 and found == pytest.approx(wanted, rel=0.02)


def test_slices_of_the_learned_weights_are_of_the_whole(steps: Any) -> None:
    fine, _ = resolve_levels(configuration(*LEARNED[1], tp=2))
    for parameter in parameters(fine.shape):
        whole = steps[0][2]["weights"][parameter.name]  # its vocabulary is padded for one rank
        halves = [rank[3]["weights"][parameter.name] for rank in steps]
        if parameter.tp_dim is None:
            assert torch.equal(halves[0], halves[1])
        elif parameter.dims[0].axis != "vocab":
            parts = [half.chunk(parameter.tp_stride, parameter.tp_dim) for half in halves]
            joined = torch.cat([half[i] for i in range(parameter.tp_stride) for half in parts], parameter.tp_dim)
            assert torch.allclose(joined, whole, atol=2e-2), parameter.name
