"""Which tensor of a Hugging Face model holds which rows of each of our parameters. Imports no torch.

One table for both directions. Names are those of transformers' GPT2LMHeadModel, MegatronBertForPreTraining (pre-LN)
and BertForPreTraining (post-LN), whose smaller relatives have a part of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ds_vcycle.levels import ModelShape
from ds_vcycle.schema import Parameter, parameters

ModelType = Literal["gpt2", "megatron-bert", "bert"]
BASE: dict[ModelType, str] = {"gpt2": "transformer.", "megatron-bert": "bert.", "bert": "bert."}
UNREAD: dict[ModelType, re.Pattern[str]] = {  # buffers, which older versions of transformers stored
    "gpt2": re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"),
    "megatron-bert": re.compile(r"(bert\.)?embeddings\.position_ids"),
    "bert": re.compile(r"(bert\.)?embeddings\.position_ids"),
}
SENTENCE_ORDER = re.compile(r"(bert\.)?pooler\..*|cls\.seq_relationship\..*")
HEADS = ("lm_head", "output_layer", "pooler", "binary_head")

_GPT2 = {
    "embedding.word_embeddings": "transformer.wte",
    "embedding.position_embeddings": "transformer.wpe",
    "decoder.layers.{}.input_layernorm": "transformer.h.{}.ln_1",
    "decoder.layers.{}.self_attention.linear_qkv": "transformer.h.{}.attn.c_attn",
    "decoder.layers.{}.self_attention.linear_proj": "transformer.h.{}.attn.c_proj",
    "decoder.layers.{}.pre_mlp_layernorm": "transformer.h.{}.ln_2",
    "decoder.layers.{}.mlp.linear_fc1": "transformer.h.{}.mlp.c_fc",
    "decoder.layers.{}.mlp.linear_fc2": "transformer.h.{}.mlp.c_proj",
    "decoder.final_layernorm": "transformer.ln_f",
    "output_layer": "lm_head",
}
_BERT = {
    "embedding.word_embeddings": "bert.embeddings.word_embeddings",
    "embedding.position_embeddings": "bert.embeddings.position_embeddings",
    "embedding.tokentype_embeddings": "bert.embeddings.token_type_embeddings",
    "encoder.layers.{}.self_attention.linear_qkv": "bert.encoder.layer.{}.attention.self",
    "encoder.layers.{}.self_attention.linear_proj": "bert.encoder.layer.{}.attention.output.dense",
    "encoder.layers.{}.mlp.linear_fc1": "bert.encoder.layer.{}.intermediate.dense",
    "encoder.layers.{}.mlp.linear_fc2": "bert.encoder.layer.{}.output.dense",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    "output_layer": "cls.predictions.decoder",
    "binary_head": "cls.seq_relationship",
    "pooler.dense": "bert.pooler.dense",
}
_NAMES: dict[ModelType, dict[str, str]] = {
    "gpt2": _GPT2,
    "megatron-bert": {
        **_BERT,
        "encoder.layers.{}.input_layernorm": "bert.encoder.layer.{}.attention.ln",
        "encoder.layers.{}.pre_mlp_layernorm": "bert.encoder.layer.{}.ln",
        "encoder.final_layernorm": "bert.encoder.ln",
    },
    "bert": {
        **_BERT,
        "embedding.layernorm": "bert.embeddings.LayerNorm",
        "encoder.layers.{}.post_attention_layernorm": "bert.encoder.layer.{}.attention.output.LayerNorm",
        "encoder.layers.{}.post_mlp_layernorm": "bert.encoder.layer.{}.output.LayerNorm",
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """``rows`` rows of one of our parameters from ``ours`` on, which are a tensor's from ``theirs`` on."""

    ours: int
    theirs: int
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedTensor:
    """One tensor of a Hugging Face model, all of whose rows are rows of one of our parameters.

    ``transposed``: transformers' Conv1D keeps [in, out], and our rows are its columns. ``aliases``: other names of the
    same tensor, which files may hold beside it or instead, and which are not written. ``copies``: tensors of their own
    that transformers reads or does not, by its version; written as well.
    """

    name: str
    parameter: Parameter
    runs: tuple[Run, ...]
    transposed: bool = False
    aliases: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """As Hugging Face has it, without pad rows."""
        rows = sum(run.rows for run in self.runs)
        others = self.parameter.shape[1:]
        return (*others, rows) if self.transposed else (rows, *others)


