"""Coalesce and refine on fragments: local work by rectangles and one ``all_to_all_single`` a bucket.

Only coarse-sized data crosses ranks. Going down a rank sums its own fine fragments' contributions per coarse element in
float64 and sends the partial sums to the owners, who add them in rank order, divide and round once: the result has the
same bits under every layout. Going up a rank receives the float32 coarse elements that its fine fragments read, and
blends in place. What is exchanged is fixed by :mod:`ds_vcycle.sharding.geometry`; the sums and the blend are
:mod:`ds_vcycle_kernels`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Literal

import numpy as np
import torch
from ds_vcycle_kernels import CoalesceJob, Implementation, Member, Positions, RefineJob, coalesce, positions, refine
from ds_vcycle_kernels.chunks import Scratch
from torch import Tensor

from ds_vcycle.faults import fault_point
from ds_vcycle.operators.apply import (
    Quantity,
    contributes,
    down_divisors,
    outer,
    unread_value,
    up_divisors,
)
from ds_vcycle.operators.plan import Child, DimMap, Index, ParameterMap
from ds_vcycle.sharding.exchange import Exchange, Pieces
from ds_vcycle.sharding.geometry import Block, Geometry, ParameterGeometry, Piece, Touch
from ds_vcycle.sharding.rectangles import Rectangle, add, part, put, view

BUCKET_ELEMENTS = 1 << 20

Passing = list[tuple[int, Piece]]  # (index of the parameter in its bucket, piece)


def coalesce_fragments(
    geometry: Geometry,
    fine: Mapping[str, Tensor],
    quantity: Quantity,
    exchange: Exchange,
    *,
    bucket: int = BUCKET_ELEMENTS,
    kernels: Implementation = "auto",
) -> dict[str, Tensor]:
    """Coalesce one quantity of the fine level's fragments into the coarse level's, float32 on the host.

    Args:
        geometry: the transition and the two layouts.
        fine: this rank's flat fragments by parameter name, [length] each.
        quantity: weights or one of Adam's moments.
        exchange: the collective; every rank calls this function with the same geometry and quantity.
        bucket: coarse elements handled at once.
        kernels: what sums; the bits do not depend on it.

    Returns:
        This rank's flat coarse fragments by parameter name; pad rows are zero.
    """
    rank, ranks = exchange.mesh.rank, range(exchange.mesh.world_size)
    held, device = geometry.coarse_placements(rank), exchange.mesh.device
    coarse = {name: torch.zeros(placement.length, device=device) for name, placement in held.items()}
    memory = Scratch(torch.float64, next((value.device for value in fine.values()), device))
    for items in geometry.buckets(bucket):
        leaving = [_passing(items, fine_rank=rank, coarse_rank=peer, down=True) for peer in ranks]
        arriving = [_passing(items, fine_rank=peer, coarse_rank=rank, down=True) for peer in ranks]
        wanted = {(index, piece.touch) for pieces in leaving for index, piece in pieces}
        sums = _partial_sums(items, sorted(wanted), fine, quantity, rank, kernels, memory)
        outgoing = [
            [
                part(sums[index, piece.touch], items[index].touches(rank)[piece.touch], piece.rows, piece.cols)
                for index, piece in pieces
            ]
            for pieces in leaving
        ]
        received = exchange(outgoing, _counts(arriving), torch.float64)
        fault_point("coalesce.exchanged")
        _add_up(items, arriving, received, coarse, quantity, rank)
    return {name: value.cpu() for name, value in coarse.items()}


def refine_fragments(
    geometry: Geometry,
    coarse: Mapping[str, Tensor],
    fine: Mapping[str, Tensor],
    quantity: Quantity,
    exchange: Exchange,
    *,
    beta: float,
    bucket: int = BUCKET_ELEMENTS,
    kernels: Implementation = "auto",
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
        kernels: what blends; the bits do not depend on it.
    """
    rank, ranks = exchange.mesh.rank, range(exchange.mesh.world_size)
    for items in geometry.buckets(bucket):
        leaving = [_passing(items, fine_rank=peer, coarse_rank=rank, down=False) for peer in ranks]
        arriving = [_passing(items, fine_rank=rank, coarse_rank=peer, down=False) for peer in ranks]
        outgoing = [[_owned(items[index], piece, coarse, rank) for index, piece in pieces] for pieces in leaving]
        received = exchange(outgoing, _counts(arriving), torch.float32)
        fault_point("refine.exchanged")
        jobs = [
            _refine_job(item, child, block, touch, z, view(fine[child.parameter.name], block), quantity, beta)
            for item, touch, z in _assembled(items, arriving, received, rank)
            for child, block in touch.members
        ]
        refine(jobs, beta=beta, implementation=kernels)


