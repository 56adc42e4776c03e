"""Process groups per layout (:class:`Mesh`), and agreeing over ranks.

Levels may have different tensor-parallel degrees in one job. Each degree's process groups are built once and reused;
Megatron-core's global ``parallel_state`` is pointed at the layout asked for last. On CPU this module also replaces
the few functions of Megatron that need a CUDA device; nothing else in the package does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random

from ds_vcycle.config import UserError

T = TypeVar("T")
TRACKER_NAME = "model-parallel-rng"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """One layout of all ranks: ``rank = dp_rank * tp_size + tp_rank``.

    ``host_group`` spans all ranks and moves CPU tensors (gloo), whatever the device is.
    """

    world_size: int
    rank: int
    tp_size: int
    tp_rank: int
    dp_size: int
    dp_rank: int
    device: torch.device
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    host_group: dist.ProcessGroup

    @property
    def mpu(self) -> MeshMpu:
        """What ``deepspeed.initialize(mpu=...)`` asks; fixed to this layout."""
        return MeshMpu(self)


class MeshMpu:
    """A mesh under the names DeepSpeed knows from Megatron; the model-parallel group is the tensor-parallel one."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_model_parallel_rank(self) -> int:
        """Rank within the tensor-parallel group."""
        return self._mesh.tp_rank

    def get_model_parallel_world_size(self) -> int:
        """Size of the tensor-parallel group."""
        return self._mesh.tp_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The tensor-parallel process group."""
        return self._mesh.tp_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Global rank of the tensor-parallel group's first member."""
        return self._mesh.rank - self._mesh.tp_rank

    def get_data_parallel_rank(self) -> int:
        """Rank within the data-parallel group."""
        return self._mesh.dp_rank

    def get_data_parallel_world_size(self) -> int:
        """Size of the data-parallel group."""
        return self._mesh.dp_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The data-parallel process group."""
        return self._mesh.dp_group

    def get_pipeline_model_parallel_rank(self) -> int:
        """Always 0: no pipeline parallelism."""
        return 0

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Always 1: no pipeline parallelism."""
        return 1


class CpuRngTracker:
    """Megatron's tracker of named random states, over torch's CPU generator."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def is_initialized(self) -> bool:
        """Whether any state was added."""
        return bool(self._states)

    def reset(self) -> None:
        """Forget all states."""
        self._states = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        """The named states; a state is never changed in place."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all named states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state that begins at ``seed``."""
        self._states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = TRACKER_NAME) -> Iterator[None]:
        """Draw from the named state inside, from the state before again afterwards."""
        assert name in self._states, "seed_ranks comes before the first forward pass with dropout"
        outside = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


@dataclass(kw_only=True, slots=True)
class _Job:
    """What exists once per process."""

    device: torch.device
    host_group: dist.ProcessGroup
    groups: dict[tuple[int, ...], dist.ProcessGroup]
    meshes: dict[int, Mesh]
    patience: timedelta


_job: _Job | None = None


def init_distributed(device: str = "auto", timeout_seconds: float = 600) -> torch.device:
    """Join the job's process group, or be a job of one process if no launcher started this one; idempotent.

    Args:
        device: ``"auto"`` (CUDA if there is any), ``"cpu"`` or ``"cuda"``.
        timeout_seconds: how long ranks wait for each other in a collective before it is an error.

    Raises:
        UserError: CUDA is asked for and there is none.
    """
    global _job
    if _job is not None:
        return _job.device
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise UserError("training.device=cuda: torch finds no CUDA device; set training.device=cpu or auto")
    on_cuda = cuda and device != "cpu"
    if on_cuda and torch.cuda.device_count() == 1:
        os.environ["LOCAL_RANK"] = "0"  # Slurm may show each task its own GPU only
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_cuda else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is first imported
        _replace_cuda_functions()
    patience = timedelta(seconds=timeout_seconds)
    _start_process_group("nccl" if place.type == "cuda" else "gloo", patience)
    host_group = dist.group.WORLD if place.type == "cpu" else dist.new_group(backend="gloo", timeout=patience)
    assert host_group is not None and dist.group.WORLD is not None
    _job = _Job(
        device=place,
        host_group=host_group,
        groups={tuple(range(dist.get_world_size())): dist.group.WORLD},
        meshes={},
        patience=patience,
    )
    return place


