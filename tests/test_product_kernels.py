"""The kernels of product prototypes against the float64 reference, interpreted where there is no GPU."""

import copy
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fused import DEVICE, FEW_TOKENS, LIMITS, ON_GPU, every_dtype, few_are_fewer, relative_rms  # noqa: F401
from test_layer import needs_triton
from test_product import build
from test_shared_memory import assert_kernels_fit, needs_of
from torch._dynamo.testing import CompileCounter

from attractor import APN
from attractor.ops import launch, product

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:.*Triton.*:UserWarning")]
KERNELS = {
    "few_halves",
    "few_pairs",
    "route_pairs",
    "lengths",
    "gather_decode",
    "gather_backward",
    "token_gradient",
    "token_products",
    "codebook_parts",
    "codebook_gradient",
    "sum_runs",
    "sum_spans",
}


def layer_of(dtype=torch.float32, **options) -> APN:
    return build(**({"temperature": 0.5, "backend": "triton"} | options)).to(DEVICE, dtype)


def tokens_of(layer: APN, count: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(count, layer.dim).to(layer.encoder)


def assert_matches(layer: APN, x: torch.Tensor, *, seed: int = 0) -> None:
    """Update, weights, confidence and every gradient, with random upstream gradients for all three."""
    dtype = layer.encoder.dtype
    exact = copy.deepcopy(layer).double()
    exact.backend = "reference"
    results = []
    for module, tokens in ((layer, x), (exact, x.double())):
        tokens = tokens.detach().requires_grad_()
        torch.manual_seed(seed)  # of patch dropout
        update, stats = module(tokens, return_stats=True)
        outputs = (update, stats.weights, stats.confidence)
        generator = torch.Generator().manual_seed(seed)
        upstream = [torch.randn(out.shape, generator=generator).to(dtype).to(out) for out in outputs]
        gradients = torch.autograd.grad(outputs, [tokens, *module.parameters()], upstream)
        gradients = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        results.append((stats.indices, [*outputs, *gradients]))
    assert torch.equal(results[0][0], results[1][0])
    names = ["update", "weights", "confidence", "input", *(name for name, _ in layer.named_parameters())]
    for name, got, wanted in zip(names, results[0][1], results[1][1], strict=True):
        assert got.dtype == (torch.float32 if name in ("weights", "confidence") else dtype), name
        assert relative_rms(got, wanted) < LIMITS[dtype], name


@every_dtype
@pytest.mark.parametrize(
    "options",
    [
        {"sparse_gradients": True},
        {"gate": "scalar", "sparse_gradients": True},
        {"gate": "scalar", "routing": "dot", "temperature": 1.0, "scale": 0.3},
        {"patch_dropout": 0.5},
        {"dim": 16, "num_patches": 256**2, "top_k": 4, "rank": 2},  # more rows than a program holds at once
        {"dim": 34, "num_patches": 140**2, "top_k": 5, "rank": 1},  # and the last of them are few
        {"dim": 8, "num_patches": (1024 if ON_GPU else 129) ** 2, "top_k": 4, "sparse_gradients": True},
        {"dim": 130, "num_patches": 9, "top_k": 9, "rank": 11},  # every patch, and nothing a power of two
        {"dim": 2080 if ON_GPU else 1040, "num_patches": 4, "top_k": 1, "rank": 9},  # a row in pieces
        {"num_patches": 1, "top_k": 1, "rank": 1},
    ],
    ids=str,
)
def test_every_option(options, dtype):
    layer = layer_of(dtype, **options)
    is_large = layer.dim > 100 or layer.num_patches > 1000
    assert_matches(layer, tokens_of(layer, 500 if ON_GPU else 5 if is_large else 21))


@every_dtype
@pytest.mark.parametrize(
    ("options", "count"),  # of more tokens it is the forward pass of training
    [
        ({}, FEW_TOKENS + 1),
        ({"gate": "scalar", "scale": 0.3, "rank": 9}, 5),
        ({"gate": "scalar", "scale": 0.3, "rank": 9}, FEW_TOKENS + 1),
        ({"routing": "dot", "temperature": 1.0}, 1),
        ({"num_patches": 4, "top_k": 3}, 5),  # more active patches than rows
        ({"num_patches": 81, "top_k": 7, "dim": 22, "rank": 1}, 1),
        ({"num_patches": 81, "top_k": 7, "dim": 22, "rank": 1}, 5),
    ],
    ids=str,
)
def test_without_gradients(options, count, dtype):
    layer = layer_of(dtype, **options)
    x = tokens_of(layer, count)
    if count > 1:
        x[-1, 0] = torch.nan
    exact = copy.deepcopy(layer).double()
    exact.backend = "reference"
    with torch.no_grad():
        update, stats = layer(x, return_stats=True)
        wanted, wanted_stats = exact(x.double(), return_stats=True)
    assert torch.equal(stats.indices, wanted_stats.indices)
    assert torch.equal(update.isnan(), wanted.isnan())
    few_numbers = 2 if dtype != torch.float32 else 1
    for got, right in (
        (update, wanted),
        (stats.weights, wanted_stats.weights),
        (stats.confidence, wanted_stats.confidence),
    ):
        assert relative_rms(got.nan_to_num(), right.nan_to_num()) < few_numbers * LIMITS[dtype]


@contextmanager
def short_spans():
    """Where there is no GPU a sixteenth of the pairs is enough: the interpreter takes its time."""
    from attractor.ops.kernels import product as kernels

    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setattr(launch, "SPAN", launch.SPAN // 16)
            patch.setattr(kernels, "SPAN", type(kernels.SPAN)(launch.SPAN))
        yield launch.SPAN


@every_dtype
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_long_runs(sparse, dtype):
    """Patches with many spans, with a full last one and not, next to each other and to short ones."""
    with short_spans() as span:
        counts = [3 * span, 1, 2 * span + 1, span, span + 1, 1, span - 1]
        assert_sums(counts, 1, sparse, dtype)
        assert_sums(counts, 6, sparse, dtype)


@given(st.lists(st.integers(0, 13), min_size=1, max_size=6), st.booleans())
@settings(max_examples=10)
def test_runs_of_any_length(counts, sparse):
    with short_spans():
        assert_sums(counts, 1, sparse, torch.float32)


def assert_sums(counts: list[int], width: int, sparse: bool, dtype: torch.dtype) -> None:
    """The gradients of patches that so many tokens selected beside one that all selected."""
    torch.manual_seed(2)
    first = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    idx = torch.stack([first[torch.randperm(len(first))], torch.full_like(first, 8)], 1).int().to(DEVICE)
    n, r, d = len(first), 3, 10
    grad, codes, gates = (torch.randn(s).to(DEVICE) for s in ((n, d), (2 * n, r), (2 * n, width)))
    bank, bias = torch.randn(9, r, d).to(DEVICE, dtype), torch.randn(9, 3).to(DEVICE, dtype)
    patches, dU, dgates = product._product_bank_gradient(
        grad.to(dtype), idx, codes, gates, bias, bank, 0.5, sparse
    )
    if sparse:
        dU, dgates = (
            torch.zeros(9, *x.shape[1:], device=DEVICE).index_add(0, patches, x.float()) for x in (dU, dgates)
        )
    pairs = grad.to(dtype).double().repeat_interleave(2, 0)
    outer = 0.5 * codes.double()[:, :, None] * pairs[:, None]
    flat = idx.flatten()
    wanted_U = torch.zeros(9, r, d, dtype=torch.float64, device=DEVICE).index_add(0, flat, outer)
    wanted = torch.zeros(9, width, dtype=torch.float64, device=DEVICE).index_add(0, flat, gates.double())
    assert relative_rms(dU, wanted_U) < LIMITS[dtype]
    assert relative_rms(dgates, wanted) < LIMITS[dtype]


def test_frozen_parts_are_not_computed(monkeypatch):
    """And the rest is the same."""
    layer = layer_of()
    x = tokens_of(layer, 9).requires_grad_()
    upstream = torch.randn_like(x)
    (wanted,) = torch.autograd.grad(layer(x), x, upstream)
    layer.requires_grad_(False)
    monkeypatch.setattr(product, "_product_bank_gradient", None)
    monkeypatch.setattr(product, "_codebook_gradient", None)
    assert torch.equal(torch.autograd.grad(layer(x), x, upstream)[0], wanted)


@pytest.mark.parametrize("gate", ["vector", "scalar"])
def test_second_derivatives(gate):
    layer = layer_of(gate=gate)
    x = tokens_of(layer, 4).requires_grad_()
    results = []
    for layer.backend in ("reference", "triton"):
        (first,) = torch.autograd.grad((x + layer(x)).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [x, *layer.parameters()]))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"rank": product.MOST_RANK + 1}, {"top_k": product.MOST_ACTIVE + 1}, {"decoder": "shared"}],
    ids=str,
)
def test_what_the_kernels_do_not_take_is_computed_otherwise(options):
    layer = layer_of(**options)
    assert_matches(layer, tokens_of(layer, 9))


