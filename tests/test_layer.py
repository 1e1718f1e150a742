"""What the module promises beyond the mathematics: shapes, dtypes, compilation, state, bad input."""

import copy
import inspect
import re
from dataclasses import fields
from importlib.util import find_spec
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor_config
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from attractor import APN, APNConfig, warmup_factor
from attractor.config import RoleName
from attractor.layer import ROLES

SMALL = {"dim": 12, "num_patches": 10, "top_k": 3, "rank": 4}
TINY = {"dim": 6, "num_patches": 6, "top_k": 2, "rank": 2, "temperature": 0.3}
"""Gradients of it are compared number by number."""
VARIANTS = {
    "core": {},
    "dot": {"routing": "dot", "temperature": 1.0},
    "scalar gate": {"gate": "scalar"},
    "shared decoder": {"decoder": "shared", "offset_rank": 2},
    "contextual": {"prototypes": "contextual", "routing_dim": 6},
    "contextual groups": {"prototypes": "contextual", "routing_dim": 6, "routing_groups": 3},
    "layer norm": {"layer_norm": True},
    "everything": {
        "routing": "dot",
        "gate": "scalar",
        "decoder": "shared",
        "prototypes": "contextual",
        "routing_groups": 2,
        "routing_dim": 8,
        "layer_norm": True,
        "scale": 0.3,
        "temperature": 0.5,
    },
}
ROUTER_OUTPUTS = ("balance", "entropy", "confidence")
EXACT_BACKENDS = ("reference", "grouped")  # those that know float64
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
every_backend = pytest.mark.parametrize(
    "backend", [*EXACT_BACKENDS, pytest.param("triton", marks=needs_triton)]
)
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def build(seed: int = 0, **options) -> APN:
    """A layer whose every parameter is random: freshly built offsets are zero, and zeros hide mistakes."""
    torch.manual_seed(seed)
    layer = APN(**(SMALL | options))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


