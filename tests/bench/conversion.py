"""One conversion in a process of its own: ``python -m tests.bench.conversion FROM TO WORKERS...`` prints its seconds.

Without WORKERS it is our resharding of FROM to TP 1; with two numbers ``ds_to_universal``, which extracts and merges in
so many processes (forked, as those of its own command are). Imports are not counted.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal

from ds_vcycle.checkpoint.offline.relayout import TargetLayout
from ds_vcycle.checkpoint.offline.reshard import reshard


def to_universal(native: Path, universal: Path, extract: int, merge: int) -> None:
    """As the command does it with these numbers of workers."""
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(native), output_folder=str(universal), num_extract_workers=extract,
            num_merge_workers=merge, keep_temp_folder=False, strict=True, inject_missing_state=False,
        )
    )  # fmt: skip


def main() -> None:
    """Convert, and print the seconds in the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("to", type=Path)
    parser.add_argument("workers", type=int, nargs="*")
    options = parser.parse_args()
    os.sync()  # nobody pays for what another wrote
    start = time.perf_counter()
    if options.workers:
        to_universal(options.source, options.to, *options.workers)
    else:
        reshard(options.source, options.to, TargetLayout(tp=1))
    print(f"\n{time.perf_counter() - start}")


if __name__ == "__main__":
    main()
