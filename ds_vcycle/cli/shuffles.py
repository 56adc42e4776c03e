"""Verb of a corpus too large for one process: deduplicate and shuffle its documents as an array job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def shuffle(
    stage: Annotated[Literal["scatter", "gather"], typer.Argument(help="scatter, and when all are done, gather.")],
    sources: Annotated[list[str] | None, typer.Argument(help="scatter: as those of `prepare`.")] = None,
    *,
    out: Annotated[Path, typer.Option(help="Directory to work in; OUT/shuffled is the result, for `prepare`.")],
    task: Annotated[int, typer.Option(envvar="SLURM_ARRAY_TASK_ID", help="Which task this is, from 0.")] = 0,
    tasks: Annotated[int, typer.Option(envvar="SLURM_ARRAY_TASK_COUNT", help="How many there are.")] = 1,
    text_key: Annotated[str, typer.Option(help="JSON key or column that holds the text.")] = "text",
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a `datasets` name.")] = None,
    dataset_split: Annotated[str, typer.Option(help="Split of a `datasets` name.")] = "train",
    seed: Annotated[int, typer.Option(help="Draws the order.")] = 1234,
) -> None:
    """Deduplicate and shuffle documents, task by task; a task that is done is not done again.

    Examples:

    - `ds-vcycle shuffle scatter "wikipedia/*.parquet" "books/*.jsonl.gz" --out data/mixed --task 0 --tasks 1`

    - `ds-vcycle shuffle gather --out data/mixed --task 0 --tasks 1`
    """
    from ds_vcycle.config import UserError
    from ds_vcycle.data.shuffle import gather, scatter

    if stage == "scatter":
        if not sources:
            raise UserError("shuffle scatter: name the sources")
        done = scatter(
            sources, out, task=task, tasks=tasks, text_key=text_key, dataset_config=dataset_config,
            dataset_split=dataset_split,
        )  # fmt: skip
    else:
        if sources:
            raise UserError("shuffle gather takes what scatter has left in --out; leave the sources out")
        done = gather(out, task=task, tasks=tasks, seed=seed)
    left_out = f"{done.duplicates} duplicates and {done.broken} broken ones left out"
    print(f"{stage}, task {task} of {tasks}: {done.documents} documents, {left_out}")
