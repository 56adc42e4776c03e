"""Build one level's module from its shape; its parameters are exactly :func:`ds_vcycle.schema.parameters`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ds_vcycle.config import ModelConfig
from ds_vcycle.levels import Level
from ds_vcycle.model.bert import Bert
from ds_vcycle.model.gpt import Gpt
from ds_vcycle.model.initial import fill_initial
from ds_vcycle.model.options import DTYPES, transformer_config
from ds_vcycle.model.spec import block_spec, uses_transformer_engine
from ds_vcycle.parallel import Mesh, mesh_for
from ds_vcycle.schema import Parameter, parameters


def build_model(level: Level, model: ModelConfig, *, mesh: Mesh, seed: int | None) -> torch.nn.Module:
    """Build a level on ``mesh``.

    Args:
        level: its shape, tensor-parallel degree and precision, the parameters' dtype.
        model: the options that are the same at every level.
        mesh: of degree ``level.tensor_parallel``.
        seed: of the initial weights, or None: zeros, to be filled by a transition or from a checkpoint.

    Returns:
        A module whose ``forward(**batch)`` returns two float32 scalars: the summed, weighted token losses of the
        micro-batch, and the summed sentence-order losses (0 without that head).

    Raises:
        ConfigError: an option cannot be had here.
    """
    assert mesh.tp_size == level.tensor_parallel and mesh_for(mesh.tp_size) is mesh
    shape = level.shape
    transformer_engine = uses_transformer_engine(model, mesh)
    config = transformer_config(level, model, mesh=mesh, transformer_engine=transformer_engine)
    spec = block_spec(shape, transformer_engine=transformer_engine)
    architecture: type[Gpt] | type[Bert] = Gpt if shape.architecture == "gpt" else Bert
    module: torch.nn.Module = architecture(config, spec, shape, mesh)
    table = parameters(shape)
    _check_table(module, table, mesh.tp_size)
    _mark_parallel(module, table, mesh)
    module.to(device=mesh.device, dtype=DTYPES[level.precision])
    if seed is None:
        for parameter in module.parameters():
            torch.nn.init.zeros_(parameter)
    else:
        fill_initial(
            module,
            table,
            seed=seed,
            std=model.init_std,
            layers=shape.layers,
            tp_size=mesh.tp_size,
            tp_rank=mesh.tp_rank,
        )
    return module


def _check_table(module: torch.nn.Module, table: tuple[Parameter, ...], tp: int) -> None:
    """The module and the schema must agree: everything else in the package goes by the schema."""
    built = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    expected = [(parameter.name, parameter.local_shape(tp)) for parameter in table]
    assert built == expected, f"module and schema differ: {sorted(set(built) ^ set(expected))}"


def _mark_parallel(module: torch.nn.Module, table: tuple[Parameter, ...], mesh: Mesh) -> None:
    """Megatron's attributes, which it sets only when it initialises; and whole gradients for replicated parameters.

    DeepSpeed counts a parameter without ``tensor_model_parallel`` once over the tensor-parallel ranks in the global
    gradient norm. A norm over each rank's own heads, or over its own part of the sequence, sees only part of its
    gradient on each rank; Megatron's trainer sums those parts itself, DeepSpeed does not.
    """
    named = dict(module.named_parameters())
    for entry in table:
        parameter = named[entry.name]
        if entry.tp_dim is not None:
            for key, value in (
                ("tensor_model_parallel", True),
                ("partition_dim", entry.tp_dim),
                ("partition_stride", entry.tp_stride),
            ):
                setattr(parameter, key, value)
        per_head = entry.dims[0].axis == "head_dim"
        if mesh.tp_size > 1 and (per_head or getattr(parameter, "sequence_parallel", False)):
            parameter.register_hook(_sum_over(mesh.tp_group))


def _sum_over(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        whole = gradient.clone()
        dist.all_reduce(whole, group=group)
        return whole

    return hook
