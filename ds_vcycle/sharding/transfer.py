"""Coalesce and refine on fragments: local work by rectangles and one ``all_to_all_single`` a bucket.

Only coarse-sized data crosses ranks. Going down a rank sums its own fine fragments' contributions per coarse element in
float64 and sends the partial sums to the owners, who add them in rank order, divide and round once: the result has the
same bits under every layout. Going up a rank receives the float32 coarse elements that its fine fragments read, and
blends in place. What is exchanged is fixed by :mod:`ds_vcycle.sharding.geometry`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_vcycle.faults import fault_point
from ds_vcycle.operators.apply import (
    Quantity,
    blend_fine_,
    contributes,
    down_divisors,
    finish_down,
    outer,
    prepare_down,
    sum_block,
    up_divisors,
)
from ds_vcycle.operators.plan import Child, Index, ParameterMap
from ds_vcycle.sharding.geometry import Block, Geometry, ParameterGeometry, Piece, Touch

if TYPE_CHECKING:
    from ds_vcycle.parallel import Mesh

BUCKET_ELEMENTS = 1 << 23


@dataclass(kw_only=True)
class Exchange:
    """The collective of a transition. ``sent_bytes`` counts what this rank handed to other ranks."""

    mesh: Mesh
    sent_bytes: int = field(default=0)

    def __call__(self, outgoing: Sequence[Tensor], incoming: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Send ``outgoing[peer]`` to each peer; return the ``incoming[peer]`` elements of each, flat, in rank order."""
        rank, device = self.mesh.rank, self.mesh.device
        if self.mesh.world_size == 1:
            return [outgoing[0].to(device)]
        sizes = [0 if peer == rank else tensor.numel() for peer, tensor in enumerate(outgoing)]
        wanted = [0 if peer == rank else count for peer, count in enumerate(incoming)]
        send = torch.cat([t.to(device) for peer, t in enumerate(outgoing) if peer != rank])
        received = torch.empty(sum(wanted), dtype=dtype, device=device)
        dist.all_to_all_single(received, send, wanted, sizes)
        self.sent_bytes += send.numel() * send.element_size()
        pieces = list(torch.split(received, wanted))
        pieces[rank] = outgoing[rank].to(device)
        return pieces


def coalesce_fragments(
    geometry: Geometry,
    fine: Mapping[str, Tensor],
    quantity: Quantity,
    exchange: Exchange,
    *,
    bucket: int = BUCKET_ELEMENTS,
) -> dict[str, Tensor]:
    """Coalesce one quantity of the fine level's fragments into the coarse level's, float32 on the host.

    Args:
        geometry: the transition and the two layouts.
        fine: this rank's flat fragments by parameter name, [length] each.
        quantity: weights or one of Adam's moments.
        exchange: the collective; every rank calls this function with the same geometry and quantity.
        bucket: coarse elements handled at once.

    Returns:
        This rank's flat coarse fragments by parameter name; pad rows are zero.
    """
    rank, world = exchange.mesh.rank, exchange.mesh.world_size
    held = geometry.coarse_placements(rank)
    coarse = {name: torch.zeros(placement.length) for name, placement in held.items()}
    for items in geometry.buckets(bucket):
        outgoing: list[list[Tensor]] = [[] for _ in range(world)]
        for parameter in items:
            partials: dict[int, Tensor] = {}
            touches = parameter.touches(rank)
            for peer in range(world):
                if parameter.goes_down(fine_rank=rank, coarse_rank=peer):
                    for piece in parameter.pieces(fine_rank=rank, coarse_rank=peer):
                        if piece.touch not in partials:
                            partials[piece.touch] = _partial_sum(parameter.item, touches[piece.touch], fine, quantity)
                        part = _part(partials[piece.touch], touches[piece.touch], piece.rows, piece.cols)
                        outgoing[peer].append(part.reshape(-1))
        expected = [_incoming(items, fine_rank=peer, coarse_rank=rank, down=True) for peer in range(world)]
        received = exchange(_joined(outgoing, torch.float64), [_count(e) for e in expected], torch.float64)
        fault_point("coalesce.exchanged")
        _add_up(items, expected, received, coarse, quantity, rank)
    return coarse


