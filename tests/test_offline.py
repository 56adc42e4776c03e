"""Coalesce and refine of stored checkpoints: the bits of the operators on whole tensors, and what they may not cost."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_vcycle import cli
from ds_vcycle.checkpoint.offline.blockwise import coarse_fragments
from ds_vcycle.checkpoint.offline.change_of_level import coalesce_checkpoint, refine_checkpoints
from ds_vcycle.checkpoint.offline.processes import Processes
from ds_vcycle.checkpoint.store import open_checkpoint
from ds_vcycle.config import RunConfig, parse_config
from ds_vcycle.levels import ModelShape, resolve_levels
from ds_vcycle.operators import apply
from ds_vcycle.operators.plan import TransitionPlan, plan_transition
from ds_vcycle.schema import parameters
from ds_vcycle.sharding.placement import Layout
from tests.dist.cases_store import on_threads
from tests.dist.ranks import run_ranks, values
from tests.memory import peak_bytes
from tests.operator_cases import config_for, divided, random_weights
from tests.stored import Wholes, differing, load_wholes, store_wholes

_SIZES = {"layers": 6, "hidden": 12, "head_dim": 2}
_UNEQUAL = {"head": [[0, 5, 7], [1], [2, 3, 4, 6, 8, 9, 10], [11]], "layer": [[2, 1], [0], [3, 4, 5]]}


def _divided(model: str, m: int) -> dict[str, int]:
    return divided(model, m, sizes=_SIZES)


# name -> (model, the coarse level's sizes, groupings, operators, tensor-parallel degree of the run)
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any], dict[str, Any], int]] = {
    "adjacent": ("gpt", _divided("gpt", 2), {}, {}, 1),
    "gated, GQA, stacked": ("llama", _divided("llama", 3), {"hidden": "stack", "ffn": "stack", "head": "stack"}, {}, 2),
    "the authors' rules": ("bert_order", _divided("bert", 2), {"layer": "stack"},
                           {"embedding": "reference", "depth_residual": "copy"}, 1),
    "within ranks": ("llama_tied", _divided("llama_tied", 3), {"ffn": "local_stack"}, {"depth_residual": "split"}, 2),
    "post-LN": ("bert_post", {"layers": 3, "hidden": 6, "heads": 4, "ffn": 36}, _UNEQUAL, {}, 2),
    "unequal lists": ("gpt_untied", {"layers": 3, "hidden": 12, "heads": 4, "ffn": 36}, _UNEQUAL, {}, 1),
}  # fmt: skip
_FINE, _COARSE = Layout(world_size=6, tp=2, zero_stage=3), Layout(world_size=3, zero_stage=1)
_STEP = 7
_BUCKETS = {"unequal lists": 100}  # fine elements at once, such that the last block of a parameter is a shorter one
_BUCKET = 200


def _config(name: str) -> RunConfig:
    model, coarse, groupings, operators, tp = CASES[name]
    sizes = {**_SIZES, "tensor_parallel": tp}
    tree = config_for(model, coarse=coarse, groupings=groupings, sizes=sizes).model_dump(mode="json")
    return parse_config({**tree, "operators": {"alpha": 0.75, "beta": 0.5, **operators}})


def _plan(config: RunConfig) -> TransitionPlan:
    fine, coarse = resolve_levels(config)
    return plan_transition(fine, coarse, config.operators)


def _bucket(name: str, plan: TransitionPlan) -> int:
    """So many elements at once that some parameters, rows merged, end in a block of fewer rows than the others have."""
    bucket = _BUCKETS.get(name, _BUCKET)
    blocks = [(item, coarse_fragments(item, ("master",), bucket)) for item in plan.maps]
    short = [
        item.coarse.name
        for item, (first, *_, last) in ((item, found) for item, found in blocks if len(found) > 1)
        if item.dims[0].sizes.max() > 1 and item.coarse.numel // item.coarse.shape[0] < last.length < first.length
    ]
    assert short
    return bucket


def _random(shape: ModelShape, seed: int) -> Wholes:
    kinds = enumerate(("master", "exp_avg", "exp_avg_sq"))
    return {kind: random_weights(shape, seed=seed + i, positive=kind == "exp_avg_sq") for i, kind in kinds}


def _state(config: RunConfig, level: int, adam_step: int = _STEP) -> dict[str, Any]:
    return {"level": level, "config": config.model_dump(mode="json"), "adam_step": adam_step}


def _by_processes(count: int, work: Callable[[Processes], object]) -> None:
    """Call a verb as the processes of a launch would, on threads."""

    def one(rank: int, gather: Any, barrier: Any) -> None:
        work(Processes(rank=rank, world_size=count, gather=gather, barrier=barrier))

    assert on_threads(count, one) == [None] * count


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_coalesce_equals_the_operator_on_whole_tensors(tmp_path: Path, name: str, count: int) -> None:
    config = _config(name)
    plan = _plan(config)
    x = _random(plan.fine.shape, seed=1)
    store_wholes(tmp_path / "fine", x, plan.fine.shape, _FINE, _state(config, 1))
    bucket = _bucket(name, plan)
    _by_processes(
        count, lambda who: coalesce_checkpoint(tmp_path / "fine", tmp_path / "to", processes=who, bucket=bucket)
    )
    wanted = {kind: apply.coalesce(plan, x[kind], kind) for kind in apply.QUANTITIES}
    assert differing(load_wholes(tmp_path / "to", plan.coarse.shape), wanted) == []


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_refine_equals_the_operator_on_whole_tensors(tmp_path: Path, name: str, count: int) -> None:
    config = _config(name)
    plan = _plan(config)
    x, y = _random(plan.fine.shape, seed=1), _random(plan.coarse.shape, seed=5)
    store_wholes(tmp_path / "fine", x, plan.fine.shape, _FINE, _state(config, 1))
    store_wholes(tmp_path / "coarse", y, plan.coarse.shape, _COARSE, _state(config, 2))
    paths, bucket = (tmp_path / "fine", tmp_path / "coarse", tmp_path / "to"), _bucket(name, plan)
    _by_processes(count, lambda who: refine_checkpoints(*paths, processes=who, bucket=bucket))
    wanted = {kind: apply.decoalesce(plan, y[kind], kind) for kind in ("exp_avg", "exp_avg_sq")}
    wanted["master"] = apply.refine(plan, x["master"], y["master"], alpha=0.75, beta=0.5)
    assert differing(load_wholes(tmp_path / "to", plan.fine.shape), wanted) == []


@pytest.mark.parametrize(("moments", "step"), [("reset", _STEP), ("map", 0)])
def test_moments_are_dropped_where_they_are_reset_or_missing(tmp_path: Path, moments: str, step: int) -> None:
    config = _config("adjacent")
    plan = _plan(config)
    x = _random(plan.fine.shape, seed=1)
    kept = x if step else {"master": x["master"]}
    store_wholes(tmp_path / "fine", kept, plan.fine.shape, _FINE, _state(config, 1, step))
    coalesce_checkpoint(tmp_path / "fine", tmp_path / "to", overrides=[f"operators.moments={moments}"])
    assert set(load_wholes(tmp_path / "to", plan.coarse.shape)) == {"master"}
    with open_checkpoint(tmp_path / "to") as checkpoint:
        assert checkpoint.state["adam_step"] == 0


def test_overrides_and_a_flat_run(tmp_path: Path) -> None:
    """A run without a second level gets one of half the size, or of the sizes that are given."""
    tree = _config("adjacent").model_dump(mode="json") | {"cycle": {"kind": "flat"}, "levels": []}
    config = parse_config(tree)
    (level,) = resolve_levels(config)
    store_wholes(tmp_path / "fine", {"master": random_weights(level.shape, seed=1)}, level.shape, _FINE,
                 _state(config, 1, 0))  # fmt: skip
    half = coalesce_checkpoint(tmp_path / "fine", tmp_path / "half").level.shape
    assert (half.layers, half.hidden, half.heads, half.ffn) == (3, 6, 6, 18)
    given = ["levels.1.hidden=4", "levels.1.layers=6", "levels.1.ffn=36", "levels.1.groupings.head=stack"]
    wide = coalesce_checkpoint(tmp_path / "fine", tmp_path / "wide", overrides=given).level
    assert (wide.shape.layers, wide.shape.hidden, wide.shape.heads, wide.shape.ffn) == (6, 4, 6, 36)
    assert wide.groupings.head == "stack"
    # The coarse checkpoint's configuration has both levels, so that refine needs to be told nothing
    refine_checkpoints(tmp_path / "fine", tmp_path / "wide", tmp_path / "back", alpha=1.0, beta=0.0)
    plan = _plan(parse_config({**tree, "cycle": {"kind": "V"}, "levels": [{}, {"hidden": 4, "layers": 6, "ffn": 36,
                               "groupings": {"head": "stack"}}]}))  # fmt: skip
    y = load_wholes(tmp_path / "wide", wide.shape)["master"]
    back = load_wholes(tmp_path / "back", level.shape)
    assert differing(back, {"master": apply.decoalesce(plan, y)}) == []
    # Nor where the coarse model was trained in a run of its own, which knows of one level, but for its groups
    own = {"hidden": 4, "heads": 6, "ffn": 36, "layers": 6, "head_dim": 2}
    alone = parse_config({**tree, "model": {**tree["model"], **own, "kv_groups": 6}})
    store_wholes(tmp_path / "own", {"master": y}, wide.shape, _COARSE, _state(alone, 1, 0))
    refine_checkpoints(tmp_path / "fine", tmp_path / "own", tmp_path / "again", alpha=1.0, beta=0.0,
                       overrides=["levels.1.groupings.head=stack"])  # fmt: skip
    assert differing(load_wholes(tmp_path / "again", level.shape), back) == []
    # A second step down: level 3 halves level 2, but for what cannot be halved
    given = ["levels.2.layers=1"]
    third = coalesce_checkpoint(tmp_path / "half", tmp_path / "third", overrides=given).level
    assert (third.index, third.shape.layers, third.shape.hidden, third.shape.heads) == (3, 1, 3, 3)


def test_memory_is_a_few_buckets_however_large_the_parameters(tmp_path: Path) -> None:
    sizes = {"vocab_size": 60_000, "hidden": 32, "heads": 4, "head_dim": 8, "ffn": 64, "layers": 2}
    config = config_for("gpt", coarse={}, sizes=sizes)
    plan = _plan(config)
    x, y = (random_weights(level.shape, seed=1) for level in (plan.fine, plan.coarse))
    store_wholes(tmp_path / "fine", {"master": x}, plan.fine.shape, Layout(world_size=1), _state(config, 1, 0))
    store_wholes(tmp_path / "coarse", {"master": y}, plan.coarse.shape, Layout(world_size=1), _state(config, 2, 0))
    bucket = 1 << 14
    largest = 4 * max(value.numel() for value in x.values())
    assert largest > 100 * 4 * bucket
    mapped = {path.stat().st_size for path in tmp_path.rglob("*.safetensors")}
    down = peak_bytes(lambda: coalesce_checkpoint(tmp_path / "fine", tmp_path / "down", bucket=bucket), mapped)
    blend = {"alpha": 0.5, "beta": 0.25, "bucket": bucket}
    up = peak_bytes(
        lambda: refine_checkpoints(tmp_path / "fine", tmp_path / "coarse", tmp_path / "up", **blend), mapped
    )
    assert bucket * 4 < down < 10 * 4 * bucket
    assert bucket * 4 < up < 10 * 4 * bucket


def _both(folder: Path, sizes: dict[str, int]) -> int:
    """Store ``fine`` and ``coarse`` of a model; the bytes of its largest parameter."""
    config = config_for("gpt", coarse={}, sizes=sizes)
    plan = _plan(config)
    for name, level in (("fine", plan.fine), ("coarse", plan.coarse)):
        whole = {"master": random_weights(level.shape, seed=1)}
        store_wholes(folder / name, whole, level.shape, Layout(world_size=1), _state(config, level.index, 0))
    return max(4 * parameter.numel for parameter in parameters(plan.fine.shape))


@pytest.mark.parametrize("verb", ["coalesce", "refine"])
def test_resident_memory_grows_by_less_than_the_largest_parameter_and_a_bucket(tmp_path: Path, verb: str) -> None:
    """What torch does not see counts too: the plan, reading, checksums, and what the allocator keeps."""
    sizes = {"hidden": 512, "heads": 8, "head_dim": 64, "ffn": 512, "layers": 2}
    largest, bucket = _both(tmp_path / "large", {"vocab_size": 40_000, **sizes}), 1 << 18
    _both(tmp_path / "small", {"vocab_size": 100, "hidden": 16, "heads": 4, "head_dim": 4, "ffn": 32, "layers": 2})
    assert largest > 80e6
    arguments = [verb, tmp_path / "small", tmp_path / "large", bucket]
    (growth,) = values(1, "tests.dist.cases_offline:resident_growth", arguments)
    assert 4 * bucket < growth < largest + 4 * bucket


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``fine`` and ``coarse`` of one run, ``other`` of another model, ``parked`` without a configuration, and more."""
    root = tmp_path_factory.mktemp("stored")
    config = _config("adjacent")
    plan, other = _plan(config), config_for("gpt", coarse={}, sizes={"hidden": 48})
    layout = Layout(world_size=2, zero_stage=1)
    for name, level, state in (
        ("fine", plan.fine, _state(config, 1, 0)),
        ("coarse", plan.coarse, _state(config, 2, 0)),
        ("other", resolve_levels(other)[0], _state(other, 1, 0)),
        ("parked", plan.fine, {"parked_level": 1}),
        ("broken", plan.fine, _state(config, 1, 0)),
    ):
        store_wholes(root / name, {"master": random_weights(level.shape, seed=1)}, level.shape, layout, state)
    data = bytearray((root / "broken" / "rank-00001.safetensors").read_bytes())
    data[-1] ^= 1
    (root / "broken" / "rank-00001.safetensors").write_bytes(data)
    (root / "file").write_text("x")
    (root / "folder").mkdir()
    (root / "folder" / "kept.txt").write_text("x")
    (root / "run" / "checkpoints").mkdir(parents=True)
    (root / "run" / "checkpoints" / "latest").write_text("step-1")
    return root


