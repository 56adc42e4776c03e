"""Which implementation a run's transitions take: said once in its log, refused before the first step."""

from __future__ import annotations

import pytest

from ds_vcycle.config import UserError
from ds_vcycle.cycle.runner import run_training
from tests.operator_models import single_process
from tests.tiny import tiny_run

group = pytest.fixture(single_process, scope="module")
SHORT = {f"cycle.{phase}": {"steps": 1} for phase in ("initial", "coarse", "final")} | {"evaluation.every_steps": 9}


def test_the_choice_is_said_once(group, tmp_path, capfd):
    run_training(tiny_run(tmp_path / "run", changes=SHORT))
    assert capfd.readouterr().err.count("transitions: kernels torch (cpu)\n") == 1


def test_triton_on_a_cpu_is_refused_before_the_first_step(group, tmp_path, capfd):
    with pytest.raises(UserError, match=r"^operators\.kernels: triton has no compiler for cpu tensors"):
        run_training(tiny_run(tmp_path / "run", changes=SHORT | {"operators.kernels": "triton"}))
    assert "[1/" not in capfd.readouterr().err
    assert not list((tmp_path / "run").glob("checkpoints/*"))
