"""The Triton kernels: the references' bits in the interpreter, and compiled for two GPUs without one."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from ds_vcycle_kernels import RefineJob, positions, refine
from ds_vcycle_kernels.coalesce_triton import coalesce_kernel
from ds_vcycle_kernels.refine_triton import refine_kernel
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


def compiled(kernel: object, constants: dict[str, object], arch: int) -> str:
    """The PTX for compute capability arch / 10."""
    types = {"beta": "fp32", "jobs": "*i64", "members": "*i64", "divisors": "*fp32", "tables": "*i32", "owners": "*i32"}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]


@pytest.mark.parametrize(("arch", "cols", "wide"), list(itertools.product((80, 90), range(4), (True, False))))
def test_refine_compiles_to_vector_accesses_without_local_memory(arch, cols, wide):
    constants = {
        "BLOCK": 1024, "COLS": cols, "WIDE": wide, "MODE": 2, "DIVIDE": cols % 2 == 0, "WEIGHT": 1 + cols % 2,
        "MOMENTS": True,
    }  # fmt: skip
    ptx = compiled(refine_kernel, constants, arch)
    assert re.search(r"ld\.global\.v4", ptx)
    assert re.search(r"st\.global\.v4", ptx)
    assert ".local" not in ptx


@pytest.mark.parametrize(("arch", "cols", "root"), list(itertools.product((80, 90), range(4), (True, False))))
def test_coalesce_compiles_without_local_memory_or_atomics(arch, cols, root):
    ptx = compiled(coalesce_kernel, {"BLOCK": 512, "COLS": cols, "VECTOR": True, "ROOT": root}, arch)
    assert ".local" not in ptx
    assert not re.search(r"\b(atom|red)\.", ptx)
