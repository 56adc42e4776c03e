"""Random generators: seeded per tensor-parallel and data-parallel rank, and their states as a checkpoint keeps them."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random

from ds_vcycle.parallel import TRACKER_NAME, Mesh


def seed_ranks(seed: int, mesh: Mesh) -> None:
    """Seed every generator of this rank.

    The default generators differ over data-parallel ranks and agree over tensor-parallel ones, because dropout on
    replicated activations must drop the same elements; the tracker's differs over both (each rank has its own heads).
    """
    common = _derived_seed(seed, mesh.dp_rank)
    random.seed(common)
    np.random.seed(common)
    torch.manual_seed(common)
    own = _derived_seed(seed, mesh.dp_rank, mesh.tp_rank + 1)  # trailing zeros do not change a SeedSequence
    if mesh.device.type == "cuda":
        megatron_random.model_parallel_cuda_manual_seed(own, tp_rank=mesh.tp_rank, ep_rank=0, etp_rank=0)
        torch.cuda.manual_seed(common)  # the line above seeded the default generator by tensor-parallel rank too
    else:
        tracker = megatron_random.get_cuda_rng_tracker()
        tracker.reset()
        tracker.add(TRACKER_NAME, own)


def rng_state() -> dict[str, torch.Tensor]:
    """All generator states of this rank: Python, numpy, torch, CUDA if used, and Megatron's tracker."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert version == 3 and kind == "MT19937"
    state = {
        "python": torch.tensor(internal, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if dist.is_initialized() and dist.get_backend() == "nccl":
        state["cuda"] = torch.cuda.get_rng_state()
    for name, value in megatron_random.get_cuda_rng_tracker().get_states().items():
        state[f"tracker.{name}"] = value.clone()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Put all generators back to what :func:`rng_state` returned."""
    random.setstate((3, tuple(state["python"].tolist()), next(iter(state["python_gauss"].tolist()), None)))
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = float(state["numpy_gauss"].item())
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    prefix = "tracker."
    tracked = {name.removeprefix(prefix): value.clone() for name, value in state.items() if name.startswith(prefix)}
    megatron_random.get_cuda_rng_tracker().set_states(tracked)


def _derived_seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1)[0]) >> 1
