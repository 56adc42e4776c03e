"""The verb of a study."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_vcycle.config import UserError

if TYPE_CHECKING:
    from ds_vcycle.study.definition import Study, Task
    from ds_vcycle.study.summary import Summary


def study(
    config: Annotated[Path, typer.Option("--config", "-c", help="The study's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Dotted overrides of the file: `seeds=[1,2,3] budget_minutes=90`.")
    ] = None,
    task: Annotated[
        int | None,
        typer.Option(min=0, help="Run only this one of its runs (from 0), as a Slurm array does; no report."),
    ] = None,
    count: Annotated[
        bool, typer.Option("--count", help="Print how many runs it has, and their names; run none.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Write the report of what is finished; run nothing.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="A results.json: say whether these savings lie within its spread.")
    ] = None,
) -> None:
    """Run named variants of base configurations over seeds, and report what each saved. What is done is skipped.

    Killed or stopped, the same command goes on where it was. The report (OUT/report.html, one file with its pictures;
    report.md, runs.csv, results.json) is of the runs that are finished.

    Examples:

    - `ds-vcycle study --config configs/studies/savings.yaml`

    - `ds-vcycle study --config STUDY.yaml --task 3` in each job of a Slurm array, and `--report` at the end

    Exit code 1: a run failed; 75: the budget was spent or it was asked to stop, the same command goes on.
    """
    from ds_vcycle.study.definition import load_study, tasks_of
    from ds_vcycle.study.summary import read_summary

    found = load_study(config, overrides or ())
    tasks = tasks_of(found)
    documented = None if against is None else read_summary(against)
    if count:
        for index, one in enumerate(tasks):
            print(f"{index} {one.name}")
        return
    if task is not None:
        if task >= len(tasks):
            raise UserError(f"--task {task}: the study has {len(tasks)} runs, from 0; give --array=0-{len(tasks) - 1}")
        raise typer.Exit(_run(found, tasks[task : task + 1])[0])
    code, failed = (0, []) if report else _run(found, tasks)
    _report(found, tasks, failed, documented)
    if code:
        raise typer.Exit(code)


def _run(study: Study, tasks: Sequence[Task]) -> tuple[int, list[str]]:
    """Run what is not done of these; the exit code, and the names of those that failed."""
    from ds_vcycle.cycle.stopping import EXIT_STOPPED
    from ds_vcycle.study.running import run_tasks

    outcomes = run_tasks(study, tasks)
    failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
    if failed:
        return 1, failed
    return 0 if set(outcomes.values()) == {"finished"} else EXIT_STOPPED, []


def _report(study: Study, tasks: Sequence[Task], failed: Sequence[str], documented: Summary | None) -> None:
    from rich.console import Console

    from ds_vcycle.study.reporting import agreement, print_report, write_report
    from ds_vcycle.study.summary import summarise

    summary, comparisons = summarise(study, tasks, failed)
    print_report(summary, Console())
    if documented is not None:
        for line in agreement(summary, documented):
            print(f"- {line}")
    written = write_report(summary, comparisons, study.out)
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
