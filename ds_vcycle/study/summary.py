"""What a study found, as plain values: written to results.json, and rendered from there. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ds_vcycle.comparison import Comparison, ReportError, Row
from ds_vcycle.config import UserError
from ds_vcycle.cycle.stopping import read_status
from ds_vcycle.rundir import Run, read_run
from ds_vcycle.seeds import QUANTITIES, SeedComparison, Spread, compare_variants
from ds_vcycle.study.definition import GroupConfig, Study, Task
from ds_vcycle.study.running import is_done


@dataclass(frozen=True, kw_only=True, slots=True)
class GoingUp:
    """Held-out loss around one refine or growth to ``level``.

    ``steps``: those trained there until the loss was back at ``before``, as evaluations saw it; None if it never was.
    """

    level: int
    before: float
    decoalesced: float | None
    after: float
    steps: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run. Costs are the whole run's; savings are to the baseline's final loss, None where it was not reached."""

    variant: str
    seed: int
    run: str
    final_loss: float
    best_loss: float
    flops: float
    flops_blocks: float
    tokens: float
    seconds: float
    saved_flops: float | None
    saved_flops_blocks: float | None
    saved_tokens: float | None
    saved_seconds: float | None
    going_up: tuple[GoingUp, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSummary:
    """The runs of one group. ``overrides``: of each variant, the group's own left out. ``notes``: of the comparison."""

    name: str
    base: str
    overrides: tuple[str, ...]
    baseline: str
    variants: dict[str, tuple[str, ...]]
    runs: tuple[RunSummary, ...]
    notes: tuple[str, ...]

    def of(self, variant: str) -> tuple[RunSummary, ...]:
        """A variant's runs in the order of the seeds."""
        return tuple(run for run in self.runs if run.variant == variant)

    def saving(self, variant: str, quantity: str) -> Spread:
        """A variant's savings over its seeds; ``quantity``: one of :data:`ds_vcycle.seeds.QUANTITIES`."""
        return Spread(values=tuple(getattr(run, quantity) for run in self.of(variant)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A study. ``missing``: a line for each run that is not in it, and why."""

    title: str
    about: str
    seeds: tuple[int, ...]
    ranks: int
    at_once: int
    groups: tuple[GroupSummary, ...]
    missing: tuple[str, ...]


def summarise(
    study: Study, tasks: Sequence[Task], failed: Collection[str] = ()
) -> tuple[Summary, dict[str, SeedComparison]]:
    """What the finished runs of a study say, and each group's comparison, for its pictures.

    ``failed``: names of runs that have just failed; one that was refused before it began has left no word of it.

    A group without a finished baseline is left out, as is a seed's run whose baseline is not finished, and a run that
    cannot be read.

    Raises:
        UserError: a run directory is of other settings.
    """
    runs, missing = _finished(tasks, failed)
    groups, comparisons = [], {}
    for name, settings in study.groups.items():
        found = _compared(settings, {key[1:]: run for key, run in runs.items() if key[0] == name})
        if found is not None:
            comparisons[name] = found
            groups.append(_group(study, name, found))
        elif any(key[0] == name for key in runs):
            missing.append(f"{name}: its baseline {settings.baseline} is not finished, so nothing is compared")
    return (
        Summary(
            title=study.title,
            about=study.about,
            seeds=tuple(study.seeds),
            ranks=study.ranks,
            at_once=study.at_once,
            groups=tuple(groups),
            missing=tuple(missing),
        ),
        comparisons,
    )


def to_json(summary: Summary) -> str:
    """It as JSON."""
    return json.dumps(asdict(summary), indent=1) + "\n"


def read_summary(path: Path) -> Summary:
    """The summary that a file has of :func:`to_json`.

    Raises:
        ReportError: the file is missing, or something else.
    """
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        groups = tuple(_group_from(group) for group in tree.pop("groups"))
        values: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()}
        return Summary(**values, groups=groups)
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror}); give a study's results.json") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReportError(f"{path}: not a study's results.json; give the one that `ds-vcycle study` wrote") from error


def _finished(tasks: Sequence[Task], failed: Collection[str]) -> tuple[dict[tuple[str, str, int], Run], list[str]]:
    """The finished runs by group, variant and seed, and what there is to say of the others."""
    runs, missing = {}, []
    for task in tasks:
        if is_done(task):
            try:
                run = replace(read_run(task.config.run_dir), name=task.variant)
                runs[task.group, task.variant, task.seed] = run
            except UserError as error:
                missing.append(f"{task.name}: damaged: {error}")
        else:
            has_failed = task.name in failed or read_status(task.config.run_dir) == "failed"
            missing.append(f"{task.name}: {'failed' if has_failed else 'not finished'}")
    return runs, missing


def _compared(settings: GroupConfig, runs: Mapping[tuple[str, int], Run]) -> SeedComparison | None:
    of_variant: dict[str, dict[int, Run]] = {settings.baseline: {}, **{name: {} for name in settings.variants}}
    for (variant, seed), run in runs.items():
        of_variant[variant][seed] = run
    base = of_variant[settings.baseline]
    if not base:
        return None
    kept = {name: {seed: run for seed, run in of_seed.items() if seed in base} for name, of_seed in of_variant.items()}
    return compare_variants([(name, of_seed) for name, of_seed in kept.items() if of_seed])


def _group(study: Study, group: str, found: SeedComparison) -> GroupSummary:
    settings = study.groups[group]
    order = list(settings.variants)
    runs = [_run(seed, row) for seed, comparison in found.comparisons.items() for row in comparison.rows]
    runs.sort(key=lambda run: (run.variant != found.baseline, order.index(run.variant)))
    return GroupSummary(
        name=group,
        base=str(settings.base),
        overrides=tuple(settings.overrides),
        baseline=found.baseline,
        variants={name: variant.words for name, variant in settings.variants.items()},
        runs=tuple(runs),
        notes=_notes(found.comparisons),
    )


def _notes(comparisons: dict[int, Comparison]) -> tuple[str, ...]:
    """What the comparisons have to say of single variants, each once: the first seed's words where seeds say alike."""
    found: dict[str, str] = {}
    for note in (note for comparison in comparisons.values() for note in comparison.notes):
        for words in (" differs from the baseline in ", " planned steps ", " alone was at "):
            if words in note:
                found.setdefault(note.partition(words)[0] + words, note)
    return tuple(found.values())


def _run(seed: int, row: Row) -> RunSummary:
    return RunSummary(
        variant=row.run.name,
        seed=seed,
        run=str(row.run.directory),
        final_loss=row.final_loss,
        best_loss=row.best_loss,
        flops=row.run.total.flops,
        flops_blocks=row.run.total.flops_blocks,
        tokens=row.run.total.tokens,
        seconds=row.run.total.seconds,
        **{key: getattr(row, key) for key in QUANTITIES},
        going_up=_going_up(row.run),
    )


def _going_up(run: Run) -> tuple[GoingUp, ...]:
    return tuple(
        GoingUp(
            level=change.level,
            before=change.before,
            decoalesced=change.decoalesced,
            after=change.after,
            steps=_steps_back(run, change.phase, change.before),
        )
        for change in run.transition_losses
        if change.kind != "coalesce"
    )


def _steps_back(run: Run, phase: int, loss: float) -> int | None:
    """Steps after the change of level ``phase`` until an evaluation of the next phase is at or below ``loss``."""
    back = (at for at in run.evaluations if at.phase in (phase, phase + 1) and at.loss <= loss)
    first = next(back, None)
    if first is None:
        return None
    return 0 if first.phase == phase else first.phase_step


def _group_from(tree: dict[str, Any]) -> GroupSummary:
    runs = tuple(
        RunSummary(**{**run, "going_up": tuple(GoingUp(**change) for change in run["going_up"])})
        for run in tree["runs"]
    )
    variants = {name: tuple(overrides) for name, overrides in tree["variants"].items()}
    return GroupSummary(
        **{
            **tree,
            "runs": runs,
            "variants": variants,
            "overrides": tuple(tree["overrides"]),
            "notes": tuple(tree["notes"]),
        }
    )