@every_variant
@pytest.mark.parametrize(
    ("backend", "output"),  # the router is the same code in every backend
    [*((backend, "update") for backend in EXACT_BACKENDS), *(("reference", name) for name in ROUTER_OUTPUTS)],
)
def test_gradients(variant, backend, output):
    layer = build(**(TINY | variant), backend=backend, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def compute(x, *values):
        update, stats = functional_call(
            layer, dict(zip(names, values, strict=True)), (x,), {"return_stats": True}
        )
        return update if output == "update" else getattr(stats, output)

    inputs = (x, *layer.parameters())
    assert torch.autograd.gradcheck(compute, inputs, fast_mode=output != "update")


def test_gradients_with_patch_dropout():
    layer = build(**TINY, patch_dropout=0.5, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def compute(x, *_):
        torch.manual_seed(3)  # the same slots in every call
        update, stats = layer(x, return_stats=True)
        assert (stats.weights == 0).any()
        return update, stats.entropy

    assert torch.autograd.gradcheck(compute, (x, *layer.parameters()))


@every_variant
def test_unused_patches_get_zero_gradients(variant):
    layer = build(**variant)
    x = torch.randn(1, 12)
    update, stats = layer(x, return_stats=True)
    update.backward(torch.randn_like(update))
    unused = torch.ones(10, dtype=torch.bool)
    unused[stats.indices.flatten()] = False
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        if ROLES[name] in ("gates", "decoders"):
            assert not parameter.grad[unused].any(), name
            assert parameter.grad[~unused].any(), name


@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_any_leading_shape(leading):
    layer = build()
    x = torch.randn(*leading, 12)
    update, stats = layer(x, return_stats=True)
    assert update.shape == x.shape
    assert stats.indices.shape == stats.weights.shape == (*leading, 3)
    assert stats.confidence.shape == stats.update_norm.shape == stats.input_norm.shape == leading
    assert stats.balance.shape == stats.entropy.shape == ()
    update.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    if x.numel() == 0:
        assert not any(parameter.grad.any() for parameter in layer.parameters())


def test_patches_are_chosen_without_statistics(monkeypatch):
    layer, x = APN(8, num_patches=6, top_k=2, rank=2, radius=0.3), torch.randn(2, 5, 8)
    expected = layer(x, return_stats=True)[1].indices
    assert {-1} < set(expected.flatten().tolist())  # some act, and some do not
    monkeypatch.delattr("attractor.layer.ops.balance_loss")  # which takes all scores of all tokens
    assert torch.equal(layer.choose(x), expected)


def test_tokens_are_independent_and_may_be_strided():
    layer = build(dtype=torch.float64)
    x = torch.randn(12, 7, dtype=torch.float64).T  # not contiguous
    torch.testing.assert_close(layer(x), torch.stack([layer(row) for row in x]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "eager") for name in VARIANTS if name not in ("core", "contextual groups", "everything")),
        ("contextual groups", "aot_eager"),
        ("everything", "aot_eager"),  # all of those before at once, with their backward traced
        ("core", "aot_eager"),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("core", "everything")),
    ],
)
def test_compiles_to_one_graph(name, backend):
    torch._dynamo.reset()
    variant = VARIANTS[name]
    layer = build(num_patches=32, **variant)
    x = torch.randn(40, 12, requires_grad=True)
    upstream = torch.randn(40, 12)

    def gradients(module):
        update, stats = module(x, return_stats=True)
        total = (update * upstream).sum() + stats.balance - stats.entropy
        return update, stats.indices, torch.autograd.grad(total, [x, *layer.parameters()])

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for got, expected in zip(gradients(compiled), gradients(layer), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_compiled_gradients_of_rows_are_hidden_from_inductor():
    """They are one operator that it calls: it may not see the indexing that it miscompiles (`ops.rows`)."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    layer = build(num_patches=32, decoder="shared", offset_rank=2, backend="reference")
    update = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    update(torch.randn(40, 12)).sum().backward()
    _, backward = graphs
    assert "attractor.add_rows.default" in backward
    assert not [name for name in backward if re.search("embedding|index_put|index_add", name)]


@pytest.mark.slow  # a quarter of a minute with an empty cache of Inductor's
@inductor_config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True})  # no processes, no trial programs
def test_compiled_gather_is_not_miscompiled(two_threads):
    """Inductor scattered this shape's gate gradients out of bounds, until `ops.rows` hid the gather."""
    torch._dynamo.reset()
    layer = APN(64, num_patches=32, top_k=2, rank=8, decoder="shared", backend="reference")
    x, upstream = torch.randn(40, 64), torch.randn(40, 64)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(layer(x), parameters, upstream)
    got = torch.autograd.grad(torch.compile(layer, fullgraph=True)(x), parameters, upstream)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_same_bits_twice(two_threads, backend):
    layer = build(num_patches=5, dim=64, rank=32, backend=backend)
    x, upstream = torch.randn(2000, 64), torch.randn(2000, 64)
    parameters = list(layer.parameters())
    first, *others = (torch.autograd.grad(layer(x), parameters, upstream) for _ in range(5))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_autocast_routes_in_float32(scale):
    layer = build(dim=32, num_patches=64)
    x = scale * torch.randn(200, 32)
    exact, exact_stats = layer(x, return_stats=True)
    with torch.autocast("cpu", torch.bfloat16):
        update, stats = layer(x, return_stats=True)
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert update.dtype == torch.bfloat16
    assert stats.confidence.dtype == stats.weights.dtype == torch.float32
    assert torch.equal(stats.indices, exact_stats.indices)
    assert (update - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_layers(dtype):
    layer = build(dtype=torch.float64)
    x = torch.randn(50, 12, dtype=dtype)
    low = copy.deepcopy(layer).to(dtype)
    exact = copy.deepcopy(low).double()  # the same rounded weights
    update, stats = low(x, return_stats=True)
    expected, expected_stats = exact(x.double(), return_stats=True)
    assert update.dtype == dtype
    assert torch.equal(stats.indices, expected_stats.indices)
    assert (update - expected).norm() < 0.02 * expected.norm()


def test_meta_device():
    layer = APN(**SMALL, layer_norm=True, decoder="shared", device="meta")
    assert layer(torch.randn(3, 12, device="meta")).shape == (3, 12)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)
    layer.reset_parameters()
    assert layer(torch.randn(3, 12)).isfinite().all()


def test_state_dict_is_a_contract():
    layer = APN(12, num_patches=10, top_k=3, rank=4)
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "prototypes": (10, 12),
        "encoder": (12, 4),
        "gate_slope": (10, 4),
        "gate_bias": (10, 4),
        "decoder": (10, 4, 12),
    }


