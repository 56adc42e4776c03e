"""What our models compute from stored weights, on the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_vcycle import parallel
from ds_vcycle.checkpoint.recorded import missing_parameters, recorded
from ds_vcycle.checkpoint.store import Checkpoint, open_checkpoint
from ds_vcycle.config import parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.model.build import build_model
from ds_vcycle.parallel import Mesh
from ds_vcycle.schema import parameters
from tests.model_level import batch_for


def outputs(stores: Sequence[str], tp: int) -> list[dict[str, torch.Tensor]]:
    """Of each checkpoint: ``hidden`` [b, s, hidden] of BERT, ``logits`` [b, s, vocabulary], ``order`` [b, 2].

    Of an encoder without heads only ``hidden``.
    """
    parallel.init_distributed("cpu")
    mesh = parallel.mesh_for(tp)
    found = []
    for store in stores:
        with open_checkpoint(Path(store)) as checkpoint, torch.no_grad():
            found.append(_computed(checkpoint, mesh, tp))
    return found


def _computed(checkpoint: Checkpoint, mesh: Mesh, tp: int) -> dict[str, torch.Tensor]:
    held = recorded(checkpoint)
    tree = held.config.model_dump(mode="json")
    tree["model"]["tensor_parallel"] = tp
    config = parse_config(tree)
    level = resolve_levels(config)[held.level.index - 1]
    module: Any = build_model(level, config.model, mesh=mesh, seed=None)
    named = dict(module.named_parameters())
    absent = missing_parameters(checkpoint)
    for entry in parameters(level.shape):
        if entry.name not in absent:
            target = named[entry.name]
            read = checkpoint.read(entry, tp=tp, tp_rank=mesh.tp_rank, start=0, length=target.numel(), key="master")
            target.copy_(read.view(target.shape))
    batch = batch_for(level)
    module.eval()
    if level.shape.architecture == "gpt":
        return {"logits": _whole(module.logits(batch["tokens"]), mesh, level.shape.vocab_size)}
    hidden = module.encode(batch["tokens"], batch["token_types"], batch["padding_mask"])
    result = {"hidden": hidden.transpose(0, 1)}
    if not absent:
        result["logits"] = _whole(module.logits(hidden), mesh, level.shape.vocab_size)
        if level.shape.sentence_order:
            result["order"] = module.order_logits(hidden)
    return {key: value.clone() for key, value in result.items()}


def _whole(logits: torch.Tensor, mesh: Mesh, vocabulary: int) -> torch.Tensor:
    """Logits over the whole vocabulary without pad columns: [s, b, padded / TP] -> [b, s, vocabulary]."""
    parts = [torch.empty_like(logits) for _ in range(mesh.tp_size)]
    dist.all_gather(parts, logits.contiguous(), group=mesh.tp_group)
    return torch.cat(parts, dim=-1)[..., :vocabulary].transpose(0, 1)
