"""The Triton kernels against the float64 reference: on a GPU in every dtype, else in Triton's interpreter."""

import copy
import math
from itertools import compress

import pytest
import torch
from test_layer import VARIANTS, build, every_variant, needs_triton
from torch._dynamo.testing import CompileCounter

from attractor import APN, ops
from attractor.ops import fused, launch, product
from attractor.ops.tapes import Taped

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:.*Triton.*:UserWarning")]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# relative RMS to the float64 reference; the interpreter multiplies float32 alone
LIMITS: dict[torch.dtype, float] = {torch.float32: 1e-5} | (
    {torch.bfloat16: 4e-3, torch.float16: 4e-3} if ON_GPU else {}
)
FEW_TOKENS, FEW_PATCHES = (fused.FEW_TOKENS, fused.FEW_PATCHES) if ON_GPU else (8, 256)
"""Up to here there is another way. Without a GPU it ends earlier: the interpreter takes its time."""
every_dtype = pytest.mark.parametrize("dtype", LIMITS, ids=str)


@pytest.fixture(autouse=True)
def few_are_fewer(monkeypatch):
    monkeypatch.setattr(fused, "FEW_TOKENS", FEW_TOKENS)
    monkeypatch.setattr(fused, "FEW_PATCHES", FEW_PATCHES)
    monkeypatch.setattr(product, "FEW_TOKENS", FEW_TOKENS)
    for taped in Taped.every:  # what a test replaces is not in a tape of before
        taped.tapes.clear()


def relative_rms(got: torch.Tensor, exact: torch.Tensor) -> float:
    scale = float(exact.detach().norm())
    return float((got.detach().double() - exact.detach()).norm()) / (scale or 1.0)


def assert_matches(layer: APN, x: torch.Tensor, *, seed: int = 0) -> None:
    """Update, weights, confidence and every gradient, with random upstream gradients for all three."""
    dtype = layer.encoder.dtype
    exact = copy.deepcopy(layer).double()
    exact.backend, layer.backend = "reference", "triton"
    results = []
    for module, tokens in ((layer, x), (exact, x.double())):
        tokens = tokens.detach().requires_grad_()
        torch.manual_seed(seed)  # of patch dropout
        update, stats = module(tokens, return_stats=True)
        outputs = (update, stats.weights, stats.confidence)
        generator = torch.Generator().manual_seed(seed)
        upstream = [torch.randn(out.shape, generator=generator).to(dtype).to(out) for out in outputs]
        leaves = [tokens, *module.parameters()]
        learned = [out.requires_grad for out in outputs]  # with radii no gradient goes through confidence
        found, above = (list(compress(each, learned)) for each in (outputs, upstream))
        gradients = torch.autograd.grad(found, leaves, above)
        results.append((stats.indices, [*outputs, *gradients]))
    assert torch.equal(results[0][0], results[1][0])
    names = ["update", "weights", "confidence", "input", *(name for name, _ in layer.named_parameters())]
    for name, got, wanted in zip(names, results[0][1], results[1][1], strict=True):
        assert got.dtype == (torch.float32 if name in ("weights", "confidence") else dtype), name
        assert relative_rms(got, wanted) < limit_of(layer), name


def limit_of(layer: APN) -> float:
    """Where the reference's equations run in half precision, around our decoding, they round more often."""
    by_equations = layer.config.decoder == "shared" or layer.config.prototypes == "contextual"
    dtype = layer.encoder.dtype
    return LIMITS[dtype] * (4 if by_equations and dtype != torch.float32 else 1)


def layer_of(dtype=torch.float32, **options) -> APN:
    return build(**({"temperature": 0.5} | options)).to(DEVICE, dtype)


