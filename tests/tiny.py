"""Tiny runs on real text: a corpus prepared once per session, and configurations of four layers and 32 features.

The vocabulary has 301 ids, which no tensor-parallel degree above 1 divides.
"""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ds_vcycle.config import RunConfig, parse_config
from ds_vcycle.data.prepare import prepare
from tests.data_corpora import SPEECHES

VOCABULARY = 301
Architecture = Literal["gpt", "bert"]


@cache
def tiny_corpus(architecture: Architecture) -> Path:
    """A dozen speeches of 1790 to 1802, prepared with a tokenizer of 301 ids; removed when the session ends."""
    directory = Path(tempfile.mkdtemp(prefix="tiny-")) / architecture
    atexit.register(shutil.rmtree, directory.parent, ignore_errors=True)
    report = prepare(
        sources=[str(SPEECHES / "179*.txt"), str(SPEECHES / "180[0-2]*.txt")],
        out=directory,
        architecture=architecture,
        train_tokenizer="bpe" if architecture == "gpt" else "wordpiece",
        vocab_size=VOCABULARY,
        split="0.7,0.2,0.1",
        progress=False,
    )
    assert report.vocab_size == VOCABULARY
    return directory


def tiny_run(
    run_dir: Path,
    architecture: Architecture = "gpt",
    *,
    tp: int = 1,
    zero_stage: int = 1,
    precision: Literal["fp32", "bf16"] = "fp32",
    changes: Mapping[str, Any] | None = None,
) -> RunConfig:
    """A two-level V cycle of 3 + 4 + 3 steps without dropout (BERT with the sentence-order head).

    Args:
        run_dir: of the run; each run wants its own.
        architecture: gpt or bert, each with its own corpus.
        tp: tensor-parallel degree of all levels.
        zero_stage: of all levels.
        precision: of the weights computed with.
        changes: dotted key -> plain value, over what is here (``{"cycle.levels": 3}``).
    """
    tree: dict[str, Any] = {
        "model": {
            "architecture": architecture, "layers": 4, "hidden": 32, "heads": 4, "sequence_length": 32,
            "vocab_size": VOCABULARY, "dropout": 0.0, "attention_dropout": 0.0, "tensor_parallel": tp,
            "sentence_order": architecture == "bert",
        },
        "cycle": {"kind": "V", "levels": 2, "initial": {"steps": 3}, "coarse": {"steps": 4}, "final": {"steps": 3}},
        "lr": {"peak": 3e-3, "warmup_steps": 1},
        "training": {
            "global_batch": 4, "micro_batch": 2, "zero_stage": zero_stage, "precision": precision, "device": "cpu",
        },
        "data": {"path": str(tiny_corpus(architecture))},
        "evaluation": {"every_steps": 2, "samples": 8, "micro_batch": 4},
        "logging": {"every_steps": 2, "tensorboard": False},
        "run_dir": str(run_dir),
    }  # fmt: skip
    for key, value in (changes or {}).items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = copy.deepcopy(value)
    return parse_config(tree)
