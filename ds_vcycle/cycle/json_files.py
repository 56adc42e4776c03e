"""The small JSON files of a run directory: replaced in one rename, read as far as they are there. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def replace_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a file in one rename: a reader finds the old one or the new one, whole (raises OSError)."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """What the file holds; nothing where it is missing, damaged or no mapping."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