def tokens_of(layer: APN, count: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(count, layer.dim).to(layer.encoder)


@every_dtype
@every_variant
@pytest.mark.parametrize("count", [1, 37])
def test_every_variant(variant, count, dtype, monkeypatch):
    if count > 1:  # gradients through a product with all prototypes, in every dtype
        monkeypatch.setattr(launch, "DENSE_TYPES", tuple(LIMITS))
    if dtype != torch.float32 and variant.get("layer_norm"):
        pytest.skip("the norm rounds to half precision before the router: it may choose otherwise")
    layer = layer_of(dtype, **variant)
    # one token's 12 numbers are no sample of half precision's rounding
    assert_matches(layer, tokens_of(layer, count if dtype == torch.float32 else 500 + count))


@every_dtype
@pytest.mark.parametrize(
    "sizes",
    [
        {"dim": 17, "num_patches": 5, "top_k": 1, "rank": 3},
        {"dim": 40, "num_patches": 260, "top_k": 3, "rank": 20},  # more than a program holds, most unused
        {"dim": 129, "num_patches": 9, "top_k": 9, "rank": 33},  # every patch, and nothing a power of two
        {"dim": 16, "num_patches": 700 if ON_GPU else 48, "top_k": 2, "rank": 16},  # most patches unused
    ],
    ids=str,
)
@pytest.mark.parametrize("dense", [False, True])
def test_odd_sizes(sizes, dtype, dense, monkeypatch):
    monkeypatch.setattr(launch, "DENSE_PATCHES", 512)
    monkeypatch.setattr(launch, "DENSE_TYPES", tuple(LIMITS) if dense else ())
    layer = layer_of(dtype, **sizes)
    few = 5 if layer.config.num_patches > 200 else 12
    assert_matches(layer, tokens_of(layer, 75 if ON_GPU or layer.config.num_patches < 9 else few))


@every_dtype
@pytest.mark.parametrize("top_k", [1, 3])
def test_few_rounds_choose_the_same(top_k, dtype, monkeypatch):
    """Of patches in parts, with scores that are equal."""
    layer = layer_of(dtype, dim=16, num_patches=90, top_k=top_k, rank=4, backend="triton")
    with torch.no_grad():
        layer.prototypes.copy_(layer.prototypes[:30].sign().repeat(3, 1))
    x = tokens_of(layer, FEW_TOKENS + 9).sign().requires_grad_()
    x.data[3, 0] = torch.nan
    results = []
    for at_a_time in (256, 16):
        monkeypatch.setitem(launch.TRIED, "route", {"BK": at_a_time})
        update, stats = layer(x, return_stats=True)
        results.append((update.nan_to_num(), stats.indices, stats.weights))
    assert all(torch.equal(old, new) for old, new in zip(*results, strict=True))


@pytest.fixture
def gates_apart(monkeypatch):
    """As where codes are wide."""
    monkeypatch.setitem(launch.TRIED, "gate_backward", {"BR": 16})
    monkeypatch.setitem(launch.TRIED, "pair_products", {"BM": 16, "num_warps": 4})


@every_dtype
@pytest.mark.parametrize("options", [{}, {"gate": "scalar"}, {"patch_dropout": 0.4}, {"top_k": 3}], ids=str)
def test_gates_apart(options, dtype, gates_apart, monkeypatch):
    """With patches of more than a segment, and of none."""
    monkeypatch.setattr(launch, "SEGMENT", 64)
    usual = {"dim": 24, "num_patches": 12, "top_k": 2, "rank": 8, "temperature": 0.05}
    assert_matches(
        layer_of(dtype, **usual | options), tokens_of(layer_of(dtype, dim=24), 1400 if ON_GPU else 225)
    )


@every_dtype
@pytest.mark.parametrize("gate", ["vector", "scalar"])
def test_gates_apart_of_basins(gate, dtype, gates_apart):
    """Pairs outside of every basin have no products; a token may have none at all, or be broken."""
    layer = layer_of(dtype, dim=24, num_patches=12, top_k=3, rank=8, gate=gate, radius=0.3)
    x = tokens_of(layer, 100)
    inside = layer(x, return_stats=True)[1].indices >= 0
    assert 0 < inside.any(1).float().mean() < 1
    assert 0 < inside[inside.any(1)].float().mean() < 1
    assert_matches(layer, x)
    layer.backend = "triton"
    x[7, 0] = torch.nan
    x.requires_grad_()
    layer(x)[8:].sum().backward()
    assert x.grad[:8].eq(0).all()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@every_dtype
@pytest.mark.parametrize("pattern", ["all to one", "zipf"])
def test_crowded_patches(pattern, dtype, monkeypatch):
    """Patches with many segments next to patches with none."""
    if not ON_GPU:  # an eighth of a segment's pairs, and of the tokens: the interpreter takes its time
        monkeypatch.setattr(launch, "SEGMENT", launch.SEGMENT // 8)
    layer = layer_of(dtype, dim=24, num_patches=12, top_k=2, rank=8)
    torch.manual_seed(2)
    count = {"all to one": 1100 if ON_GPU else 138, "zipf": 1400 if ON_GPU else 225}[pattern]
    favourite = torch.zeros(count, dtype=torch.long)
    if pattern == "zipf":
        favourite = torch.multinomial(1 / torch.arange(1.0, 13), count, replacement=True)
    noise = 0.05 if pattern == "all to one" else 0.5
    directions = layer.prototypes.detach().float().cpu()
    directions /= directions.norm(dim=1, keepdim=True)
    x = directions[favourite] + noise * torch.randn(count, 24) / math.sqrt(24)
    x = x.to(layer.encoder)
    layer.backend = "reference"
    chosen = layer(x, return_stats=True)[1].indices
    assert chosen.unique(return_counts=True)[1].max() > launch.SEGMENT
    if pattern == "all to one":
        assert (chosen[:, 0] == 0).all()
        assert count > 2 * launch.SEGMENT
    assert_matches(layer, x)


def test_equal_scores_go_to_the_lower_patch():
    """Of vectors of 1 and -1, 4 long, every score is exact: a product rounds the rest by its place."""
    layer = layer_of(dim=16, num_patches=300, top_k=4)
    with torch.no_grad():
        layer.prototypes.copy_(layer.prototypes[:3].sign().repeat(100, 1))
    x = tokens_of(layer, FEW_TOKENS + 6).sign()
    results = []
    for layer.backend in ("reference", "triton"):
        results.append(layer(x, return_stats=True)[1].indices)
        with torch.no_grad():
            results.append(layer(x[:5], return_stats=True)[1].indices)  # the way of few tokens
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


@every_dtype
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, count) for name in VARIANTS for count in ((1, 5) if ON_GPU else (5,))),
        *((name, FEW_TOKENS + 1) for name in (VARIANTS if ON_GPU else ("core", "everything"))),
        *((name, FEW_TOKENS) for name in (VARIANTS if ON_GPU else ("core",))),
        *((name, 1) for name in (() if ON_GPU else ("core", "shared decoder", "everything"))),
    ],
)
def test_without_gradients(name, count, dtype):
    layer = layer_of(dtype, **VARIANTS[name]).eval()
    x = tokens_of(layer, count)
    if count > 1:
        x[-1, 0] = torch.nan
    exact = copy.deepcopy(layer).double()
    exact.backend, layer.backend = "reference", "triton"
    with torch.no_grad():
        update, stats = layer(x, return_stats=True)
        wanted, wanted_stats = exact(x.double(), return_stats=True)
    assert torch.equal(stats.indices, wanted_stats.indices)
    assert torch.equal(update.isnan(), wanted.isnan())
    for got, right in ((update, wanted), (stats.weights, wanted_stats.weights)):
        few_numbers = 2 if dtype != torch.float32 else 1
        assert relative_rms(got.nan_to_num(), right.nan_to_num()) < few_numbers * limit_of(layer)


