"""Writes docs/savings.md from the results of studies in docs/studies/: ``python docs/savings_page.py``."""

from __future__ import annotations

from pathlib import Path

from ds_vcycle.study.rendering import markdown
from ds_vcycle.study.summary import read_summary

DOCS = Path(__file__).parent
ORDER = ("savings", "controls", "cycles", "rivals")  # the others follow by name

HEAD = """# What is saved

This page is written by `make savings-page` from the files in docs/studies/, which `ds-vcycle study` wrote; nothing on
it is typed in. Each table names the configuration that made it; `ds-vcycle study --config configs/studies/NAME.yaml`
makes it again, and `make savings` runs one seed of the first and says whether it lies within the spread stated here.

These are models of a million weights trained for minutes on a CPU. A saving at this size says that the method works as
it should and what its parts are worth beside each other; it says nothing about a model of yours. Where a spread is 0.0%
every seed was at the baseline's loss as soon as it came back up to level 1, so that the steps given to the small level
fix the saving; the notes then say how early the small level alone was there, which is what limits these baselines: they
are too short to need the larger model.

"""

PAPER = """## The paper's own table

Not ours and not rerun: what the paper reports for its own models, the cost of small models counted (Zou, Zhang, Deng,
"A Multi-Level Framework for Accelerating Training Transformer Models", ICLR 2024, tables 1, 2 and 4).

| paper's model | method | FLOPs saved | wall time saved |
|---|---|---:|---:|
| BERT-Base | V cycle, 2 levels | 19.0% | 10.8% |
| BERT-Large | V cycle, 2 levels | 37.4% | 32.9% |
| BERT-Large | V cycle, 3 levels | 51.6% | 41.9% |
| GPT-Base | V cycle, 2 levels | 24.1% | 16.5% |
| GPT-Base | StackBERT | 9.5% | 8.4% |
| GPT-Base | bert2BERT | 11.5% | 8.3% |
| GPT-Base | LiGO | 14.1% | 6.9% |
| GPT-Base | Network Expansion | 15.2% | 12.2% |
"""


def page() -> str:
    """The page's text."""
    found = {path.stem: path for path in (DOCS / "studies").glob("*.json")}
    names = [name for name in ORDER if name in found] + sorted(found.keys() - set(ORDER))
    parts = [HEAD]
    for name in names:
        text = markdown(read_summary(found[name]), level=2)
        parts.append(f"{text}\nMade by `configs/studies/{name}.yaml`; every run: docs/studies/{name}.json.\n\n")
    return "".join([*parts, PAPER])


if __name__ == "__main__":
    (DOCS / "savings.md").write_text(page(), encoding="utf-8")