@every_variant
def test_copies_and_checkpoints_are_exact(variant):
    layer, other = build(**variant), build(seed=1, **variant)
    x = torch.randn(4, 12)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(load(save(layer.state_dict())))
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    rebuilt = APN.from_config(12, APNConfig.from_json(layer.config.to_json()))
    rebuilt.load_state_dict(layer.state_dict())
    assert torch.equal(rebuilt(x), layer(x))


@every_variant
def test_every_parameter_has_a_role(variant):
    layer = build(**variant)
    by_role = [id(p) for role in sorted(set(ROLES.values())) for p in layer.parameters_of(role)]
    assert sorted(by_role) == sorted(id(p) for p in layer.parameters())
    assert all(p.shape[0] == 10 for p in layer.patch_parameters())
    assert layer.prototypes in set(layer.router_parameters())
    with pytest.raises(ValueError, match=r"unknown roles \['attention'\]"):
        layer.parameters_of("attention")


@every_backend
def test_activation_checkpointing(backend):
    layer = build(backend=backend)
    x = torch.randn(5, 12, requires_grad=True)
    plain = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    recomputed = checkpoint(layer, x, use_reentrant=False).square().sum()
    torch.testing.assert_close(torch.autograd.grad(recomputed, [x, *layer.parameters()]), plain)


BAD = (torch.nan, torch.inf, -torch.inf, 1e30)
"""1e30 is finite, but its square is not: it has no direction in float32."""


@pytest.mark.parametrize(
    ("backend", "name", "bad"),
    [
        *((backend, name, (bad,)) for backend in EXACT_BACKENDS for name in VARIANTS for bad in BAD),
        # the interpreter takes its time: all of them next to each other, once in every kernel's every way
        *(
            pytest.param("triton", name, BAD, marks=needs_triton)
            for name in ("core", "dot", "scalar gate", "shared decoder", "everything")
        ),
    ],
)
def test_rows_that_are_not_finite(backend, name, bad):
    layer = build(**VARIANTS[name], backend=backend)
    x = torch.randn(6 * len(bad), 12, requires_grad=True)
    damaged = x.detach().clone()
    damaged[2::6, 3] = damaged[4::6, 0] = torch.tensor(bad)
    good = torch.tensor([True, True, False, True, False, True] * len(bad))
    expected, expected_stats = layer(x, return_stats=True)
    update, stats = layer(damaged, return_stats=True)
    # a grouped product rounds by the size of its groups, as any matrix product does by its shape
    rounding = 0 if backend == "reference" else 1e-6
    torch.testing.assert_close(update[good], expected[good], rtol=rounding, atol=rounding)
    assert update[~good].isnan().all()
    assert (stats.indices[~good] == -1).all()
    assert torch.equal(stats.indices[good], expected_stats.indices[good])
    assert stats.balance.isfinite()
    assert stats.entropy.isfinite()
    loss = (damaged + update).square().mean()  # also when nobody masks the loss
    assert all(
        gradient.isfinite().all()
        for gradient in torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    )
    # A masked loss teaches exactly what the good rows teach.
    parameters = list(layer.parameters())
    upstream = torch.randn_like(update[good])
    got = torch.autograd.grad(update[good], parameters, upstream)
    torch.testing.assert_close(got, torch.autograd.grad(expected[good], parameters, upstream))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reset_and_scale_factor(dtype):
    layer = build(dtype=dtype, decoder="shared", prototypes="contextual", dim=400, routing_dim=100, rank=64)
    layer.set_scale_factor(0.5)
    assert layer.scale_factor.dtype == dtype
    layer.reset_parameters()
    assert layer.scale_factor is None
    assert float(layer.router_projection.detach().float().std()) == pytest.approx(400**-0.5, rel=0.05)
    assert float(layer.prototypes.detach().float().std()) == pytest.approx(0.3, rel=0.05)
    assert float(layer.offset_in.detach().float().std()) == pytest.approx(64**-0.5, rel=0.05)
    assert float(layer.decoder_base.detach().float().std()) == pytest.approx(0.02 / 2**0.5, rel=0.05)