def test_more_patches_than_one_program_can_choose_from():
    layer = layer_of(dim=16, num_patches=FEW_PATCHES + 1, top_k=2, rank=4, backend="triton")
    x = tokens_of(layer, 3)
    with torch.no_grad():
        few = layer(x)
        layer.backend = "reference"
        torch.testing.assert_close(few, layer(x), rtol=1e-5, atol=1e-5)


def test_a_rank_beyond_the_kernels_is_computed_otherwise():
    layer = layer_of(dim=8, num_patches=3, top_k=2, rank=fused.MOST_RANK + 1)
    assert_matches(layer, tokens_of(layer, 9))


def test_operators_are_well_behaved():
    z, P, V, a, b, U = (
        torch.randn(s, device=DEVICE) for s in ((9, 8), (5, 8), (8, 3), (5, 3), (5, 3), (5, 3, 8))
    )
    options = (2, 0.5, 1.0, True, torch.float32)
    operators = torch.ops.attractor
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        operators.fused.default, (z, P, V, a, b, U, None, None, *options, True), test_utils=checks
    )
    scalar = (z, P, V, None, b[:, :1].contiguous(), U, None, torch.zeros(5, device=DEVICE))  # and basins
    torch.library.opcheck(operators.fused.default, (*scalar, *options, False), test_utils=checks)
    _, saved = fused._fused(z, P, V, a, b, U, None, None, *options, True)
    arguments = (torch.randn_like(z), None, None, z, P, V, a, b, U, saved, *options[:4], False, torch.float32)
    for wants in ([True] * 5, [False, False, False, True, False], [False, True, False, False, True]):
        torch.library.opcheck(operators.fused_backward.default, (*arguments, wants), test_utils=checks)
    code, idx = torch.randn(9, 2, 3, device=DEVICE), saved[:18].view(torch.int32).view(9, 2)
    torch.library.opcheck(operators.fused_decode.default, (code, U, idx, True), test_utils=checks)
    _, order, numbers = fused._fused_decode(code, U, idx, True)
    for wants in ([True, True], [False, True], [True, False]):
        arguments = (z, code, U, order, numbers, wants)
        torch.library.opcheck(operators.fused_decode_backward.default, arguments, test_utils=checks)


