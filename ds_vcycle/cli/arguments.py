"""Arguments that several verbs take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Dotted overrides of the file, the value in YAML: `model.hidden=256 cycle.kind=flat`."),
]
