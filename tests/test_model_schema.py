"""The schema against Megatron's own modules: names, order, shapes, and how Megatron says they are split."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ds_vcycle import parallel
from ds_vcycle.model.bert import Bert
from ds_vcycle.model.build import build_model
from ds_vcycle.model.gpt import Gpt
from ds_vcycle.model.options import transformer_config
from ds_vcycle.model.spec import block_spec
from ds_vcycle.schema import parameters
from tests.dist.ranks import values
from tests.model_level import tiny

MODERN = {"normalization": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False}
CASES: list[dict[str, Any]] = [
    {},
    {"tied_embeddings": False},
    MODERN,
    MODERN | {"tied_embeddings": False, "kv_groups": 2, "qk_norm": True},
    {"kv_groups": 2, "bias": True, "activation": "swiglu"},
    {"qk_norm": True, "bias": False},
    {"position": "rope", "normalization": "rmsnorm", "head_dim": 12, "layers": 1},
    {"ffn": 48, "vocab_size": 300, "hidden": 24, "heads": 2},
    {"architecture": "bert"},
    {"architecture": "bert", "sentence_order": True},
    {"architecture": "bert", "tied_embeddings": False, "sentence_order": True},
    {"architecture": "bert", "normalization": "rmsnorm", "activation": "swiglu", "kv_groups": 2},
    {"architecture": "bert", "bias": False, "qk_norm": True, "tied_embeddings": False},
    {"architecture": "bert", "norm_placement": "post", "sentence_order": True},
    {"architecture": "bert", "norm_placement": "post", "normalization": "rmsnorm", "qk_norm": True, "kv_groups": 2},
]

Row = tuple[str, tuple[int, ...], int | None, int]


def described(tp: int, cases: list[dict[str, Any]]) -> list[tuple[list[Row], list[Row], list[Row]]]:
    """Per case: the schema's rows, those of Megatron's module initialised by Megatron, and those of our build."""
    parallel.init_distributed("cpu")
    mesh = parallel.mesh_for(tp)
    found = []
    for options in cases:
        level, model = tiny(tp, **options)
        schema: list[Row] = [(p.name, p.local_shape(tp), p.tp_dim, p.tp_stride) for p in parameters(level.shape)]
        config = transformer_config(level, model, mesh=mesh, transformer_engine=False)
        config = dataclasses.replace(config, perform_initialization=True)
        architecture = Gpt if level.shape.architecture == "gpt" else Bert
        megatron = architecture(config, block_spec(level.shape, transformer_engine=False), level.shape, mesh)
        ours = build_model(level, model, mesh=mesh, seed=None)
        found.append((schema, rows(megatron), rows(ours)))
    return found


def rows(module: Any) -> list[Row]:
    return [
        (
            name,
            tuple(p.shape),
            p.partition_dim if getattr(p, "tensor_model_parallel", False) else None,
            p.partition_stride if getattr(p, "tensor_model_parallel", False) else 1,
        )
        for name, p in module.named_parameters()
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_schema_is_what_megatron_registers(tp: int) -> None:
    for found in values(tp, "tests.test_model_schema:described", (tp, CASES)):
        for options, (schema, megatron, ours) in zip(CASES, found, strict=True):
            assert [row[:2] for row in schema] == [row[:2] for row in megatron], options
            split = {row[0]: row[2:] for row in megatron}
            for name, _, tp_dim, stride in schema:
                assert (tp_dim, stride) == split[name], (options, name)
            assert ours == schema, options
