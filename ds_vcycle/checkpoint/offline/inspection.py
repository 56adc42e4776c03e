"""``ds-vcycle inspect``: what is in a checkpoint, in one screen, and whether it is whole."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_vcycle.checkpoint.deepspeed.files import is_deepspeed, is_universal, tag_directory
from ds_vcycle.checkpoint.manifest import CheckpointError, Manifest
from ds_vcycle.checkpoint.reader import Checkpoint, open_checkpoint
from ds_vcycle.checkpoint.recorded import Recorded, incomplete, locate_checkpoint, recorded
from ds_vcycle.checkpoint.retention import find_latest, settled

Advance = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What a checkpoint holds, as lines for a person, each a word and a text; the same as plain values for programs.

    Attributes:
        directory: of the checkpoint.
        facts: name -> number, text, list or None.
        lines: heading -> text.
    """

    directory: Path
    facts: Mapping[str, Any]
    lines: Mapping[str, str]

    def __str__(self) -> str:
        return "\n".join([str(self.directory), *(f"  {name:<12}{text}" for name, text in self.lines.items())])


def inspect_checkpoint(path: Path, *, verify: bool = True, advance: Advance = lambda done, total: None) -> Inspection:
    """Read what a checkpoint says of itself, and compare all of its files, and those it needs, with their checksums.

    Args:
        path: a checkpoint, a run directory (its latest), or RUN@STEP.
        verify: compare the checksums too; without, names and sizes only.
        advance: told of the bytes compared and to compare.

    Raises:
        CheckpointError: it, or a parked level it needs, is damaged, incomplete or none; names the file and what in it.
    """
    if is_deepspeed(path):
        form = "universal" if is_universal(tag_directory(path)) else "native"
        raise CheckpointError(
            f"{path} is a {form} DeepSpeed checkpoint; make a checkpoint of it with ds-vcycle convert --from {path} "
            "--to DIR --config C, and inspect that"
        )
    directory = locate_checkpoint(path)
    with open_checkpoint(directory) as checkpoint:
        needed = [settled(directory.parent / name) for name in checkpoint.manifest.references]
        parked = {where.name: _sizes(open_checkpoint(where).manifest) for where in needed}
        own = _sizes(checkpoint.manifest)
        if verify:
            _verify(
                [directory, *needed], own["tensor_bytes"] + sum(p["tensor_bytes"] for p in parked.values()), advance
            )
        try:
            facts = _facts(checkpoint) | {"parked": parked, "verified": verify, **own}
        except (LookupError, TypeError, AttributeError) as error:
            raise incomplete(directory, error) from error
        return Inspection(directory=directory, facts=facts, lines=_lines(facts))


def _verify(directories: list[Path], total: int, advance: Advance) -> None:
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        advance(done, total)

    for directory in directories:
        with open_checkpoint(directory) as checkpoint:
            checkpoint.verify(advance=count)


def _sizes(manifest: Manifest) -> dict[str, int]:
    kinds = {key for file in manifest.files for entry in file.fragments for key in entry.tensors}
    elements = sum(math.prod(parameter.shape) for parameter in manifest.parameters.values())
    tensors = [entry for file in manifest.files for entry in file.fragments]
    return {
        "parameters": len(manifest.parameters),
        "elements": elements,
        "files": len(manifest.files),
        "bytes": sum(file.bytes for file in manifest.files),
        "tensors": sum(len(entry.tensors) for entry in tensors) + sum(len(file.extras) for file in manifest.files),
        "tensor_bytes": 4 * elements * len(kinds),
        "random_states": sum(bool(file.extras) for file in manifest.files),
    }


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    state, manifest = checkpoint.state, checkpoint.manifest
    facts: dict[str, Any] = {
        "kind": _kind(state),
        "created": manifest.created,
        "is_latest": _is_latest(checkpoint.directory),
        "ranks": checkpoint.world_size,
        "tensor_parallel": checkpoint.tensor_parallel,
        "adam_step": int(state.get("adam_step", 0)),
        "missing": list(state.get("missing", ())),
        "versions": dict(state.get("versions", {})),
        "level": state.get("parked_level"),
    }
    if "config" in state:
        facts |= _model(recorded(checkpoint))
    if "position" in state:
        facts |= _position(state)
    return facts