def _passing(items: Sequence[ParameterGeometry], *, fine_rank: int, coarse_rank: int, down: bool) -> Passing:
    """The pieces that pass between two ranks, in the order in which they are sent."""
    found: Passing = []
    for index, parameter in enumerate(items):
        serves = parameter.goes_down if down else parameter.goes_up
        if serves(fine_rank=fine_rank, coarse_rank=coarse_rank):
            found += [(index, piece) for piece in parameter.pieces(fine_rank=fine_rank, coarse_rank=coarse_rank)]
    return found


def _partial_sums(
    items: Sequence[ParameterGeometry],
    wanted: Sequence[tuple[int, int]],
    fine: Mapping[str, Tensor],
    quantity: Quantity,
    rank: int,
    kernels: Implementation,
    memory: Scratch,
) -> dict[tuple[int, int], Tensor]:
    """The float64 sums of this rank's fine elements, by (parameter of the bucket, touch), [rows, cols] each.

    They lie in ``memory``, which the next bucket overwrites.
    """
    touches = [items[index].touches(rank)[number] for index, number in wanted]
    sizes = [prod(touch.shape) for touch in touches]
    room = torch.split(memory.matrix("sums", 1, sum(sizes)).view(-1), sizes)
    jobs = {}
    for (index, number), touch, total in zip(wanted, touches, room, strict=True):
        item = items[index].item
        members = []
        for child, block in touch.members:
            if contributes(child, quantity):
                rows, cols = _positions(item.dims, block)
                members.append(Member(x=view(fine[child.parameter.name], block), rows=rows, cols=cols))
        jobs[index, number] = CoalesceJob(members=members, total=total.view(touch.shape), root=quantity == "exp_avg_sq")
    coalesce(list(jobs.values()), implementation=kernels)
    return {at: job.total for at, job in jobs.items()}


def _owned(parameter: ParameterGeometry, piece: Piece, coarse: Mapping[str, Tensor], rank: int) -> Tensor:
    block = parameter.blocks(rank)[piece.block]
    return part(view(coarse[parameter.item.coarse.name], block), block, piece.rows, piece.cols)


def _add_up(
    items: Sequence[ParameterGeometry],
    arriving: Sequence[Passing],
    received: Sequence[Pieces],
    coarse: Mapping[str, Tensor],
    quantity: Quantity,
    rank: int,
) -> None:
    """Add the partial sums of all peers in rank order, divide, round once, and write the coarse fragments."""
    found = _by_rectangle(arriving, received, "block")
    for index, parameter in enumerate(items):
        item = parameter.item
        for number, block in enumerate(parameter.blocks(rank)):
            total = _combined(block, found[index, number], torch.float64, item.coarse.name)
            divisors, scalar = down_divisors(item, quantity)
            divisor = _divisor(divisors, scalar, block)
            if isinstance(divisor, Tensor):
                total.div_(divisor.to(total.device))
            elif divisor != 1.0:
                total.div_(divisor)
            if quantity == "exp_avg_sq":
                total.square_()
            view(coarse[item.coarse.name], block).copy_(total)


def _assembled(
    items: Sequence[ParameterGeometry], arriving: Sequence[Passing], received: Sequence[Pieces], rank: int
) -> Iterator[tuple[ParameterMap, Touch, Tensor]]:
    """The coarse rectangle of each touch of this rank, put together from all peers' pieces."""
    found = _by_rectangle(arriving, received, "touch")
    for index, parameter in enumerate(items):
        for number, touch in enumerate(parameter.touches(rank)):
            yield (
                parameter.item,
                touch,
                _combined(touch, found[index, number], torch.float32, parameter.item.coarse.name),
            )