APART = ["pair_products", "code_backward", "gate_backward"]
EVERYTHING = [
    "decode_backward",
    "token_backward",
    "token_products",
    "add_products",
    "bank_backward",
    "sum_parts",
]


@every_dtype
@pytest.mark.parametrize(
    "learns", ["decoder", "gate_bias", "input", "encoder", "input decoder", "encoder gate_bias"]
)
def test_nothing_is_launched_for_frozen_parts_apart(learns, dtype, gates_apart, monkeypatch):
    monkeypatch.setattr(launch, "DENSE_TYPES", tuple(LIMITS))
    wanted = set(learns.split())
    tokens, bank = wanted & {"input", "encoder"}, wanted & {"decoder", "gate_bias"}
    first = ["pair_products", *["code_backward"] * bool(tokens), *["gate_backward"] * bool(bank)]
    launched = ["decode_backward"] if wanted == {"decoder"} else first
    launched += ["token_backward"] * bool(tokens) + EVERYTHING[2:4] * ("encoder" in wanted)
    check_launches(list(wanted), launched + EVERYTHING[4:] * bool(bank), "vector", dtype, monkeypatch)


@every_dtype
@pytest.mark.parametrize("gate", ["vector", "scalar"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    ("learns", "launched"),
    [
        (["decoder"], ["decode_backward", "bank_backward", "sum_parts"]),
        (["gate_bias"], ["decode_backward", "bank_backward", "sum_parts"]),
        (["decoder", "gate_bias"], ["decode_backward", "bank_backward", "sum_parts"]),
        (["input"], ["decode_backward", "token_backward"]),
        (["encoder"], EVERYTHING[:4]),
        (["prototypes"], None),
        (["input", "prototypes", "encoder"], None),
        (["input", "decoder"], ["decode_backward", "token_backward", "bank_backward", "sum_parts"]),
    ],
    ids=str,
)
def test_nothing_is_launched_for_frozen_parts(learns, launched, dense, gate, dtype, monkeypatch):
    if launched is None:  # gradients of prototypes are a product with all tokens, or sums over pairs
        last = EVERYTHING[2:4] if dense else EVERYTHING[4:]
        encoder = EVERYTHING[2:4] if "encoder" in learns else []
        launched = [*EVERYTHING[:2], *(encoder or last), *(last if encoder and not dense else [])]
    monkeypatch.setattr(launch, "DENSE_TYPES", tuple(LIMITS) if dense else ())
    check_launches(learns, launched, gate, dtype, monkeypatch)


def check_launches(learns, launched, gate, dtype, monkeypatch):
    """These kernels, and gradients with the same bits as if all learned."""
    from attractor.ops import kernels

    layer = layer_of(dtype, dim=24, num_patches=7, top_k=2, rank=8, gate=gate, backend="triton")
    x = tokens_of(layer, 30).requires_grad_()
    upstream = torch.randn_like(x)
    leaves = {"input": x, **dict(layer.named_parameters())}
    full = dict(zip(leaves, torch.autograd.grad(layer(x), list(leaves.values()), upstream), strict=True))
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in learns)
    calls = []
    for name in (*EVERYTHING, *APART):
        monkeypatch.setattr(kernels, name, Counted(name, getattr(kernels, name), calls))
    found = torch.autograd.grad(layer(x), [leaves[name] for name in learns], upstream)
    assert calls == launched
    for name, gradient in zip(learns, found, strict=True):
        assert torch.equal(gradient, full[name]), name


