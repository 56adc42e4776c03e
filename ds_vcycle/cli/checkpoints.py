"""Verbs on finished checkpoints: coalesce, refine, convert, inspect."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ds_vcycle.config import UserError

PolicyOverrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides of the recorded configuration: `operators.depth_residual=copy levels.1.hidden=64`."),
]
Target = Annotated[Path, typer.Option("--to", help="Directory to write; it appears complete or not at all.")]
Overwrite = Annotated[bool, typer.Option(help="Replace an earlier one there.")]
HuggingFaceConfig = Annotated[
    Path | None, typer.Option("--config", "-c", help="A run's YAML file, for a Hugging Face model, which has none.")
]
Form = Annotated[
    Literal["store", "huggingface"] | None,
    typer.Option("--format", help="A checkpoint or a Hugging Face directory; default: what the (fine) model is."),
]
ShardSize = Annotated[str, typer.Option("--max-shard-size", help="Hugging Face: the most a file holds, as 5GB.")]


def coalesce(
    source: Annotated[
        Path, typer.Option("--from", help="A checkpoint, a run directory (its latest), or a Hugging Face directory.")
    ],
    to: Target,
    overrides: PolicyOverrides = None,
    config: HuggingFaceConfig = None,
    form: Form = None,
    max_shard_size: ShardSize = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Coalesce a finished checkpoint to the next smaller level, weights and moments, without a model or a GPU.

    The smaller level is the one of the run's configuration, or half the width and depth. Memory holds a few blocks of
    one parameter, however large the model is. Examples:

    - `ds-vcycle coalesce --from runs/large --to small`

    - `deepspeed --num_gpus 4 --module ds_vcycle coalesce --from runs/large --to small levels.1.layers=6`

    - `ds-vcycle coalesce --from models/gpt2 --to models/gpt2-half`
    """
    from ds_vcycle.checkpoint.offline.change_of_level import coalesce_checkpoint
    from ds_vcycle.checkpoint.offline.output import Output
    from ds_vcycle.checkpoint.offline.processes import launched
    from ds_vcycle.checkpoint.offline.progress import bar, summary

    with launched() as processes:
        with bar("coalesce", enabled=processes.rank == 0) as advance:
            output = Output(to=to, form=form, overwrite=overwrite, max_shard_size=max_shard_size)
            written = coalesce_checkpoint(
                source, output, config_file=config, overrides=overrides or [], processes=processes, advance=advance
            )
        if processes.rank == 0:
            print(summary(written))


