"""The arithmetic of the operators on tensors: pure functions, no collectives, inputs never written.

Blocks are two-dimensional (a vector is a block of one column). Coalescing sums in float64 and rounds once;
every scale is a division by an integer, never a multiplication by a rounded reciprocal, so that
coalescing what was de-coalesced gives the same bits back for groups of 2, 4, 8.

Shape suffixes: ``x_RC`` fine rows and columns, ``y_rc`` coarse rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ds_vcycle.operators.plan import Child, Index, ParameterMap, TransitionPlan

Quantity = Literal["master", "exp_avg", "exp_avg_sq"]
QUANTITIES: tuple[Quantity, ...] = ("master", "exp_avg", "exp_avg_sq")


def sum_block(x_RC: Tensor, rows_R: Tensor, cols_C: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Sum a fine block into its coarse block: float64 [*shape].

    Args:
        x_RC: fine values.
        rows_R: the coarse row of each fine row.
        cols_C: the coarse column of each fine column; None where columns are not merged.
        shape: coarse rows and columns.
    """
    partial = torch.zeros(shape[0], x_RC.shape[1], dtype=torch.float64, device=x_RC.device)
    partial.index_add_(0, rows_R, x_RC.double())
    if cols_C is None:
        return partial
    total = torch.zeros(shape, dtype=torch.float64, device=x_RC.device)
    return total.index_add_(1, cols_C, partial)


def prepare_down(x: Tensor, quantity: Quantity) -> Tensor:
    """What is summed when going down: the value, or the square root of a second moment.

    The root is rounded to float32 before the float64 sum, so that the sum is exact and no order of adding shows. It is
    taken in float64: the float32 root of torch on a CPU is off by one ulp here and there.
    """
    return x.double().sqrt().float() if quantity == "exp_avg_sq" else x


def contributes(child: Child, quantity: Quantity) -> bool:
    """Whether a child enters the sum; moments skip those that de-coalescing fills with a constant."""
    return child.sums_down if quantity == "master" else child.constant is None


def finish_down(total_rc: Tensor, divisor_rc: Tensor, quantity: Quantity) -> Tensor:
    """Divide the float64 sum, square it for a second moment, and round once to float32."""
    value = total_rc / divisor_rc
    return (value.square() if quantity == "exp_avg_sq" else value).float()


def down_divisors(item: ParameterMap, quantity: Quantity) -> tuple[tuple[Index, ...], int]:
    """Per-dim integers and one scalar whose product divides the sum at each coarse element.

    Weights: the mean over what produces. Moments: the transpose of de-coalescing, whose scale is what consumes.
    """
    if quantity == "master":
        return item.divisors("produces"), item.down_divisor
    return item.divisors("consumes"), item.children[0].up_divisor


def up_divisors(item: ParameterMap, child: Child, quantity: Quantity) -> tuple[tuple[Index, ...], int]:
    """Per-dim integers and one scalar that divide a coarse element when ``child`` reads it; scalar 0: it reads none.

    Weights: what consumes. Moments (m/k, v/k^2): k is the product of the producing dims' group sizes.
    """
    if quantity == "master":
        return item.divisors("consumes"), child.up_divisor if child.constant is None else 0
    dims = item.divisors("produces")
    if quantity == "exp_avg":
        return dims, 0 if child.moment_zero else item.moment_divisor
    return tuple(size * size for size in dims), item.moment_divisor**2


def unread_value(child: Child, quantity: Quantity, *, beta: float) -> float:
    """What a child that reads no coarse value gets besides beta x.

    De-coalescing gives it its constant c whatever the coarse level holds, so its blend, alpha c + (1 - alpha) c +
    beta (x - c), is beta x + (1 - beta) c. Moments are zero.
    """
    return (1.0 - beta) * (child.constant or 0.0) if quantity == "master" else 0.0


def parent_cols(item: ParameterMap) -> Tensor:
    """The coarse column of each fine column, int64; a vector has one column."""
    return torch.from_numpy(item.dims[1].parent) if len(item.dims) > 1 else torch.zeros(1, dtype=torch.int64)


def outer(divisors: Sequence[Index], scalar: int, *, rows: Index, cols: Index) -> Tensor:
    """The divisor of each element of a coarse block, float64 [rows, cols] (integers, exact)."""
    row = divisors[0][rows].astype(np.float64) * scalar
    col = divisors[1][cols] if len(divisors) > 1 else np.ones(len(cols))
    return torch.from_numpy(row[:, None] * col.astype(np.float64)[None, :])


def blend_coarse(y: Tensor, cx: Tensor | None, *, alpha: float, beta: float) -> Tensor:
    """z = alpha y + (1 - alpha - beta) C x at coarse size; ``cx`` may be None when its factor is zero."""
    factor = coarse_factor(alpha, beta)
    if factor == 0.0:
        return y.clone() if alpha == 1.0 else (alpha * y.double()).float()
    assert cx is not None, "the coalesced fine weights are needed when alpha + beta is not 1"
    return (alpha * y.double() + factor * cx.double()).float()


def coarse_factor(alpha: float, beta: float) -> float:
    """The weight of C x in the blend, 1 - alpha - beta; exactly zero when it is a rounding residue."""
    factor = 1.0 - alpha - beta
    return 0.0 if abs(factor) < 1e-12 else factor


