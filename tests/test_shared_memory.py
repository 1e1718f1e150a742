"""Kernels that need more shared memory than a GPU has fail at their launch. Compiling them tells before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_layer import needs_triton

SCRIPT = Path(__file__).with_name("shared_memory.py")
KERNELS = {"route", "decode", "token_backward", "decode_backward", "bank_backward", "encoder_backward"}


CASES = [
    *((capability, 256, "bfloat16", 256) for capability in (80, 86, 90)),
    *((capability, 256, "float32", 64) for capability in (86, 90)),
    (90, 128, "float32", 64),
]
"""Those that need the most."""


def needs_of(capability: int, *arguments: object) -> dict[str, int]:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), str(capability), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_fits(case: tuple[int, int, str, int]) -> None:
    from shared_memory import MOST

    needs = needs_of(*case)
    assert needs.keys() >= KERNELS
    assert {name: size for name, size in needs.items() if size > MOST[case[0]]} == {}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_assembles(case: tuple[int, int, str, int]) -> None:
    """And needs what it was said to need before it went to the assembler."""
    assert needs_of(*case, "whole") == needs_of(*case)