def _refine_job(
    item: ParameterMap, child: Child, block: Block, touch: Touch, z: Tensor, x: Tensor, quantity: Quantity, beta: float
) -> RefineJob:
    """A fine block that reads the coarse rectangle it touches, or a constant in its place."""
    divisors, scalar = up_divisors(item, child, quantity)
    rows, cols = _positions(item.dims, block)
    if scalar == 0:
        unread = unread_value(child, quantity, beta=beta)
        return RefineJob(x=x, z=torch.full_like(z, unread) if unread else None, rows=rows, cols=cols)
    divisor = _divisor(divisors, scalar, touch)
    if isinstance(divisor, float):
        return RefineJob(x=x, z=z, divisor=divisor, rows=rows, cols=cols)
    return RefineJob(
        x=x, z=z / divisor.float().to(z.device), rows=rows, cols=cols
    )  # unlike groups: divided at coarse size


def _by_rectangle(
    arriving: Sequence[Passing], received: Sequence[Pieces], which: Literal["block", "touch"]
) -> Mapping[tuple[int, int], list[tuple[Piece, Tensor]]]:
    """The pieces of each rectangle with their values, in rank order, by (parameter of the bucket, rectangle)."""
    found: defaultdict[tuple[int, int], list[tuple[Piece, Tensor]]] = defaultdict(list)
    for pieces, values in zip(arriving, received, strict=True):
        for (index, piece), value in zip(pieces, values, strict=True):
            found[index, piece.block if which == "block" else piece.touch].append((piece, value))
    return found


def _combined(
    rectangle: Block | Touch, pieces: Sequence[tuple[Piece, Tensor]], dtype: torch.dtype, name: str
) -> Tensor:
    """A rectangle from its pieces: float64 ones are added up, float32 ones lie side by side. All of it is covered."""
    shape = len(rectangle.rows), len(rectangle.cols)
    count = sum(piece.numel for piece, _ in pieces)
    covered = count >= prod(shape) if dtype == torch.float64 else count == prod(shape)
    assert covered, f"{name}: {count} elements arrived for {shape[0]} x {shape[1]}"
    if len(pieces) == 1:
        return pieces[0][1].reshape(shape).contiguous()
    device = pieces[0][1].device
    if dtype == torch.float32:
        values = torch.empty(shape, dtype=dtype, device=device)
        for piece, value in pieces:
            put(values, rectangle, piece.rows, piece.cols, value)
        return values
    values = torch.zeros(shape, dtype=dtype, device=device)
    for piece, value in pieces:
        add(values, rectangle, piece.rows, piece.cols, value)
    return values


def _divisor(divisors: Sequence[Index], scalar: int, rectangle: Rectangle) -> float | Tensor:
    """What divides a coarse rectangle: one number where all groups are alike, else float64 [rows, cols]."""
    indices = (rectangle.rows, rectangle.cols)
    parts = [divisor[index] for divisor, index in zip(divisors, indices)]
    if all(part.min() == part.max() for part in parts):
        return float(scalar * prod(int(part[0]) for part in parts))
    return outer(divisors, scalar, rows=rectangle.rows, cols=rectangle.cols)


@lru_cache(maxsize=4096)  # layer after layer lies alike
def _positions(dims: tuple[DimMap, ...], block: Block) -> tuple[Positions, Positions]:
    """Positions of each fine row and column of a block within the coarse rectangle that it touches."""
    rows = _ranked(dims[0].parent[block.rows])
    cols = _ranked(dims[1].parent[block.cols]) if len(dims) > 1 else Positions(count=1)
    return rows, cols


def _ranked(parents: Index) -> Positions:
    return positions(torch.from_numpy(np.unique(parents, return_inverse=True)[1]))


def _counts(arriving: Sequence[Passing]) -> list[list[int]]:
    return [[piece.numel for _, piece in pieces] for pieces in arriving]
