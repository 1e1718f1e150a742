"""Taped launches, with a kernel that works on addresses, on the CPU."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton

from attractor.ops import fused, launch, tapes
from attractor.ops.kernels import quick
from attractor.ops.tapes import Tape, Taped


class Doubling:
    """As triton.jit makes them: y = 2 x + plus, of n numbers."""

    arg_names = ("x", "y", "n", "plus", "BN")
    function, packed_metadata = "function", "metadata"

    def __getitem__(self, grid):
        def launch(x, y, n, plus, BN):
            self.run(*[None] * 9, x.data_ptr(), y.data_ptr(), n, plus, BN)
            return self

        return launch

    def run(self, *arguments):
        x, y, n, plus, _ = arguments[9:]
        numbers = (ctypes.c_float * n).from_address(x)
        (ctypes.c_float * n).from_address(y)[:] = [2 * number + plus for number in numbers]


@pytest.fixture
def double(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tapes, "stream_of", lambda device: 7)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    return quick.Quick(Doubling())


def numbers(count):
    return torch.randint(-99, 99, (count,)).float()


def quadruple(double):
    """4 x + 3 and 8 x + 6, the second beside it in memory."""

    def run(x, plus):
        n = x.numel()
        between = torch.empty_like(x)
        both, alone = torch.empty(2 * 64), torch.empty(0)
        double[(1,)](x, between, n, plus, BN=4)
        more = torch.empty_like(x)
        double[(1,)](between, both[:n], n, plus, BN=4)
        double[(1,)](both[:n], more, n, 0.0, BN=4)
        double[(1,)](between, both[64 : 64 + n].view(n), n, plus, BN=4)
        return both, more, alone

    return run


def test_other_tensors_of_the_same_sizes(double):
    call = Taped(quadruple(double), lambda: None)
    for number in range(5):
        x = numbers(20)
        both, more, alone = call(x, 1.0)
        wanted = 4 * x + 3
        assert torch.equal(both[:20], wanted)
        assert torch.equal(both[64:84], wanted)
        assert torch.equal(more, 2 * wanted)
        assert alone.numel() == 0
        (tape,) = call.tapes.values()
        assert isinstance(tape, Tape) == (number > 0)


def test_each_kind_has_its_own(double):
    call = Taped(quadruple(double), lambda: None)
    for _ in range(3):
        for n, plus in ((20, 1.0), (24, 1.0), (20, 0.5)):
            x = numbers(n)
            assert torch.equal(call(x, plus)[1], 2 * (4 * x + 3 * plus))
    assert len(call.tapes) == 3


def test_what_must_not_be_taped(double):
    def adding(x, y):
        double[(1,)](x, z := torch.empty_like(x), x.numel(), 0.0, BN=4)
        return [z + y]

    call = Taped(adding, lambda: None)
    for _ in range(4):
        x, y = numbers(20), numbers(20)
        assert torch.equal(call(x, y)[0], 2 * x + y)
    assert not any(isinstance(tape, Tape) for tape in call.tapes.values())


def test_a_tensor_that_stands_for_two_tells_nothing_of_who_is_who(double):
    def run(x, y):
        first, second = torch.empty_like(x), torch.empty_like(y)
        double[(1,)](x, first, x.numel(), 0.0, BN=4)
        double[(1,)](y, second, y.numel(), 0.0, BN=4)
        return [first, second]

    call = Taped(run, lambda: None)
    same = numbers(20)
    for _ in range(3):
        call(same, same)
    for _ in range(4):
        x, y = numbers(20), numbers(20)
        first, second = call(x, y)
        assert torch.equal(first, 2 * x)
        assert torch.equal(second, 2 * y)
    whole = numbers(41)
    assert torch.equal(call(whole[1:21], whole[21:])[0], 2 * whole[1:21])  # not aligned


def test_the_layer_has_tapes(double, monkeypatch):
    """Nothing runs; but all that a step does can be taped."""
    from attractor.ops import kernels

    class Still(quick.Quick):
        def launch(self, grid, *given, **constants):
            self.launches.clear()
            super().launch(grid, *given, **constants)

    class Kernel:
        function, packed_metadata = "function", "metadata"

        def __init__(self, kernel):
            self.arg_names = kernel.arg_names

        def __getitem__(self, grid):
            return lambda *given, **constants: self

        def run(self, *arguments):
            pass

    for name in kernels.__all__:
        monkeypatch.setattr(kernels, name, Still(Kernel(getattr(kernels, name))))
    call, back = (Taped(run, lambda: None) for run in (fused.fused, fused.fused_backward))
    z, P, V, a, b, U = (torch.randn(s) for s in ((99, 8), (5, 8), (8, 3), (5, 3), (5, 3), (5, 3, 8)))
    options = (2, 0.5, 1.0, True, torch.float32)
    for _ in range(3):
        _, saved = call(z, P, V, a, b, U, None, None, *options, True)
        given = (torch.randn_like(z), None, None, z, P, V, a, b, U, saved)
        back(*given, *options[:4], False, torch.float32, [True] * 5)
    for taped in (call, back):
        assert all(isinstance(tape, Tape) for tape in taped.tapes.values())
    assert launch.aligned(65) == 128
