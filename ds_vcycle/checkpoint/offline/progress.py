"""What a person sees of an offline verb: a bar on rank 0 while it works, and what was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ds_vcycle.checkpoint.offline.output import Advance, Written


@contextmanager
def bar(title: str, *, enabled: bool) -> Iterator[Advance]:
    """A bar of the elements done in this process, for the length of the block; it appears with the first of them."""
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TaskProgressColumn()
    progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not enabled)
    task = progress.add_task(title, total=None)

    def advance(done: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()


def summary(written: Written) -> str:
    """What was written, by which policies, and what to do with it."""
    shape, operators = written.level.shape, written.config.operators
    moments = f"Adam's moments of step {written.adam_step:,}" if written.adam_step else "no moments"
    groups = ", ".join(
        f"{axis} {grouping if isinstance(grouping, str) else 'as listed'}"
        for axis, grouping in written.groupings.model_dump().items()
    )
    use = (
        "from_pretrained loads it; ds-vcycle convert makes a checkpoint of it"
        if written.form == "huggingface"
        else f"a run starts from it with training.init_from={written.directory}"
    )
    return (
        f"written: {written.directory}: level {written.level.index} (layers {shape.layers}, hidden {shape.hidden}, "
        f"heads {shape.heads}, ffn {shape.ffn}), {moments}\n"
        f"embedding {operators.embedding}, depth_residual {operators.depth_residual}, groupings {groups}\n"
        f"{use}"
    )