def test_no_tokens():
    layer = layer_of()
    update = layer(torch.zeros(0, 12, device=DEVICE))
    assert update.shape == (0, 12)
    update.sum().backward()
    assert not any(parameter.grad.any() for parameter in layer.parameters())


def test_operators_are_well_behaved():
    shapes = ((9, 8), (2, 3, 4), (8, 2), (9, 2), (9, 2), (9, 2, 8))
    z, C, V, a, b, U = (torch.randn(shape, device=DEVICE) for shape in shapes)
    checks = ("test_schema", "test_faketensor")
    options = (2, 0.5, 1.0, True, torch.float32, True)
    operators = torch.ops.attractor
    forward, backward = operators.product_forward.default, operators.product_backward.default
    bank = operators.product_bank_gradient.default
    torch.library.opcheck(forward, (z, C, V, a, b, U, None, *options), test_utils=checks)
    scalar = (z, C, V, None, b[:, :1].contiguous(), U, torch.ones(9, 2, dtype=torch.bool, device=DEVICE))
    torch.library.opcheck(forward, (*scalar, *options), test_utils=checks)
    _, idx, w, _, *saved = forward(z, C, V, a, b, U, None, *options)
    arguments = (torch.randn_like(z), None, None, z, C, V, a, b, U, idx, w, *saved, *options[1:4])
    for wants_codebooks in (True, False):
        torch.library.opcheck(backward, (*arguments, wants_codebooks), test_utils=checks)
    *_, codes, gates = backward(*arguments, True)
    for compact in (True, False):
        torch.library.opcheck(bank, (z, idx, codes, gates, b, U, 1.0, compact), test_utils=checks)