def refine(
    fine: Annotated[Path, typer.Option(help="The kept large model: a checkpoint, a run, a Hugging Face directory.")],
    coarse: Annotated[Path, typer.Option(help="The trained small model, of the same run or of one of its own.")],
    to: Target,
    overrides: PolicyOverrides = None,
    alpha: Annotated[float | None, typer.Option(help="Default: operators.alpha of the configuration.")] = None,
    beta: Annotated[float | None, typer.Option(help="Default: operators.beta of the configuration.")] = None,
    config: HuggingFaceConfig = None,
    form: Form = None,
    max_shard_size: ShardSize = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """De-coalesce a trained small checkpoint and blend it with the large one it came from; no model, no GPU.

    Give the overrides that `coalesce` was given, unless the small checkpoint's configuration has both levels. Examples:

    - `ds-vcycle refine --fine runs/large --coarse runs/small --to blended`

    - `deepspeed --num_gpus 4 --module ds_vcycle refine --fine runs/large --coarse runs/small --to blended --beta 0.5`
    """
    from ds_vcycle.checkpoint.offline.change_of_level import refine_checkpoints
    from ds_vcycle.checkpoint.offline.output import Output
    from ds_vcycle.checkpoint.offline.processes import launched
    from ds_vcycle.checkpoint.offline.progress import bar, summary

    with launched() as processes:
        with bar("refine", enabled=processes.rank == 0) as advance:
            output = Output(to=to, form=form, overwrite=overwrite, max_shard_size=max_shard_size)
            written = refine_checkpoints(
                fine, coarse, output, alpha=alpha, beta=beta, config_file=config, overrides=overrides or [],
                processes=processes, advance=advance,
            )  # fmt: skip
        if processes.rank == 0:
            print(summary(written))


def convert(
    source: Annotated[
        Path,
        typer.Option(
            "--from",
            help="A checkpoint, a run (its latest), RUN@STEP, a Hugging Face directory, or a DeepSpeed checkpoint.",
        ),
    ],
    to: Target,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Of the configuration: `model.sentence_order=false` leaves heads out.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="A run's YAML file (RUN/config.yaml is one), for a model of Hugging Face or DeepSpeed.",
        ),
    ] = None,
    form: Annotated[
        Literal["store", "huggingface", "deepspeed-universal"] | None,
        typer.Option("--format", help="Default: a Hugging Face directory of a checkpoint, a checkpoint of the rest."),
    ] = None,
    max_shard_size: ShardSize = "5GB",
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel degree of another layout.")] = None,
    dp: Annotated[int | None, typer.Option("--dp", min=1, help="Data-parallel ranks of another layout.")] = None,
    zero: Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage of another layout.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert to or from Hugging Face or DeepSpeed's universal checkpoints, from its native ones, or to another layout.

    Hugging Face directories have weights only: GPT-2 and BERT, pre-LN (MegatronBert) and post-LN (Bert). What has no
    counterpart, is missing or left over is named and refused; whole heads may be missing. With `--tp`, `--dp` or
    `--zero`, rewrite a run's checkpoint for another layout, moments, parked levels and all: a run directory to go on
    from with `--resume`. Examples:

    - `ds-vcycle convert --from runs/large@20000 --to models/large`

    - `ds-vcycle convert --from models/bert-large-uncased --to start model.sentence_order=false`

    - `ds-vcycle convert --from runs/large --to moved --tp 4 --dp 16 --zero 1`

    DeepSpeed's own checkpoints, moments and all: native ones (ZeRO 1 to 3) and universal ones are read with `--config`,
    the run whose model they are of; the universal layout is written for engines with `load_universal`:

    - `ds-vcycle convert --from saved --to start --config run.yaml`

    - `ds-vcycle convert --from runs/large --to universal --format deepspeed-universal`
    """
    if (tp, dp, zero) != (None, None, None):
        given = {"--config": config, "--format": form, "an override": overrides}
        for name in (name for name, value in given.items() if value):
            raise UserError(f"{name} is for Hugging Face models, --tp, --dp and --zero are for checkpoints; drop one")
        _reshard(source, to, (tp, dp, zero), overwrite=overwrite)
        return
    from ds_vcycle.checkpoint.deepspeed.files import is_deepspeed

    if is_deepspeed(source) or form == "deepspeed-universal":
        _deepspeed(source, to, form, config, overrides or [], overwrite=overwrite)
        return
    from ds_vcycle.checkpoint.offline.convert_huggingface import convert as convert_weights
    from ds_vcycle.checkpoint.offline.output import Output
    from ds_vcycle.checkpoint.offline.progress import bar

    output = Output(to=to, form=form, overwrite=overwrite, max_shard_size=max_shard_size)
    with bar("convert", enabled=True) as advance:
        written = convert_weights(source, output, config=config, overrides=overrides or [], advance=advance)
    print(written)


def _deepspeed(
    source: Path, to: Path, form: str | None, config: Path | None, overrides: list[str], *, overwrite: bool
) -> None:
    from ds_vcycle.checkpoint.deepspeed.files import is_deepspeed
    from ds_vcycle.checkpoint.offline.convert_deepspeed import from_deepspeed, to_universal
    from ds_vcycle.checkpoint.offline.progress import bar

    with bar("convert", enabled=True) as advance:
        if not is_deepspeed(source):
            if config is not None:
                raise UserError(f"--config {config}: {source} records its own configuration; change it with overrides")
            written = to_universal(source, to, overrides=overrides, overwrite=overwrite, advance=advance)
        elif form in (None, "store"):
            written = from_deepspeed(
                source, to, config=config, overrides=overrides, overwrite=overwrite, advance=advance
            )
        else:
            raise UserError(f"--format {form}: {source} is DeepSpeed's; convert it to a checkpoint first, then that")
    print(written)


def _reshard(source: Path, to: Path, layout: tuple[int | None, int | None, int | None], *, overwrite: bool) -> None:
    from ds_vcycle.checkpoint.offline.processes import launched
    from ds_vcycle.checkpoint.offline.progress import bar
    from ds_vcycle.checkpoint.offline.relayout import TargetLayout
    from ds_vcycle.checkpoint.offline.reshard import reshard

    tp, dp, zero = layout
    with launched() as processes:
        with bar("convert", enabled=processes.rank == 0) as advance:
            target = TargetLayout(tp=tp, dp=dp, zero_stage=zero)
            written = reshard(source, to, target, overwrite=overwrite, processes=processes, advance=advance)
        if processes.rank == 0:
            print(written)


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a run directory (its latest), or RUN@STEP.")],
    verify: Annotated[bool, typer.Option(help="Compare every tensor with its checksum.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is in a checkpoint, and whether it and the parked levels it needs are whole: exit code 0, or 2.

    Examples:

    - `ds-vcycle inspect runs/mine`

    - `ds-vcycle inspect runs/mine@20000 --no-verify`
    """
    from ds_vcycle.checkpoint.offline.inspection import inspect_checkpoint
    from ds_vcycle.checkpoint.offline.progress import bar

    with bar("checksums", enabled=sys.stderr.isatty()) as advance:
        found = inspect_checkpoint(checkpoint, verify=verify, advance=advance)
    if as_json:
        print(json.dumps({"directory": str(found.directory), **found.facts}, indent=1))
    else:
        print(found)