def blend_fine_(x: Tensor, value: Tensor | None, *, beta: float) -> None:
    """x <- beta x + value in place, value None meaning zero; beta 0 ignores what x held, beta 1 keeps its bits."""
    if beta == 0.0:
        x.zero_() if value is None else x.copy_(value)
        return
    if beta != 1.0:
        x.mul_(beta)
    if value is not None:
        x.add_(value)


def coalesce(plan: TransitionPlan, fine: Mapping[str, Tensor], quantity: Quantity = "master") -> dict[str, Tensor]:
    """Coalesce whole tensors of global shape (pad rows allowed) to the coarse level's, float32.

    Raises:
        KeyError: a fine parameter is missing.
        ValueError: something is left over.
    """
    coarse = {}
    used: set[str] = set()
    for item in plan.maps:
        rows, cols = _all_indices(item)
        total = torch.zeros(len(rows), len(cols), dtype=torch.float64)
        parents = _parents(item)
        for child in item.children:
            used.add(child.parameter.name)
            if contributes(child, quantity):
                x = _real_block(fine[child.parameter.name], child.parameter.dims[0].real)
                total += sum_block(prepare_down(x, quantity), *parents, (len(rows), len(cols)))
        divisor = outer(*down_divisors(item, quantity), rows=rows, cols=cols)
        coarse[item.coarse.name] = _padded(finish_down(total, divisor, quantity), item)
    _refuse_leftovers(set(fine) - used)
    return coarse


def decoalesce(plan: TransitionPlan, coarse: Mapping[str, Tensor], quantity: Quantity = "master") -> dict[str, Tensor]:
    """De-coalesce whole coarse tensors to the fine level's global shapes, float32."""
    return _expanded(plan, coarse, quantity, beta=0.0)


def refine(
    plan: TransitionPlan, fine: Mapping[str, Tensor], coarse: Mapping[str, Tensor], *, alpha: float, beta: float
) -> dict[str, Tensor]:
    """De-coalesce ``coarse`` and blend it with the kept ``fine``: alpha P(y) + (1-alpha) P(Cx) + beta (x - P(Cx)).

    Raises:
        KeyError: a parameter of either level is missing.
        ValueError: something is left over.
    """
    _require(plan, fine, coarse)
    if alpha == 0.0 and beta == 1.0:
        return {name: value.clone() for name, value in fine.items()}
    cx = coalesce(plan, fine) if coarse_factor(alpha, beta) else {}
    z = {name: blend_coarse(y, cx.get(name), alpha=alpha, beta=beta) for name, y in coarse.items()}
    values = _expanded(plan, z, "master", beta=beta)
    blended = {name: value.float().clone() for name, value in fine.items()}
    for name, x in blended.items():
        blend_fine_(x, values[name], beta=beta)
    return blended


def _expanded(
    plan: TransitionPlan, coarse: Mapping[str, Tensor], quantity: Quantity, *, beta: float
) -> dict[str, Tensor]:
    """What is added to beta x: the coarse values, or of constants the share that beta leaves."""
    fine = {}
    for item in plan.maps:
        rows, cols = _all_indices(item)
        parents = _parents(item)
        for child in item.children:
            divisors, scalar = up_divisors(item, child, quantity)
            z = _real_block(coarse[item.coarse.name], item.coarse.dims[0].real).float()
            if scalar == 0:
                value = torch.full((len(parents[0]), len(parents[1])), unread_value(child, quantity, beta=beta))
            else:
                value = (z / outer(divisors, scalar, rows=rows, cols=cols).float())[parents[0]][:, parents[1]]
            shape = child.parameter.shape
            out = torch.zeros(shape)
            _real_block(out, child.parameter.dims[0].real).copy_(value)
            fine[child.parameter.name] = out
    _refuse_leftovers(set(coarse) - {item.coarse.name for item in plan.maps})
    return fine


def _real_block(x: Tensor, rows: int) -> Tensor:
    return x.reshape(x.shape[0], -1)[:rows]


def _all_indices(item: ParameterMap) -> tuple[Index, Index]:
    rows = np.arange(len(item.dims[0].sizes))
    return rows, np.arange(len(item.dims[1].sizes)) if len(item.dims) > 1 else np.zeros(1, dtype=np.int64)


def _parents(item: ParameterMap) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(item.dims[0].parent), parent_cols(item)


def _padded(value: Tensor, item: ParameterMap) -> Tensor:
    out = torch.zeros(item.coarse.shape)
    _real_block(out, value.shape[0]).copy_(value)
    return out


def _require(plan: TransitionPlan, fine: Mapping[str, Tensor], coarse: Mapping[str, Tensor]) -> None:
    """Both levels complete and nothing else, whatever of them the blend's factors then read."""
    fine_names = {child.parameter.name for item in plan.maps for child in item.children}
    coarse_names = {item.coarse.name for item in plan.maps}
    missing = [*(fine_names - set(fine)), *(coarse_names - set(coarse))]
    if missing:
        raise KeyError(sorted(missing)[0])
    _refuse_leftovers((set(fine) - fine_names) | (set(coarse) - coarse_names))


def _refuse_leftovers(names: set[str]) -> None:
    if names:
        raise ValueError(f"parameters that belong to neither level: {', '.join(sorted(names)[:5])}")
