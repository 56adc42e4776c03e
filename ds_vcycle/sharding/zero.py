"""The one adapter that knows DeepSpeed's private attributes: where an engine keeps its fp32 masters and Adam's moments.

Weights are changed by writing into the masters (under ``torch.no_grad()``) and calling :func:`push`. Never write into
``parameter.data``: the next step would overwrite it with the master; and not through ``deepspeed.utils.safe_set_*``,
which fails on odd sizes and misplaces elements under ``round_robin_gradients``. All between steps, gradients cleared.

Written against DeepSpeed 0.19.8; ``sharding.self_test`` says at start-up whether the installed one still does so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ds_vcycle.config import UserError

Engine: TypeAlias = DeepSpeedEngine  # under this name for the rooms that do not import deepspeed
_KNOWN_VERSION = "0.19.8"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class AdapterError(UserError):
    """The installed DeepSpeed keeps its weights otherwise than this adapter knows."""

    def __init__(self, problem: str) -> None:
        remedy = "remove the keys under deepspeed: in the configuration, and report this"
        if deepspeed.__version__ != _KNOWN_VERSION:
            remedy = f"install the release this was written against (pip install deepspeed=={_KNOWN_VERSION})"
        super().__init__(f"DeepSpeed {deepspeed.__version__}: {problem}; {remedy}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fragment:
    """Elements [start, start + length) of a parameter's local slice, as held by this rank.

    ``master``, ``exp_avg``, ``exp_avg_sq``: fp32 views [length] into what the optimizer itself uses; write into them in
    place, under ``torch.no_grad()``. The moments are None while Adam has no state (before its first step).
    """

    name: str
    start: int
    length: int
    master: Tensor
    exp_avg: Tensor | None
    exp_avg_sq: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Piece:
    """A fragment's place: ``length`` elements from ``offset`` in the flattened ``owner``, Adam's key to its state."""

    name: str
    start: int
    length: int
    owner: Tensor
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.detach().view(-1).narrow(0, self.offset, self.length)


def fragments(engine: DeepSpeedEngine) -> list[Fragment]:
    """This rank's fragments in schema order, empty ones left out. Views: cheap, but ask again after a first step.

    Raises:
        AdapterError: the engine's optimizer is of a class this adapter does not know.
    """
    state = engine.basic_optimizer.state
    found = []
    for piece in _pieces(engine):
        moments = state.get(piece.owner) or {}
        exp_avg, exp_avg_sq = (piece.of(moments[key]) if key in moments else None for key in _MOMENTS)
        found.append(
            Fragment(
                name=piece.name, start=piece.start, length=piece.length, master=piece.of(piece.owner),
                exp_avg=exp_avg, exp_avg_sq=exp_avg_sq,
            )
        )  # fmt: skip
    return found


@torch.no_grad()
def push(engine: DeepSpeedEngine) -> None:
    """Round the masters into the weights the model computes with. Collective over the data-parallel group."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer._partition_all_parameters()
        for sub_group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
        optimizer.invalidate_secondary_tensor()
        if optimizer.persistent_parameters:  # small parameters keep a full copy, which is stale now
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)


def adam_step(engine: DeepSpeedEngine) -> int:
    """Adam's step count, the one of bias correction; 0 while there is no state. One number for all of a rank."""
    state = engine.basic_optimizer.state
    steps = {int(state[owner]["step"].item()) for owner in _owners(engine) if state.get(owner)}
    if len(steps) > 1:
        raise AdapterError(f"Adam's step differs between partitions of one rank: {sorted(steps)}")
    return steps.pop() if steps else 0


@torch.no_grad()
def create_moments(engine: DeepSpeedEngine, step: int) -> None:
    """Give Adam the state it would make itself at its first step (zero moments), at step ``step``.

    State that is there already keeps its moments and gets the step.
    """
    optimizer = engine.basic_optimizer
    on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
    for owner in _owners(engine):
        state = optimizer.state[owner]
        if not state:
            # torch keeps the step of a fused Adam on the weights' device, of any other on the CPU
            state["step"] = torch.zeros((), dtype=torch.float32, device=owner.device if on_device else "cpu")
            for key in _MOMENTS:
                state[key] = torch.zeros_like(owner, memory_format=torch.preserve_format, requires_grad=False)
        state["step"].fill_(step)


@torch.no_grad()
def set_moments(engine: DeepSpeedEngine, values: Mapping[str, tuple[Tensor, Tensor]], step: int) -> None:
    """Set Adam's moments of this rank's fragments, before or after the first step.

    Args:
        engine: the engine.
        values: parameter name -> (exp_avg, exp_avg_sq), each [length of the fragment]; one entry per fragment.
        step: how many steps these moments have seen.

    Raises:
        ValueError: a fragment has no entry, or an entry no fragment.
    """
    create_moments(engine, step)
    held = {fragment.name: fragment for fragment in fragments(engine)}
    if held.keys() != values.keys():
        raise ValueError(f"moments given and held differ in {sorted(held.keys() ^ values.keys())[:5]}")
    for name, (exp_avg, exp_avg_sq) in values.items():
        fragment = held[name]
        assert fragment.exp_avg is not None and fragment.exp_avg_sq is not None
        fragment.exp_avg.copy_(exp_avg)
        fragment.exp_avg_sq.copy_(exp_avg_sq)