def test_scale_warm_up():
    assert [warmup_factor(step, 4, start=0.2) for step in (-1, 0, 2, 4, 9)] == pytest.approx(
        [0.2, 0.2, 0.6, 1, 1]
    )
    assert warmup_factor(0, 0) == 1
    torch._dynamo.reset()
    layer = build(scale=0.5)
    x = torch.randn(3, 12)
    full, keys = layer(x), set(layer.state_dict())
    layer.set_scale_factor(0.25)
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for factor in (0.25, 0.5, 1.0):
        layer.set_scale_factor(factor)
        torch.testing.assert_close(layer(x), factor * full)
        torch.testing.assert_close(compiled(x), factor * full)
    assert counter.frame_count == 1
    assert set(layer.state_dict()) == keys


def test_dropout():
    layer = build(dropout=0.4)
    x = torch.randn(2000, 12)
    update, clean = layer(x), layer.eval()(x)
    dropped = update == 0
    assert dropped.float().mean() == pytest.approx(0.4, abs=0.02)
    torch.testing.assert_close(update[~dropped], clean[~dropped] / 0.6)


def test_signature_and_repr():
    keywords = set(inspect.signature(APN).parameters) - {"dim", "backend", "device", "dtype"}
    assert keywords == {field.name for field in fields(APNConfig)}
    for field in fields(APNConfig):
        assert inspect.signature(APN).parameters[field.name].default == field.default
    assert repr(APN(8, num_patches=4, top_k=2)) == (
        "APN(8, num_patches=4, top_k=2, rank=32, backend='auto', parameters=1,568: 3.06 of a 4d FFN's)"
    )
    assert "gate='scalar', num_layers=3" in repr(APN(8, gate="scalar", num_layers=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 11}, "top_k=11 must not exceed num_patches=10"),
        ({"top_k": 0}, "top_k=0 must be a positive integer"),
        ({"top_k": 2.0}, "top_k=2.0 must be a positive integer"),
        ({"num_patches": -1}, "num_patches=-1 must be a positive integer"),
        ({"rank": 0}, "rank=0 must be"),
        ({"dim": 0}, "dim=0 must be"),
        ({"dim": True}, "dim=True must be"),
        ({"num_layers": 0}, "num_layers=0 must be"),
        ({"temperature": 0}, "temperature=0 must be a number, 1e-6 or more"),
        ({"temperature": 1e-45}, "temperature=1e-45 must be"),
        (
            {"temperature": np.float32(1)},
            "temperature=np.float32(1.0) must be a number, 1e-6 or more (a Python int or float)",
        ),
        ({"rank": np.int64(4)}, "must be a positive integer (a Python int)"),
        ({"scale": 10**400}, "must be a finite number"),
        ({"prototypes": "contextual", "routing_dim": 1}, "a direction in one dimension is only a sign"),
        ({"prototypes": "contextual", "routing_groups": 12}, "2 or more channels each"),
        ({"dtype": "float32"}, "dtype=float32 must be one of torch.float32"),
        ({"temperature": torch.nan}, "temperature=nan must be"),
        ({"temperature": "cold"}, "temperature='cold' must be"),
        ({"scale": torch.inf}, "scale=inf must be a finite number"),
        ({"dropout": 1.0}, "dropout=1.0 must be a probability, 0 <= p < 1"),
        ({"patch_dropout": -0.1}, "patch_dropout=-0.1 must be"),
        ({"routing": "l2"}, "routing='l2' is unknown; allowed: 'cosine', 'dot'"),
        ({"init": "zeros"}, "init='zeros' is unknown"),
        ({"gate": None}, "gate=None is unknown; allowed: 'vector', 'scalar'"),
        ({"decoder": "tied"}, "decoder='tied' is unknown"),
        ({"prototypes": "dynamic"}, "prototypes='dynamic' is unknown"),
        ({"backend": "cuda"}, "backend='cuda' is unknown; allowed: 'auto', 'reference', 'grouped', 'triton'"),
        ({"layer_norm": 1}, "layer_norm=1 must be True or False"),
        ({"offset_rank": 2}, 'offset_rank=2 needs decoder="shared"'),
        ({"decoder": "shared", "offset_rank": 9}, "offset_rank=9 must not exceed rank=4"),
        ({"routing_dim": 4}, 'routing_dim=4 and routing_groups=1 need prototypes="contextual"'),
        ({"prototypes": "contextual", "routing_groups": 5}, "dim=12 must be a multiple of routing_groups=5"),
        (
            {"prototypes": "contextual", "routing_groups": 3, "routing_dim": 4},
            "routing_dim=4 must be a multiple of routing_groups=3",
        ),
        ({"dtype": torch.int64}, "dtype=torch.int64 must be one of torch.float32"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError) as error:
        APN(**(SMALL | options))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1.0], r"input of type list: expected a tensor \(\.\.\., 12\)"),
        (torch.randn(3, 11), r"input of shape \(3, 11\): the last dimension must be dim=12"),
        (torch.randn(()), r"input of shape \(\): the last dimension"),
        (torch.ones(3, 12, dtype=torch.long), "input of dtype torch.int64: tokens must be floating point"),
        (torch.ones(3, 12, dtype=torch.complex64), "input of dtype torch.complex64"),
        (
            torch.ones(3, 12, dtype=torch.bfloat16),
            "input of dtype torch.bfloat16 for a layer of dtype torch.float32",
        ),
    ],
)
def test_bad_input(x, message):
    with pytest.raises(ValueError, match=message):
        build()(x)


