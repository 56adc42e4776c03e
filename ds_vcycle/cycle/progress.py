"""What a person sees while a run goes on: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_SECONDS = 10.0


class RunProgress:
    """Progress of the phases on rank 0; silent on the other ranks."""

    def __init__(self, *, enabled: bool, phases: int) -> None:
        self._phases = phases
        self._console = Console(stderr=True) if enabled else None
        self._bar: Progress | None = None
        self._task: Any = None
        self._title, self._steps = "", 0
        self._last_line = 0.0
        if self._console is not None and sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=8),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
            )
            self._bar = Progress(*columns, TextColumn("{task.fields[values]}"), console=self._console)
            self._bar.start()

    def phase(self, index: int, title: str, steps: int, done: int = 0) -> None:
        """Begin a phase of ``steps`` steps, ``done`` of them made before."""
        self._title, self._steps = f"[{index + 1}/{self._phases}] {title}", steps
        if self._bar is not None:
            if self._task is not None:
                self._bar.update(self._task, completed=self._bar.tasks[-1].total)
            self._task = self._bar.add_task(self._title, total=steps, completed=done, values="")
        else:
            self._line(f"{self._title}: {steps} steps" if steps > 1 else self._title)

    def update(self, done: int, values: str) -> None:
        """Show the steps done and the values measured last."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, values=values)
        elif time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._line(f"{self._title}: {done}/{self._steps} {values}")

    def note(self, text: str) -> None:
        """Print a line of its own."""
        if self._console is not None:
            self._console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self.note(text)