def refine_fragments(
    geometry: Geometry,
    coarse: Mapping[str, Tensor],
    fine: Mapping[str, Tensor],
    quantity: Quantity,
    exchange: Exchange,
    *,
    beta: float,
    bucket: int = BUCKET_ELEMENTS,
) -> None:
    """De-coalesce one quantity and blend it into the fine fragments in place: x <- beta x + P(z).

    Args:
        geometry: the transition and the two layouts.
        coarse: this rank's flat coarse fragments z by parameter name.
        fine: this rank's flat fine fragments, written in place.
        quantity: weights or one of Adam's moments.
        exchange: the collective; every rank calls this function with the same geometry, quantity and beta.
        beta: the factor of what ``fine`` holds; 0 overwrites.
        bucket: coarse elements handled at once.
    """
    rank, world = exchange.mesh.rank, exchange.mesh.world_size
    for items in geometry.buckets(bucket):
        outgoing: list[list[Tensor]] = [[] for _ in range(world)]
        for parameter in items:
            owned = parameter.blocks(rank)
            for peer in range(world):
                if parameter.goes_up(fine_rank=peer, coarse_rank=rank):
                    for piece in parameter.pieces(fine_rank=peer, coarse_rank=rank):
                        block = owned[piece.block]
                        view = _view(coarse[parameter.item.coarse.name], block)
                        outgoing[peer].append(_part(view, block, piece.rows, piece.cols).reshape(-1))
        expected = [_incoming(items, fine_rank=rank, coarse_rank=peer, down=False) for peer in range(world)]
        received = exchange(_joined(outgoing, torch.float32), [_count(e) for e in expected], torch.float32)
        fault_point("refine.exchanged")
        for item, touch, z in _assembled(items, expected, received, rank):
            for child, block in touch.members:
                x = _view(fine[child.parameter.name], block)
                value = _de_coalesced(item, child, block, touch, z, quantity)
                blend_fine_(x, None if value is None else value.to(x.device), beta=beta)


Expected = list[tuple[int, Piece]]  # (index of the parameter in its bucket, piece)


def _incoming(items: Sequence[ParameterGeometry], *, fine_rank: int, coarse_rank: int, down: bool) -> Expected:
    """The pieces this rank receives from a peer, in the order in which the peer sends them."""
    expected: Expected = []
    for index, parameter in enumerate(items):
        serves = parameter.goes_down if down else parameter.goes_up
        if serves(fine_rank=fine_rank, coarse_rank=coarse_rank):
            expected += [(index, piece) for piece in parameter.pieces(fine_rank=fine_rank, coarse_rank=coarse_rank)]
    return expected


def _partial_sum(item: ParameterMap, touch: Touch, fine: Mapping[str, Tensor], quantity: Quantity) -> Tensor:
    total: Tensor | None = None
    for child, block in touch.members:
        x = _view(fine[child.parameter.name], block)
        if total is None:
            total = torch.zeros(touch.shape, dtype=torch.float64, device=x.device)
        if contributes(child, quantity):
            rows, cols = _parents(item, touch, block, x.device)
            total += sum_block(prepare_down(x, quantity), rows, cols, touch.shape)
    assert total is not None
    return total


def _add_up(
    items: Sequence[ParameterGeometry],
    expected: Sequence[Expected],
    received: Sequence[Tensor],
    coarse: Mapping[str, Tensor],
    quantity: Quantity,
    rank: int,
) -> None:
    """Add the partial sums of all peers in rank order, divide, round once, and write the coarse fragments."""
    owned = [parameter.blocks(rank) for parameter in items]
    totals = [[torch.zeros(len(b.rows), len(b.cols), dtype=torch.float64) for b in blocks] for blocks in owned]
    counts = [[0 for _ in blocks] for blocks in owned]
    for pieces, flat in zip(expected, received, strict=True):
        for (index, piece), values in zip(pieces, _split(flat.cpu(), pieces), strict=True):
            block = owned[index][piece.block]
            rows, cols = _within(block.rows, piece.rows), _within(block.cols, piece.cols)
            target = totals[index][piece.block]
            _add(target, rows, cols, values)
            counts[index][piece.block] += piece.numel
    for parameter, blocks, sums, seen in zip(items, owned, totals, counts, strict=True):
        item = parameter.item
        for block, total, count in zip(blocks, sums, seen, strict=True):
            assert count >= block.numel, f"{item.coarse.name}: {block.numel - count} coarse elements were not filled"
            divisor = outer(*down_divisors(item, quantity), rows=block.rows, cols=block.cols)
            _view(coarse[item.coarse.name], block).copy_(finish_down(total, divisor, quantity))


