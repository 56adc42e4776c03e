"""The Triton kernels: the references' bits in the interpreter, and compiled for two GPUs without one."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from ds_vcycle_kernels import RefineJob, positions, refine
from ds_vcycle_kernels.coalesce_triton import coalesce_kernel
from ds_vcycle_kernels.descriptors import TABLE
from ds_vcycle_kernels.refine_triton import refine_kernel
from triton import JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def test_interpreted_kernels_have_the_references_bits():
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel_interpreted"],
        cwd=root, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


def test_triton_is_refused_on_a_cpu():
    rule = positions(torch.tensor([0]))
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        refine([RefineJob(x=torch.zeros(1, 1), z=None, rows=rule, cols=rule)], beta=0.5, implementation="triton")


@cache
def compiled(kernel: JITFunction[Any], arch: int, **constants: object) -> dict[str, Any]:
    """What Triton makes of a kernel for compute capability arch / 10: ttir, ptx and the machine code, cubin."""
    types = {"beta": "fp32", "jobs": "*i64", "members": "*i64", "divisors": "*fp32", "tables": "*i32", "owners": "*i32"}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    source = ASTSource(kernel, signature, places)
    return dict(triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm)


def resources(cubin: bytes, directory: Path) -> dict[str, int]:
    """Bytes of stack and of local memory (where registers spill) that a thread takes, and its registers."""
    path = directory / "kernel.cubin"
    path.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}


def check_code(asm: dict[str, Any], directory: Path, stack_bytes: int = 0) -> None:
    """Nothing spills, no local memory, no atomics, no fused or flushed arithmetic; fine and coarse data by 64 bits."""
    used = resources(asm["cubin"], directory)
    assert used["STACK"] <= stack_bytes
    assert used["LOCAL"] == 0
    assert 0 < used["REG"] <= 128
    ptx = asm["ptx"]
    assert ".local" not in ptx
    assert not re.search(r"\b(atom|red)\.", ptx)
    assert not re.search(r"\bfma\.|\.ftz", ptx), "the references' roundings"
    data = r"tt\.addptr %\w+, (%\w+) : tensor<[\dx]*!tt\.ptr<(?:f32|f64|f16|i16)>>, tensor<[\dx]*i32>"
    assert set(re.findall(data, asm["ttir"])) <= {"%lane"}, "but for the place in a tile, offsets are of 64 bits"


@pytest.mark.parametrize(("arch", "cols", "wide"), list(itertools.product((80, 90), range(4), (True, False))))
def test_refine_compiles_to_vector_accesses_without_spills(arch, cols, wide, tmp_path):
    asm = compiled(
        refine_kernel, arch, BLOCK=1024, COLS=cols, WIDE=wide, MODE=2, DIVIDE=cols % 2 == 0, WEIGHT=1 + cols % 2,
        MOMENTS=True,
    )  # fmt: skip
    check_code(asm, tmp_path)
    assert re.search(r"ld\.global\.v4", asm["ptx"])
    assert re.search(r"st\.global\.v4", asm["ptx"])


@pytest.mark.parametrize(("arch", "cols", "root"), list(itertools.product((80, 90), range(4), (True, False))))
def test_coalesce_compiles_to_vector_loads_without_spills(arch, cols, root, tmp_path):
    """By columns as they are, in pairs and in runs of four or more; tables gather single elements."""
    for rows, columns, stack_bytes in ((1, 512, 0), (32, 16, 16)):  # narrow tiles set a few registers aside
        asm = compiled(coalesce_kernel, arch, ROWS=rows, COLUMNS=columns, COLS=cols, VECTOR=True, ROOT=root)
        check_code(asm, tmp_path, stack_bytes)
        assert re.search(r"st\.global\.v2\.b64", asm["ptx"])
        assert bool(re.search(r"ld\.global\.v4", asm["ptx"])) == (cols != TABLE)
