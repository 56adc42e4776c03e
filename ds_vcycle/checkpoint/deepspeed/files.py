"""Which files a DeepSpeed checkpoint consists of, told by their names. Imports no torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ds_vcycle.checkpoint.manifest import MANIFEST, CheckpointError
from ds_vcycle.checkpoint.retention import is_name

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
ZERO, OPTIMIZER_STATE = "zero", "optimizer_state.pt"
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<tp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<tp>\d+)_optim_states\.pt")
_FOREIGN = {
    r"layer_\d+-.*model_states\.pt": "pipeline stages (layer_*-model_states.pt)",
    r"layer_.*expert_.*": "experts (layer_*_expert_*)",
    r"expp_rank_\d+_.*": "experts (expp_rank_*)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeFiles:
    """The files of one native checkpoint.

    Attributes:
        directory: the tag's.
        model: one of each tensor-parallel rank.
        optimizer: by tensor-parallel rank, then data-parallel rank.
    """

    directory: Path
    model: tuple[Path, ...]
    optimizer: tuple[tuple[Path, ...], ...]

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return len(self.optimizer)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return len(self.optimizer[0])


def is_deepspeed(path: Path) -> bool:
    """Whether a path is a DeepSpeed checkpoint, native or universal, or the directory above one."""
    if not path.is_dir() or (path / MANIFEST).is_file() or (path / "checkpoints").is_dir():
        return False
    return _tag_of(path) is not None or _holds_files(path)


def tag_directory(path: Path) -> Path:
    """The directory with the files: ``path``, or the one that ``latest`` or else ``latest_universal`` in it names.

    Raises:
        CheckpointError: it names none that is there.
    """
    if _holds_files(path):
        return path
    found = _tag_of(path)
    if found is None:
        raise CheckpointError(f"{path} is no DeepSpeed checkpoint; give the directory that has {LATEST}, or a tag's")
    name, tag = found
    if not is_name(tag) or not (path / tag).is_dir():
        raise CheckpointError(
            f"{path / name} names {tag[:80]!r}, which is not there; give the directory of another tag"
        )
    return path / tag


def is_universal(directory: Path) -> bool:
    """Whether a tag's directory has the universal layout."""
    return (directory / ZERO).is_dir()


def model_files(directory: Path) -> tuple[Path, ...]:
    """The model files of a tag's directory, one of each tensor-parallel rank, in order."""
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        if (match := _MODEL.fullmatch(path.name)) and int(match["dp"] or 0) == 0:
            found[int(match["tp"])] = path
    return tuple(found[rank] for rank in sorted(found))


def native_files(directory: Path) -> NativeFiles:
    """All files of a native checkpoint.

    Args:
        directory: the tag's.

    Raises:
        CheckpointError: one is missing, or the checkpoint is of a kind that cannot be read; names it.
    """
    for path in sorted(directory.iterdir()):
        for pattern, what in _FOREIGN.items():
            if re.fullmatch(pattern, path.name):
                raise CheckpointError(
                    f"{directory} is split over {what}, which ds-vcycle has not; save it from an engine without them"
                )
    optimizer: dict[int, dict[int, Path]] = {}
    for path in sorted(directory.iterdir()):
        if match := _OPTIMIZER.fullmatch(path.name):
            ranks = optimizer.setdefault(int(match["tp"]), {})
            if other := ranks.get(int(match["dp"])):
                raise CheckpointError(f"{path} and {other.name} are of the same rank; keep those that one job saved")
            ranks[int(match["dp"])] = path
    if not optimizer:
        raise CheckpointError(
            f"{directory} has no *_zero_pp_rank_*_optim_states.pt: it was saved without ZeRO, or its optimizer files "
            "are missing; save it with zero_optimization.stage 1, 2 or 3, or copy it again"
        )
    model = model_files(directory)
    tp, dp = max(len(model), 1 + max(optimizer)), 1 + max(max(ranks) for ranks in optimizer.values())
    for tp_rank in range(tp):
        for dp_rank in range(dp):
            if dp_rank not in optimizer.get(tp_rank, {}):
                name = f"zero_pp_rank_{dp_rank}_mp_rank_{tp_rank:02d}_optim_states.pt"
                raise CheckpointError(f"{directory} lacks {name} (or bf16_{name}); copy it again")
    _check_model_files(directory, tp, dp)
    if len(model) < tp:
        raise CheckpointError(f"{directory} has the model files of {len(model)} of {tp} mp_ranks; copy it again")
    grid = tuple(tuple(optimizer[t][d] for d in range(dp)) for t in range(tp))
    return NativeFiles(directory=directory, model=model, optimizer=grid)


def _check_model_files(directory: Path, tp: int, dp: int) -> None:
    """Under ZeRO 3 every rank has written one; with one of them lost the job's record is not whole."""
    found = [match for path in directory.iterdir() if (match := _MODEL.fullmatch(path.name)) and match["dp"]]
    ranks = {(int(match["dp"]), int(match["tp"])) for match in found}
    for tp_rank in range(tp):
        for dp_rank in range(dp):
            if ranks and (dp_rank, tp_rank) not in ranks:
                name = f"zero_pp_rank_{dp_rank}_mp_rank_{tp_rank:02d}_model_states.pt"
                raise CheckpointError(f"{directory} lacks {name}, and other ranks have theirs; copy it again")


def digest(paths: Iterable[Path]) -> str:
    """Tells files from others, by their names, sizes and times."""
    found = hashlib.sha256()
    for path in paths:
        found.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return found.hexdigest()


def _holds_files(path: Path) -> bool:
    return (path / ZERO / OPTIMIZER_STATE).is_file() or any(
        _MODEL.fullmatch(child.name) or _OPTIMIZER.fullmatch(child.name) for child in path.iterdir()
    )


def _tag_of(path: Path) -> tuple[str, str] | None:
    for name in (LATEST, LATEST_UNIVERSAL):
        if (path / name).is_file():
            tag = (path / name).read_text(errors="replace").strip()
            # a run of ours also has a file of this name, beside directories with manifests
            if not (is_name(tag) and (path / tag / MANIFEST).is_file()):
                return name, tag
    return None
