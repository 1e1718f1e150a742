"""Every backend against the reference: the same update, routing and gradients."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layer import build, every_variant

from attractor.ops.grouped import decode as grouped
from attractor.ops.grouped import grouped_decode, grouped_decode_backward
from attractor.ops.reference import gathered_decode
from attractor.ops.rows import add_rows


@every_variant
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_grouped_agrees(variant, tokens):
    layer = build(**variant, dtype=torch.float64)
    x = torch.randn(tokens, 12, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(tokens, 12, dtype=torch.float64)
    results = []
    for layer.backend in ("reference", "grouped"):
        update, stats = layer(x, return_stats=True)
        gradients = torch.autograd.grad(update, [x, *layer.parameters()], upstream)
        results.append((update, stats.indices, stats.weights, stats.confidence, *gradients))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def routings(tokens: int, top_k: int, patches: int) -> dict[str, torch.Tensor]:
    even = torch.rand(tokens, patches).argsort(1)[:, :top_k]
    zipf = (1 / torch.arange(1, patches + 1)).expand(tokens, patches)
    return {
        "even": even,
        "zipf": torch.multinomial(zipf, top_k),
        "all to the first": torch.arange(top_k).expand(tokens, top_k),
        "all to the last": patches - 1 - torch.arange(top_k).expand(tokens, top_k),
    }


@pytest.mark.parametrize("options", [{}, {"gate": "scalar"}, {"radius": 0.3}], ids=str)
@pytest.mark.parametrize(
    "learns",
    [["decoder"], ["gate_bias"], ["gate_slope", "decoder"], ["input"], ["encoder"], ["prototypes", "input"]],
    ids=str,
)
def test_gradients_are_the_same_where_others_are_frozen(learns, options):
    """To the bit, though less is computed."""
    layer = build(backend="grouped", **options)
    torch.manual_seed(1)
    x = torch.randn(40, layer.dim, requires_grad=True)
    upstream = torch.randn_like(x)
    leaves = {"input": x, **dict(layer.named_parameters())}
    full = dict(zip(leaves, torch.autograd.grad(layer(x), list(leaves.values()), upstream), strict=True))
    learns = [name for name in learns if name in leaves]
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in learns)
    for name in learns:
        (gradient,) = torch.autograd.grad(layer(x), leaves[name], upstream)
        assert torch.equal(gradient, full[name]), name
        assert gradient.any()


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.integers(0, 50), st.integers(1, 4), st.integers(4, 9), st.integers(1, 7), st.integers(1, 9), st.data()
)
def test_grouped_decode(tokens, top_k, patches, rank, dim, data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    given_routings = routings(tokens, top_k, patches)
    idx = given_routings[data.draw(st.sampled_from(sorted(given_routings)))]
    code = torch.randn(tokens, top_k, rank, dtype=torch.float64, requires_grad=True)
    decoder = torch.randn(patches, rank, dim, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(tokens, dim, dtype=torch.float64)
    results = []
    for decode in (gathered_decode, grouped):
        update = decode(code, decoder, idx)
        results.append((update, *torch.autograd.grad(update, (code, decoder), upstream)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def test_operators_are_well_behaved():
    code, decoder = torch.randn(6, 2, 3), torch.randn(5, 3, 4)
    idx = torch.tensor([[0, 4], [0, 1], [4, 1], [3, 0], [0, 1], [1, 0]])
    torch.library.opcheck(grouped_decode, (code, decoder, idx))
    torch.library.opcheck(grouped_decode_backward, (torch.randn(6, 4), code, decoder, idx))
    torch.library.opcheck(add_rows, (torch.randn(6, 2, 7), idx, 5))


@pytest.mark.parametrize(
    ("backend", "options", "reason"),
    [
        ("grouped", {"device": "meta"}, "it is for the CPU, and the input is on meta"),
        ("triton", {"device": "meta"}, "Triton kernels need a GPU, and the input is on meta"),
        ("triton", {"dtype": torch.float64}, "the kernels know float32, bfloat16 and float16"),
    ],
)
def test_asking_for_what_cannot_run(backend, options, reason):
    layer = build(backend=backend, **options)
    if backend == "triton" and find_spec("triton") is None:
        reason = "triton is not installed"
    with pytest.raises(ValueError, match=f"backend='{backend}' cannot run: {reason}"):
        layer(torch.randn(2, 12, **options))
