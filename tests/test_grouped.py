"""The CPU backend alone: ties, few tokens, uneven routing, threads, and what it must refuse."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layer import build
from torch.autograd import forward_ad

from attractor import APN
from attractor.ops import grouped, reference

OPTIONS = {"temperature": 0.2, "scale": 0.7, "routing": "cosine"}


@pytest.fixture(params=[2**24, 1], ids=["sums of rows", "groups"])
def each_decoder(request, monkeypatch):
    """Both ways to decode, also at sizes where one of them would never be chosen; and tiny blocks."""
    monkeypatch.setattr(grouped, "CACHE", request.param)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(0, 40), st.integers(1, 300), st.integers(1, 6), st.integers(0, 1000), st.data())
def test_ties_go_to_the_lower_index(tokens, patches, distinct, seed, data):
    top_k = data.draw(st.integers(1, patches))
    torch.manual_seed(seed)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, torch.nan])[:distinct]
    scores = values[torch.randint(distinct, (tokens, patches))]
    clear = torch.rand(tokens, 1) < 0.3  # among rows without any tie
    scores = torch.where(clear, torch.randn(tokens, patches), scores)
    assert torch.equal(grouped.best_patches(scores, top_k), reference.best_patches(scores, top_k))


def parameters(patches: int, dim: int, rank: int, *, scalar: bool) -> list[torch.Tensor | None]:
    shapes = [
        (patches, dim),
        (dim, rank),
        (patches, rank),
        (patches, 1 if scalar else rank),
        (patches, rank, dim),
    ]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [tensors[0], tensors[1], None if scalar else tensors[2], *tensors[3:]]


def tokens_for(routing: str, prototypes: torch.Tensor, tokens: int) -> torch.Tensor:
    """Tokens near the prototypes that they should prefer."""
    patches, dim = prototypes.shape
    noise = torch.randn(tokens, dim, dtype=torch.float64)
    if routing == "even":
        return noise
    zipf = 1 / torch.arange(1, patches + 1)
    favourite = torch.multinomial(zipf, tokens, replacement=True) if routing == "zipf" else patches - 1
    return 20 * prototypes[favourite] + 0.01 * noise


@pytest.mark.parametrize(
    ("routing", "scalar", "dtype"),  # every two of them together
    [
        ("even", False, torch.float64),
        ("even", True, torch.float32),
        ("zipf", True, torch.float64),
        ("zipf", False, torch.float32),
        ("all to one", False, torch.float64),
        ("all to one", True, torch.float32),
    ],
)
@pytest.mark.parametrize(
    ("tokens", "patches", "dim", "rank", "top_k"),
    [(1, 5, 3, 1, 1), (7, 4, 5, 3, 4), (130, 9, 17, 7, 2), (600, 40, 24, 8, 1), (300, 300, 12, 5, 4)],
)
def test_gradients_of_every_output(
    each_decoder, two_threads, tokens, patches, dim, rank, top_k, routing, scalar, dtype
):
    """Against the float64 reference, with random upstream gradients for the router's outputs as well."""
    torch.manual_seed(0)
    weights = parameters(patches, dim, rank, scalar=scalar)
    inputs = [tokens_for(routing, weights[0], tokens), *weights]
    keep = torch.rand(tokens, top_k) < 0.7
    keep[:, 0] |= ~keep.any(-1)
    upstream = [
        torch.randn(shape, dtype=torch.float64) for shape in ((tokens, dim), (tokens, top_k), (tokens,))
    ]

    def run(apn, precision):
        x = [t if t is None else t.to(dtype).to(precision).requires_grad_() for t in inputs]
        output = apn(*x, top_k=top_k, keep_nk=keep, **OPTIONS)
        outputs = [output.update, output.weights, output.confidence]
        leaves = [t for t in x if t is not None]
        gradients = torch.autograd.grad(outputs, leaves, [grad.to(precision) for grad in upstream])
        return output.indices, [*outputs, *gradients]

    indices, exact = run(reference.apn, torch.float64)  # of the same numbers, rounded to dtype
    ours_indices, ours = run(grouped.apn, dtype)
    assert torch.equal(ours_indices, indices)
    for got, rounded, expected in zip(ours, run(reference.apn, dtype)[1], exact, strict=True):
        unavoidable = (
            rounded - expected
        ).norm()  # prototypes that their tokens agree on hardly get a gradient
        allowed = 2 * unavoidable + (1e-12 if dtype == torch.float64 else 1e-6) * (1 + expected.norm())
        assert (got - expected).norm() <= allowed


