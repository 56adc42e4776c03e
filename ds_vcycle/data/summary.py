"""What ``prepare`` did, for people."""

from __future__ import annotations

from ds_vcycle.data.prepare import PrepareReport


def summary(report: PrepareReport) -> str:
    """Counts of each split, what was left out with the first few places, and the keys a run needs; several lines."""
    lines = [f"{report.out}: a {report.architecture} corpus with {report.vocab_size:,} ids"]
    rows: list[tuple[str, ...]] = [("split", "documents", "sentences", "tokens", "bytes")]
    rows += [
        (name, *(f"{count:,}" for count in (s.documents, s.items, s.tokens, s.bin_bytes + s.idx_bytes)))
        for name, s in report.splits.items()
    ]
    if report.architecture == "gpt":  # whose items are the documents
        rows = [(*row[:2], *row[3:]) for row in rows]
    lines += _aligned(rows)
    lines += _skipped(report)
    lines.append(f"for a run: data.path={report.out} model.vocab_size={report.vocab_size}")
    return "\n".join(lines)


def _skipped(report: PrepareReport) -> list[str]:
    total = sum(report.skipped.values())
    if not total:
        return ["left out: no document"]
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.skipped.items()))
    places = [f"  {broken.file}:{broken.line}: {broken.kind}" for broken in report.examples]
    more = [f"  and {total - len(places):,} more"] if total > len(places) else []
    return [f"left out: {total:,} ({kinds})", *places, *more]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as columns: names flush left, numbers flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    first, *others = widths
    return [
        f"  {name:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, others))
        for name, *cells in rows
    ]
