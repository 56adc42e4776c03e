"""Pairs of levels for the operators' tests: a name for each architecture, and what a level may change of it."""

from __future__ import annotations

import torch

from ds_vcycle.config import OperatorsConfig, parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.operators.plan import plan_transition
from ds_vcycle.schema import parameters

MODELS = {
    "gpt": {"architecture": "gpt"},
    "gpt_untied": {"architecture": "gpt", "tied_embeddings": False},
    "gpt_no_bias": {"architecture": "gpt", "bias": False},
    "llama": {
        "architecture": "gpt",
        "kv_groups": 6,
        "activation": "swiglu",
        "normalization": "rmsnorm",
        "position": "rope",
        "bias": False,
        "qk_norm": True,
        "tied_embeddings": False,
    },
    "llama_tied": {
        "architecture": "gpt",
        "kv_groups": 6,
        "activation": "swiglu",
        "normalization": "rmsnorm",
        "position": "rope",
    },
    "bert": {"architecture": "bert"},
    "bert_order": {"architecture": "bert", "sentence_order": True},
    "bert_untied": {"architecture": "bert", "tied_embeddings": False, "sentence_order": True},
    "bert_post": {"architecture": "bert", "norm_placement": "post", "norm_eps": 1e-12, "sentence_order": True},
    "bert_post_untied": {
        "architecture": "bert",
        "norm_placement": "post",
        "norm_eps": 1e-12,
        "normalization": "rmsnorm",
        "tied_embeddings": False,
    },
}
SIZES = {"layers": 12, "hidden": 24, "heads": 12, "head_dim": 4, "ffn": 36, "sequence_length": 8, "vocab_size": 61}


def config_for(model, *, coarse, groupings=None, sizes=None):
    """A run of two levels; ``coarse`` holds the second level's sizes, ``sizes`` changes the first one's."""
    return parse_config(
        {
            "model": {**SIZES, **MODELS[model], **(sizes or {}), "dropout": 0.0, "attention_dropout": 0.0},
            "levels": [{}, {**coarse, "groupings": groupings or {}}],
            "cycle": {"kind": "V", "levels": 2},
            "training": {"global_batch": 2, "micro_batch": 1},
            "data": {"path": "unused"},
        }
    )


def levels_for(model, *, coarse, groupings=None, sizes=None):
    return resolve_levels(config_for(model, coarse=coarse, groupings=groupings, sizes=sizes))


def plan_for(model, *, coarse, groupings=None, sizes=None, embedding="lossless", depth_residual="first"):
    fine, small = levels_for(model, coarse=coarse, groupings=groupings, sizes=sizes)
    return plan_transition(fine, small, OperatorsConfig(embedding=embedding, depth_residual=depth_residual))


def random_weights(shape, *, seed, positive=False):
    """Random tensors for every parameter of a level, zero in the pad rows."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for parameter in parameters(shape):
        value = torch.randn(parameter.shape, generator=generator)
        value[parameter.dims[0].real :] = 0
        weights[parameter.name] = value.square() if positive else value
    return weights


def divided(model, m, *, width=True, depth=True, sizes=None):
    """The coarse level's sizes when each mapped axis is divided by ``m``."""
    fine = {**SIZES, **MODELS[model], **(sizes or {})}
    kv_groups = fine.get("kv_groups", fine["heads"])
    per_group = fine["heads"] // kv_groups
    mw, md = (m if width else 1), (m if depth else 1)
    assert fine["hidden"] % mw == fine["ffn"] % mw == fine["layers"] % md == 0
    groups = max(1, kv_groups // mw)
    return {
        "hidden": fine["hidden"] // mw,
        "ffn": fine["ffn"] // mw,
        "kv_groups": groups,
        "heads": groups * per_group,
        "layers": fine["layers"] // md,
    }
