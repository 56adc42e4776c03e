"""Settings of all tests; what needs programs that are not installed here is left out, and said."""

from __future__ import annotations

import pytest
import torch

from tests.slurm import cluster, hosts, missing

torch.set_num_threads(1)


def _missing() -> dict[str, list[str]]:
    return {"slurm": missing(cluster.PROGRAMS), "ssh": missing(hosts.PROGRAMS)}


def pytest_report_header() -> list[str]:
    """Say which tests cannot be run here."""
    return [
        f"tests marked {mark} are left out: {', '.join(programs)} not installed (tests/slurm/install)"
        for mark, programs in _missing().items()
        if programs
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect them."""
    marks = [mark for mark, programs in _missing().items() if programs]
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in marks)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
