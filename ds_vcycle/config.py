"""One YAML file per run: the tree of settings, its defaults, and what is refused.

Defaults < file < dotted overrides (``model.hidden=256``). Every key is checked before anything runs; an
error names the key, the value and the remedy. Imports no torch, so that ``ds-vcycle plan`` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ds_vcycle.explain import explain
from ds_vcycle.yaml_tree import TreeError, apply_override, read_tree


class UserError(ValueError):
    """Something the user can mend: the command line prints it without a traceback and exits with 2."""


class ConfigError(UserError):
    """A key of the run's configuration is unknown, out of range or contradicts another."""


def _kind(value: object) -> str:
    return "#list" if isinstance(value, list) else "#one"


# A list or something else, decided before it is validated: a wrong value is then one error, not one per possibility.
_list_or_one = Discriminator(_kind)
Grouping = Annotated[
    Annotated[Literal["adjacent", "stack", "local_stack"], Tag("#one")]
    | Annotated[list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]], Tag("#list")],
    _list_or_one,
]
EmbeddingPolicy = Literal["lossless", "reference"]
DepthPolicy = Literal["copy", "split", "first"]
MomentPolicy = Literal["reset", "map"]


def _no_fp16(value: object) -> object:
    if value == "fp16":
        raise ValueError(
            "fp16 is refused: its loss scaler skips steps, so a phase's step count, learning rate and Adam's step "
            "would no longer be functions of the position; use bf16 or fp32"
        )
    return value


Precision = Annotated[Literal["fp32", "bf16"], BeforeValidator(_no_fp16)]


class Section(BaseModel):
    """A part of the tree: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Without this, pydantic takes ``layers: yes`` for one layer."""
        if isinstance(value, bool) and info.field_name and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError(
                f"{str(value).lower()} is a switch to YAML, and a value is expected; give one, or remove the key"
            )
        return value


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


class LrConfig(Section):
    """Learning rate of a phase: linear warm-up from 0 to ``peak``, then ``schedule`` down to ``minimum``."""

    peak: float = Field(1e-3, gt=0)
    minimum: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    rewarmup_steps: int | None = Field(
        None, ge=0, description="warm-up of a phase that follows a change of level; default warmup_steps"
    )
    schedule: Literal["cosine", "linear", "constant"] = "cosine"


class PhaseConfig(Section):
    """Settings of one kind of training phase; what is not given comes from the level, then from ``lr``."""

    steps: int | None = Field(None, ge=0)
    lr: float | None = Field(None, gt=0, description="peak learning rate")
    minimum_lr: float | None = Field(None, ge=0)
    warmup_steps: int | None = Field(None, ge=0)
    schedule: Literal["cosine", "linear", "constant"] | None = None
    until_loss: float | None = Field(None, gt=0, description="end early once the held-out loss is at or below")


class PhaseEntry(PhaseConfig):
    """One entry of an explicit phase list: exactly one of train, coalesce, refine names the (fine) level."""

    train: int | None = Field(None, ge=1)
    coalesce: int | None = Field(None, ge=1)
    refine: int | None = Field(None, ge=1)
    alpha: float | None = Field(None, ge=0, le=1)
    beta: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [k for k in ("train", "coalesce", "refine") if getattr(self, k) is not None]
        if len(kinds) != 1:
            raise ValueError(f"a phase is exactly one of train, coalesce, refine; this one has {kinds or 'none'}")
        training = [k for k in PhaseConfig.model_fields if getattr(self, k) is not None]
        if kinds != ["train"] and training:
            raise ValueError(f"{kinds[0]} takes no {training[0]}; remove it")
        if kinds == ["train"] and self.steps is None:
            raise ValueError("a train phase needs steps; add steps: N")
        if kinds != ["refine"] and (self.alpha is not None or self.beta is not None):
            raise ValueError(f"{kinds[0]} takes no alpha or beta; they belong to refine")
        return self


