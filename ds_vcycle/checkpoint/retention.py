"""Which checkpoints a directory holds: ``latest``, what a killed save left behind, what may be removed.

Inside RUN/checkpoints, names that begin with a dot are under way or on their way out: ``.tmp-`` a save not committed,
``.trash-`` a removal not finished, ``.replaced-NAME`` the old NAME while a new one takes its place.
"""

from __future__ import annotations

import glob
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from ds_vcycle.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, read_manifest
from ds_vcycle.faults import fault_point

LATEST = "latest"
_STEP = "step-"


def set_latest(root: Path, name: str) -> None:
    """Make ``latest`` in ``root`` (RUN/checkpoints) name a committed checkpoint. Call on one rank.

    Raises:
        CheckpointError: there is no such checkpoint, or the file cannot be written; the old ``latest`` stays.
    """
    if not (root / name / MANIFEST).is_file():
        raise CheckpointError(f"{root / name} is no checkpoint; 'latest' is left as it was")
    temporary = root / ".tmp-latest"
    try:
        with temporary.open("w") as file:
            file.write(name + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(root / LATEST)
        sync_directory(root)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{root / LATEST} cannot be written ({error.strerror}); free space or mend permissions"
        ) from error
    fault_point("save.latest")


def find_latest(root: Path) -> Path | None:
    """The checkpoint in ``root`` (RUN/checkpoints) to resume from, or None.

    It is the one ``latest`` names; without that file, the newest step-... with all of its files. A damaged checkpoint
    that ``latest`` names is still returned: opening it says what is wrong, rather than silently going back in time.

    Raises:
        CheckpointError: ``latest`` names no checkpoint that is there; says which one could be had instead.
    """
    try:
        name = (root / LATEST).read_bytes().decode(errors="replace").strip()
    except OSError:
        return _newest(root)
    if is_name(name) and settled(root / name).is_dir():
        return settled(root / name)
    other = _newest(root)
    raise CheckpointError(
        f"{root / LATEST} names {name[:80]!r}, and there is no such checkpoint; restore it, or remove "
        f"{root / LATEST} to " + (f"go on from {other}" if other else "begin anew")
    )


def is_name(text: str) -> bool:
    """Whether a text can be the name of an entry of a directory, no path and no file system's limit passed."""
    return text not in ("", ".", "..") and not {"/", "\0"} & set(text) and len(os.fsencode(text)) <= 255


def _newest(root: Path) -> Path | None:
    paths = [settled(root / name) for name in checkpoint_names(root) if name.startswith(_STEP)]
    complete = [(manifest.created, path) for path in paths if (manifest := _complete(path))]
    return max(complete)[1] if complete else None


@contextmanager
def staged(to: Path) -> Iterator[Path]:
    """A temporary directory beside ``to`` that gets its name when the block ends, in place of what was there.

    Raises:
        CheckpointError: the disk is full, or the file system refuses otherwise; nothing is left behind.
    """
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        clean(to.parent, to.name)
        staging = to.parent / f".tmp-{to.name}-{uuid.uuid4().hex[:8]}"
        staging.mkdir()
        try:
            yield staging
            publish(staging, to)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or to}: {error.strerror or error}; free space or mend the permissions"
        ) from error


def settled(directory: Path) -> Path:
    """Where a checkpoint lies: ``directory``, or beside it when a save was killed while replacing it."""
    replaced = _replaced(directory)
    return replaced if replaced.is_dir() and not directory.exists() else directory


def checkpoint_names(root: Path) -> set[str]:
    """Names of the checkpoints in ``root``, one that is being replaced included."""
    found = {path.parent.name.removeprefix(".replaced-") for path in root.glob(f"*/{MANIFEST}")}
    return {name for name in found if not name.startswith(".")}


def check_files(directory: Path, manifest: Manifest) -> None:
    """Compare the files beside a manifest with it.

    Raises:
        CheckpointError: one is missing, has another size, or is not of this checkpoint.
    """
    for file in manifest.files:
        path = directory / file.name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; restore the file or use another checkpoint")
        if path.stat().st_size != file.bytes:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes, the manifest says {file.bytes}: the file is truncated or not "
                "of this checkpoint; restore the file or use another checkpoint"
            )
    known = {file.name for file in manifest.files}
    for path in sorted(directory.glob("*.safetensors")):
        if path.name not in known:
            raise CheckpointError(f"{path} is not of this checkpoint (the manifest does not list it); move it away")


