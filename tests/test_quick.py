"""Quick launches of kernels, with a kernel that says what it was compiled for and launched with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from attractor.ops.kernels import quick


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, launched):
        self.launched = launched

    def run(self, *arguments):
        self.launched.append(arguments)


class Kernel:
    """As triton.jit makes them, but nothing is compiled."""

    arg_names = ("x", "n", "scale", "D", "BN")

    def __init__(self):
        self.compiled_for, self.launched = [], []

    def __getitem__(self, grid):
        def launch(*given, **constants):
            self.compiled_for.append((grid, given, constants))
            return Compiled(self.launched)

        return launch


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    class Driver:
        class active:
            @staticmethod
            def get_current_stream(device):
                return f"stream of {device}"

    monkeypatch.setattr(quick.triton.runtime, "driver", Driver)
    return quick.Quick(Kernel())


def test_compiles_once_and_launches_with_constants_in_the_order_of_the_kernel(kernel):
    x = torch.zeros(64)
    for n in (32, 48):
        kernel[(7,)](x, n, 0.5, BN=16, D=8, num_warps=4)
    assert len(kernel.kernel.compiled_for) == 1  # 32 and 48 are alike: 16 divides both
    (launched,) = kernel.kernel.launched
    where = (7, 1, 1, "stream of 0", "function", "metadata", None, None, None)
    assert launched == (*where, x.data_ptr(), 48, 0.5, 8, 16)


@pytest.mark.parametrize(
    "other",
    [
        lambda k, x: k[(7,)](x, 33, 0.5, D=8, BN=16),  # 16 does not divide it
        lambda k, x: k[(7,)](x, 1, 0.5, D=8, BN=16),  # Triton makes a constant of it
        lambda k, x: k[(7,)](x, 1 << 35, 0.5, D=8, BN=16),  # 64 bits
        lambda k, x: k[(7,)](x[1:], 32, 0.5, D=8, BN=16),  # not aligned to 16 bytes
        lambda k, x: k[(7,)](x.half(), 32, 0.5, D=8, BN=16),
        lambda k, x: k[(7,)](None, 32, 0.5, D=8, BN=16),
        lambda k, x: k[(7,)](x, 32, 0.5, D=16, BN=8),
        lambda k, x: k[(7,)](x, 32, 0.5, BN=8, D=16),  # the same values under other names
        lambda k, x: k[(7,)](x, 32, 0.5, D=8, BN=16, num_warps=8),
    ],
)
def test_what_triton_compiles_for_is_never_mixed_up(kernel, other):
    x = torch.zeros(64)
    kernel[(7,)](x, 32, 0.5, D=8, BN=16)
    other(kernel, x)
    assert len(kernel.kernel.compiled_for) == 2
    assert not kernel.kernel.launched


def test_a_kernel_that_is_interpreted_stays_as_it_is():
    interpreted = object()
    assert quick.quick(interpreted) is interpreted


def test_a_step_of_training_launches_what_triton_would():
    """Every kernel, by Triton's own code and by ours, up to the point where the driver takes over."""
    assert "are the same" in output_of("launches.py")


def output_of(script):
    """In a process of its own, where nothing is interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = Path(__file__).parent
    environment["PYTHONPATH"] = str(tests.parent)
    done = subprocess.run(
        [sys.executable, script], cwd=tests, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