class CycleConfig(Section):
    """Which levels are trained when. ``V``: down with ``initial``, up with ``coarse``, level 1 with ``final``."""

    kind: Literal["flat", "V", "phases"] = "V"
    levels: int = Field(2, ge=1)
    flat: PhaseConfig = PhaseConfig()
    initial: PhaseConfig = PhaseConfig()
    coarse: PhaseConfig = PhaseConfig()
    final: PhaseConfig = PhaseConfig()
    phases: list[PhaseEntry] = Field(default_factory=list)
    park: Literal["host", "disk"] = Field(
        "host", description="where a kept fine level lives while coarse levels train; it is written to the disk anyway"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind == "phases" and not self.phases:
            raise ValueError("kind=phases needs a list phases; add it or choose kind=flat or kind=V")
        if self.kind != "phases" and self.phases:
            raise ValueError(f"phases is given but kind={self.kind}; remove phases or set kind=phases")
        if self.kind == "V" and self.levels < 2:
            raise ValueError(f"kind=V needs levels >= 2, not {self.levels}; raise it or set kind=flat")
        if self.kind == "phases" and self.levels not in (CycleConfig.model_fields["levels"].default, self.visited):
            raise ValueError(f"levels={self.levels} but the phases visit {self.visited}; remove levels")
        return self

    @property
    def visited(self) -> int:
        """How many levels the cycle visits."""
        if self.kind == "flat":
            return 1
        if self.kind == "V":
            return self.levels
        return max(max(p.train or 1, (p.coalesce or 0) + 1, (p.refine or 0) + 1) for p in self.phases)


class OperatorsConfig(Section):
    """Blend and policies of the transitions."""

    alpha: float = Field(1.0, ge=0, le=1)
    beta: float = Field(0.25, ge=0, le=1)
    embedding: EmbeddingPolicy = "lossless"
    depth_residual: DepthPolicy = "first"
    moments: MomentPolicy = "map"
    groupings: GroupingsConfig = GroupingsConfig()
    kernels: Literal["auto", "triton", "torch"] = Field(
        "auto", description="what sums and blends: triton on a GPU, torch anywhere, auto by the device; the same bits"
    )


class OptimizerConfig(Section):
    """AdamW."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    grad_clip: float = Field(1.0, ge=0, description="global norm; 0 switches clipping off")


class TrainingConfig(Section):
    """Batch, precision, ZeRO and seed."""

    global_batch: int = Field(ge=1, description="samples of one step")
    micro_batch: int = Field(ge=1, description="samples of one forward pass on one data-parallel rank")
    zero_stage: int = Field(1, ge=0, le=3)
    precision: Precision = Field("fp32", description="of the weights computed with; the masters are always fp32")
    seed: int = Field(1234, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    init_from: Path | None = Field(
        None,
        description="checkpoint or run directory that level 1 starts from instead of from the seed: its weights and, "
        "unless operators.moments=reset, Adam's moments and step if it has them",
    )


class Blend(Section):
    """One prepared corpus and its share of the samples."""

    path: Path
    weight: float = Field(1.0, gt=0)


class DataConfig(Section):
    """Directories written by ``ds-vcycle prepare``."""

    path: Annotated[
        Annotated[Path, Tag("#one")] | Annotated[list[Blend], Field(min_length=1), Tag("#list")], _list_or_one
    ] = Field(description="one prepared directory, or a list of {path, weight}")
    mask_probability: float = Field(0.15, gt=0, lt=1, description="BERT: share of tokens predicted")
    seed: int = Field(1234, ge=0)

    @property
    def blend(self) -> tuple[Blend, ...]:
        """The corpora as a list, a single path having weight 1."""
        return tuple(self.path) if isinstance(self.path, list) else (Blend(path=self.path),)


class EvaluationConfig(Section):
    """Held-out loss on a fixed set."""

    every_steps: int = Field(100, ge=1)
    samples: int = Field(256, ge=1)
    micro_batch: int | None = Field(None, ge=1, description="default training.micro_batch")
    transitions: bool = Field(
        True, description="also inside each refine, of the model de-coalesced at alpha 1 before it is blended"
    )


class SavingConfig(Section):
    """When to write a checkpoint besides each phase's end."""

    every_steps: int = Field(0, ge=0, description="0: at phase ends only")
    keep_last: int = Field(2, ge=1)
    keep_phase_ends: bool = Field(False, description="never remove the checkpoint at the end of a phase")
    background: bool = Field(
        False, description="write while training goes on, from a copy of masters and moments in host memory"
    )


class LoggingConfig(Section):
    """What is written besides metrics.jsonl."""

    every_steps: int = Field(10, ge=1, description="how many steps' metrics are read back from the device at once")
    tensorboard: bool = True


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    levels: list[LevelConfig] = Field(default_factory=list, description="overrides of level 1, 2, ...")
    cycle: CycleConfig = CycleConfig()
    operators: OperatorsConfig = OperatorsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr: LrConfig = LrConfig()
    training: TrainingConfig
    data: DataConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    saving: SavingConfig = SavingConfig()
    logging: LoggingConfig = LoggingConfig()
    deepspeed: dict[str, Any] = Field(default_factory=dict, description="further DeepSpeed settings")
    run_dir: Path = Path("runs/run")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        share = DataConfig.model_fields["mask_probability"].default
        if self.model.architecture == "gpt" and self.data.mask_probability != share:
            raise ValueError(
                f"data.mask_probability={self.data.mask_probability} is for model.architecture=bert; remove it"
            )
        return self


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file, apply dotted overrides (``key.sub=value``, the value in YAML) and validate the whole.

    Raises:
        ConfigError: naming the file or key, the value and what to change.
    """
    if not path.is_file():
        raise ConfigError(
            f"--config {path}: no such file; give the path of a run's YAML file, e.g. configs/demo_gpt.yaml"
        )
    try:
        tree = read_tree(path)
    except TreeError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    try:
        for override in overrides or []:
            apply_override(tree, override)
    except TreeError as error:
        raise ConfigError(str(error)) from error
    return parse_config(tree, source=f"{path} and overrides" if overrides else str(path))


def parse_config(tree: dict[str, Any], *, source: str = "config") -> RunConfig:
    """Validate a tree of plain values into a :class:`RunConfig` (raises :class:`ConfigError`)."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        errors = error.errors()
        unknown = [entry for entry in errors if entry["type"] == "extra_forbidden"]  # often the misspelt missing one
        raise ConfigError("\n".join(f"{source}: {explain(e, RunConfig)}" for e in unknown or errors)) from error