@pytest.mark.parametrize("tokens", [0, 1, 8, 9, 64])
@pytest.mark.parametrize("routing", ["cosine", "dot"])
@pytest.mark.parametrize("patches", [4, 9, 256])
def test_few_tokens_without_gradients(two_threads, tokens, patches, routing):
    layer = build(
        num_patches=patches, routing=routing, temperature=0.5, dtype=torch.float64, backend="grouped"
    )
    x = torch.randn(tokens, 12, dtype=torch.float64)
    with_gradients = layer(x)
    with torch.inference_mode():
        update, stats = layer(x, return_stats=True)
        layer.backend = "reference"
        expected, expected_stats = layer(x, return_stats=True)
    torch.testing.assert_close(update, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(with_gradients, expected, rtol=0, atol=1e-12)
    assert torch.equal(stats.indices, expected_stats.indices)
    assert torch.get_num_threads() == 2


def test_inference_mode_reaches_the_threads(each_decoder, two_threads):
    layer = build(num_patches=4)
    x = torch.randn(500, 12)
    with torch.inference_mode():
        update = layer(x)
    torch.testing.assert_close(update, layer(x))


def test_same_bits_every_time(each_decoder, two_threads):
    torch.manual_seed(0)
    layer = APN(64, num_patches=50, rank=16, backend="grouped")
    x = tokens_for("zipf", layer.prototypes.detach().double(), 500).float().requires_grad_()
    upstream = torch.randn(500, 64)

    def run():
        update = layer(x)
        return [update, *torch.autograd.grad(update, [x, *layer.parameters()], upstream)]

    first, *others = (run() for _ in range(3))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_an_error_in_a_thread_is_raised_and_the_thread_count_restored(two_threads):
    def fail(piece):
        raise ArithmeticError(piece)

    for pieces in ([1], [1, 2, 3]):
        with pytest.raises(ArithmeticError, match="1"):
            grouped.share_out(fail, pieces)
        assert torch.get_num_threads() == 2


def test_second_derivatives_count_each_path_once():
    """One input computed from another: the partial derivatives of our function must not include that path."""
    layer = build(dim=4, num_patches=3, top_k=2, rank=2, temperature=0.5, dtype=torch.float64)
    weights = [layer.prototypes, layer.encoder, layer.gate_slope, layer.gate_bias, layer.decoder]
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for apn in (reference.apn, grouped.apn):
        prototypes = weights[0] + x[:3].square()
        output = apn(x, prototypes, *weights[1:], top_k=2, **OPTIONS)
        (first,) = torch.autograd.grad(output.update.square().sum(), x, create_graph=True)
        results.append([first, *torch.autograd.grad(first.square().sum(), [x, *weights])])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("gradients", [True, False])
def test_forward_mode_is_refused(each_decoder, number, gradients):
    inputs = [torch.randn(30, 12, dtype=torch.float64), *parameters(9, 12, 4, scalar=False)]
    with torch.set_grad_enabled(gradients), forward_ad.dual_level():
        inputs[number] = forward_ad.make_dual(inputs[number], torch.ones_like(inputs[number]))
        with pytest.raises(NotImplementedError, match="jvp"):
            grouped.apn(*inputs, top_k=3, **OPTIONS)


def test_scale_may_change_before_the_backward_pass():
    layer = build()
    layer.set_scale_factor(0.5)
    x = torch.randn(20, 12, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    update = layer(x)
    layer.set_scale_factor(1.0)
    assert torch.equal(torch.autograd.grad(update.sum(), x)[0], expected)


def test_strided_tensors():
    layer = build(dtype=torch.float64)
    for name, value in list(layer.named_parameters()):
        setattr(layer, name, torch.nn.Parameter(value.detach().mT.contiguous().mT))
    x = torch.randn(12, 37, dtype=torch.float64).T.requires_grad_()
    upstream = torch.randn(12, 37, dtype=torch.float64).T
    results = []
    for layer.backend in ("reference", "grouped"):
        results.append(torch.autograd.grad(layer(x), [x, *layer.parameters()], upstream))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1e-20, 1e-22, 1e-30])
def test_gradients_of_tokens_whose_squares_underflow(size):
    layer = build()
    x = torch.randn(20, 12)
    x[2] *= size
    gradients = torch.autograd.grad(layer(x.requires_grad_()).sum(), [x, *layer.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_threads_are_not_lost():
    """Many threads at once, each with small passes: none may leave the process with fewer threads."""
    layer = APN(16, num_patches=8, top_k=2, rank=4)
    x = torch.randn(4, 16)
    before = torch.get_num_threads()
    seen = []

    def work():
        with torch.no_grad():
            for _ in range(30):
                layer(x)
        layer(x).sum().backward()
        seen.append(torch.get_num_threads())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.get_num_threads() == before
    assert len(set(seen)) == 1
