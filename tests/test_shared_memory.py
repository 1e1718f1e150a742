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


@needs_triton
@pytest.mark.parametrize(
    ("capability", "rank", "dtype", "patches"),
    [
        *((capability, 256, "bfloat16", 256) for capability in (80, 86, 90)),
        *((capability, 256, "float32", 64) for capability in (86, 90)),
        (90, 128, "float32", 64),
    ],
)
def test_every_kernel_fits(capability: int, rank: int, dtype: str, patches: int) -> None:
    """Those that need the most."""
    from shared_memory import MOST

    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), str(capability), str(rank), dtype, str(patches)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    needs = json.loads(done.stdout)
    assert needs.keys() >= KERNELS
    assert {name: size for name, size in needs.items() if size > MOST[capability]} == {}
