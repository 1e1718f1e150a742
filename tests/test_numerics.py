"""Statistics on request, extreme numbers, and derivatives beyond a plain backward pass."""

import copy

import pytest
import torch
from test_layer import EXACT_BACKENDS, build
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorNames(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_statistics_cost_nothing_unless_asked():
    layer, x = build(), torch.randn(3, 12)
    with OperatorNames() as plain:
        layer(x)
    with OperatorNames() as asked:
        layer(x, return_stats=True)
    assert "log.default" in asked.seen
    assert "log.default" not in plain.seen
    assert plain.seen.count("linalg_vector_norm.default") == 2  # one for tokens, one for prototypes
    assert plain.seen.count("sort.stable") + plain.seen.count("sort.default") <= 2
    assert len(asked.seen) > len(plain.seen) + 10


def test_norm_statistics_do_not_overflow_in_low_precision():
    layer = build(dim=768, dtype=torch.float16)
    x = torch.full((2, 768), 3000.0, dtype=torch.float16)
    _, stats = layer(x, return_stats=True)
    torch.testing.assert_close(stats.input_norm, torch.full((2,), 3000.0 * 768**0.5))


def test_update_norm_is_taken_before_dropout():
    x = torch.randn(4, 12)
    _, stats = build(dropout=0.5)(x, return_stats=True)
    _, clean = build()(x, return_stats=True)
    assert torch.equal(stats.update_norm, clean.update_norm)


@pytest.mark.parametrize("size", [0.0, 1e-14, 1e-18])
def test_gradients_of_tiny_tokens_and_prototypes_are_finite(size):
    for variant in ({}, {"prototypes": "contextual", "routing_dim": 6}):
        layer = build(**variant)
        with torch.no_grad():
            layer.prototypes[0] *= size
        x = torch.randn(6, 12)
        x[2] *= size
        x.requires_grad_()
        update = layer(x)
        gradients = torch.autograd.grad(update, [x, *layer.parameters()], torch.randn_like(update))
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_zero_token_has_no_routing_gradient():
    layer = build()
    x = torch.zeros(1, 12, requires_grad=True)
    _, stats = layer(x, return_stats=True)
    assert not torch.autograd.grad(stats.confidence.sum() + stats.balance, x)[0].any()


def test_function_transforms():
    layer = build(dtype=torch.float64, temperature=0.3)
    reference = copy.deepcopy(layer)
    reference.backend = "reference"
    x, direction = torch.randn(2, 12, dtype=torch.float64).unbind()
    expected = torch.autograd.functional.jacobian(reference, x)
    torch.testing.assert_close(torch.func.jacrev(layer)(x), expected)
    torch.testing.assert_close(torch.func.jvp(layer, (x,), (direction,))[1], expected @ direction)
    layer.backend = "grouped"  # asked for, it says what it cannot do
    with pytest.raises(RuntimeError):
        torch.func.jvp(layer, (x,), (direction,))


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_second_derivatives(backend):
    layer = build(
        dim=4, num_patches=3, top_k=2, rank=2, temperature=0.5, dtype=torch.float64, backend=backend
    )
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))