class Counted:
    """A kernel that says when it is launched."""

    def __init__(self, name, kernel, calls):
        self.name, self.kernel, self.calls = name, kernel, calls

    def __getitem__(self, grid):
        self.calls.append(self.name)
        return self.kernel[grid]


def test_gradients_of_float32_parameters_are_not_rounded():
    """Autocast multiplies in half precision; the sums of products keep their digits."""
    layer = layer_of(dim=24, num_patches=7, top_k=2, rank=8, backend="triton")
    x = tokens_of(layer, FEW_TOKENS + 30)
    with torch.autocast(DEVICE, torch.bfloat16):
        layer(x).square().sum().backward()
    for gradient in (layer.decoder.grad, layer.encoder.grad):
        assert gradient.dtype == torch.float32
        assert not torch.equal(gradient, gradient.bfloat16().float())


def test_the_compiler_knows_what_is_frozen():
    layer = layer_of(dim=16, num_patches=9, top_k=3, backend="triton").requires_grad_(False)
    layer.decoder.requires_grad_(True)
    x = tokens_of(layer, FEW_TOKENS + 5)
    (wanted,) = torch.autograd.grad(layer(x).sum(), layer.decoder)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(x).sum(), layer.decoder)[0], wanted)


@pytest.mark.parametrize("frozen", ["decoder", "codes"])
def test_decoding_alone_leaves_out_what_is_frozen(frozen):
    code, U = torch.randn(20, 2, 3, device=DEVICE), torch.randn(5, 3, 8, device=DEVICE)
    idx = torch.randint(5, (20, 2), device=DEVICE)
    both = torch.autograd.grad(
        fused.decode(code.requires_grad_(), U.requires_grad_(), idx).square().sum(), [code, U]
    )
    learns = code if frozen == "decoder" else U
    (U if frozen == "decoder" else code).requires_grad_(False)
    (alone,) = torch.autograd.grad(fused.decode(code, U, idx).square().sum(), learns)
    assert torch.equal(alone, both[0 if learns is code else 1])


@pytest.mark.parametrize("options", [{}, {"gate": "scalar"}, {"decoder": "shared"}], ids=str)
@pytest.mark.parametrize("residual", [True, False])
def test_second_derivatives(options, residual):
    """Also where the upstream gradient depends on nothing: there an error that is only a node gets lost."""
    layer = layer_of(**options)
    x = tokens_of(layer, 4).requires_grad_()
    results = []
    for layer.backend in ("reference", "triton"):
        y = layer(x)
        value = (x + y).square().sum() if residual else y.sum() + x.pow(3).sum()
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [x, *layer.parameters()], allow_unused=True))
    for got, wanted in zip(*results, strict=True):
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_forward_mode_is_an_error():
    layer = layer_of(backend="triton")
    x = tokens_of(layer, 4)
    with torch.autograd.forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("broken", [slice(None), slice(1, 2)], ids=["all", "one"])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # by the interpreter's NumPy
def test_broken_prototypes_show(bad, broken, gradients):
    """A diverged router must end in NaN, as in the reference, not in memory it does not own."""
    layer = layer_of(dim=16, num_patches=7, top_k=2, backend="triton")
    with torch.no_grad():
        layer.prototypes[broken] = bad
    with torch.set_grad_enabled(gradients):
        assert layer(tokens_of(layer, 80 if gradients else 3)).isnan().all()


@pytest.mark.parametrize("size", [1e-12, 1e-18, 1e-20])
def test_tiny_tokens_have_finite_gradients(size):
    layer = layer_of(dim=16, num_patches=7, top_k=2)
    x = size * tokens_of(layer, 20)
    results = []
    for layer.backend in ("reference", "triton"):
        tokens = x.clone().requires_grad_()
        results.append(torch.autograd.grad(layer(tokens).sum(), tokens)[0])
    assert results[1].isfinite().all()
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3 * float(results[0].abs().max()))


