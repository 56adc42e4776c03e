"""What `make transitions` measures, on tiny runs: its losses obey what the operators promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.transitions import BLENDS, Row, caption, cells, markdown
from tests.dist.ranks import values
from tests.tiny import Architecture, tiny_run

Rows = dict[tuple[str, str], Row]
POLICIES = [(embedding, depth) for embedding in ("reference", "lossless") for depth in ("copy", "split", "first")]
LIVELY = {"model.init_std": 0.2, "evaluation.samples": 4}  # blocks that matter although they are hardly trained


def _measured(folder: Path, architecture: Architecture, changes: dict[str, Any]) -> Rows:
    config = tiny_run(folder / "run", architecture, changes=LIVELY | changes)
    (rows,) = values(1, "tests.bench.transitions:measure", [config])
    return {(row.embedding, row.depth): row for row in rows}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return _measured(tmp_path_factory.mktemp("gpt"), "gpt", {"cycle.coarse.steps": 8, "cycle.coarse.lr": 5e-3})


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return _measured(tmp_path_factory.mktemp("bert"), "bert", {"cycle.coarse.steps": 1, "cycle.coarse.lr": 1e-12})


def _changes(rows: Rows) -> dict[tuple[str, str], float]:
    """By how much de-coalescing alone changes the coarse level's loss."""
    return {key: abs(row.up["de-coalesced"] - row.trained) for key, row in rows.items()}


def test_lossless_and_first_keep_the_loss_and_nothing_else_does(trained: Rows, untrained: Rows) -> None:
    for rows in (trained, untrained):
        assert list(rows) == POLICIES
        changes = _changes(rows)
        assert changes.pop(("lossless", "first")) < 1e-4
        assert min(changes.values()) > 1e-3, changes


def test_copy_changes_the_loss_more_than_split_which_keeps_the_first_order(trained: Rows) -> None:
    changes = _changes(trained)
    assert changes["lossless", "copy"] > 2 * changes["lossless", "split"]


def test_what_all_policies_and_what_split_and_first_share(trained: Rows) -> None:
    assert len({row.before for row in trained.values()}) == 1
    for embedding in ("reference", "lossless"):
        copy, split, first = (trained[embedding, depth] for depth in ("copy", "split", "first"))
        assert (split.coalesced, split.trained) == (first.coalesced, first.trained)
        assert abs(split.coalesced - copy.coalesced) > 1e-3
        assert abs(split.up["in between"] - first.up["in between"]) > 1e-3
    assert all(row.trained < row.coalesced - 0.1 for row in trained.values())


def test_correction_by_an_untrained_coarse_level_changes_nothing(untrained: Rows) -> None:
    """With y = C x the correction x + P(y) - P(C x) is x, whatever the policies; the other blends are not."""
    for row in untrained.values():
        assert row.trained == pytest.approx(row.coalesced, abs=1e-6)
        assert row.up["correct"] == pytest.approx(row.before, abs=1e-5)
        assert abs(row.up["in between"] - row.before) > 1e-3
        assert abs(row.up["interpolate"] - row.before) > 1e-3


def test_the_table_has_the_losses_in_the_order_of_a_cycle(tmp_path: Path) -> None:
    losses = dict(zip(BLENDS, (5.0, 5.25, 5.5, 5.125), strict=True))
    row = Row(embedding="lossless", depth="first", before=6.5, coalesced=6.75, trained=5.0, up=losses)
    title = caption(tiny_run(tmp_path / "run"), [row])
    header, rule, line = markdown(title, cells([row])).strip().splitlines()[-3:]
    assert "level 1 after 3 steps 6.500; level 2 trained for 4 steps" in title
    assert line == "| lossless | first | 6.750 | 5.000 | 5.000 | 5.250 | 5.500 | 5.125 |"
    assert header.count("|") == rule.count("|") == line.count("|")
    assert "interpolate (0.25, 0.75) | correct (1, 1) | in between (1, 0.25)" in header
