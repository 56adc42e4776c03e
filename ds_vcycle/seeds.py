"""Savings over several seeds: each run against the baseline of its own seed, then mean and spread. Imports no torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_vcycle.comparison import Comparison, ReportError, Row, compare_runs
from ds_vcycle.rundir import Run

QUANTITIES = ("saved_flops", "saved_flops_blocks", "saved_tokens", "saved_seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A saving over seeds. ``values``: of each seed, None where the loss was not reached.

    ``mean`` and ``deviation`` (the sample's, 0 for one seed) are None unless every seed reached it: a mean over those
    that happened to get there would be a selection.
    """

    values: tuple[float | None, ...]

    @property
    def reached(self) -> int:
        """How many seeds reached the loss."""
        return sum(value is not None for value in self.values)

    @property
    def mean(self) -> float | None:
        """Over all seeds."""
        found = [value for value in self.values if value is not None]
        return statistics.fmean(found) if len(found) == len(self.values) else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds, n - 1 in its denominator."""
        found = [value for value in self.values if value is not None]
        if len(found) < len(self.values):
            return None
        return statistics.stdev(found) if len(found) > 1 else 0.0

    def __str__(self) -> str:
        if self.mean is None or self.deviation is None:
            return f"reached by {self.reached} of {len(self.values)}"
        return f"{self.mean:+.1%}" + (f" ± {self.deviation:.1%}" if len(self.values) > 1 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Runs that differ in their seeds only, ``rows`` in the order of ``seeds``; ``savings`` by :data:`QUANTITIES`."""

    name: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    savings: dict[str, Spread]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedComparison:
    """The variants but for the baseline's, and the comparison of each seed."""

    baseline: str
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]
    comparisons: dict[int, Comparison]


def seeds_of_baseline(runs: Sequence[Run]) -> int:
    """With how many seeds the baseline, the first run, was run: above 1, :func:`compare_seeds` says more."""
    return sum(_but_for_the_seed(run) == _but_for_the_seed(runs[0]) for run in runs)


def compare_seeds(runs: Sequence[Run]) -> SeedComparison:
    """Compare runs of several seeds with the variant of the first of them.

    Raises:
        ReportError: a seed is there twice or lacks its baseline, or runs are not comparable.
    """
    variants: dict[str, dict[int, Run]] = {}
    for run in runs:
        of_seed = variants.setdefault(_but_for_the_seed(run), {})
        seed = run.config.training.seed
        if seed in of_seed:
            raise ReportError(
                f"{run.directory} and {of_seed[seed].directory} are the same run with the same training.seed={seed}; "
                "leave one of them out"
            )
        of_seed[seed] = run
    return compare_variants([(_name(of_seed), of_seed) for of_seed in variants.values()])


def compare_variants(variants: Sequence[tuple[str, Mapping[int, Run]]]) -> SeedComparison:
    """Compare named variants, each with its run of each seed, with the first of them.

    Raises:
        ReportError: a seed lacks its baseline, or runs are not comparable.
    """
    (baseline, base), *rest = variants
    for _, of_seed in rest:
        for seed, run in of_seed.items():
            if seed not in base:
                known = ", ".join(map(str, sorted(base)))
                raise ReportError(
                    f"{run.directory} has training.seed={seed}, and the baseline has runs of {known} only; run the "
                    f"baseline with training.seed={seed}, or leave this run out"
                )
    comparisons = {
        seed: compare_runs([run, *(found[seed] for _, found in rest if seed in found)]) for seed, run in base.items()
    }
    return SeedComparison(
        baseline=baseline,
        seeds=tuple(base),
        variants=tuple(_variant(name, found, comparisons) for name, found in rest),
        comparisons=comparisons,
    )


def _variant(name: str, runs: Mapping[int, Run], comparisons: Mapping[int, Comparison]) -> Variant:
    rows = tuple(next(row for row in comparisons[seed].rows if row.run is run) for seed, run in runs.items())
    savings = {key: Spread(values=tuple(getattr(row, key) for row in rows)) for key in QUANTITIES}
    return Variant(name=name, seeds=tuple(runs), rows=rows, savings=savings)


def _but_for_the_seed(run: Run) -> str:
    tree = run.config.model_dump(mode="json")
    tree["run_dir"] = tree["training"]["seed"] = tree["data"]["seed"] = None
    return json.dumps(tree, sort_keys=True)


def _name(runs: dict[int, Run]) -> str:
    """What the runs' names begin with alike, or the first one's."""
    names = [run.name for run in runs.values()]
    if len(set(names)) == 1:
        return names[0]
    alike = 0
    while len({name[: alike + 1] for name in names}) == 1 and alike < min(map(len, names)):
        alike += 1
    return names[0][:alike].rstrip("-_./ 0123456789") or names[0]