def _assembled(
    items: Sequence[ParameterGeometry],
    expected: Sequence[Expected],
    received: Sequence[Tensor],
    rank: int,
) -> Iterator[tuple[ParameterMap, Touch, Tensor]]:
    """The coarse rectangle of each touch of this rank, put together from all peers' pieces."""
    touches = [parameter.touches(rank) for parameter in items]
    device = received[0].device
    blocks = [[torch.empty(touch.shape, device=device) for touch in found] for found in touches]
    counts = [[0 for _ in found] for found in touches]
    for pieces, flat in zip(expected, received, strict=True):
        for (index, piece), values in zip(pieces, _split(flat, pieces), strict=True):
            touch = touches[index][piece.touch]
            rows, cols = _within(touch.rows, piece.rows), _within(touch.cols, piece.cols)
            _put(blocks[index][piece.touch], rows, cols, values)
            counts[index][piece.touch] += piece.numel
    for parameter, found, values_of, seen in zip(items, touches, blocks, counts, strict=True):
        item = parameter.item
        for touch, z, count in zip(found, values_of, seen, strict=True):
            assert count == z.numel(), f"{item.coarse.name}: {count} of {z.numel()} coarse elements arrived"
            yield item, touch, z


def _de_coalesced(
    item: ParameterMap, child: Child, block: Block, touch: Touch, z: Tensor, quantity: Quantity
) -> Tensor | None:
    """The values of a fine block read from the coarse rectangle it touches; None where they are all zero."""
    divisors, scalar = up_divisors(item, child, quantity)
    if scalar == 0:
        return None
    scaled = z / outer(divisors, scalar, rows=touch.rows, cols=touch.cols).float().to(z.device)
    rows, cols = _parents(item, touch, block, z.device)
    value = scaled.index_select(0, rows)
    return value if cols is None else value.index_select(1, cols)


def _parents(item: ParameterMap, touch: Touch, block: Block, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Positions within the touch of each fine row and column of a block; None where columns map one to one in order."""
    rows = np.searchsorted(touch.rows, item.dims[0].parent[block.rows])
    columns = (
        np.searchsorted(touch.cols, item.dims[1].parent[block.cols]) if len(item.dims) > 1 else np.zeros(1, np.int64)
    )
    one_to_one = len(columns) == len(touch.cols) and bool((columns[1:] > columns[:-1]).all())
    return _tensor(rows, device), None if one_to_one else _tensor(columns, device)


def _view(flat: Tensor, block: Block) -> Tensor:
    return flat[block.offset : block.offset + block.numel].view(len(block.rows), len(block.cols))


def _tensor(index: Index, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(index)).to(device, non_blocking=True)


def _within(container: Index, subset: Index) -> Index | slice:
    """Positions of an ascending subset in an ascending container; a slice where they have no gaps."""
    first = int(np.searchsorted(container, subset[0]))
    last = int(np.searchsorted(container, subset[-1]))
    if last - first + 1 == len(subset):
        return slice(first, last + 1)
    return np.searchsorted(container, subset)


def _part(matrix: Tensor, container: Touch | Block, rows: Index, cols: Index) -> Tensor:
    return _select(_select(matrix, _within(container.rows, rows), 0), _within(container.cols, cols), 1)


def _select(matrix: Tensor, positions: Index | slice, dim: int) -> Tensor:
    if isinstance(positions, slice):
        return matrix.narrow(dim, positions.start, positions.stop - positions.start)
    return matrix.index_select(dim, _tensor(positions, matrix.device))


def _grid(matrix: Tensor, rows: Index | slice, cols: Index | slice) -> tuple[Tensor, Tensor] | None:
    """Advanced indices of a rectangle with gaps; None where it is a plain sub-matrix."""
    if isinstance(rows, slice) and isinstance(cols, slice):
        return None
    row = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
    col = np.arange(cols.start, cols.stop) if isinstance(cols, slice) else cols
    return _tensor(row, matrix.device)[:, None], _tensor(col, matrix.device)[None, :]


def _put(matrix: Tensor, rows: Index | slice, cols: Index | slice, values: Tensor) -> None:
    grid = _grid(matrix, rows, cols)
    if grid is None:
        target = _select(_select(matrix, rows, 0), cols, 1)
        target.copy_(values.view_as(target))
    else:
        matrix[grid] = values.view(grid[0].numel(), grid[1].numel())


def _add(matrix: Tensor, rows: Index | slice, cols: Index | slice, values: Tensor) -> None:
    grid = _grid(matrix, rows, cols)
    if grid is None:
        target = _select(_select(matrix, rows, 0), cols, 1)
        target.add_(values.view_as(target))
    else:
        matrix[grid] += values.view(grid[0].numel(), grid[1].numel())


def _joined(outgoing: Iterable[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    return [torch.cat(list(parts)) if parts else torch.empty(0, dtype=dtype) for parts in outgoing]


def _count(pieces: Expected) -> int:
    return sum(piece.numel for _, piece in pieces)


def _split(flat: Tensor, pieces: Expected) -> Sequence[Tensor]:
    return torch.split(flat, [piece.numel for _, piece in pieces])
