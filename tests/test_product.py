"""Prototypes that are pairs from two codebooks, against the cosine with every pair written out."""

import copy
import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from test_layer import EXACT_BACKENDS, ROUTER_OUTPUTS, needs_triton
from torch import nn
from torch.func import functional_call

from attractor import APN, APNConfig, GPTConfig, analysis, load_resized, monitor
from attractor.config import TrainConfig
from attractor.model import GPT
from attractor.ops import gathered, reference
from attractor.trainer import make_optimizer

SMALL = {"dim": 12, "num_patches": 25, "top_k": 3, "rank": 4, "prototypes": "product", "temperature": 0.3}
VARIANTS = {
    "core": {},
    "dot": {"routing": "dot", "temperature": 1.0},
    "scalar gate": {"gate": "scalar"},
    "shared decoder": {"decoder": "shared", "offset_rank": 2},
    "layer norm": {"layer_norm": True},
    "more active patches than rows": {"num_patches": 9, "top_k": 7},
    "one patch": {"num_patches": 1, "top_k": 1},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
every_backend = pytest.mark.parametrize(
    "backend", [*EXACT_BACKENDS, pytest.param("triton", marks=needs_triton)]
)


def build(seed: int = 0, **options) -> APN:
    torch.manual_seed(seed)
    layer = APN(**(SMALL | options))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def written_out(layer: APN) -> APN:
    """The same layer with all pairs as prototypes of its own: what the pairs mean."""
    config = dataclasses.replace(layer.config, prototypes="static", sparse_gradients=False)
    flat = APN.from_config(layer.dim, config, backend="reference", dtype=layer.encoder.dtype)
    state = layer.state_dict()
    first, second = (rows / rows.norm(dim=1, keepdim=True) for rows in state.pop("codebooks"))
    number = torch.arange(layer.num_patches)
    side = len(first)
    state["prototypes"] = torch.cat([first[number // side], second[number % side]], 1) / math.sqrt(2)
    flat.load_state_dict(state)
    return flat


@every_variant
@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_is_the_layer_with_all_pairs_written_out(variant, backend):
    layer = build(**variant, backend=backend, dtype=torch.float64)
    flat = written_out(layer)
    assert layer.config.prototypes == "product"
    torch.testing.assert_close(
        flat.prototypes.norm(dim=1), torch.ones(layer.num_patches, dtype=torch.float64)
    )
    x = torch.randn(40, 12, dtype=torch.float64)
    upstream = torch.randn_like(x)
    results = []
    for module in (layer, flat):
        tokens = x.clone().requires_grad_()
        update, stats = module(tokens, return_stats=True)
        shared = [p for name, p in module.named_parameters() if name not in ("codebooks", "prototypes")]
        gradients = torch.autograd.grad(update, [tokens, *shared], upstream)
        results.append(
            [update, stats.indices, stats.weights, stats.confidence, stats.balance, stats.entropy, *gradients]
        )
    assert stats.num_patches == layer.num_patches
    torch.testing.assert_close(*results, rtol=0, atol=1e-11)


@st.composite
def halves(draw):
    """Scores of both halves of some tokens: whole numbers, whose sums are exact, with many ties."""
    side, tokens, spread = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(0, 6))
    number = st.integers(-spread, spread)
    size = 2 * tokens * side
    values = draw(st.lists(number, min_size=size, max_size=size))
    return torch.tensor(values, dtype=torch.float32).view(2, tokens, side)


@given(halves(), st.data())
def test_exactly_the_best_pairs_and_ties_go_to_the_lower_patch(half, data):
    side = half.shape[-1]
    top_k = data.draw(st.integers(1, min(side**2, 20)))
    every = (half[0][:, :, None] + half[1][:, None, :]).flatten(1)
    assert torch.equal(reference.best_pairs(half, top_k), reference.best_patches(every, top_k))


@given(
    st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([1, 4, 7]), st.sampled_from([1e-3, 1.0, 30.0])
)
def test_scores_are_cosines(side, seed, top_k, size):
    top_k = min(top_k, side**2)
    layer = build(seed % 1000, num_patches=side**2, top_k=top_k, dtype=torch.float64)
    x = size * torch.randn(5, 12, dtype=torch.float64)
    _, stats = layer(x, return_stats=True)
    prototypes = written_out(layer).prototypes
    cosine = torch.nn.functional.cosine_similarity(x[:, None], prototypes[None], dim=-1)
    best = cosine.topk(top_k, dim=-1)
    assert torch.equal(stats.indices, best.indices)
    weights = (best.values / layer.config.temperature).softmax(-1)
    torch.testing.assert_close(stats.weights, weights, rtol=0, atol=1e-12)
    torch.testing.assert_close(stats.confidence, best.values[:, 0] / layer.config.temperature)


def tie(layer: APN, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codebooks and tokens of 1 and -1, four channels in each half, whose every score is exact, and the best
    patches by whole numbers.
    """
    side = layer.codebooks.shape[1]
    with torch.no_grad():
        layer.codebooks.copy_(torch.randn(2, 3, 4).sign().repeat(1, side, 1)[:, :side])
    x = torch.randn(count, 8).sign()
    halves = torch.einsum("nhm,hNm->hnN", x.unflatten(1, (2, 4)), layer.codebooks.detach().cpu())
    every = (halves[0][:, :, None] + halves[1][:, None, :]).flatten(1)
    return x, reference.best_patches(every, layer.config.top_k)


@pytest.mark.parametrize(
    ("backend", "top_k"),
    [
        *((backend, top_k) for backend in EXACT_BACKENDS for top_k in (1, 4, 5)),
        *(pytest.param("triton", top_k, marks=needs_triton) for top_k in (1, 5)),
    ],
)
def test_equal_scores_go_to_the_lower_patch(backend, top_k):
    layer = build(dim=8, num_patches=49, top_k=top_k, routing="dot", temperature=1.0, backend=backend)
    x, wanted = tie(layer, 6 if backend == "triton" and not torch.cuda.is_available() else 30)
    assert torch.equal(layer(x, return_stats=True)[1].indices, wanted)
    with torch.no_grad():  # of few tokens: another way
        assert torch.equal(layer(x, return_stats=True)[1].indices, wanted)


@every_variant
@pytest.mark.parametrize(
    ("backend", "output"),  # the router is the same code in both backends
    [*((backend, "update") for backend in EXACT_BACKENDS), *(("reference", name) for name in ROUTER_OUTPUTS)],
)
def test_gradients(variant, backend, output):
    options = {"dim": 6, "rank": 2, "num_patches": 9, "top_k": 2} | variant
    layer = build(**options, backend=backend, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def compute(x, *values):
        update, stats = functional_call(
            layer, dict(zip(names, values, strict=True)), (x,), {"return_stats": True}
        )
        return update if output == "update" else getattr(stats, output)

    assert torch.autograd.gradcheck(compute, (x, *layer.parameters()), fast_mode=output != "update")


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_second_derivatives(backend):
    layer = build(dim=4, rank=2, num_patches=4, top_k=2, backend=backend, dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, *_: layer(x), (x, *layer.parameters()), fast_mode=True)


@pytest.mark.parametrize(("tokens", "top_k", "rank"), [(0, 2, 1), (1, 1, 1), (60, 4, 1), (33, 3, 5)])
def test_gathered_decode(tokens, top_k, rank):
    code = torch.randn(tokens, top_k, rank, dtype=torch.float64, requires_grad=True)
    bank = torch.randn(20, rank, 7, dtype=torch.float64, requires_grad=True)
    idx, upstream = torch.randint(20, (tokens, top_k)), torch.randn(tokens, 7, dtype=torch.float64)
    results = []
    for decode in (reference.gathered_decode, gathered.decode):
        update = decode(code, bank, idx)
        results.append((update, *torch.autograd.grad(update, (code, bank), upstream)))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    update = gathered.decode(code, bank, idx, sparse=True)
    grad_code, grad_bank = torch.autograd.grad(update, (code, bank), upstream)
    torch.testing.assert_close((grad_code, grad_bank.to_dense()), results[0][1:], rtol=0, atol=1e-12)
    assert grad_bank.is_coalesced()
    assert grad_bank.indices().squeeze(0).tolist() == sorted(set(idx.flatten().tolist()))


def test_operators_are_well_behaved():
    code, bank, idx = torch.randn(6, 2, 3), torch.randn(5, 3, 4), torch.randint(5, (6, 2))
    torch.library.opcheck(gathered.gathered_decode, (code, bank, idx))
    torch.library.opcheck(gathered.code_gradient, (torch.randn(6, 4), code, bank, idx))
    torch.library.opcheck(gathered.bank_gradient, (torch.randn(6, 4), code, bank, idx))


@every_backend
@pytest.mark.parametrize("gate", ["vector", "scalar"])
def test_sparse_gradients_are_the_dense_ones(backend, gate):
    layer = build(num_patches=100, gate=gate, backend=backend)
    sparse = build(num_patches=100, gate=gate, backend=backend, sparse_gradients=True)
    x, upstream = torch.randn(9, 12), torch.randn(9, 12)
    update, stats = layer(x, return_stats=True)
    update.backward(upstream)
    torch.testing.assert_close(sparse(x), update)
    sparse(x).backward(upstream)
    used = stats.indices.unique()
    for (name, dense), found in zip(layer.named_parameters(), sparse.parameters(), strict=True):
        assert found.grad.is_sparse == name.startswith(("gate", "decoder")), name
        if found.grad.is_sparse:
            torch.testing.assert_close(found.grad.coalesce().to_dense(), dense.grad, msg=name)
            assert torch.equal(found.grad.coalesce().indices()[0], used), name
        else:
            torch.testing.assert_close(found.grad, dense.grad, msg=name)


def test_sparse_adam_moves_what_was_selected_and_nothing_else():
    layer = build(num_patches=100, sparse_gradients=True)
    optimizer = torch.optim.SparseAdam(list(layer.patch_parameters()), lr=0.1)
    x = torch.randn(4, 12)
    update, stats = layer(x, return_stats=True)
    before = copy.deepcopy(layer.state_dict())
    update.square().sum().backward()
    optimizer.step()
    used = torch.zeros(100, dtype=torch.bool)
    used[stats.indices.flatten()] = True
    for name, after in layer.state_dict().items():
        moved = (after != before[name]).flatten(1).any(1)
        assert torch.equal(moved, used) if name in ("gate_slope", "gate_bias", "decoder") else not moved.any()


@pytest.mark.parametrize("variant", [{}, {"gate": "scalar"}, {"decoder": "shared"}], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_to_one_graph(variant, backend):
    torch._dynamo.reset()
    layer = build(**variant)
    x, upstream = torch.randn(40, 12, requires_grad=True), torch.randn(40, 12)

    def gradients(module):
        update, stats = module(x, return_stats=True)
        total = (update * upstream).sum() + stats.balance - stats.entropy
        return update, stats.indices, torch.autograd.grad(total, [x, *layer.parameters()])

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for got, expected in zip(gradients(compiled), gradients(layer), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at it
def test_sparse_gradients_break_a_compiled_graph_and_stay_sparse():
    torch._dynamo.reset()
    layer = build(sparse_gradients=True)
    model = nn.Sequential(nn.Linear(12, 12), layer)
    x = torch.randn(5, 12)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x).sum().backward()
    assert layer.decoder.grad.is_sparse


def test_meta_device():
    layer = APN(**SMALL, device="meta")
    assert layer(torch.randn(3, 12, device="meta")).shape == (3, 12)
    layer.to_empty(device="cpu").reset_parameters()
    assert float(layer.codebooks.detach().std()) == pytest.approx(0.3, rel=0.2)
    assert layer(torch.randn(3, 12)).isfinite().all()


def test_function_transforms():
    layer = build(dtype=torch.float64)
    x = torch.randn(4, 12, dtype=torch.float64)
    jacobian = torch.func.jacrev(layer)(x)
    assert torch.allclose(jacobian, torch.autograd.functional.jacobian(layer, x))


def test_autocast_routes_in_float32():
    layer = build(dim=32, num_patches=64)
    x = torch.randn(200, 32)
    exact, exact_stats = layer(x, return_stats=True)
    with torch.autocast("cpu", torch.bfloat16):
        update, stats = layer(x, return_stats=True)
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert update.dtype == torch.bfloat16
    assert stats.balance.dtype == stats.confidence.dtype == stats.weights.dtype == torch.float32
    assert torch.equal(stats.indices, exact_stats.indices)
    assert (update - exact).norm() < 0.01 * exact.norm()
    update.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_layers(dtype):
    low = build(dtype=torch.float64).to(dtype)
    x = torch.randn(50, 12, dtype=dtype)
    exact = copy.deepcopy(low).double()
    update, stats = low(x, return_stats=True)
    expected, expected_stats = exact(x.double(), return_stats=True)
    assert update.dtype == dtype
    assert torch.equal(stats.indices, expected_stats.indices)
    assert (update - expected).norm() < 0.02 * expected.norm()
    update.sum().backward()
    expected.sum().backward()
    for (name, got), wanted in zip(low.named_parameters(), exact.parameters(), strict=True):
        assert (got.grad - wanted.grad).norm() < 0.03 * wanted.grad.norm(), name


@every_backend
def test_rows_that_are_not_finite(backend):
    layer = build(backend=backend)
    x = torch.randn(6, 12)
    damaged = x.clone()
    damaged[2, 3], damaged[4, 0] = torch.nan, 1e30
    good = torch.tensor([True, True, False, True, False, True])
    expected, expected_stats = layer(x, return_stats=True)
    update, stats = layer(damaged, return_stats=True)
    torch.testing.assert_close(update[good], expected[good], rtol=1e-6, atol=1e-6)
    assert update[~good].isnan().all()
    assert (stats.indices[~good] == -1).all()
    assert torch.equal(stats.indices[good], expected_stats.indices[good])
    assert stats.balance.isfinite()
    loss = (damaged + update).square().mean()  # also when nobody masks the loss
    parameters, upstream = list(layer.parameters()), torch.randn_like(update[good])
    unmasked = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert all(gradient.isfinite().all() for gradient in unmasked)
    got = torch.autograd.grad(update[good], parameters, upstream)
    torch.testing.assert_close(got, torch.autograd.grad(expected[good], parameters, upstream))


@every_backend
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # by the interpreter's NumPy
def test_a_broken_codebook_shows(backend):
    layer = build(backend=backend)
    with torch.no_grad():
        layer.codebooks[1, 2] = torch.nan
    assert layer(torch.randn(5, 12)).isnan().all()
    with torch.no_grad():
        assert layer(torch.randn(5, 12)).isnan().all()


def test_same_bits_twice(two_threads):
    layer = build(num_patches=16, dim=64, rank=3)
    x, upstream = torch.randn(2000, 64), torch.randn(2000, 64)
    parameters = list(layer.parameters())
    first, *others = (torch.autograd.grad(layer(x), parameters, upstream) for _ in range(4))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@every_backend
def test_patch_dropout(backend):
    layer = build(patch_dropout=0.5, backend=backend)
    x = torch.randn(20, 12)
    torch.manual_seed(3)
    update, stats = layer(x, return_stats=True)
    assert (stats.weights == 0).any()
    torch.testing.assert_close(stats.weights.sum(-1), torch.ones(20))
    layer.backend = "reference"
    torch.manual_seed(3)
    torch.testing.assert_close(update, layer(x))


def test_a_million_patches():
    """Of which nothing but the parameters is as large: a table of scores alone would have 32 GB."""
    layer = APN(8, num_patches=2**20, rank=1, prototypes="product", sparse_gradients=True)
    x = torch.randn(2**13, 8)
    update, stats = layer(x, return_stats=True)
    update.sum().backward()
    assert stats.indices.max() < 2**20
    assert len(layer.decoder.grad._values()) == len(stats.indices.unique())
    values = monitor.summary(stats)
    assert values["dead_patches"] == 2**20 - len(stats.indices.unique())
    assert monitor.overlap_histogram(stats.indices, 2**20).sum() == pytest.approx(1)


def test_counts():
    layer = APN(12, num_patches=100, top_k=3, rank=4, prototypes="product", device="meta")
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "codebooks": (2, 10, 6),
        "encoder": (12, 4),
        "gate_slope": (100, 4),
        "gate_bias": (100, 4),
        "decoder": (100, 4, 12),
    }
    assert analysis.multiply_adds(layer)["router"] == 10 * 12
    counts = analysis.parameter_counts(layer)
    assert counts["active"] == 120 + 48 + 3 * (8 + 48)
    assert set(layer.router_parameters()) == {layer.codebooks}
    x = torch.randn(2, 12)
    built = APN(12, num_patches=100, top_k=3, rank=4, prototypes="product")
    assert analysis.update_surface(built, x).is_local
    assert not analysis.update_surface(built, x, roles=("router",)).is_local


@every_variant
def test_copies_and_checkpoints_are_exact(variant):
    layer, other = build(**variant), build(seed=1, **variant)
    x = torch.randn(4, 12)
    other.load_state_dict(load(save(layer.state_dict())))
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    rebuilt = APN.from_config(12, APNConfig.from_json(layer.config.to_json()))
    rebuilt.load_state_dict(layer.state_dict())
    assert torch.equal(rebuilt(x), layer(x))


def test_files_from_before_still_load():
    old = APNConfig().to_dict()
    del old["sparse_gradients"]
    assert APNConfig.from_dict(old) == APNConfig()
    with pytest.raises(RuntimeError, match="codebooks"):
        build().load_state_dict(build(prototypes="static").state_dict())


def test_a_model_of_it_is_saved_and_read(tmp_path):
    apn = APNConfig(num_patches=16, top_k=2, rank=2, prototypes="product")
    config = GPTConfig(vocab_size=11, context=8, num_layers=2, num_heads=2, dim=16, ffn="apn", apn=apn)
    model = GPT(config)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(11, (2, 8))
    assert torch.equal(GPT.from_pretrained(tmp_path)(tokens), model(tokens))
    _, stats = model(tokens, return_stats=True)
    assert monitor.summary(stats[0])["tokens"] == 16


@pytest.mark.parametrize("decoder", ["independent", "shared"])
def test_growth(decoder):
    layer = build(decoder=decoder)
    grown = copy.deepcopy(layer)
    grown.codebooks.requires_grad_(False)
    grown.resize(49)
    assert grown.num_patches == grown.config.num_patches == 49
    assert not grown.codebooks.requires_grad
    x = torch.randn(60, 12)
    old, new = (module(x, return_stats=True) for module in (layer, grown))
    i, j = new[1].indices // 7, new[1].indices % 7
    only_old = ((i < 5) & (j < 5)).all(-1)
    assert only_old.any()
    assert not only_old.all()
    assert torch.equal((i * 5 + j)[only_old], old[1].indices[only_old])
    torch.testing.assert_close(new[0][only_old], old[0][only_old])
    if decoder == "independent":
        only_new = ((i >= 5) | (j >= 5)).all(-1)
        assert only_new.any()
        assert not new[0][only_new].any()
    other = build(seed=1, decoder=decoder)
    load_resized(other, grown.state_dict())
    assert torch.equal(other(x), grown(x))
    grown.resize(25, shrink=True)
    assert torch.equal(grown(x), layer(x))


@pytest.mark.parametrize(
    ("attempt", "problem"),
    [
        (lambda: build(num_patches=24), "num_patches=24 must be a square .* use 16 or 25"),
        (lambda: build(dim=13), "dim=13 must be even .* use 14"),
        (lambda: build(dim=2), "dim=2 must be even .* use 4"),
        (lambda: build(radius=0.5), 'radius=0.5 needs prototypes="static" or "contextual"'),
        (lambda: build(routing_dim=4), "need prototypes=\"contextual\", not 'product'"),
        (
            lambda: build(prototypes="static", sparse_gradients=True),
            "needs prototypes=\"product\", not 'static'",
        ),
        (lambda: build(sparse_gradients=1), "sparse_gradients=1 must be True or False"),
        (
            lambda: build(sparse_gradients=True, decoder="shared"),
            'sparse_gradients=True needs decoder="independent"',
        ),
        (lambda: build().resize(30), "num_patches=30 must be a square"),
        (lambda: build().resize(16), r"would drop the last 9 .* resize\(16, shrink=True\) does that"),
        (lambda: build().fresh_patches(3), r"fresh_patches\(3\): product prototypes cannot be appended"),
        (lambda: APN.like_ffn(64, prototypes="product"), "needs a square of patches"),
    ],
)
def test_mistakes(attempt, problem):
    with pytest.raises(ValueError, match=problem):
        attempt()


def test_codebooks_are_not_decayed():
    apn = APNConfig(num_patches=16, top_k=2, rank=2, prototypes="product")
    model = GPT(GPTConfig(vocab_size=11, context=8, num_layers=1, num_heads=2, dim=16, ffn="apn", apn=apn))
    decayed = make_optimizer(model, TrainConfig()).param_groups[0]["params"]
    layer = model.apn_layers()[0]
    assert any(p is layer.decoder for p in decayed)
    assert not any(p is layer.codebooks for p in decayed)
