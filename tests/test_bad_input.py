"""Bad input ends in one error on every rank, exit code 2, with nothing written, changed or left half made."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import yaml

from ds_vcycle import cli
from tests.dist.cases_bad_input import Outcome, tree
from tests.dist.ranks import free_port, values
from tests.tiny import tiny_run

RANKS = 2

# name: (overrides or options of `train --config run.yaml`, what the message must say)
CONFIGURATION: dict[str, tuple[str, Sequence[str]]] = {
    "unknown key at the top": ("trainig={}", ["unknown key 'trainig'", "did you mean 'training'?"]),
    "unknown key in a section": ("model.hiden=64", ["unknown key 'model.hiden'", "did you mean 'hidden'?"]),
    "unknown key in levels": ("levels=[{},{laiers: 2}]", ["unknown key 'levels.1.laiers'", "did you mean 'layers'?"]),
    "unknown key in phases": (
        "cycle={kind: phases, phases: [{train: 1, stepps: 3}]}",
        ["unknown key 'cycle.phases.0.stepps'", "did you mean 'steps'?"],
    ),
    "wrong type": ("model.layers=four", ["model.layers='four'", "integer"]),
    "a switch for a number": ("model.layers=yes", ["model.layers", "true"]),
    "not finite": ("lr.peak=.nan", ["lr.peak=nan", "finite"]),
    "fp16": ("training.precision=fp16", ["training.precision", "fp16 is refused", "use bf16 or fp32"]),
    "override without a value": ("model.hidden", ["'model.hidden'", "key.sub=value"]),
    "override without a key": ("=3", ["'=3'", "key.sub=value"]),
    "override past a list's end": ("levels.9.hidden=3", ["'levels.9.hidden=3'", "'9' is not an index", "levels=[...]"]),
    "override below a value": ("model.hidden.x=1", ["'model.hidden.x=1'", "model.hidden is a value"]),
    "override that is no YAML": ("model.hidden=[1", ["'model.hidden=[1'", "not YAML"]),
    "a GPT with norms after its branches": (
        "model.norm_placement=post",
        ["norm_placement=post is for bert", "set norm_placement=pre"],
    ),
    "hidden not a multiple of heads": ("model.hidden=34", ["hidden=34", "heads=4", "head_dim"]),
    "phases beside the V cycle's": (
        "cycle.kind=phases cycle.phases=[{train: 1, steps: 3}]",
        ["cycle: initial is set, but kind=phases does not read it; remove cycle.initial", "remove cycle.initial"],
    ),
}
LAYOUT: dict[str, tuple[str, Sequence[str]]] = {
    "heads over ranks": (
        "model.tensor_parallel=2 levels=[{},{heads: 1}]",
        ["level 2: heads=1 is not divisible by tensor_parallel=2", "change heads or tensor_parallel"],
    ),
    "ffn over ranks": (
        "model.tensor_parallel=2 model.ffn=126",
        ["level 2: ffn=63 is not divisible by tensor_parallel=2", "change ffn or tensor_parallel"],
    ),
    "ranks over tensor parallelism": (
        "levels=[{tensor_parallel: 4},{}]",
        ["level 1: tensor_parallel=4 does not divide the 2 ranks", "start a multiple of 4"],
    ),
    "batch over ranks": ("training.global_batch=6", ["training.global_batch=6", "micro_batch=2", "2 data-parallel"]),
    "odd layers": ("model.layers=3", ["level 2: layers of level 1 is 3", "set levels.1.layers"]),
    "grouping that is no partition": (
        "operators.groupings.head=[[0,1],[1,2]]",
        ["groupings.head", "index 1 is in groups 0 and 1", "keep it in one"],
    ),
    "groups that do not divide": ("levels=[{},{hidden: 20}]", ["groupings.hidden=adjacent", "32", "20"]),
    "coarse larger than fine": ("levels=[{},{layers: 6}]", ["level 2: layers=6 exceeds level 1's 4", "lower it"]),
    "sizes for level 1 among the levels": ("levels=[{hidden: 64}]", ["levels.0", "under model"]),
    "more levels than the cycle has": ("levels=[{},{},{}]", ["levels has 3 entries", "visits 2", "remove"]),
    "groupings above level 1": ("levels=[{groupings: {}},{}]", ["levels.0.groupings", "operators.groupings"]),
    "weights for level 1 of a cycle that starts below": (
        "cycle.kind=F training.init_from=somewhere",
        ["training.init_from=somewhere", "this cycle starts at level 2", "cycle.kind=V"],
    ),
    "depth growth of another width": (
        "cycle.kind=growth cycle.initial={} cycle.growth.method=stackbert",
        ["cycle.growth.method=stackbert grows depth only", "hidden is 16 at level 2 and 32", "set levels.1.hidden=32"],
    ),
    "phases that lead nowhere": (
        "cycle={kind: phases, phases: [{train: 1, steps: 2}, {coalesce: 2}]}",
        ["cycle.phases.1.coalesce=2", "the cycle is at level 1 there"],
    ),
    "no steps": ("cycle.final.steps=null", ["cycle.final.steps is missing", "set cycle.final.steps"]),
    "long warm-up": ("cycle.initial.warmup_steps=9", ["cycle.initial", "warmup_steps=9 exceeds its 3 steps", "lower"]),
    "DeepSpeed key that is ours": (
        "deepspeed.train_batch_size=8",
        ["deepspeed.train_batch_size", "training.global_batch"],
    ),
    "unknown DeepSpeed key": (
        "deepspeed.zero_optimization.overlap_com=true",
        ["deepspeed.zero_optimization.overlap_com", "'overlap_comm'"],
    ),
    "value DeepSpeed refuses": (
        "deepspeed.zero_optimization.reduce_bucket_size=many",
        ["reduce_bucket_size='many'", "under deepspeed:"],
    ),
    "unknown Megatron option": (
        "model.megatron.recompute_methd=block",
        ["model.megatron.recompute_methd", "did you mean 'recompute_method'?"],
    ),
    "Megatron option that is ours": ("model.megatron.num_layers=3", ["model.megatron.num_layers=3", "model.layers"]),
    "sequence parallel on CPU": (
        "model.sequence_parallel=true model.tensor_parallel=2",
        ["model.sequence_parallel=true", "CPU", "set model.sequence_parallel=false"],
    ),
    "Transformer Engine missing": (
        "model.transformer_engine=always",
        ["model.transformer_engine=always", "set model.transformer_engine=auto or never"],
    ),
    "reference policy, untied": (
        "operators.embedding=reference model.tied_embeddings=false",
        ["operators.embedding=reference", "model.tied_embeddings=false", "use operators.embedding=lossless"],
    ),
}
DATA: dict[str, tuple[str, Sequence[str]]] = {
    "no data": ("data.path={root}/nowhere", ["data.path={root}/nowhere", "no such directory", "ds-vcycle prepare"]),
    "unprepared data": ("data.path={root}/plain", ["data.path={root}/plain", "prepare.json", "ds-vcycle prepare"]),
    "damaged manifest": ("data.path={root}/manifest", ["{root}/manifest/prepare.json", "ds-vcycle prepare again"]),
    "truncated .bin": ("data.path={root}/bin", ["{root}/bin/train.bin", "damaged", "copy it again"]),
    "longer .idx": ("data.path={root}/idx", ["{root}/idx/validation.idx", "damaged", "copy it again"]),
    ".idx of another file": ("data.path={root}/swapped", ["{root}/swapped/train.idx", "copy it again"]),
    "other architecture": ("model.architecture=bert", ["prepared for gpt", "model.architecture=bert"]),
    "other vocabulary": ("model.vocab_size=300", ["model.vocab_size=300", "has 301", "set model.vocab_size=301"]),
    "no whole sample": ("model.sequence_length=1000000", ["model.sequence_length=1000000", "fewer than one sample"]),
    "too little to evaluate on": (
        "evaluation.samples=1000000",
        ["evaluation.samples=1000000", "validation split of {root}/good", "set evaluation.samples="],
    ),
}
RUN_DIRECTORY: dict[str, tuple[str, Sequence[str]]] = {
    "a run is there": ("run_dir={root}/broken", ["run_dir={root}/broken", "already holds a run", "--resume"]),
    "run_dir is a file": ("run_dir={root}/run.yaml", ["run_dir={root}/run.yaml", "is a file"]),
    "run_dir below a file": ("run_dir={root}/run.yaml/new", ["{root}/run.yaml is a file"]),
    "nothing to resume": ("run_dir={root}/new --resume", ["--resume", "{root}/new/checkpoints", "holds no checkpoint"]),
    "flipped bit": ("run_dir={root}/flipped --resume", ["rank-00001.safetensors", "is damaged", "another checkpoint"]),
    "flipped bit of the parked level": (
        "run_dir={root}/parked --resume",
        ["parked-01-level-1/rank-00000.safetensors", "is damaged", "another checkpoint"],
    ),
    "truncated shard": ("run_dir={root}/truncated --resume", ["rank-00001.safetensors", "truncated", "restore"]),
    "missing shard": ("run_dir={root}/missing --resume", ["rank-00001.safetensors", "is missing", "restore"]),
    "missing parked level": ("run_dir={root}/unparked --resume", ["parked-01-level-1", "is missing", "restore it"]),
    "edited manifest": ("run_dir={root}/edited --resume", ["manifest.json", "was edited"]),
    "resumed with another seed": (
        "run_dir={root}/broken training.seed=5 --resume",
        ["training.seed is 1234 in the run and 5 in the configuration", "resume with"],
    ),
    "resumed with other phases": (
        "run_dir={root}/broken cycle.final.steps=9 --resume=auto",
        ["phase 4", "steps", "9", "resume with"],
    ),
    "resumed with other sizes": (
        "run_dir={root}/broken model.ffn=64 --resume",
        ["model.ffn is None in the run and 64 in the configuration", "resume with"],
    ),
}
DEVICE = {"device that is not there": ("training.device=cuda", ["training.device=cuda", "training.device=cpu or auto"])}
WITHOUT_GPU = (
    {} if torch.cuda.is_available() else DEVICE
)  # the first case that joins a process group settles the device
CASES = {**WITHOUT_GPU, **CONFIGURATION, **LAYOUT, **DATA, **RUN_DIRECTORY}
FILES = {
    "no file": ("nowhere.yaml", ["--config {root}/nowhere.yaml", "no such file"]),
    "not YAML": ("broken.yaml", ["--config {root}/broken.yaml", "not readable as YAML", "line 2"]),
    "key given twice": ("twice.yaml", ["--config {root}/twice.yaml", "'layers' is given twice"]),
    "a list": ("list.yaml", ["--config {root}/list.yaml", "expected a mapping of sections"]),
    "not text": ("binary.yaml", ["--config {root}/binary.yaml", "UTF-8"]),
}


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)


def _edit_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["state"]["position"]["totals"]["samples"] += 4
    path.write_text(json.dumps(manifest))


LATEST, PARKED = "step-00000007-phase-02", "parked-01-level-1"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda at: _flip(at / LATEST / "rank-00001.safetensors"),
    "parked": lambda at: _flip(at / PARKED / "rank-00000.safetensors"),
    "truncated": lambda at: os.truncate(at / LATEST / "rank-00001.safetensors", 5000),
    "missing": lambda at: (at / LATEST / "rank-00001.safetensors").unlink(),
    "unparked": lambda at: shutil.rmtree(at / PARKED),
    "edited": lambda at: _edit_manifest(at / LATEST),
}


def _write_files(root: Path) -> None:
    """The configurations, the good corpus, and corpora with something wrong."""
    config = tiny_run(root / "new").model_dump(mode="json", exclude_defaults=True)
    shutil.copytree(config["data"]["path"], root / "good")
    config["data"]["path"] = str(root / "good")
    (root / "run.yaml").write_text(yaml.safe_dump(config))
    (root / "broken.yaml").write_text("model:\n  layers: [1}\n")
    (root / "twice.yaml").write_text("model:\n  layers: 2\n  hidden: 8\n  layers: 4\n")
    (root / "list.yaml").write_text("- model\n")
    (root / "binary.yaml").write_bytes(b"model: \xff\xfe\n")
    (root / "plain").mkdir()
    for name in ("manifest", "bin", "idx", "swapped"):
        shutil.copytree(root / "good", root / name)
    (root / "manifest" / "prepare.json").write_text('{"format": 1')
    os.truncate(root / "bin" / "train.bin", (root / "bin" / "train.bin").stat().st_size - 2)
    (root / "idx" / "validation.idx").write_bytes((root / "idx" / "validation.idx").read_bytes() + b"\0")
    index = root / "swapped" / "train.idx"
    index.write_bytes(b"MMIDIDX\0" + bytes(index.stat().st_size - 8))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Outcome]]]:
    """All cases in one job: the outcomes of each rank."""
    root = tmp_path_factory.mktemp("bad") / "input"
    root.mkdir()
    _write_files(root)
    start = ["train", "--config", str(root / "run.yaml"), f"run_dir={root}/broken"]
    broken = values(RANKS, "tests.dist.cases_bad_input:run_command_lines", [str(root), start, {}])
    assert broken == [{}] * RANKS
    for name, damage in DAMAGES.items():
        shutil.copytree(root / "broken", root / name)
        damage(root / name / "checkpoints")
    commands = {name: ["train", "--config", str(root / file)] for name, (file, _) in FILES.items()}
    for name, (words, _) in CASES.items():
        given = re.split(r"\s(?=[\w.]+=|--)", words.replace("{root}", str(root)))
        commands[name] = ["train", "--config", str(root / "run.yaml"), *given]
    return root, values(RANKS, "tests.dist.cases_bad_input:run_command_lines", [str(root), [], commands])


@pytest.mark.parametrize("name", [*FILES, *CASES])
def test_one_error_on_every_rank_and_nothing_changed(job: tuple[Path, list[dict[str, Outcome]]], name: str) -> None:
    root, ranks = job
    texts = []
    for rank, outcomes in enumerate(ranks):
        outcome = outcomes[name]
        assert outcome.code == 2, outcome
        assert outcome.changed == ()
        assert outcome.output == ""
        prefix = f"[rank {rank}] ds-vcycle: error: "
        assert outcome.errors.startswith(prefix) and outcome.errors.endswith("\n"), outcome.errors
        texts.append(outcome.errors.removeprefix(prefix).rstrip("\n"))
    assert texts == [texts[0]] * RANKS
    assert "\n" not in texts[0] and "Traceback" not in texts[0]
    for part in {**FILES, **CASES}[name][1]:
        assert part.replace("{root}", str(root)) in texts[0]


def test_the_same_files_undamaged_are_accepted(job: tuple[Path, list[dict[str, Outcome]]]) -> None:
    """Else every case above might fail for a reason of its own."""
    root, _ = job
    commands = {"resume": ["train", "--config", str(root / "run.yaml"), f"run_dir={root}/broken", "--resume"]}
    for outcomes in values(RANKS, "tests.dist.cases_bad_input:run_command_lines", [str(root), [], commands]):
        assert outcomes["resume"].code == 0, outcomes["resume"]
    assert yaml.safe_load((root / "broken" / "status.json").read_text())["status"] == "finished"


PREPARE: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "empty corpus": (["{root}/empty.txt"], ["no readable document", "1 empty", "{root}/empty.txt"]),
    "no file": (["{root}/nowhere.txt"], ["{root}/nowhere.txt", "no such file"]),
    "nothing in the directory": (["{root}/nothing"], ["{root}/nothing", "holds no .txt"]),
    "unknown kind": (["{root}/text.pdf"], ["{root}/text.pdf", "unknown kind"]),
    "wrong text key": (["{root}/lines.jsonl", "--text-key", "body"], ["no readable document", "key missing", "lines"]),
    "too few documents": (["{root}/text.txt"], ["1 documents are too few"]),
    "shares": (["{root}/lines.jsonl", "--split", "0.9,0.2,0.1"], ["split=0.9,0.2,0.1", "add up to 1"]),
    "small vocabulary": (["{root}/lines.jsonl", "--vocab-size", "20"], ["vocab_size=20", "raise it"]),
    "directory with other things": (["{root}/lines.jsonl", "--out", "{root}"], ["out={root}", "not a prepared corpus"]),
}


@pytest.mark.parametrize("name", PREPARE)
def test_prepare_refuses_and_leaves_nothing(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "text.txt").write_text("One document.")
    (tmp_path / "text.pdf").write_text("One document.")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "lines.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n{"text": "Three."}\n')
    words, parts = PREPARE[name]
    given = [word.replace("{root}", str(tmp_path)) for word in words]
    before = tree(tmp_path)
    options = ["--architecture", "gpt", "--train-tokenizer", "bpe", "--vocab-size", "300", "--workers", "1"]
    assert cli.run(["prepare", "--out", str(tmp_path / "out"), *options, *given]) == 2
    assert tree(tmp_path) == before
    shown = capsys.readouterr()
    last = shown.err.strip().splitlines()[-1]
    assert "ds-vcycle: error: " in last and "Traceback" not in shown.err and shown.out == ""
    for part in parts:
        assert part.replace("{root}", str(tmp_path)) in last


def test_under_the_launcher_each_rank_says_it_and_the_launcher_fails(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {hiden: 64}\n")
    program = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS)]
    program += ["--master_port", str(free_port()), "--module", "ds_vcycle"]
    arguments = ["train", "--config", "run.yaml", f"run_dir={tmp_path}/run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*program, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    text = done.stdout + done.stderr
    for rank in range(RANKS):
        assert f"[rank {rank}] ds-vcycle: error: run.yaml and overrides: unknown key 'model.hiden'" in text
    assert done.returncode != 0
    assert "Traceback" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