def mesh_for(tp: int) -> Mesh:
    """The mesh of tensor-parallel degree ``tp``; Megatron's ``parallel_state`` is pointed at it. Collective at first.

    Raises:
        UserError: ``tp`` does not divide the number of ranks.
    """
    assert _job is not None, "init_distributed comes first"
    if tp not in _job.meshes:
        _job.meshes[tp] = _build_mesh(_job, tp)
    _point_megatron_at(_job, _job.meshes[tp])
    return _job.meshes[tp]


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on any rank (collective over all ranks)."""
    if _job is None:
        return flag
    value = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=_job.host_group)
    return bool(value.item())


def raise_together(error: Exception | None) -> None:
    """Return if no rank has an error; otherwise every rank raises the lowest failing rank's (collective).

    Raises:
        UserError: with the lowest failing rank's text, on every rank.
        RuntimeError: the same for an error that is not a :class:`UserError`; the failing rank raises its own.
    """
    if not any_rank(error is not None):
        return
    mine = None if error is None else (str(error), isinstance(error, UserError))
    found: list[tuple[str, bool] | None] = [mine]
    if _job is not None:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=_job.host_group)
    rank, (text, is_user_error) = next((rank, entry) for rank, entry in enumerate(found) if entry is not None)
    if error is not None and (_job is None or rank == dist.get_rank()):
        raise error
    raise UserError(text) if is_user_error else RuntimeError(f"rank {rank} failed: {text}")


def together(work: Callable[[], T]) -> T:
    """Do something on every rank that needs no other rank; all return, or all raise the lowest failing rank's error.

    Raises:
        UserError: as :func:`raise_together`.
        RuntimeError: as :func:`raise_together`.
    """
    try:
        value = work()
    except Exception as error:
        raise_together(error)
        raise
    raise_together(None)
    return value


def shutdown() -> None:
    """Leave the process group and forget every mesh; without this, gloo's threads can abort the interpreter's exit."""
    global _job
    if _job is not None and dist.is_initialized():
        dist.destroy_process_group()
    _job = None


def _start_process_group(backend: str, patience: timedelta) -> None:
    import deepspeed  # after DS_ACCELERATOR is settled

    if backend == "gloo" and deepspeed.accelerator.get_accelerator().device_name() != "cpu":
        raise UserError(
            "training.device=cpu: DeepSpeed has chosen another device; set DS_ACCELERATOR=cpu in the environment"
        )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else the first use compiles an extension (50 s)
    os.environ.setdefault("LOCAL_RANK", "0")  # deepspeed.initialize insists on it
    if not dist.is_initialized() and "RANK" not in os.environ:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)  # 0: any free port
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=patience)


def _group(job: _Job, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of ``ranks``, built at most once. Collective over all ranks, but for single ones."""
    if ranks not in job.groups:
        job.groups[ranks] = dist.new_group(list(ranks), timeout=job.patience, use_local_synchronization=len(ranks) == 1)
    return job.groups[ranks]


def _build_mesh(job: _Job, tp: int) -> Mesh:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size % tp:
        raise UserError(
            f"tensor_parallel={tp} does not divide the {world_size} ranks of this launch; change one of them"
        )
    dp = world_size // tp
    rows = [tuple(range(row * tp, (row + 1) * tp)) for row in range(dp)]
    columns = [tuple(range(column, world_size, tp)) for column in range(tp)]
    for ranks in (*rows, *columns):
        if len(ranks) > 1 or ranks == (rank,):
            _group(job, ranks)
    _group(job, (rank,))  # Megatron wants pipeline and context groups: this rank alone
    return Mesh(
        world_size=world_size,
        rank=rank,
        tp_size=tp,
        tp_rank=rank % tp,
        dp_size=dp,
        dp_rank=rank // tp,
        device=job.device,
        tp_group=job.groups[rows[rank // tp]],
        dp_group=job.groups[columns[rank % tp]],
        host_group=job.host_group,
    )


def _point_megatron_at(job: _Job, mesh: Mesh) -> None:
    """Set what ``parallel_state.initialize_model_parallel`` would set, without its dozens of process groups."""
    alone, world = job.groups[(mesh.rank,)], job.groups[tuple(range(mesh.world_size))]
    first = mesh.rank - mesh.tp_rank
    tensor = ("TENSOR_MODEL_PARALLEL_GROUP", "MODEL_PARALLEL_GROUP", "TENSOR_AND_CONTEXT_PARALLEL_GROUP")
    data = ("DATA_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP", "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP")
    everyone = ("TENSOR_AND_DATA_PARALLEL_GROUP", "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP")
    single = (
        "PIPELINE_MODEL_PARALLEL_GROUP",
        "CONTEXT_PARALLEL_GROUP",
        "EMBEDDING_GROUP",
        "POSITION_EMBEDDING_GROUP",
        "EXPERT_MODEL_PARALLEL_GROUP",
        "EXPERT_TENSOR_PARALLEL_GROUP",
        "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    )
    values: dict[str, Any] = dict.fromkeys(tensor, mesh.tp_group)
    values |= dict.fromkeys(data, mesh.dp_group)
    values |= dict.fromkeys(everyone, world)
    values |= dict.fromkeys(single, alone)
    values["TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"] = list(range(first, first + mesh.tp_size))
    values["DATA_PARALLEL_GLOBAL_RANKS"] = list(range(mesh.tp_rank, mesh.world_size, mesh.tp_size))
    values["PIPELINE_GLOBAL_RANKS"] = values["EMBEDDING_GLOBAL_RANKS"] = [mesh.rank]
    for name, value in values.items():
        assert hasattr(parallel_state, f"_{name}"), name
        setattr(parallel_state, f"_{name}", value)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def _replace_cuda_functions() -> None:
    """What Megatron calls on CUDA only, for CPU: where tensors go, and the random states of its recomputation."""
    vars(torch.cuda)["current_device"] = lambda: "cpu"
    megatron_random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.empty(0)
    megatron_random._set_cuda_rng_state = lambda *_args, **_kwargs: None
    megatron_random._CUDA_RNG_STATE_TRACKER = CpuRngTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
