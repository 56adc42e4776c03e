"""What a run writes down as it goes: metrics.jsonl and the monitor, on rank 0."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ds_vcycle.config import RunConfig
from ds_vcycle.parallel import raise_together
from ds_vcycle.train.engine import build_monitor
from ds_vcycle.train.metrics import MetricsError, MetricsWriter, Record


class RunRecords:
    """Records on rank 0; nothing elsewhere. A write that fails is kept until :meth:`settle`, where all ranks meet."""

    def __init__(self, config: RunConfig, rank: int, *, resume_at: tuple[int, int] | None) -> None:
        """Open the files; ``resume_at`` as in :class:`MetricsWriter`. Collective: all ranks return, or all raise."""
        self._run_dir = config.run_dir
        self._monitor = build_monitor(config, config.run_dir)
        self._metrics: MetricsWriter | None = None
        self._failure: MetricsError | None = None
        error = None
        if rank == 0:
            try:
                self._metrics = MetricsWriter(config.run_dir / "metrics.jsonl", resume_at=resume_at)
            except ValueError as problem:
                error = problem
        raise_together(error)

    def write(self, record: Record) -> None:
        """Append a record to metrics.jsonl."""
        if self._metrics is not None and self._failure is None:
            try:
                self._metrics.write(record)
            except OSError as error:
                self._failure = _cannot_write(self._run_dir / "metrics.jsonl", error)

    def show(self, events: list[tuple[str, float, int]]) -> None:
        """Give (name, value, step) to the monitor."""
        if self._monitor is not None and self._failure is None:
            try:
                self._monitor.write_events(events)
            except OSError as error:
                self._failure = _cannot_write(self._run_dir / "tensorboard", error)

    def settle(self) -> None:
        """Collective: raise on every rank what rank 0 could not write.

        Raises:
            MetricsError: naming the file and the remedy.
        """
        raise_together(self._failure)

    def close(self) -> None:
        """Close the file; what a full disk refused has been reported by :meth:`settle`."""
        if self._metrics is not None:
            with suppress(OSError):
                self._metrics.close()


def _cannot_write(path: Path, error: OSError) -> MetricsError:
    return MetricsError(
        f"{path} cannot be written ({error.strerror or error}); free space or mend the permissions, then go on with "
        "--resume"
    )
