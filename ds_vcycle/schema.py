"""The parameters of each architecture: name, dims with axis and role, tensor-parallel dim. Imports no torch.

This table is what the operators, the sharding, the checkpoints and the model builder all read. Names are
Megatron-core's own (local layer spec). A test holds the table against the built modules: name for name,
shape for shape, ``partition_dim`` for ``partition_dim``, nothing left over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_vcycle.config import EmbeddingPolicy
from ds_vcycle.levels import ModelShape

Axis = Literal["hidden", "head", "ffn", "vocab", "position", "token_type", "label", "head_dim"]
Role = Literal["produces", "consumes"]
Initial = Literal["normal", "scaled_normal", "zero", "one"]
Branch = Literal["attention", "mlp"]
WIDTH_AXES: tuple[Axis, ...] = ("hidden", "head", "ffn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dim:
    """One dim of a tensor. Row ``(part * length + i) * block + offset`` belongs to index i of the axis.

    ``parts``: copies of the axis laid end to end (2 for a gated fc1: gate rows, then up rows).
    ``block``: rows of one axis index (a KV group's q, k, v rows). ``pad``: trailing rows that stand for nothing
    (padded vocabulary): zero, never mapped, never stored.
    """

    axis: Axis
    role: Role
    length: int
    parts: int = 1
    block: int = 1
    pad: int = 0

    @property
    def size(self) -> int:
        """Rows with the pad rows."""
        return self.real + self.pad

    @property
    def real(self) -> int:
        """Rows that stand for something."""
        return self.parts * self.length * self.block


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of one level. ``template`` is the name with ``{}`` for the layer number.

    ``residual_writer``: it ends a branch and adds to the residual stream. ``normed_branch``: it is of the norm that
    follows the sum with this branch (post-LN layers).
    """

    template: str
    layer: int | None
    dims: tuple[Dim, ...]
    tp_dim: int | None = None
    residual_writer: bool = False
    normed_branch: Branch | None = None
    initial: Initial = "normal"

    @property
    def name(self) -> str:
        """Megatron's name of the parameter."""
        return self.template if self.layer is None else self.template.format(self.layer)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape over all tensor-parallel ranks, pad rows included."""
        return tuple(dim.size for dim in self.dims)

    @property
    def numel(self) -> int:
        """Elements of the global shape, pad rows included."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def tp_stride(self) -> int:
        """Megatron's ``partition_stride``: in how many runs a rank's slice of ``tp_dim`` lies in the global dim."""
        return 1 if self.tp_dim is None else self.dims[self.tp_dim].parts

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape on one of ``tp`` tensor-parallel ranks."""
        return tuple(size // tp if d == self.tp_dim else size for d, size in enumerate(self.shape))

    def global_ranges(self, dim: int, tp: int, rank: int) -> tuple[tuple[int, int], ...]:
        """The global index ranges [start, end) of ``dim`` that tensor-parallel rank ``rank`` holds, in local order."""
        size = self.dims[dim].size
        if dim != self.tp_dim:
            return ((0, size),)
        per_part = size // self.tp_stride
        run = per_part // tp
        starts = (part * per_part + rank * run for part in range(self.tp_stride))
        return tuple((start, start + run) for start in starts)


def parameters(shape: ModelShape, embedding: EmbeddingPolicy = "lossless") -> tuple[Parameter, ...]:
    """All parameters of a level, in Megatron's order of registration; roles follow the embedding policy.

    Under ``lossless`` the norm that feeds a tied head consumes (DESIGN section 3); under ``reference`` the
    embeddings consume and every norm produces. Post-LN layers take the same roles: the norm after the embeddings and
    those after the branches produce, and there is no last norm.
    """
    lossless = embedding == "lossless"
    embedding_role: Role = "produces" if lossless else "consumes"
    head_norm_role: Role = "consumes" if lossless and shape.tied_embeddings else "produces"
    hidden = Dim(axis="hidden", role=embedding_role, length=shape.hidden)
    vocab = Dim(axis="vocab", role="produces", length=shape.vocab_size, pad=shape.padded_vocab - shape.vocab_size)
    table = [_plain("embedding.word_embeddings.weight", vocab, hidden, tp_dim=0)]
    if shape.position == "learned":
        position = Dim(axis="position", role="produces", length=shape.sequence_length)
        table.append(_plain("embedding.position_embeddings.weight", position, hidden))
    if shape.architecture == "bert":
        token_type = Dim(axis="token_type", role="produces", length=2)
        table.append(_plain("embedding.tokentype_embeddings.weight", token_type, hidden))
    if shape.norm_placement == "post":
        table += _norm(shape, "embedding.layernorm", "produces")
    block = "encoder" if shape.architecture == "bert" else "decoder"
    for layer in range(shape.layers):
        table += _layer(shape, f"{block}.layers.{{}}.", layer)
    if shape.architecture == "gpt":
        table += _norm(shape, "decoder.final_layernorm", head_norm_role)
        if not shape.tied_embeddings:
            table.append(_plain("output_layer.weight", vocab, _hidden(shape, "consumes"), tp_dim=0))
    else:
        if shape.norm_placement == "pre":
            table += _norm(shape, "encoder.final_layernorm", "produces")
        table += _bert_heads(shape, vocab, head_norm_role)
    return tuple(table)


def parameter_count(shape: ModelShape) -> int:
    """Elements of all parameters of a level, padded vocabulary included (as built)."""
    return sum(parameter.numel for parameter in parameters(shape))


def _layer(shape: ModelShape, prefix: str, layer: int) -> list[Parameter]:
    group = shape.head_dim
    qkv = Dim(axis="head", role="produces", length=shape.kv_groups, block=(shape.heads_per_group + 2) * group)
    attended = Dim(axis="head", role="consumes", length=shape.kv_groups, block=shape.heads_per_group * group)
    fc1 = Dim(axis="ffn", role="produces", length=shape.ffn, parts=2 if shape.activation == "swiglu" else 1)
    fc2 = Dim(axis="ffn", role="consumes", length=shape.ffn)
    into, out = _hidden(shape, "consumes"), _hidden(shape, "produces")
    attention, mlp = prefix + "self_attention.", prefix + "mlp."
    pre = shape.norm_placement == "pre"
    table = _norm(shape, prefix + "input_layernorm", "produces", layer) if pre else []
    table += _linear(shape, attention + "linear_proj", (out, attended), layer, tp_dim=1, writer=True)
    table += _linear(shape, attention + "linear_qkv", (qkv, into), layer, tp_dim=0)
    if shape.qk_norm:
        inner = Dim(axis="head_dim", role="produces", length=group)
        table += _norm(shape, attention + "q_layernorm", "produces", layer, inner)
        table += _norm(shape, attention + "k_layernorm", "produces", layer, inner)
    if pre:
        table += _norm(shape, prefix + "pre_mlp_layernorm", "produces", layer)
    table += _linear(shape, mlp + "linear_fc1", (fc1, into), layer, tp_dim=0)
    table += _linear(shape, mlp + "linear_fc2", (out, fc2), layer, tp_dim=1, writer=True)
    if not pre:
        table += _norm(shape, prefix + "post_attention_layernorm", "produces", layer, branch="attention")
        table += _norm(shape, prefix + "post_mlp_layernorm", "produces", layer, branch="mlp")
    return table


def _bert_heads(shape: ModelShape, vocab: Dim, head_norm_role: Role) -> list[Parameter]:
    into, out = _hidden(shape, "consumes"), _hidden(shape, "produces")
    table = [_plain("lm_head.dense.weight", out, into), _plain("lm_head.dense.bias", out, initial="zero")]
    table += _norm(shape, "lm_head.layer_norm", head_norm_role)
    if not shape.tied_embeddings:
        table.append(_plain("output_layer.weight", vocab, into, tp_dim=0))
    table.append(_plain("output_layer.bias", vocab, tp_dim=0, initial="zero"))
    if shape.sentence_order:
        label = Dim(axis="label", role="produces", length=2)
        table += [_plain("binary_head.weight", label, into), _plain("binary_head.bias", label, initial="zero")]
        table += [_plain("pooler.dense.weight", out, into), _plain("pooler.dense.bias", out, initial="zero")]
    return table


def _hidden(shape: ModelShape, role: Role) -> Dim:
    return Dim(axis="hidden", role=role, length=shape.hidden)


def _plain(name: str, *dims: Dim, tp_dim: int | None = None, initial: Initial = "normal") -> Parameter:
    return Parameter(template=name, layer=None, dims=dims, tp_dim=tp_dim, initial=initial)


def _norm(
    shape: ModelShape,
    name: str,
    role: Role,
    layer: int | None = None,
    dim: Dim | None = None,
    branch: Branch | None = None,
) -> list[Parameter]:
    dims = (dim or _hidden(shape, role),)
    kinds: list[tuple[str, Initial]] = [("weight", "one"), ("bias", "zero")]
    return [
        Parameter(template=f"{name}.{kind}", layer=layer, dims=dims, normed_branch=branch, initial=initial)
        for kind, initial in (kinds if shape.normalization == "layernorm" else kinds[:1])
    ]


def _linear(
    shape: ModelShape, name: str, dims: tuple[Dim, Dim], layer: int, *, tp_dim: int, writer: bool = False
) -> list[Parameter]:
    scaled = writer and shape.norm_placement == "pre"  # the norms of a post-LN model bound its residual stream
    initial: Initial = "scaled_normal" if scaled else "normal"
    weight = Parameter(
        template=f"{name}.weight", layer=layer, dims=dims, tp_dim=tp_dim, residual_writer=writer, initial=initial
    )
    if not shape.bias:
        return [weight]
    bias = Parameter(
        template=f"{name}.bias", layer=layer, dims=dims[:1], tp_dim=0 if tp_dim == 0 else None,
        residual_writer=writer, initial="zero",
    )  # fmt: skip
    return [weight, bias]
