"""The target model, and how the smaller levels differ from it."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ds_vcycle.config.section import Grouping, Precision, Section


class ModelConfig(Section):
    """The target model (level 1) and how Megatron-core builds it."""

    architecture: Literal["gpt", "bert"]
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    head_dim: int | None = Field(None, ge=1, description="default hidden / heads; the same at every level")
    kv_groups: int | None = Field(None, ge=1, description="grouped-query attention; default heads")
    ffn: int | None = Field(None, ge=1, description="default 4 x hidden")
    sequence_length: int = Field(ge=2)
    vocab_size: int = Field(ge=2, description="the tokenizer's size, padding not counted")
    tied_embeddings: bool = True
    position: Literal["learned", "rope"] = "learned"
    normalization: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_placement: Literal["pre", "post"] = Field("pre", description="post: the original BERT, norms after branches")
    norm_eps: float = Field(1e-5, gt=0)
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = Field(
        "gelu", description="gelu_tanh: GPT-2's, by the tanh approximation"
    )
    bias: bool = True
    qk_norm: bool = False
    dropout: float = Field(0.1, ge=0, lt=1)
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    init_std: float = Field(0.02, gt=0)
    sentence_order: bool = Field(False, description="BERT: pooler and sentence-order head")
    tensor_parallel: int = Field(1, ge=1)
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    transformer_engine: Literal["auto", "never", "always"] = "auto"
    megatron: dict[str, Any] = Field(default_factory=dict, description="further TransformerConfig options")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden={self.hidden} is not a multiple of heads={self.heads}; change one of them or set head_dim"
            )
        groups = self.kv_groups or self.heads
        if self.heads % groups:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_groups={groups}; change one of them")
        if self.architecture == "bert" and self.position != "learned":
            raise ValueError("position=rope is not supported for bert; set position=learned")
        if self.architecture == "gpt" and self.sentence_order:
            raise ValueError("sentence_order=true is for bert; remove it")
        if self.architecture == "gpt" and self.norm_placement == "post":
            raise ValueError("norm_placement=post is for bert; set norm_placement=pre")
        if self.position == "rope" and (self.head_dim or self.hidden // self.heads) % 2:
            raise ValueError("position=rope turns pairs of features and needs an even head_dim; set an even head_dim")
        return self


class GroupingsConfig(Section):
    """Which fine indices of an axis share one coarse index (DESIGN: groupings)."""

    hidden: Grouping = "adjacent"
    head: Grouping = "adjacent"
    ffn: Grouping = "adjacent"
    layer: Grouping = "adjacent"


class LevelConfig(Section):
    """Overrides of one level; what is not given halves width and depth of the level above."""

    layers: int | None = Field(None, ge=1)
    hidden: int | None = Field(None, ge=1)
    heads: int | None = Field(None, ge=1)
    kv_groups: int | None = Field(None, ge=1)
    ffn: int | None = Field(None, ge=1)
    tensor_parallel: int | None = Field(None, ge=1)
    zero_stage: int | None = Field(None, ge=0, le=3)
    micro_batch: int | None = Field(None, ge=1)
    precision: Precision | None = None
    lr: float | None = Field(None, gt=0)
    steps: int | None = Field(None, ge=0, description="steps of each of the level's coarse or final phases")
    groupings: GroupingsConfig | None = Field(None, description="from the level above to this one")
