"""Start-up proof that DeepSpeed keeps its weights where ``sharding.zero`` and ``sharding.placement`` say."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from ds_vcycle.parallel import raise_together
from ds_vcycle.schema import Parameter
from ds_vcycle.sharding.placement import Layout, Placement, placements, rank_placements
from ds_vcycle.sharding.zero import AdapterError, fragments, push

_SENTINELS = 251  # small integers are exact in bf16; a prime, so that neighbours differ


def self_test(engine: DeepSpeedEngine, parameters: Sequence[Parameter], layout: Layout) -> None:
    """Prove this adapter on the engine: placements as by the rule; a value written, pushed, is read in the weights.

    Writes the first and last element of every fragment and restores them. Collective over all ranks.

    Raises:
        AdapterError: naming the DeepSpeed version, if any rank finds a difference (the others raise a UserError with
            the same text).
    """
    raise_together(_placement_error(engine, parameters, layout))
    rank = dist.get_rank()
    order = {parameter.name: index for index, parameter in enumerate(parameters)}
    held = fragments(engine)
    saved = [fragment.master[[0, -1]].clone() for fragment in held]
    for fragment in held:
        for position in (0, fragment.length - 1):
            fragment.master[position] = _sentinel(order[fragment.name], fragment.start + position)
    push(engine)
    peers = range(layout.coordinates(rank)[1], layout.world_size, layout.tp)
    written = {placement for peer in peers for placement in placements(parameters, layout)[peer]}
    error = _weights_error(engine, written, order, rank_placements(parameters, layout, rank))
    for fragment, (first, last) in zip(held, saved, strict=True):
        fragment.master[0], fragment.master[-1] = first, last
    push(engine)
    raise_together(error)


def _sentinel(parameter: int, position: int) -> int:
    return 1 + (31 * parameter + 7 * position) % _SENTINELS


def _placement_error(engine: DeepSpeedEngine, parameters: Sequence[Parameter], layout: Layout) -> AdapterError | None:
    rank = dist.get_rank()
    try:
        found = {(held.name, held.start, held.length) for held in fragments(engine)}
    except AdapterError as error:
        return error
    ruled = {(held.name, held.start, held.length) for held in rank_placements(parameters, layout, rank)}
    if found == ruled:
        return None
    name = min(name for name, _, _ in found ^ ruled)
    seen, expected = ([(s, n) for key, s, n in side if key == name] for side in (found, ruled))
    return AdapterError(f"rank {rank} holds (start, length) {seen} of {name}, by the rule {expected}")


def _weights_error(
    engine: DeepSpeedEngine, written: Collection[Placement], order: Mapping[str, int], own: Collection[Placement]
) -> AdapterError | None:
    """Compare the sentinels in the weights this rank can see with those its data-parallel peers and it wrote."""
    weights = {name: parameter for parameter, name in engine.param_names.items()}
    mine = set(own)
    for placement in written:
        visible = _visible(weights[placement.name], own=placement in mine, start=placement.start)
        for position in (0, placement.length - 1):
            at = placement.start + position
            wanted = _sentinel(order[placement.name], at)
            if visible is not None and visible[position].item() != wanted:
                value = visible[position].item()
                return AdapterError(f"{placement.name}[{at}] reads {value} after {wanted} was written to its master")
    return None


def _visible(weight: Tensor, *, own: bool, start: int) -> Tensor | None:
    """The low-precision weights from ``start`` on, flat; None where ZeRO 3 holds no copy of them here."""
    shard: Tensor | None = getattr(weight, "ds_tensor", None)
    if shard is None or weight.numel():  # ZeRO 3 leaves small parameters whole and empties the others
        return weight.detach().view(-1)[start:]
    return shard.detach().view(-1) if own else None