def test_few_graphs_for_many_sizes():
    torch._dynamo.reset()
    graphs = CompileCounter()
    layer = layer_of()
    compiled = torch.compile(layer, backend=graphs, dynamic=True, fullgraph=True)
    for count in (5, 6, 7, 12):
        update = compiled(tokens_of(layer, count))
    update.sum().backward()
    assert graphs.frame_count <= 3


@pytest.mark.parametrize(
    "cases",
    [
        [(86, 64, "float32", 4096), (90, 8, "bfloat16", 65536), (90, 8, "float32", 65536)],
        pytest.param([(80, 8, "bfloat16", 65536), (90, 8, "bfloat16", 2**20)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_kernel_fits(cases):
    """With 256 rows an earlier `route_pairs` chose other patches in each run (see kernels.lengths)."""
    assert_kernels_fit(cases, KERNELS, how=("product",))


def test_tiles_that_are_read_twice_are_found():
    from shared_memory import tiles_read_twice

    text = """
        %a = ttg.local_alloc : () -> !ttg.memdesc<2x64x64xbf16>
        %b = ttg.local_alloc : () -> !ttg.memdesc<3x64x64xbf16>
        %c = ttg.memdesc_index %a[%i] : !ttg.memdesc<2x64x64xbf16>
        %d = ttg.local_load %c token %t : !ttg.memdesc<64x64xbf16>
        %e = ttg.memdesc_index %b[%i] : !ttg.memdesc<3x64x64xbf16>
        %f = ttng.warp_group_dot %c, %e, %x {isAsync = true}
        %g:3 = ttng.warp_group_dot_wait %f, %c, %e {pendings = 1 : i32}
    """
    assert tiles_read_twice(text) == ["%a (0)"]
    assert tiles_read_twice(text.replace("pendings = 1", "pendings = 0")) == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 90])
def test_every_kernel_assembles(capability):
    case = (capability, 8, "bfloat16", 65536)
    assert needs_of(case, how=("product", "whole")) == needs_of(case, how=("product",))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA device")
class TestOnGPU:
    @every_dtype
    @pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
    @pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.11, on a GPU
    def test_same_bits_twice(self, dtype, sparse):
        layer = layer_of(dtype, dim=64, num_patches=1024, top_k=4, rank=2, sparse_gradients=sparse)
        x = tokens_of(layer, 5000).requires_grad_()
        upstream, leaves = torch.randn_like(x), [x, *layer.parameters()]
        first, *others = (torch.autograd.grad(layer(x), leaves, upstream) for _ in range(5))
        assert all(
            torch.equal(a.to_dense(), b.to_dense())
            for other in others
            for a, b in zip(first, other, strict=True)
        )

    @every_dtype
    @pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
    def test_in_a_cuda_graph(self, dtype):
        layer = layer_of(dtype, dim=64, num_patches=1024, top_k=4, rank=2)
        x = tokens_of(layer, 3000).requires_grad_()
        upstream, leaves = torch.randn_like(x), [x, *layer.parameters()]

        def run():
            update = layer(x)
            return update, *torch.autograd.grad(update, leaves, upstream)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        for got, wanted in zip(captured, run(), strict=True):
            assert torch.equal(got, wanted)

    def test_autocast_routes_in_float32(self):
        layer = layer_of(dim=384, num_patches=4096, top_k=4, rank=2, temperature=0.07)
        x = tokens_of(layer, 4000)
        exact = copy.deepcopy(layer).double()
        exact.backend = "reference"
        with torch.no_grad():
            wanted = exact(x.double(), return_stats=True)[1].indices
            with torch.autocast("cuda", torch.bfloat16):
                got = layer(x, return_stats=True)[1].indices
        assert (got == wanted).all(-1).float().mean() > 0.999