def test_few_graphs_for_many_sizes():
    torch._dynamo.reset()
    graphs = CompileCounter()
    layer = layer_of(dim=16, num_patches=9, top_k=3, backend="triton")
    compiled = torch.compile(layer, backend=graphs, dynamic=True, fullgraph=True)
    for count in (FEW_TOKENS + more for more in (1, 2, 3, 16, 46 if ON_GPU else 20)):
        update = compiled(tokens_of(layer, count))
    update.sum().backward()
    assert graphs.frame_count <= 3


def test_auto_takes_the_kernels_on_a_gpu():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert ops.choose_backend(cuda, torch.bfloat16) == "triton"
    assert ops.choose_backend(cuda, torch.float64) == "reference"
    assert ops.choose_backend(cpu, torch.float32) == "grouped"


def test_what_is_compiled_runs_the_same_backend(monkeypatch):
    """Up to torch 2.12 the compiler says of all that it compiles that it is exported: no kernel would run."""
    chosen = []

    def run(x):
        chosen.append(ops.choose_backend(x.device, x.dtype))
        return x + 1

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    compiled(torch.zeros(2))
    assert chosen == ["grouped"]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA device")
class TestOnGPU:
    @every_dtype
    def test_same_bits_twice(self, dtype):
        layer = layer_of(dtype, dim=64, num_patches=20, top_k=4, rank=16)
        x = tokens_of(layer, 5000).requires_grad_()
        upstream = torch.randn_like(x)
        leaves = [x, *layer.parameters()]
        first, *others = (torch.autograd.grad(layer(x), leaves, upstream) for _ in range(5))
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))

    @every_dtype
    @pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
    @pytest.mark.parametrize("count", [16, 3000])
    def test_in_a_cuda_graph(self, dtype, count):
        """Forward and backward, replayed with other tokens: nothing waits for the host or remembers sizes."""
        layer = layer_of(dtype, dim=64, num_patches=20, top_k=4, rank=16)
        x = tokens_of(layer, count).requires_grad_()
        upstream = torch.randn_like(x)
        leaves = [x, *layer.parameters()]

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
            x.copy_(layer.prototypes[torch.arange(count, device=DEVICE) % 3] + 0.1 * torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        for got, wanted in zip(captured, run(), strict=True):
            assert torch.equal(got, wanted)

    def test_autocast_routes_in_float32(self):
        """The token is float32 there: rounding it to bfloat16 would send some tokens to other patches."""
        layer = layer_of(dim=384, num_patches=256, top_k=4, rank=32, temperature=0.07)
        x = tokens_of(layer, 4000)
        exact = copy.deepcopy(layer).double()
        exact.backend = "reference"
        with torch.no_grad():
            wanted = exact(x.double(), return_stats=True)[1].indices
            with torch.autocast("cuda", torch.bfloat16):
                got = layer(x, return_stats=True)[1].indices
            rounded = layer.bfloat16()(x.bfloat16(), return_stats=True)[1].indices
        assert (got == wanted).all(-1).float().mean() > 0.999
        assert (rounded == wanted).all(-1).float().mean() < 0.99

    def test_half_precision_tokens_under_autocast(self):
        """What nn.Sequential(nn.Linear, APN) gives a float32 layer."""
        layer = layer_of(dim=64, num_patches=20, top_k=4, rank=16)
        x = tokens_of(layer, 300).bfloat16()
        with torch.autocast("cuda", torch.bfloat16):
            update = layer(x)
        with torch.no_grad():  # autocast rounds the matrices of products
            layer.encoder.copy_(layer.encoder.bfloat16())
            layer.decoder.copy_(layer.decoder.bfloat16())
        exact = copy.deepcopy(layer).double()
        exact.backend = "reference"
        assert relative_rms(update, exact(x.double())) < LIMITS[torch.bfloat16]

    def test_many_patches_need_little_memory(self):
        layer = layer_of(torch.bfloat16, dim=64, num_patches=65536, top_k=4, rank=16)
        x = tokens_of(layer, 4096)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            layer(x)
        assert (
            torch.cuda.max_memory_allocated() - before < 4096 * 65536
        )  # a byte for each score would be more
        layer.backend = "reference"
        with torch.no_grad():
            got, wanted = copy.copy(layer), layer(x[:64], return_stats=True)[1].indices
            got.backend = "triton"
            assert torch.equal(got(x[:64], return_stats=True)[1].indices, wanted)