def reset_moments(engine: DeepSpeedEngine) -> None:
    """Empty Adam's state: m = v = 0 and step = 0, as before the first step, and free its memory.

    Never zero the moments and keep the step: the bias correction would be off and updates 5 x lr.
    """
    engine.basic_optimizer.state.clear()
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # DeepSpeed keeps views of the state; let it link anew
        engine.optimizer._hp_optimizer_states_linked = False
        for parameter in engine.param_names:
            if getattr(parameter, "_hp_mapping", None) is not None:
                parameter._hp_mapping.optim_fragment = None


def counters(engine: DeepSpeedEngine) -> dict[str, int]:
    """DeepSpeed's own counters that a resumed run continues: steps, samples, skipped steps."""
    return {name: int(getattr(engine, name)) for name in _COUNTERS}


def set_counters(engine: DeepSpeedEngine, values: Mapping[str, int]) -> None:
    """Set what :func:`counters` gave. ``micro_steps`` follows: whole steps of this engine's accumulation."""
    for name in _COUNTERS:
        setattr(engine, name, int(values[name]))
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()


def _pieces(engine: DeepSpeedEngine) -> list[_Piece]:
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        found = _split_pieces(engine, optimizer)
    elif isinstance(optimizer, BF16_Optimizer):
        masters = optimizer.fp32_groups_flat_partition
        found = _flat_pieces(engine, optimizer, optimizer.bf16_groups, optimizer.bf16_groups_flat, masters)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        masters = optimizer.single_partition_of_fp32_groups
        found = _flat_pieces(engine, optimizer, optimizer.bit16_groups, optimizer.bit16_groups_flat, masters)
    else:
        found = _whole_pieces(engine, optimizer)
    order = {name: index for index, name in enumerate(engine.param_names.values())}
    pieces = sorted((piece for piece in found if piece.length), key=lambda piece: order[piece.name])
    for piece in pieces:
        if piece.owner.dtype != torch.float32:
            raise AdapterError(f"the master of {piece.name} is {piece.owner.dtype}, not float32")
    return pieces


def _whole_pieces(engine: DeepSpeedEngine, optimizer: object) -> Iterator[_Piece]:
    """Stage 0: the parameters are the masters, or each has one of its own."""
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        pairs = [pair for weights, masters in groups for pair in zip(weights, masters, strict=True)]
    elif isinstance(optimizer, torch.optim.Optimizer):
        pairs = [(p, p) for group in optimizer.param_groups for p in group["params"]]
    else:
        raise AdapterError(f"unknown optimizer class {type(optimizer).__name__}")
    for weight, master in pairs:
        yield _Piece(name=engine.param_names[weight], start=0, length=master.numel(), owner=master, offset=0)


def _flat_pieces(
    engine: DeepSpeedEngine,
    optimizer: DeepSpeedZeroOptimizer | BF16_Optimizer,
    groups: Sequence[Sequence[Tensor]],
    flats: Sequence[Tensor],
    masters: Sequence[Tensor],
) -> Iterator[_Piece]:
    """ZeRO 1, 2: a weight's true offset in its flat group is that of its storage, whatever DeepSpeed's maps say."""
    for index, (group, flat, master) in enumerate(zip(groups, flats, masters, strict=True)):
        process_group = optimizer.real_dp_process_group[index]
        run = flat.numel() // dist.get_world_size(process_group)
        low = dist.get_rank(process_group) * run
        for weight in group:
            if weight.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
                raise AdapterError(f"{engine.param_names[weight]} is not a view of its flat group")
            offset = int(weight.storage_offset() - flat.storage_offset())
            first, last = max(offset, low), min(offset + weight.numel(), low + run)
            length = max(0, last - first)
            yield _Piece(
                name=engine.param_names[weight], start=first - offset if length else 0, length=length, owner=master,
                offset=first - low if length else 0,
            )  # fmt: skip


def _split_pieces(engine: DeepSpeedEngine, optimizer: DeepSpeedZeroOptimizer_Stage3) -> Iterator[_Piece]:
    """ZeRO 3: dp runs of each parameter; past its end the last run is uninitialised."""
    for weight, name in engine.param_names.items():
        sub_group, offset, run = optimizer.grad_position[optimizer.get_param_id(weight)]
        start = dist.get_rank(weight.ds_process_group) * run
        length = max(0, min(run, weight.ds_numel - start))
        owner = optimizer.fp32_partitioned_groups_flat[sub_group]
        yield _Piece(name=name, start=start if length else 0, length=length, owner=owner, offset=offset)


def _owners(engine: DeepSpeedEngine) -> list[Tensor]:
    """All tensors Adam steps on this rank, pads included."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(optimizer.fp32_partitioned_groups_flat)
    return [owner for group in engine.basic_optimizer.param_groups for owner in group["params"]]
