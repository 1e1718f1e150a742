"""Kernels that need more shared memory than a GPU has fail at their launch. Compiling them tells before."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_layer import needs_triton

SCRIPT = Path(__file__).with_name("shared_memory.py")
KERNELS = {
    "lengths",
    "route",
    "decode",
    "token_backward",
    "decode_backward",
    "bank_backward",
    "token_products",
}

Case = tuple[int, int, str, int]
CASES: list[Case] = [
    *((capability, 256, "bfloat16", 256) for capability in (80, 86, 90)),
    *((capability, 256, "float32", 64) for capability in (86, 90)),
    (90, 128, "float32", 64),
    *((capability, 128, "bfloat16", patches) for capability in (80, 86, 90) for patches in (64, 256)),
    *((capability, 32, "bfloat16", 4096) for capability in (80, 86, 90)),
]
"""Those that need the most, and those with sizes of their own."""


def needs_of(*cases: Case, how: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """In one process: to start it takes as long as to compile a case."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), *(str(word) for case in cases for word in case), *how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_kernels_fit(cases: list[Case], kernels: set[str], how: tuple[str, ...] = ()) -> None:
    """And none copies over a tile while it is multiplied, which warps of Hopper GPUs do without waiting."""
    from shared_memory import MOST

    for case, needs in zip(cases, needs_of(*cases, how=how), strict=True):
        assert needs.keys() >= kernels, case
        assert {name: size for name, (size, _) in needs.items() if size > MOST[case[0]]} == {}, case
        assert {name: tiles for name, (_, tiles) in needs.items() if tiles} == {}, case


@needs_triton
@pytest.mark.parametrize("capability", [80, 86, 90])
def test_every_kernel_fits(capability: int) -> None:
    cases = [case for case in [*CASES, (90, 32, "bfloat16", 256)] if case[0] == capability]
    assert cases
    assert_kernels_fit(cases, KERNELS)


@needs_triton
def test_gates_apart_fit() -> None:
    cases: list[Case] = [
        (capability, rank, "bfloat16", 256) for capability in (80, 86, 90) for rank in (64, 128)
    ]
    assert_kernels_fit(cases, {"pair_products", "code_backward", "gate_backward"})


@needs_triton
def test_every_kernel_fits_under_autocast() -> None:
    cases: list[Case] = [(capability, 256, "bfloat16", 256) for capability in (80, 86, 90)]
    cases += [(80, 128, "bfloat16", 256), (90, 128, "bfloat16", 256)]
    cases += [(capability, 32, "bfloat16", 256) for capability in (80, 86, 90)]
    assert_kernels_fit(cases, KERNELS, how=("autocast",))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_assembles(case: Case) -> None:
    """And needs what it was said to need before it went to the assembler."""
    assert needs_of(case, how=("whole",)) == needs_of(case)