def publish(staging: Path, directory: Path) -> None:
    """Give a complete temporary directory its final name; an older checkpoint of that name goes only afterwards."""
    replaced = _replaced(directory)
    if directory.exists():
        directory.rename(replaced)
        fault_point("save.replacing")
    try:
        staging.rename(directory)
        sync_directory(directory.parent)
    except OSError:
        if not staging.exists():
            directory.rename(staging)
        if replaced.exists():
            replaced.rename(directory)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def clean(root: Path, name: str | None = None) -> None:
    """Remove what killed saves and removals left in ``root``. Only when no other save is under way.

    ``name``: only what belongs to the checkpoint of this name, in a directory that holds other things too.
    """
    of_name = "*" if name is None else glob.escape(name)
    staged = ".tmp-*" if name is None else f".tmp-{of_name}-{'[0-9a-f]' * 8}"
    for path in root.glob(f".replaced-{of_name}"):
        directory = root / path.name.removeprefix(".replaced-")
        if directory.exists():
            shutil.rmtree(path)
        else:
            path.rename(directory)
    for path in (*root.glob(staged), *root.glob(f".trash-{of_name}")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def prune(root: Path, keep_last: int, keep: Set[str] = frozenset(), *, keep_phase_ends: bool = False) -> list[str]:
    """Remove old checkpoints from ``root`` (RUN/checkpoints), one rename each before anything is deleted.

    Kept: the ``keep_last`` newest step-..., those in ``keep``, the ends of phases if asked for, the one ``latest``
    names, every other that a kept one references, whatever is newer than the one ``latest`` names, and whatever cannot
    be read (with all that is not step-..., as its references are unknown). Call on one rank, between saves.

    Returns:
        The names removed.

    Raises:
        CheckpointError: one cannot be removed.
    """
    if keep_last < 1:
        raise CheckpointError(f"keep_last={keep_last} would remove every checkpoint; set it to 1 or more")
    try:
        clean(root)
    except OSError as error:
        raise CheckpointError(f"{root} cannot be cleaned ({error}); mend its permissions") from error
    latest = find_latest(root)
    if latest is None:
        return []
    manifests = {name: _manifest(root / name) for name in checkpoint_names(root)}
    kept = _kept(manifests, latest.name, keep_last) | keep
    if keep_phase_ends:
        kept |= {name for name, manifest in manifests.items() if manifest and _ends_a_phase(manifest)}
    kept |= _referenced(manifests, kept)
    removed = sorted(set(manifests) - kept)
    for name in removed:
        _remove(root, name)
    return removed


def _kept(manifests: Mapping[str, Manifest | None], latest: str, keep_last: int) -> set[str]:
    readable = {name: (manifest.created, name) for name, manifest in manifests.items() if manifest}
    unreadable = set(manifests) - set(readable)
    steps = sorted((age for name, age in readable.items() if name.startswith(_STEP)), reverse=True)
    kept = {latest, *unreadable, *(name for _, name in steps[:keep_last])}
    kept |= {name for name, age in readable.items() if latest not in readable or age > readable[latest]}
    if unreadable:
        kept |= {name for name in manifests if not name.startswith(_STEP)}
    return kept


def _ends_a_phase(manifest: Manifest) -> bool:
    position = manifest.state.get("position")
    return isinstance(position, dict) and position.get("done") is True


def _referenced(manifests: Mapping[str, Manifest | None], names: Set[str]) -> set[str]:
    found: set[str] = set()
    pending = list(names)
    while pending:
        manifest = manifests.get(pending.pop())
        new = set(manifest.references if manifest else ()) - found
        found |= new
        pending += new
    return found


def make_directory(directory: Path) -> None:
    """Make a directory and those above it that are missing, durably."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(root: Path, name: str) -> None:
    trash = root / f".trash-{name}"
    try:
        (root / name).rename(trash)
        fault_point("prune.renamed")
        shutil.rmtree(trash)
    except OSError as error:
        raise CheckpointError(
            f"{root / name} cannot be removed ({error.strerror}); mend permissions or raise keep_last"
        ) from error


def _replaced(directory: Path) -> Path:
    return directory.with_name(f".replaced-{directory.name}")


def _manifest(directory: Path) -> Manifest | None:
    try:
        return read_manifest(directory)
    except CheckpointError:
        return None


def _complete(directory: Path) -> Manifest | None:
    """The manifest, if every file is there with its size."""
    manifest = _manifest(directory)
    try:
        if manifest:
            check_files(directory, manifest)
    except CheckpointError:
        return None
    return manifest
