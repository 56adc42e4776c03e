"""A study's summary as markdown, csv and one self-contained HTML page. Imports no torch."""

from __future__ import annotations

import base64
import csv
import html
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from ds_vcycle.comparison import ReportError
from ds_vcycle.cycle.render import flops_text
from ds_vcycle.report import Cells, markdown_table, saving_text
from ds_vcycle.seeds import QUANTITIES, Spread
from ds_vcycle.study.summary import GroupSummary, RunSummary, Summary

_HEADS = {
    "saved_flops": "FLOPs saved",
    "saved_flops_blocks": "of the blocks",
    "saved_tokens": "tokens saved",
    "saved_seconds": "wall time saved",
}


def verdict(saving: Spread) -> str:
    """One honest sentence about a saving."""
    if saving.mean is None or saving.deviation is None:
        return f"the baseline's loss was reached by {saving.reached} of {len(saving.values)} runs: no saving is shown"
    amount = f"{abs(saving.mean):.1%} of FLOPs {'saved' if saving.mean > 0 else 'more than the baseline'}"
    if len(saving.values) == 1:
        return f"{amount}, by one seed, which shows no spread"
    if abs(saving.mean) <= saving.deviation:
        return f"{amount} on average, with a spread that touches zero: no saving is shown"
    if saving.deviation < 5e-4:
        return f"{amount}, the same for all {len(saving.values)} seeds: each was there at the same evaluation"
    return f"{amount}, the spread of {len(saving.values)} seeds ({saving.deviation:.1%}) not touching zero"


def savings_table(group: GroupSummary) -> Cells:
    """A row for each variant, mean ± standard deviation over the seeds; the baseline first."""
    table = [["", "seeds", "final held-out loss", "whole run, FLOPs", *_HEADS.values()]]
    for variant in _variants(group):
        runs = group.of(variant)
        savings = [str(group.saving(variant, key)) for key in QUANTITIES]
        if variant == group.baseline:
            savings = ["baseline"] * len(QUANTITIES)
        flops = flops_text(statistics.fmean(run.flops for run in runs))
        table.append([variant, str(len(runs)), _mean([run.final_loss for run in runs], "{:.4f}"), flops, *savings])
    return table


def going_up_table(group: GroupSummary) -> Cells:
    """What going up did to the held-out loss, and how long it took to win it back: means over the seeds."""
    table = [["", "to level", "before", "de-coalesced", "after", "steps until back at 'before'"]]
    for variant in _variants(group):
        changes = [run.going_up for run in group.of(variant)]
        for same in zip(*changes):
            steps = [change.steps for change in same]
            back = [value for value in steps if value is not None]
            decoalesced = [change.decoalesced for change in same if change.decoalesced is not None]
            table.append(
                [
                    variant,
                    str(same[0].level),
                    _mean([change.before for change in same], "{:.4f}"),
                    _mean(decoalesced, "{:.4f}") if decoalesced else "-",
                    _mean([change.after for change in same], "{:.4f}"),
                    f"{statistics.fmean(back):.0f}" if len(back) == len(steps) else "never",
                ]
            )
    return table


def markdown(summary: Summary, *, level: int = 1) -> str:
    """The whole study; ``level``: of its heading."""
    mark = "#" * level
    lines = [f"{mark} {summary.title}", "", *_about(summary)]
    for group in summary.groups:
        lines += [f"{mark}# {group.name}", "", _base(group), "", *markdown_table(savings_table(group)), ""]
        lines += [f"- `{name}`: {verdict(group.saving(name, 'saved_flops'))}." for name in _rivals(group)]
        lines += ["", "Going up:", "", *markdown_table(going_up_table(group)), ""] if _goes_up(group) else [""]
        lines += ["What each variant sets:", "", *(f"- `{n}`: {_set(group, n)}" for n in _variants(group)), ""]
        lines += [f"- {note}" for note in group.notes] + ([""] if group.notes else [])
    return "\n".join(lines).rstrip() + "\n"


