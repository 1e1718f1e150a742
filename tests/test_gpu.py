"""The layer on a CUDA device, against the same layer in float64 on the CPU."""

import copy

import pytest
import torch
from test_layer import build, every_variant

from attractor.ops.tapes import Tape, Taped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch.compile's advice about this GPU
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = {"dim": 96, "num_patches": 64, "top_k": 4, "rank": 16}


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double().cpu() - expected).norm() / expected.norm().clamp(min=1e-30))


def run(call, layer, x, upstream):
    x = x.detach().requires_grad_()
    update, stats = call(x, return_stats=True)
    gradients = torch.autograd.grad(update, [x, *layer.parameters()], upstream.to(update))
    return update.detach(), stats.indices.cpu(), gradients


@every_variant
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16 autocast"])
def test_matches_float64(variant, compiled, autocast):
    torch._dynamo.reset()
    exact = build(**(SIZES | variant)).double()
    x, upstream = torch.randn(300, 96).double(), torch.randn(300, 96).double()
    expected, expected_indices, expected_gradients = run(exact, exact, x, upstream)
    layer = copy.deepcopy(exact).float().cuda()
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        update, indices, gradients = run(call, layer, x.float().cuda(), upstream)
    assert torch.equal(indices, expected_indices)
    limit = 2e-2 if autocast else 1e-5
    assert relative_error(update, expected) < limit
    names = ["input", *(name for name, _ in layer.named_parameters())]
    for name, got, wanted in zip(names, gradients, expected_gradients, strict=True):
        assert relative_error(got, wanted) < 3 * limit, name


def test_forward_is_safe_in_a_cuda_graph():
    layer = build(**SIZES).cuda()
    x = torch.randn(128, 96, device="cuda")
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        layer(x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        update = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(update, layer(x).detach())


def test_same_bits_twice():
    layer = build(**SIZES).cuda()
    x, upstream = torch.randn(500, 96).cuda(), torch.randn(500, 96).cuda()
    first = torch.autograd.grad(layer(x), list(layer.parameters()), upstream)
    second = torch.autograd.grad(layer(x), list(layer.parameters()), upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_is_compiled_repeats_launches():
    """From the third step on; with the bits of eager code, also where other tokens come in between."""
    torch._dynamo.reset()
    layer = build(**SIZES).cuda()
    compiled = torch.compile(layer, fullgraph=True)
    upstream = torch.randn(500, 96, device="cuda")
    for taped in Taped.every:
        taped.tapes.clear()
    for _ in range(4):
        x = torch.randn(500, 96, device="cuda", requires_grad=True)
        found, wanted = (
            torch.autograd.grad(call(x), [x, *layer.parameters()], upstream) for call in (compiled, layer)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    known = [tape for taped in Taped.every for tape in taped.tapes.values()]
    assert len(known) == 2  # of both: forward and backward
    assert all(isinstance(tape, Tape) for tape in known)
