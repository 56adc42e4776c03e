"""LiGO's learned maps: every fine weight is a linear function of the coarse ones (Wang et al., ICLR 2023).

A fine layer's weight is ``B (sum_j w_j W_j) A^T`` over the coarse layers j, with ``B = [I; M]`` along what a dim
produces and A, the B of the layer that feeds it, along what it consumes. Only the M and the w are learned. In the
schema's axes (code: https://github.com/VITA-Group/LiGO):

- ``hidden``: one M for the whole model, of embeddings, norms, and both sides of every branch, the heads included
  (theirs has another one at an untied head);
- ``head``: for each fine layer one M of the queries', one of the keys' and one of the values' rows, row by row, not
  head by head as our own maps; linear_proj's columns go by the values' M, the same for all query heads of a KV group;
- ``ffn``: one M for each fine layer, in both halves of a gated fc1;
- ``layer``: for each fine layer and each parameter a row w, for each of queries, keys and values where they are one
  parameter.

Nothing is divided, so the coarse model's function is not kept. Every rank holds the whole coarse model, the whole fine
weights and the maps: for models of a demo's size (:mod:`ds_vcycle.baselines.learned` refuses larger ones).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_vcycle.levels import ModelShape
from ds_vcycle.model.initial import generator_of
from ds_vcycle.schema import Dim, Parameter, parameters

_NOISE = 0.03  # of the depth rows' beginning
_QKV = ("q", "k", "v")


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedMaps:
    """``widths``: M by axis, ``hidden`` or ``AXIS.LAYER`` (q, k, v, ffn): [fine rows - coarse rows, coarse rows].

    ``depths``: w by the parameters' name template: [fine layers, 1, or 3 for q, k, v, coarse layers]. All fp32.
    """

    widths: Mapping[str, Tensor]
    depths: Mapping[str, Tensor]

    def tensors(self) -> Iterator[Tensor]:
        """All that is learned, in a fixed order."""
        yield from self.widths.values()
        yield from self.depths.values()


def initial_maps(fine: ModelShape, coarse: ModelShape, seed: int) -> LearnedMaps:
    """The maps as they begin, leaves that want gradients; the same on all ranks.

    As in the authors' BERT runs: rows of M are uniform in [0, 1) and normalised to sum 1; fine layer l takes coarse
    layer ``l mod layers``, with noise uniform in [0, 0.03), normalised to sum 1.
    """
    per_layer = {
        "q": (fine.heads * fine.head_dim, coarse.heads * coarse.head_dim),
        "k": (fine.kv_groups * fine.head_dim, coarse.kv_groups * coarse.head_dim),
        "v": (fine.kv_groups * fine.head_dim, coarse.kv_groups * coarse.head_dim),
        "ffn": (fine.ffn, coarse.ffn),
    }
    sizes = {"hidden": (fine.hidden, coarse.hidden)}
    sizes |= {f"{axis}.{layer}": size for layer in range(fine.layers) for axis, size in per_layer.items()}
    widths = {}
    for name, (rows, columns) in sizes.items():
        drawn = torch.rand(rows - columns, columns, generator=generator_of(seed, f"ligo.{name}"))
        widths[name] = (drawn / drawn.sum(dim=1, keepdim=True)).requires_grad_()
    nearest = torch.eye(coarse.layers).repeat(-(-fine.layers // coarse.layers), 1)[: fine.layers, None]
    depths = {}
    for parameter in parameters(fine):
        if parameter.layer == 0:
            shape = (fine.layers, len(_parts(parameter)), coarse.layers)
            noise = _NOISE * torch.rand(shape, generator=generator_of(seed, f"ligo.{parameter.template}"))
            mixed = nearest + noise
            depths[parameter.template] = (mixed / mixed.sum(dim=-1, keepdim=True)).requires_grad_()
    return LearnedMaps(widths=widths, depths=depths)


def expand(fine: ModelShape, coarse: ModelShape, weights: Mapping[str, Tensor], maps: LearnedMaps) -> dict[str, Tensor]:
    """Every fine parameter, whole, as the maps make it of the coarse ones.

    Args:
        fine: the level to make.
        coarse: the level it is made of.
        weights: every coarse parameter, whole and in its shape.
        maps: of these two levels.

    Raises:
        ValueError: a coarse parameter goes into none.
    """
    sources: dict[str, list[Tensor]] = {}
    for parameter in parameters(coarse):
        sources.setdefault(parameter.template, []).append(weights[parameter.name])
    table = parameters(fine)
    unused = sources.keys() ^ {parameter.template for parameter in table}
    if unused or len(weights) != sum(map(len, sources.values())):
        raise ValueError(f"coarse and fine parameters differ: {', '.join(sorted(unused)[:5])}")
    return {p.name: _expanded(p, sources[p.template], coarse, maps) for p in table}


def _expanded(target: Parameter, sources: Sequence[Tensor], coarse: ModelShape, maps: LearnedMaps) -> Tensor:
    """One fine parameter: the coarse layers combined, then each dim widened."""
    heads = _Heads(groups=coarse.kv_groups, per_group=coarse.heads_per_group, size=coarse.head_dim)
    value = sources[0]
    if target.layer is not None:
        rows, stacked = maps.depths[target.template][target.layer], torch.stack(list(sources))
        if len(_parts(target)) == 1:
            value = torch.tensordot(rows[0], stacked, dims=1)
        else:
            split = heads.split(stacked, dim=1)
            value = heads.join([torch.tensordot(row, part, dims=1) for row, part in zip(rows, split, strict=True)])
    for position, dim in enumerate(target.dims):
        value = _widened(value.movedim(position, 0), dim, target.layer, heads, maps).movedim(0, position)
    return value.contiguous()


def _widened(value: Tensor, dim: Dim, layer: int | None, heads: _Heads, maps: LearnedMaps) -> Tensor:
    """The first dim of ``value``, from the coarse to the fine length."""
    if dim.axis == "hidden":
        return _with_rows(value, maps.widths["hidden"])
    if dim.axis == "ffn":
        extra = maps.widths[f"ffn.{layer}"]
        return torch.cat([_with_rows(part, extra) for part in value.chunk(dim.parts)])
    if dim.axis != "head":
        return value
    rest = value.shape[1:]
    if dim.role == "produces":
        parts = [
            _with_rows(part.reshape(-1, *rest), maps.widths[f"{name}.{layer}"])
            for name, part in zip(_QKV, heads.split(value, dim=0), strict=True)
        ]
        widths = (heads.per_group, 1, 1)
        return heads.join([part.view(-1, n, heads.size, *rest) for part, n in zip(parts, widths, strict=True)])
    attended = value.view(heads.groups, heads.per_group, heads.size, *rest).movedim(1, 2)
    wide = _with_rows(attended.reshape(-1, heads.per_group, *rest), maps.widths[f"v.{layer}"])
    return wide.view(-1, heads.size, heads.per_group, *rest).movedim(2, 1).reshape(-1, *rest)


def _with_rows(value: Tensor, extra: Tensor) -> Tensor:
    """[I; M] times the first dim."""
    return torch.cat([value, torch.tensordot(extra, value, dims=1)]) if len(extra) else value


def _parts(parameter: Parameter) -> tuple[str, ...]:
    """The modules that a parameter is of: queries, keys and values lie in one."""
    first = parameter.dims[0]
    return _QKV if first.axis == "head" and first.role == "produces" else ("",)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Heads:
    """How rows of queries, keys and values lie: for each KV group its queries' rows, the key's, the value's."""

    groups: int
    per_group: int
    size: int

    def split(self, value: Tensor, dim: int) -> list[Tensor]:
        """Queries, keys, values of one fused dim: it becomes [groups, heads of a group, head_dim]."""
        shape = value.shape
        grouped = value.reshape(*shape[:dim], self.groups, self.per_group + 2, self.size, *shape[dim + 1 :])
        places = ((0, self.per_group), (self.per_group, 1), (self.per_group + 1, 1))
        return [grouped.narrow(dim + 1, start, heads) for start, heads in places]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The fused first dim of queries, keys, values, each [groups, heads of a group, head_dim, ...]."""
        return torch.cat(list(parts), dim=1).flatten(0, 2)