def model_type(shape: ModelShape) -> ModelType:
    """Which of transformers' models computes what a level of this shape does."""
    if shape.architecture == "gpt":
        return "gpt2"
    return "bert" if shape.norm_placement == "post" else "megatron-bert"


def named_tensors(shape: ModelShape) -> tuple[NamedTensor, ...]:
    """All tensors of the model of a level, in the order of :func:`ds_vcycle.schema.parameters`.

    The shape must be one that Hugging Face has (:func:`ds_vcycle.checkpoint.huggingface.settings.require_counterpart`).
    """
    kind = model_type(shape)
    return tuple(tensor for parameter in parameters(shape) for tensor in _of_parameter(parameter, shape, kind))


def head_of(parameter: Parameter) -> str | None:
    """The head a parameter belongs to, or None; a model may come without one."""
    first = parameter.name.partition(".")[0]
    return "lm_head" if first == "output_layer" else first if first in HEADS else None


def _of_parameter(parameter: Parameter, shape: ModelShape, kind: ModelType) -> list[NamedTensor]:
    module, _, value = parameter.template.rpartition(".")
    name = _NAMES[kind][module]
    if parameter.layer is not None:
        name = name.format(parameter.layer)
    if module.endswith("linear_qkv"):
        return _attention(parameter, name, value, shape, kind)
    rows = parameter.dims[0].real
    aliases, copies = _further_names(parameter, shape, kind)
    if parameter.name == "output_layer.bias" and shape.tied_embeddings:
        name = "cls.predictions"
    return [
        NamedTensor(
            name=f"{name}.{value}", parameter=parameter, runs=(Run(ours=0, theirs=0, rows=rows),),
            transposed=kind == "gpt2" and "linear" in module and value == "weight", aliases=aliases, copies=copies,
        )
    ]  # fmt: skip


def _further_names(parameter: Parameter, shape: ModelShape, kind: ModelType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Aliases and copies. An untied BERT reads ``decoder.bias``; older versions made ``bias`` the same tensor."""
    if parameter.name == "output_layer.bias":
        return (("cls.predictions.decoder.bias",), ()) if shape.tied_embeddings else ((), ("cls.predictions.bias",))
    if parameter.name == "embedding.word_embeddings.weight" and shape.tied_embeddings:
        return ("lm_head.weight" if kind == "gpt2" else "cls.predictions.decoder.weight",), ()
    return (), ()


def _attention(parameter: Parameter, name: str, value: str, shape: ModelShape, kind: ModelType) -> list[NamedTensor]:
    """Our rows are q, k, v of head 0, then of head 1, ...; theirs are all heads' q, all k, all v."""
    size = shape.head_dim
    parts = [
        [Run(ours=(3 * head + part) * size, theirs=head * size, rows=size) for head in range(shape.heads)]
        for part in range(3)
    ]
    if kind != "gpt2":
        return [
            NamedTensor(name=f"{name}.{part}.{value}", parameter=parameter, runs=tuple(runs))
            for part, runs in zip(("query", "key", "value"), parts, strict=True)
        ]
    third = shape.heads * size
    fused = tuple(
        Run(ours=run.ours, theirs=part * third + run.theirs, rows=size)
        for part, runs in enumerate(parts)
        for run in runs
    )
    return [
        NamedTensor(name=f"{name}.{value}", parameter=parameter, runs=fused, transposed=value == "weight")
    ]  # fmt: skip
