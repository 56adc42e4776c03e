"""What DeepSpeed is told, what is refused, and that gradients, norms and the monitor come out right."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ds_vcycle.config import ConfigError, RunConfig, parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.train.deepspeed_config import deepspeed_config
from tests.dist.ranks import values


def config_with(extras: dict[str, Any], stage: int = 1, precision: str = "bf16", **more: Any) -> RunConfig:
    return parse_config(
        {
            "model": {
                "architecture": "gpt",
                "layers": 2,
                "hidden": 8,
                "heads": 2,
                "sequence_length": 4,
                "vocab_size": 9,
            },
            "training": {"global_batch": 24, "micro_batch": 2, "zero_stage": stage, "precision": precision},
            "cycle": {"kind": "flat"},
            "deepspeed": extras,
            "data": {"path": "nowhere"},
            **more,
        }
    )


def told(config: RunConfig, world_size: int = 4) -> dict[str, Any]:
    return deepspeed_config(resolve_levels(config)[0], config, world_size)


def test_our_settings_become_deepspeeds() -> None:
    found = told(config_with({"zero_optimization": {"reduce_bucket_size": 1000}}, optimizer={"grad_clip": 0.5}))
    assert found == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"reduce_bucket_size": 1000, "stage": 1},
    }


@pytest.mark.parametrize(
    "extras",
    [
        {"zero_optimization": {"round_robin_gradients": True, "sub_group_size": 100, "overlap_comm": False}},
        {"zero_optimization": {"stage3_param_persistence_threshold": 7}},
        {"data_types": {"grad_accum_dtype": "fp32"}, "log_level": "info", "comms_logger": {"enabled": True}},
    ],
)
def test_harmless_extras_are_passed_on(extras: dict[str, Any]) -> None:
    found = told(config_with(extras))
    for key, value in extras.items():
        assert found[key] == ({**value, "stage": 1} if key == "zero_optimization" else value)


def test_monitors_are_not_given_to_each_engine() -> None:
    assert "wandb" not in told(config_with({"wandb": {"enabled": False}}))


@pytest.mark.parametrize(
    ("extras", "named"),
    [
        ({"train_batch_size": 8}, "training.global_batch"),
        ({"train_micro_batch_size_per_gpu": 8}, "training.micro_batch"),
        ({"gradient_accumulation_steps": 8}, "training.global_batch"),
        ({"gradient_clipping": 1.0}, "optimizer.grad_clip"),
        ({"optimizer": {"type": "Adam"}}, "optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "lr"),
        ({"bf16": {"enabled": True}}, "training.precision"),
        ({"fp16": {"enabled": True}}, "training.precision"),
        ({"tensorboard": {"enabled": True}}, "logging.tensorboard"),
        ({"zero_optimization": {"stage": 3}}, "training.zero_stage"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "refused"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "refused"),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "refused"),
        ({"zero_optimization": {"reduce_bucket_sizes": 10}}, "did you mean 'reduce_bucket_size'"),
        ({"zero_optimisation": {"reduce_bucket_size": 10}}, "did you mean 'zero_optimization'"),
        ({"zero_optimization": True}, "expected a section"),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "fp32 or bf16"),
        ({"data_types": {"param_dtype": "bf16"}}, "training.precision"),
    ],
)
def test_clashes_are_errors_that_name_the_key_and_ours(extras: dict[str, Any], named: str) -> None:
    key, value = next(iter(extras.items()))
    nested = key in ("zero_optimization", "data_types") and isinstance(value, dict)
    path = f"deepspeed.{key}.{next(iter(value))}" if nested else f"deepspeed.{key}"
    with pytest.raises(ConfigError) as error:
        told(config_with(extras))
    assert path in str(error.value) and named in str(error.value)


@pytest.mark.parametrize(("stage", "precision", "dtype"), [(0, "bf16", "fp32"), (1, "fp32", "bf16")])
def test_impossible_accumulation_is_an_error(stage: int, precision: str, dtype: str) -> None:
    with pytest.raises(ConfigError, match="grad_accum_dtype"):
        told(config_with({"data_types": {"grad_accum_dtype": dtype}}, stage=stage, precision=precision))


def test_a_levels_own_precision_is_what_deepspeed_is_told() -> None:
    both = {"levels": [{}, {"precision": "fp32"}], "cycle": {"kind": "V"}}
    config = config_with({"data_types": {"grad_accum_dtype": "fp32"}}, **both)
    told_of = [deepspeed_config(level, config, 1)["bf16"] for level in resolve_levels(config)]
    assert told_of == [{"enabled": True}, {"enabled": False}]
    config = config_with({"data_types": {"grad_accum_dtype": "bf16"}}, **both)
    fine, coarse = resolve_levels(config)
    deepspeed_config(fine, config, 1)
    with pytest.raises(ConfigError, match=r"grad_accum_dtype=bf16 does not go with precision=fp32 .* of level 2"):
        deepspeed_config(coarse, config, 1)


def test_deepspeed_does_not_clip_at_stage_zero() -> None:
    assert told(config_with({}, stage=0))["gradient_clipping"] == 0.0


JOBS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("real_model", {"architecture": kind, "stage": stage, "precision": precision, "qk_norm": kind == "gpt"})
        for kind, stage, precision in [
            ("gpt", 0, "fp32"), ("gpt", 0, "bf16"), ("bert", 1, "fp32"), ("gpt", 2, "bf16"), ("gpt", 3, "fp32"),
        ]
    ),
]  # fmt: skip
SELF_TESTS: list[tuple[str, dict[str, Any]]] = [
    ("self_test_says", {"stage": 3, "precision": "bf16", "claimed": {}}),
    ("self_test_says", {"stage": 2, "precision": "fp32", "claimed": {"round_robin": True}}),
    ("self_test_says", {"stage": 1, "precision": "bf16", "claimed": {}, "lose_push": True}),
]


@pytest.fixture(scope="module")
def trained() -> dict[int, list[dict[str, Any]]]:
    """The same model and batch trained at tensor-parallel degree 1 and 2, case by case (rank 0's view)."""
    found = {}
    for tp in (1, 2):
        jobs = [(name, {**case, "tp": tp}) for name, case in JOBS]
        found[tp] = values(tp, "tests.dist.cases_zero:run", [jobs])[0]
    return found


@pytest.mark.parametrize("index", range(len(JOBS)), ids=lambda i: "-".join(map(str, list(JOBS[i][1].values())[:3])))
def test_gradient_norm_is_the_same_at_every_tensor_parallel_degree(trained: Any, index: int) -> None:
    one, two = trained[1][index]["norms"], trained[2][index]["norms"]
    assert one[0] > 0.1 and len(set(one)) == 3
    assert two == pytest.approx(one, rel=2e-4 if JOBS[index][1]["precision"] == "fp32" else 2e-2)


def test_stages_and_precisions_agree_on_the_first_gradient_norm(trained: Any) -> None:
    gpt = [trained[1][i]["norms"][0] for i, (_, case) in enumerate(JOBS) if case["architecture"] == "gpt"]
    assert gpt == pytest.approx([gpt[0]] * len(gpt), rel=2e-2)


def test_released_megatron_models_leave_nothing(trained: Any) -> None:
    assert [result["alive"] for tp in (1, 2) for result in trained[tp]] == [0] * (2 * len(JOBS))


def test_the_self_test_stops_every_rank_with_the_deepspeed_version() -> None:
    good, moved, lost = zip(*values(2, "tests.dist.cases_zero:run", [SELF_TESTS]), strict=True)
    assert [rank["said"] for rank in good] == ["", ""]
    for ranks, words in ((moved, "by the rule"), (lost, "was written to its master")):
        assert ranks[0]["said"] == ranks[1]["said"]
        assert words in ranks[0]["said"] and f"DeepSpeed {version('deepspeed')}" in ranks[0]["said"]
    assert all(rank["unchanged"] for rank in (*good, *moved, *lost))


def monitor_case(run_dir: str) -> list[str]:
    """Writes events as a run would, on two ranks."""
    from ds_vcycle.parallel import init_distributed
    from ds_vcycle.train.engine import build_monitor

    init_distributed("cpu")
    csv = {"enabled": True, "output_path": run_dir, "job_name": "csv"}
    monitor = build_monitor(config_with({"csv_monitor": csv}), Path(run_dir))
    monitor.write_events([("train/loss", 2.5, 10), ("train/loss", 2.25, 20)])
    return sorted(p.name for p in Path(run_dir).iterdir())


def test_events_reach_tensorboard_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values(2, "tests.test_engine:monitor_case", [str(tmp_path)])
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(10, 2.5), (20, 2.25)]
    assert (tmp_path / "csv").is_dir()