def to_csv(summary: Summary) -> str:
    """A row for each run, with its overrides."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = [key for key in RunSummary.__dataclass_fields__ if key != "going_up"]
    writer.writerow(["study", "group", "baseline", *keys, "overrides"])
    for group in summary.groups:
        for run in group.runs:
            values = asdict(run)
            overrides = " ".join((*group.overrides, *group.variants[run.variant]))
            writer.writerow([summary.title, group.name, group.baseline, *(values[key] for key in keys), overrides])
    return out.getvalue()


def to_html(summary: Summary, pictures: Mapping[str, Sequence[Path]]) -> str:
    """One page with its pictures inside; ``pictures``: PNG files by group."""
    body = [
        f"<h1>{html.escape(summary.title)}</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in _about(summary) if line),
    ]
    for group in summary.groups:
        body += [f"<h2>{html.escape(group.name)}</h2>", f"<p>{html.escape(_base(group))}</p>"]
        body.append(_html_table(savings_table(group)))
        sentences = (f"{name}: {verdict(group.saving(name, 'saved_flops'))}." for name in _rivals(group))
        body.append(_html_list(sentences))
        body += [_image(path) for path in pictures.get(group.name, ())]
        if _goes_up(group):
            body += ["<h3>Going up</h3>", _html_table(going_up_table(group))]
        body += ["<h3>What each variant sets</h3>", _html_list(f"{n}: {_set(group, n)}" for n in _variants(group))]
        body += ["<h3>Each run</h3>", _html_table(_runs_table(group)), _html_list(group.notes)]
    title = html.escape(summary.title)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n<style>{_STYLE}</style>\n'
        + ("\n".join(body) + "\n</html>\n")
    )


def write_text(path: Path, text: str) -> Path:
    """Write a file of a report.

    Raises:
        ReportError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path}: cannot be written ({error.strerror}); give the study another out") from error
    return path


_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}th,td{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "th:first-child,td:first-child{text-align:left}img{max-width:100%}"
)


def _about(summary: Summary) -> list[str]:
    seeds = ", ".join(map(str, summary.seeds))
    how = f"{summary.ranks} rank{'s' if summary.ranks > 1 else ''} a run, {summary.at_once} at a time"
    lines = [
        summary.about.strip(),
        f"Each run is compared with the baseline of its seed ({seeds}): saved = 1 - cost / baseline's cost to the "
        "baseline's final held-out loss, counted from the first step of the first phase, coarse levels and transitions "
        f"included, evaluation left out; mean ± standard deviation over the seeds. {how}.",
    ]
    if summary.missing:
        lines.append(f"Not here: {'; '.join(summary.missing)}.")
    return [part for line in lines if line for part in (line, "")]


def _base(group: GroupSummary) -> str:
    return f"Base `{group.base}`" + (f" with `{' '.join(group.overrides)}`." if group.overrides else ".")


def _set(group: GroupSummary, variant: str) -> str:
    return " ".join(group.variants[variant]) or "nothing: the base as it is"


def _variants(group: GroupSummary) -> list[str]:
    return list(dict.fromkeys(run.variant for run in group.runs))


def _rivals(group: GroupSummary) -> list[str]:
    return [name for name in _variants(group) if name != group.baseline]


def _goes_up(group: GroupSummary) -> bool:
    return any(run.going_up for run in group.runs)


def _mean(values: Sequence[float], form: str) -> str:
    mean = form.format(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ± {form.format(statistics.stdev(values))}"


def _runs_table(group: GroupSummary) -> Cells:
    table = [["run", "final loss", "FLOPs", "wall time, s", *_HEADS.values()]]
    for run in group.runs:
        savings = (saving_text(getattr(run, key)) for key in _HEADS)
        table.append([run.run, f"{run.final_loss:.4f}", flops_text(run.flops), f"{run.seconds:,.0f}", *savings])
    return table


def _html_table(table: Cells) -> str:
    rows = []
    for index, row in enumerate(table):
        tag = "td" if index else "th"
        rows.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return "<table>" + "\n".join(rows) + "</table>"


def _html_list(items: Iterable[str]) -> str:
    entries = [f"<li>{html.escape(item)}</li>" for item in items]
    return "<ul>" + "\n".join(entries) + "</ul>" if entries else ""


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<p><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></p>'