# (the verb's arguments, of which NAME: stands for the directory, and what the error must say)
REFUSED = [
    ("coalesce --from :fine --to :coarse", "--to .*coarse exists; give another directory, or .*--overwrite"),
    ("coalesce --from :fine --to :file --overwrite", "--to .*file is no checkpoint"),
    ("coalesce --from :fine --to :folder --overwrite", "--to .*folder is no checkpoint, so --overwrite leaves it"),
    ("coalesce --from :fine --to :fine --overwrite", "--to .*fine holds the checkpoint that is read"),
    ("coalesce --from :fine --to :run/checkpoints/mine", "lies among a run's checkpoints"),
    ("coalesce --from :fine --to :file/new", "--to .*file.new: .*file is a file; give a path"),
    ("coalesce --from :nothing --to :new", "nothing does not exist; give a checkpoint directory"),
    ("coalesce --from :folder --to :new", "folder holds no checkpoint; give"),
    ("coalesce --from :file --to :new", "file is a file; give"),
    ("coalesce --from :parked --to :new", r"does not say which level .*\(a parked level\?\)"),
    ("coalesce --from :broken --to :new", r"new was not saved: .*rank-00001\.safetensors is damaged"),
    ("coalesce --from :fine --to :new levels.1.hiden=8", "levels.1.hiden"),
    ("coalesce --from :fine --to :new levels.1.hidden=7", "12 fine indices do not divide into 7"),
    ("coalesce --from :fine --to :new model.hidden=48", "model.hidden=48 changes no level"),
    ("coalesce --from :fine --to :new nonsense", "expected key.sub=value"),
    ("refine --fine :fine --coarse :coarse --to :new --alpha 2", "operators.alpha"),
    ("refine --fine :coarse --coarse :fine --to :new", "coarse .*fine has layers=6, more than the 3 of .*coarse; give"),
    ("refine --fine :other --coarse :coarse --to :new", "other holds a model with layers=12, level 1 has 6"),
    ("refine --fine :fine --coarse :other --to :new", "other has layers=12, more than the 6 of --fine"),
    ("refine --fine :fine --coarse :coarse --to :new levels.1.ffn=9", "coarse holds a model with ffn=18, .* has 9"),
]  # fmt: skip