def size(layer):
    return sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 384, 768, 2048])
def test_a_layer_with_the_parameters_of_a_dense_ffn(dim):
    for hidden in (None, 2 * dim, 3 * dim, 5 * dim + 1):
        layer = APN.like_ffn(dim, hidden, device="meta")
        patches, rank = layer.num_patches, layer.config.rank
        assert size(layer) == dim * rank + patches * (dim + 2 * rank + rank * dim)
        assert abs(size(layer) / (2 * dim * (hidden or 4 * dim)) - 1) <= 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"gate": "scalar"},
        {"decoder": "shared", "prototypes": "contextual"},
        {"rank": 24},
        {"layer_norm": True, "top_k": 2},
    ],
)
def test_options_of_such_a_layer(options):
    layer = APN.like_ffn(128, 300, device="meta", **options)
    for name, value in options.items():
        assert getattr(layer.config, name) == value
    fewer, more = (
        APN(
            128, num_patches=layer.num_patches + step, device="meta", **{"rank": layer.config.rank, **options}
        )
        for step in (-1, 1)
    )
    wanted = 2 * 128 * 300
    assert size(fewer) < wanted < size(more)
    assert abs(size(layer) - wanted) <= min(wanted - size(fewer), size(more) - wanted)


@pytest.mark.parametrize(
    ("dim", "hidden", "patches", "rank"),
    [
        (384, None, 256, 32),
        (768, None, 256, 64),
        (2048, None, 256, 128),
        (128, None, 85, 8),
        (384, 384, 64, 8),
    ],
)
def test_a_layer_that_takes_no_longer_than_a_dense_ffn_has_a_shape_that_was_timed(dim, hidden, patches, rank):
    layer = APN.like_ffn(dim, hidden, by="time", device="meta")
    assert (layer.num_patches, layer.config.rank, layer.config.top_k) == (patches, rank, 4)


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: APN.like_ffn(64, by="money"), "by='money' is unknown; allowed: 'parameters', 'time'"),
        (lambda: APN.like_ffn(64, 0), "hidden=0 must be a positive integer"),
        (lambda: APN.like_ffn(64, num_patches=3), "num_patches is what like_ffn works out"),
        (
            lambda: APN.from_config(APNConfig(), 64),
            "config is 64, and must be of the class APNConfig: the width comes first",
        ),
        (lambda: APN(8, num_patches=4).set_scale_factor(-1), "factor=-1 must be a number, 0 or more"),
    ],
)
def test_mistakes_are_explained_where_they_are_made(build, problem):
    with pytest.raises(ValueError, match=problem):
        build()


def test_roles_of_parameters_are_those_that_configurations_know():
    assert set(ROLES.values()) == set(get_args(RoleName))