def _kind(state: Mapping[str, Any]) -> str:
    if "parked_level" in state:
        return "parked level"
    if "position" in state:
        return "checkpoint of a run" + (", resharded" if "origin" in state else "")
    return f"written by ds-vcycle {state['origin']['verb']}" if "origin" in state else "no checkpoint of a run"


def _is_latest(directory: Path) -> bool:
    try:
        return find_latest(directory.parent) == directory
    except CheckpointError:
        return False


def _model(held: Recorded) -> dict[str, Any]:
    level = held.level
    return {
        "level": level.index,
        "levels": held.config.cycle.visited,
        "zero_stage": level.zero_stage,
        "precision": level.precision,
        "shape": asdict(level.shape),
    }


def _position(state: Mapping[str, Any]) -> dict[str, Any]:
    position = state["position"]
    phase = state["phases"][position["phase"]]
    going = f" {phase['fine']}" if phase["kind"] != "train" else f" {phase['level']}"
    return {
        "phase": position["phase"],
        "phases": len(state["phases"]),
        "phase_kind": f"{phase['kind']} level{going}",
        "phase_step": position["phase_step"],
        "phase_steps": phase.get("steps", 1),
        "phase_done": position["done"],
        **{key: position["totals"][key] for key in ("steps", "samples", "tokens")},
    }


def _lines(facts: Mapping[str, Any]) -> dict[str, str]:
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["created"]))
    lines = {"what": f"{facts['kind']}{', its latest' if facts['is_latest'] else ''}; saved {saved}"}
    if "phase" in facts:
        done = ", done" if facts["phase_done"] else ""
        lines["position"] = (
            f"phase {facts['phase'] + 1} of {facts['phases']} ({facts['phase_kind']}), step "
            f"{facts['phase_step']:,} of {facts['phase_steps']:,}{done}; step {facts['steps']:,} of the run, "
            f"{facts['samples']:,} samples, {facts['tokens']:,} tokens"
        )
    if "shape" in facts:
        shape = facts["shape"]
        sizes = ", ".join(f"{key} {shape[key]:,}" for key in ("layers", "hidden", "heads", "ffn"))
        lines["model"] = (
            f"{shape['architecture']}, level {facts['level']} of {facts['levels']}: {sizes}, vocabulary "
            f"{shape['vocab_size']:,} (padded to {shape['padded_vocab']:,}), sequence {shape['sequence_length']:,}"
        )
    elif facts["level"] is not None:
        lines["model"] = f"level {facts['level']}"
    computed = f", computed with in {facts['precision']}" if "precision" in facts else ""
    lines["parameters"] = f"{facts['elements']:,} in {facts['parameters']:,} tensors; fp32 masters{computed}"
    if facts["missing"]:
        lines["missing"] = ", ".join(facts["missing"])
    lines["moments"] = f"Adam's, of step {facts['adam_step']:,}" if facts["adam_step"] else "none"
    lines |= _storage_lines(facts)
    if facts["versions"]:
        lines["versions"] = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return lines


def _storage_lines(facts: Mapping[str, Any]) -> dict[str, str]:
    ranks, tp = facts["ranks"], facts["tensor_parallel"]
    stage = f", ZeRO {facts['zero_stage']}" if "zero_stage" in facts else ""
    states = f"; random states of {facts['random_states']}" if facts["random_states"] else ""
    lines = {
        "layout": f"{ranks} rank{'s' * (ranks > 1)}: tensor parallel {tp} x data parallel {ranks // tp}{stage}{states}",
        "files": f"{facts['files']:,}, {_size(facts['bytes'])}",
    }
    if facts["parked"]:
        lines["needs"] = ", ".join(f"{name} ({_size(sizes['bytes'])})" for name, sizes in facts["parked"].items())
    compared = facts["tensors"] + sum(sizes["tensors"] for sizes in facts["parked"].values())
    lines["checksums"] = (
        f"ok, of {compared:,} tensors" if facts["verified"] else "not compared; names and sizes are right"
    )
    return lines


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"