def _listing(root: Path) -> list[str]:
    return sorted(f"{path.relative_to(root)} {path.stat().st_mtime_ns}" for path in root.rglob("*"))


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_what_cannot_be_done_is_one_line_and_nothing_is_written(
    stored: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    before = _listing(stored)
    assert cli.run([word.replace(":", f"{stored}{os.sep}", 1) for word in line.split()]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("ds-vcycle: error: ")
    assert re.search(message, error), error
    assert _listing(stored) == before


def test_every_process_of_a_launch_says_the_same(stored: Path, tmp_path: Path) -> None:
    """Also where only one of them finds out: the damaged file is in one's share of the parameters."""
    for source, message in (("parked", "does not say which level"), ("broken", "rank-00001.safetensors is damaged")):
        command = ["coalesce", "--from", str(stored / source), "--to", str(tmp_path / "new")]
        log = str(tmp_path / source)
        results = run_ranks(2, "tests.dist.cases_resume:command_line", [command, log], check=False, wait_all=True)
        assert [result.exit_code for result in results] == [2, 2], results
        said = [Path(f"{log}.{rank}").read_text().splitlines()[-1].partition("error: ")[2] for rank in (0, 1)]
        assert said[0] == said[1] and message in said[0]
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_overwrite_replaces_a_checkpoint_and_leaves_its_neighbours(stored: Path, tmp_path: Path) -> None:
    (tmp_path / ".tmp-mine").mkdir()
    (tmp_path / "to").mkdir()
    arguments = ["coalesce", "--from", str(stored / "fine"), "--to", str(tmp_path / "to"), "--overwrite"]
    assert cli.run(arguments) == 0  # an empty directory may be replaced
    with open_checkpoint(tmp_path / "to") as checkpoint:
        first = checkpoint.manifest.identity
    assert cli.run(arguments) == 0
    with open_checkpoint(tmp_path / "to") as checkpoint:
        assert checkpoint.manifest.identity != first
        checkpoint.verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-mine", "to"]
