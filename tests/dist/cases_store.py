"""A small set of parameters, cut over simulated or real ranks, for the tests of the checkpoint store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ds_vcycle.checkpoint import store
from ds_vcycle.checkpoint.store import StoredFragment
from ds_vcycle.schema import Axis, Dim, Parameter

KEYS = ("master", "exp_avg", "exp_avg_sq")
Shards = Mapping[tuple[str, int, str], torch.Tensor]


def _dim(axis: Axis, length: int, *, parts: int = 1, pad: int = 0) -> Dim:
    return Dim(axis=axis, role="produces", length=length, parts=parts, pad=pad)


def _parameter(name: str, *dims: Dim, tp_dim: int | None = None) -> Parameter:
    return Parameter(template=name, layer=None, dims=dims, tp_dim=tp_dim)


# A vocabulary of 13 padded to 16 and, for the bias, to 32: on two ranks the second holds pad rows only.
PARAMETERS = (
    _parameter("word.weight", _dim("vocab", 13, pad=3), _dim("hidden", 5), tp_dim=0),
    _parameter("norm.weight", _dim("hidden", 5)),
    _parameter("fc1.weight", _dim("ffn", 6, parts=2), _dim("hidden", 5), tp_dim=0),
    _parameter("fc2.weight", _dim("hidden", 5), _dim("ffn", 6), tp_dim=1),
    _parameter("word.bias", _dim("vocab", 13, pad=19), tp_dim=0),
)
REAL_NUMEL = {"word.weight": 65, "norm.weight": 5, "fc1.weight": 60, "fc2.weight": 30, "word.bias": 13}


def local_shards(tp: int, *, seed: int = 0, keys: Sequence[str] = KEYS) -> dict[tuple[str, int, str], torch.Tensor]:
    """Random flat local shards by (name, tensor-parallel rank, key); pad rows zero, replicated ones equal."""
    generator = torch.Generator().manual_seed(seed)
    shards = {}
    for parameter in PARAMETERS:
        for key in keys:
            whole = torch.randn(parameter.shape, generator=generator)
            whole[parameter.dims[0].real :] = 0
            for rank in range(tp):
                local = whole
                if parameter.tp_dim is not None:
                    runs = parameter.global_ranges(parameter.tp_dim, tp, rank)
                    local = torch.cat([whole.narrow(parameter.tp_dim, a, b - a) for a, b in runs], parameter.tp_dim)
                shards[parameter.name, rank, key] = local.reshape(-1).clone()
    return shards


def cut(parameters: Sequence[Parameter], tp: int, dp: int, dp_rank: int) -> list[tuple[Parameter, int, int]]:
    """(parameter, start, length) that one data-parallel rank holds when all parameters lie end to end, cut evenly."""
    sizes = [parameter.numel // (1 if parameter.tp_dim is None else tp) for parameter in parameters]
    per_rank = -(-sum(sizes) // dp)
    first, position, ranges = dp_rank * per_rank, 0, []
    for parameter, size in zip(parameters, sizes):
        start, end = max(first - position, 0), min(first + per_rank - position, size)
        if end > start:
            ranges.append((parameter, start, end - start))
        position += size
    return ranges


def fragments_of(shards: Shards, *, tp: int, dp: int, rank: int, zero_stage: int = 1) -> list[StoredFragment]:
    """What ``rank`` gives to ``save``: its cut (everything under ZeRO 0), as far as it is the writer."""
    dp_rank, tp_rank = divmod(rank, tp)
    keys = sorted({key for _, _, key in shards})
    ranges = cut(PARAMETERS, tp, dp, dp_rank) if zero_stage else cut(PARAMETERS, tp, 1, 0)
    return [
        StoredFragment(
            parameter=parameter, tp=tp, tp_rank=tp_rank, start=start, length=length,
            tensors={key: shards[parameter.name, tp_rank, key][start : start + length] for key in keys},
        )
        for parameter, start, length in ranges
        if store.is_writer(parameter, tp_rank=tp_rank, dp_rank=dp_rank, zero_stage=zero_stage)
    ]  # fmt: skip


def on_threads(
    world_size: int, work: Callable[[int, Callable[[Any], list[Any]], Callable[[], None]], Any], patience_s: float = 10
) -> list[Any]:
    """Call ``work(rank, gather, barrier)`` on one thread per rank; a rank's exception is its result."""
    meeting, box = threading.Barrier(world_size, timeout=patience_s), [None] * world_size

    def one(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            box[rank] = value
            meeting.wait()
            values = list(box)
            meeting.wait()
            return values

        try:
            return work(rank, gather, lambda: meeting.wait() and None)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


def save_simulated(
    directory: Path,
    shards: Shards,
    *,
    tp: int = 1,
    dp: int = 1,
    zero_stage: int = 1,
    state: Mapping[str, Any] | None = None,
    references: Sequence[str] = (),
) -> list[Any]:
    """``save`` on ``tp * dp`` threads; each rank's extra tensor holds its rank. Returns None or the error per rank."""

    def work(rank: int, gather: Callable[[Any], list[Any]], barrier: Callable[[], None]) -> None:
        store.save(
            directory, fragments=fragments_of(shards, tp=tp, dp=dp, rank=rank, zero_stage=zero_stage),
            extras={"rng": torch.tensor([rank, 255], dtype=torch.uint8)}, state=state or {"step": 1},
            rank=rank, world_size=tp * dp, gather=gather, barrier=barrier, references=references,
        )  # fmt: skip

    return on_threads(tp * dp, work)


def read_all(checkpoint: store.Checkpoint, tp: int, dp: int = 1) -> dict[tuple[str, int, str], torch.Tensor]:
    """The local shards read back in the pieces ``dp`` data-parallel ranks would ask for."""
    shards: dict[tuple[str, int, str], list[torch.Tensor]] = {}
    for tp_rank in range(tp):
        for dp_rank in range(dp):
            for parameter, start, length in cut(PARAMETERS, tp, dp, dp_rank):
                for key in sorted(checkpoint.keys(parameter)):
                    piece = checkpoint.read(parameter, tp=tp, tp_rank=tp_rank, start=start, length=length, key=key)
                    shards.setdefault((parameter.name, tp_rank, key), []).append(piece)
    return {at: torch.cat(pieces) for at, pieces in shards.items()}


def same(left: Shards, right: Shards) -> bool:
    """Bit for bit the same shards."""
    return left.keys() == right.keys() and all(torch.equal(left[at], right[at]) for at in left)


def save_and_mark(root: str, seed: int, prune_to: int | None = None) -> None:
    """One real rank: save the shards of ``seed`` as step-0000000{seed}, mark it as the latest, prune."""
    directory = Path(root, f"step-{seed:08d}")
    fragments = fragments_of(local_shards(1, seed=seed), tp=1, dp=1, rank=0)
    store.save(
        directory, fragments=fragments, extras={}, state={"seed": seed},
        rank=0, world_size=1, gather=lambda value: [value], barrier=lambda: None,
    )  # fmt: skip
    store.set_latest(Path(root), directory.name)
    if prune_to is not None:
        store.prune(Path(root), prune_to)


def save_distributed(root: str) -> list[bool]:
    """Two real ranks save together over gloo; each reads back what the other wrote."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size, shards = dist.get_rank(), dist.get_world_size(), local_shards(1, seed=5)

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value)
        return values

    store.save(
        Path(root, "step-00000005"), fragments=fragments_of(shards, tp=1, dp=size, rank=rank),
        extras={"rng": torch.get_rng_state()}, state={"seed": 5}, rank=rank, world_size=size, gather=gather,
        barrier=dist.barrier,
    )  # fmt: skip
    with store.open_checkpoint(Path(root, "step-00000005")) as checkpoint:
        rng = checkpoint.extras(rank)["rng"]
        return [same(read_all(checkpoint, 1, 3), shards), torch.equal(rng, torch.get_rng_state())]
