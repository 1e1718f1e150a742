"""Basins: patches that act only within a radius, against a transcription of their equations.

(B1) m_i = s_i - radius_i / tau; (B2) e_i = exp(m_i) - 1 inside and 0 outside, w_i = e_i / (1 + sum_j e_j);
(B3) update = scale * sum_i w_i Delta_i. `basins` says it for one token in loops of float64, `equations` for
many in float64 tensors, so that it has derivatives.
"""

import copy
import math
from collections import namedtuple

import numpy as np
import paper
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from test_layer import needs_triton
from torch import nn
from torch.func import functional_call
from torch.nn import functional

import attractor
from attractor import APN, APNConfig, load_resized

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Triton.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # the interpreter's NumPy
]
GPU = "cuda" if torch.cuda.is_available() else "cpu"
FEW = 64
"""Up to so many tokens without gradients take a way of their own in Triton."""
EXACT = ("reference", "grouped")
"""The backends that know float64."""
every_backend = pytest.mark.parametrize("backend", [*EXACT, pytest.param("triton", marks=needs_triton)])
SMALL = {"dim": 12, "num_patches": 10, "top_k": 3, "rank": 4, "temperature": 0.3, "radius": 0.1}
VARIANTS = {
    "core": {},
    "one patch": {"top_k": 1},
    "two patches": {"top_k": 2},
    "four patches": {"top_k": 4, "scale": -0.7},
    "dot": {"routing": "dot", "temperature": 1.0},
    "scalar gate": {"gate": "scalar"},
    "shared decoder": {"decoder": "shared", "offset_rank": 2},
    "contextual": {"prototypes": "contextual", "routing_dim": 6},
    "contextual groups": {"prototypes": "contextual", "routing_dim": 6, "routing_groups": 3},
    "whitened": {"whiten": True},
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
        "whiten": True,
    },
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def backends_and_variants(*interpreted):
    """Every variant in every backend; of them only these in Triton, whose interpreter takes its time."""
    names = VARIANTS if torch.cuda.is_available() else interpreted
    return pytest.mark.parametrize(
        ("backend", "variant"),
        [pytest.param(b, VARIANTS[name], id=f"{b}-{name}") for b in EXACT for name in VARIANTS]
        + [pytest.param("triton", VARIANTS[name], id=f"triton-{name}", marks=needs_triton) for name in names],
    )


Forward = namedtuple("Forward", "update indices weights margins")


def entry_weights(margins, keep):
    """(B2), with numerator and denominator divided by exp(top), so that no margin is too large."""
    top = max(0.0, *margins)
    inside = [kept and margin > 0 for margin, kept in zip(margins, keep, strict=True)]
    e = [
        math.exp(margin - top) * -math.expm1(-margin) if entered else 0.0
        for margin, entered in zip(margins, inside, strict=True)
    ]
    return [value / (math.exp(-top) + sum(e)) for value in e]


def basins(h, parameters, k, temperature, scale=1.0, routing="cosine", keep=None):
    """One token: (B1), the best k margins, (B2) and (B3)."""
    z = h
    if "norm.weight" in parameters:
        z = paper.layer_norm(z, parameters["norm.weight"], parameters["norm.bias"])
    if "whitening" in parameters:
        z = paper.project(z, parameters["whitening"]) + parameters["whitening_shift"]
    scores = paper.routing_scores(z, parameters, routing, temperature)
    margins = [s - r / temperature for s, r in zip(scores, parameters["radius"], strict=True)]
    chosen = paper.top_k(margins, k)
    weights = entry_weights([margins[i] for i in chosen], keep or [True] * k)
    u = paper.project(z, parameters["encoder"])
    update = np.zeros(len(h))
    for w, i in zip(weights, chosen, strict=True):
        if w > 0:
            update += w * paper.project(paper.features(u, parameters, i), paper.decoder(parameters, i))
    return Forward(scale * update, [i if margins[i] > 0 else -1 for i in chosen], weights, margins)


def all_margins(x, p, config):
    """(B1) for every token and patch, and the whitened token."""
    z = x
    if config.layer_norm:
        z = functional.layer_norm(z, z.shape[-1:], p["norm.weight"], p["norm.bias"])
    if config.whiten:
        z = z @ p["whitening"] + p["whitening_shift"]
    query, prototypes = z[:, None], p["prototypes"][:, None]
    if config.prototypes == "contextual":
        groups, wide, narrow = p["router_projection"].shape
        query = torch.einsum("ngw,gwc->ngc", z.view(-1, groups, wide), p["router_projection"])
        prototypes = p["prototypes"].view(-1, groups, narrow)
    if config.routing == "cosine":
        query = functional.normalize(query, dim=-1)
    products = torch.einsum("ngc,kgc->nk", query, functional.normalize(prototypes, dim=-1))
    return z, (products / query.shape[1] - p["radius"]) / config.temperature


def equations(x, p, config, keep=None):
    """Update, weights, indices and best margin of many tokens, differentiable; moderate margins only."""
    z, margins = all_margins(x, p, config)
    order = margins.argsort(dim=-1, descending=True, stable=True)[:, : config.top_k]
    chosen = margins.gather(1, order)
    inside = chosen > 0
    e = torch.expm1(chosen.clamp(min=0)) * (1 if keep is None else keep)
    w = e / (1 + e.sum(-1, keepdim=True))
    u = (z @ p["encoder"])[:, None]
    slope = p["gate_slope"][order] if config.gate == "vector" else 0
    features = u * torch.sigmoid(slope * u + p["gate_bias"][order])
    decoder = p["decoder"] if "decoder" in p else p["decoder_base"] + p["offset_in"] @ p["offset_out"]
    update = config.scale * torch.einsum("nk,nkr,nkrd->nd", w, features, decoder[order])
    return update, w, order.where(inside, -1), chosen[:, 0]


def tensors(layer, dtype=torch.float64):
    """Everything a layer holds, as float64 leaves on the CPU."""
    return {name: value.detach().cpu().to(dtype) for name, value in layer.state_dict().items()}


def arrays(layer):
    return {name: value.numpy() for name, value in tensors(layer).items()}


def build(seed=0, backend="reference", **options):
    """A layer whose every parameter is random, with radii that about half of the tokens get into."""
    options = SMALL | options
    layer = APN(**options, backend=backend)
    randomize(layer, np.random.default_rng(seed))
    return layer.to(GPU if backend == "triton" else "cpu")


@torch.no_grad()
def randomize(layer, rng):
    for parameter in layer.parameters():
        parameter.copy_(torch.from_numpy(0.5 * rng.standard_normal(parameter.shape)))
    # The length of a prototype must not matter.
    layer.prototypes.mul_(torch.from_numpy(10.0 ** rng.uniform(-1, 1, (layer.num_patches, 1))))
    reach = {"cosine": 0.4, "dot": 1.4}[layer.config.routing]
    if layer.config.prototypes == "contextual":  # fewer dimensions: larger cosines
        reach *= 1.5
    layer.radius.copy_(torch.from_numpy(reach * rng.uniform(0.25, 1.5, layer.num_patches)))
    if layer.config.whiten:
        dim = layer.dim
        mix = np.eye(dim) + rng.standard_normal((dim, dim)) / math.sqrt(dim)
        layer.whitening.copy_(torch.from_numpy(mix))
        layer.whitening_shift.copy_(torch.from_numpy(0.5 * rng.standard_normal(dim)))


def ambiguous(margins, k, closeness):
    """Which rows hold a margin too near to an edge, or to another one, for roundings to agree on."""
    ordered = np.sort(np.asarray(margins), axis=-1)[..., ::-1][..., : k + 1]
    near = np.abs(ordered) < closeness
    ties = -np.diff(ordered, axis=-1) < closeness
    return near.any(-1) | ties.any(-1)


def tokens_of(layer, count, seed=1, closeness=1e-3):
    """Tokens whose routing no rounding can change."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * count + 50, layer.dim, generator=generator, dtype=torch.float64)
    x = x.to(layer.encoder.dtype).double()
    _, margins = all_margins(x, tensors(layer), layer.config)
    clear = ~ambiguous(margins.numpy(), layer.config.top_k, closeness)
    x = x[torch.from_numpy(clear)]
    assert len(x) >= count
    return x[:count].to(layer.encoder)


def inside_and_outside(layer, x):
    """The statistics of a batch that holds both kinds of tokens, or no test of one means anything."""
    stats = layer(x, return_stats=True)[1]
    assert stats.touched.any()
    assert not stats.touched.all()
    return stats


def relative_rms(got, exact):
    size = float(exact.detach().norm())
    return float((got.detach().cpu().double() - exact.detach()).norm()) / (size or 1.0)


def assert_consistent(update, stats):
    """What holds for any batch: `touched`, `indices` and `weights` tell the same story."""
    entered = stats.indices >= 0
    assert stats.indices.dtype == torch.int64
    assert stats.touched.dtype == torch.bool
    assert stats.touched.shape == stats.indices.shape[:-1]
    assert torch.equal(stats.touched, entered.any(-1))
    assert torch.equal(stats.weights > 0, entered)
    assert (stats.weights[~entered] == 0).all()
    assert (stats.weights <= 1).all()
    assert not stats.confidence.requires_grad
    finite = ~stats.confidence.isnan()
    assert torch.equal(stats.touched, stats.confidence > 0)
    assert (update[~stats.touched & finite] == 0).all()
    # Best first: the slots of patches that were not entered come last.
    assert (entered[..., :-1] | ~entered[..., 1:]).all()


class TestForward:
    @settings(max_examples=120)
    @given(st.data())
    def test_against_the_loops(self, data):
        groups = data.draw(st.integers(1, 2))
        options = {
            "dim": groups * data.draw(st.integers(2, 5)),
            "num_patches": data.draw(st.integers(1, 9)),
            "rank": data.draw(st.integers(1, 4)),
            "gate": data.draw(st.sampled_from(["vector", "scalar"])),
            "decoder": data.draw(st.sampled_from(["independent", "shared"])),
            "layer_norm": data.draw(st.booleans()),
            "whiten": data.draw(st.booleans()),
            "temperature": data.draw(st.floats(0.05, 2.0)),
            "scale": data.draw(st.floats(-2.0, 2.0)),
            "routing": data.draw(st.sampled_from(["cosine", "dot"])),
        }
        if data.draw(st.booleans()):
            contextual = {"routing_dim": groups * data.draw(st.integers(2, 3)), "routing_groups": groups}
            options |= {"prototypes": "contextual"} | contextual
        k = data.draw(st.sampled_from([k for k in (1, 2, 4, 9) if k <= options["num_patches"]]))
        seed = data.draw(st.integers(0, 2**32 - 1))
        backend = data.draw(st.sampled_from(EXACT))
        layer = build(seed, backend, **options, top_k=k, dtype=torch.float64)
        lead = data.draw(st.sampled_from([(), (1,), (6,), (2, 3)]))
        size = data.draw(st.sampled_from([1e-3, 1.0, 10.0]))
        x = size * np.random.default_rng(seed).standard_normal((*lead, layer.dim))
        run = {name: options[name] for name in ("temperature", "scale", "routing")}
        found = [basins(h, arrays(layer), k, **run) for h in x.reshape(-1, layer.dim)]
        assume(not ambiguous([f.margins for f in found], k, 1e-9).any())
        update, stats = layer(torch.from_numpy(x), return_stats=True)
        wanted = {name: np.array([getattr(f, name) for f in found]) for name in Forward._fields}
        np.testing.assert_array_equal(stats.indices.numpy(), wanted["indices"].reshape(*lead, k))
        close = {"rtol": 1e-10, "atol": 1e-10}
        np.testing.assert_allclose(update.detach().numpy(), wanted["update"].reshape(x.shape), **close)
        np.testing.assert_allclose(
            stats.weights.detach().numpy(), wanted["weights"].reshape(*lead, k), **close
        )
        best = wanted["margins"].max(axis=-1).reshape(lead)
        np.testing.assert_allclose(stats.confidence.numpy(), best, **close)
        assert_consistent(update, stats)
        # The tensors that the gradients are compared with say the same as the loops.
        exact = equations(torch.from_numpy(x.reshape(-1, layer.dim)), tensors(layer), layer.config)
        if best.max() < 100:
            np.testing.assert_allclose(exact[0].numpy(), wanted["update"], **close)
            np.testing.assert_array_equal(exact[2].numpy(), wanted["indices"])

    @backends_and_variants(*VARIANTS)
    def test_float32_of_few_tokens(self, backend, variant):
        for count in (2,) if backend == "triton" else (1, 7, FEW):
            self.check_without_gradients(backend, variant, count)

    @backends_and_variants("four patches", "everything")
    def test_float32_of_more_tokens(self, backend, variant):
        self.check_without_gradients(backend, variant, FEW + 1)

    def check_without_gradients(self, backend, variant, count):
        layer = build(backend=backend, **variant).eval()
        x = tokens_of(layer, count)
        with torch.no_grad():
            update, stats = layer(x, return_stats=True)
            alone = layer(x[:2])
        exact, weights, indices, best = equations(x.cpu().double(), tensors(layer), layer.config)
        assert torch.equal(stats.indices.cpu(), indices)
        for got, wanted in ((update, exact), (stats.weights, weights), (stats.confidence, best)):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.cpu().double(), wanted, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(alone, update[:2], rtol=1e-5, atol=1e-5)
        assert_consistent(update, stats)
        if count > 7:
            inside_and_outside(layer, x)

    @every_backend
    @pytest.mark.parametrize("count", [4, FEW + 2])
    def test_ties_and_edges_of_exact_numbers(self, backend, count):
        """Of signs every cosine is a multiple of 1/8, so margins are exact: many tie, many are just 0."""
        layer = build(backend=backend, dim=16, num_patches=60, top_k=4, temperature=0.5)
        rng = np.random.default_rng(3)
        directions = rng.choice([-1.0, 1.0], (6, 16))
        with torch.no_grad():
            layer.prototypes.copy_(torch.from_numpy(directions[rng.integers(6, size=60)]))
            layer.radius.copy_(torch.from_numpy(rng.integers(-1, 6, 60) / 8))
        x = torch.from_numpy(rng.choice([-1.0, 1.0], (count, 16)))
        found = [basins(h, arrays(layer), 4, 0.5) for h in x.numpy()]
        wanted = torch.tensor([f.indices for f in found])
        assert (wanted == -1).any()
        assert any(0.0 in f.margins for f in found)
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                stats = layer(x.to(layer.encoder), return_stats=True)[1]
            assert torch.equal(stats.indices.cpu(), wanted)
            expected = torch.tensor([max(f.margins) for f in found], dtype=torch.float32)
            torch.testing.assert_close(stats.confidence.cpu(), expected, rtol=0, atol=0)
            expected = torch.tensor([f.weights for f in found], dtype=torch.float32)
            torch.testing.assert_close(stats.weights.detach().cpu(), expected, rtol=1e-6, atol=1e-7)

    @every_backend
    @pytest.mark.parametrize("gradients", [True, False])
    def test_margins_whose_exponential_overflows(self, backend, gradients):
        layer = build(backend=backend, dim=16, num_patches=12, top_k=3, temperature=2.0**-13)
        rng = np.random.default_rng(4)
        with torch.no_grad():
            layer.prototypes.copy_(torch.from_numpy(rng.choice([-1.0, 1.0], (12, 16))))
            layer.prototypes[5] = layer.prototypes[2]
            layer.radius.fill_(0.25)
        x = torch.from_numpy(rng.choice([-1.0, 1.0], (9, 16)))
        x[0] = layer.prototypes[2].detach().cpu()
        found = [basins(h, arrays(layer), 3, 2.0**-13) for h in x.numpy()]
        assert max(found[0].margins) == 0.75 * 2**13
        assert found[0].indices == [2, 5, 4]
        tokens = x.to(layer.encoder).requires_grad_(gradients)
        with torch.set_grad_enabled(gradients):
            update, stats = layer(tokens, return_stats=True)
        named = stats.indices.cpu()  # where a weight is more than nothing in float32
        assert torch.equal(named[named >= 0], torch.tensor([f.indices for f in found])[named >= 0])
        assert torch.equal(stats.touched.cpu(), torch.tensor([max(f.margins) > 0 for f in found]))
        expected = torch.tensor([f.weights for f in found], dtype=torch.float32)
        torch.testing.assert_close(stats.weights.detach().cpu(), expected, rtol=1e-6, atol=1e-7)
        wanted = torch.from_numpy(np.array([f.update for f in found]))
        torch.testing.assert_close(update.detach().cpu().double(), wanted, rtol=1e-5, atol=1e-5)
        if gradients:
            leaves = [tokens, *layer.parameters()]
            found = torch.autograd.grad(update.sum() + stats.weights.square().sum(), leaves)
            assert all(gradient.isfinite().all() for gradient in found)

    @pytest.mark.parametrize("layer_norm", [False, True])
    def test_whitening_alone_comes_before_router_and_encoder(self, layer_norm):
        """Without a radius the layer is the paper's, of the whitened token."""
        options = {"num_patches": 6, "top_k": 2, "rank": 3, "dtype": torch.float64, "backend": "reference"}
        layer = APN(8, **options, whiten=True, layer_norm=layer_norm)
        x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert "radius" not in layer.state_dict()
        assert torch.equal(layer.whitening, torch.eye(8, dtype=torch.float64))
        assert torch.equal(layer.whitening_shift, torch.zeros(8, dtype=torch.float64))
        plain = APN(8, **options)
        plain.load_state_dict(
            {name: p for name, p in layer.state_dict().items() if name in plain.state_dict()}
        )
        z = functional.layer_norm(x, (8,)) if layer_norm else x
        torch.testing.assert_close(layer(x), plain(z), rtol=0, atol=1e-12)
        with torch.no_grad():
            layer.whitening.copy_(torch.from_numpy(np.random.default_rng(1).standard_normal((8, 8))))
            layer.whitening_shift.copy_(torch.arange(8.0) / 8)
        expected = plain(z @ layer.whitening + layer.whitening_shift)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
        for h, update in zip(z.numpy(), layer(x), strict=True):
            h = paper.project(h, layer.whitening.numpy()) + layer.whitening_shift.numpy()
            wanted = paper.apn(h, arrays(plain), 2, 0.07).update
            np.testing.assert_allclose(update.detach().numpy(), wanted, rtol=0, atol=1e-12)


class TestEdge:
    @settings(max_examples=60)
    @given(st.integers(0, 2**32 - 1), st.sampled_from(["cosine", "dot"]), st.integers(1, 6))
    def test_weights_move_no_further_than_margins(self, seed, routing, patches):
        """No derivative of a weight by a margin exceeds 1, and no edge is a jump: |dw_i| <= sum_j |dm_j|."""
        options = {"dim": 5, "num_patches": patches, "top_k": patches, "routing": routing, "temperature": 0.2}
        layer = build(seed, **options, dtype=torch.float64)
        start, end = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x = start + (end - start) * torch.linspace(0, 1, 200, dtype=torch.float64)[:, None]
        with torch.no_grad():
            stats = layer(x, return_stats=True)[1]
        weights = torch.zeros(200, patches + 1, dtype=torch.float64)  # the last is nobody's
        weights.scatter_(1, stats.indices.where(stats.indices >= 0, patches), stats.weights)
        _, margins = all_margins(x, tensors(layer), layer.config)
        moved = margins.diff(dim=0).abs().sum(-1, keepdim=True)
        assert (weights.diff(dim=0).abs() <= moved + 1e-12).all()
        assert torch.equal(weights[:, :patches] > 0, margins > 0)

    @every_backend
    @pytest.mark.parametrize("gradients", [True, False])
    def test_crossing_the_edge_of_one_patch(self, backend, gradients):
        """A token turns into a patch: its update grows from exactly nothing, as 1 - exp(-m) does."""
        layer = build(backend=backend, dim=4, num_patches=1, top_k=1, rank=2, temperature=0.1)
        with torch.no_grad():
            layer.prototypes.copy_(torch.tensor([[1.0, 0, 0, 0]]))
            layer.radius.fill_(0.5)
        angles = torch.linspace(math.acos(0.5) + 0.03, math.acos(0.5) - 0.03, 21, dtype=torch.float64)
        x = torch.stack([angles.cos(), angles.sin(), 0 * angles, 0 * angles], 1)
        with torch.set_grad_enabled(gradients):
            update, stats = layer(x.to(layer.encoder), return_stats=True)
        update, weights = update.detach().cpu().double(), stats.weights.detach().cpu().double()[:, 0]
        margins = (angles.cos() - 0.5) / 0.1
        torch.testing.assert_close(weights, 1 - torch.exp(-margins.clamp(min=0)), rtol=0, atol=3e-6)
        outside = margins < -1e-4
        assert (update[outside] == 0).all()
        assert (weights[outside] == 0).all()
        assert (weights[margins > 1e-4] > 0).all()
        largest = float(margins.diff().abs().max()) + 1e-5
        assert (weights.diff().abs() <= largest).all()
        assert update.diff(dim=0).norm(dim=-1).max() <= 1.2 * largest * update[-1].norm() / weights[-1]

    @settings(max_examples=60)
    @given(st.integers(0, 2**32 - 1), st.floats(-1, 1), st.floats(0.15, 2), st.sampled_from(EXACT))
    def test_weights_leave_something_to_nobody(self, seed, radius, temperature, backend):
        layer = build(seed, backend, temperature=temperature, dtype=torch.float64)
        with torch.no_grad():
            layer.radius.fill_(radius)
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        with torch.no_grad():
            update, stats = layer(x, return_stats=True)
        assert (stats.weights >= 0).all()
        assert (stats.weights < 1).all()
        assert (stats.weights.sum(-1) < 1).all()
        _, margins = all_margins(x, tensors(layer), layer.config)
        e = torch.expm1(margins.topk(3).values.clamp(min=0)).sum(-1)
        torch.testing.assert_close(1 - stats.weights.sum(-1), 1 / (1 + e), rtol=0, atol=1e-12)
        assert_consistent(update, stats)


class TestOutside:
    @backends_and_variants("core", "everything")
    def test_nothing_at_all(self, backend, variant):
        """No token is in any basin: the update and every gradient are exactly zero."""
        layer = build(backend=backend, **variant)
        with torch.no_grad():
            layer.radius.fill_(1000.0 if layer.config.routing == "dot" else 1.1)
        for count in (2, FEW + 1):
            x = torch.randn(count, 12).to(layer.encoder).requires_grad_()
            with torch.no_grad():
                assert (layer(x) == 0).all()
            update, stats = layer(x, return_stats=True)
            assert (update == 0).all()
            assert (stats.indices == -1).all()
            assert (stats.weights == 0).all()
            assert not stats.touched.any()
            assert (stats.confidence < 0).all()
            upstream = [torch.randn_like(update), torch.randn_like(stats.weights)]
            for gradient in torch.autograd.grad((update, stats.weights), [x, *layer.parameters()], upstream):
                assert (gradient == 0).all()

    @every_backend
    @pytest.mark.parametrize("kind", ["float32", "autocast", "bfloat16"])
    @pytest.mark.parametrize("count", [8, FEW + 8])
    def test_next_to_tokens_that_are_inside(self, backend, kind, count):
        if backend == "triton" and kind != "float32" and GPU == "cpu":
            pytest.skip("the interpreter multiplies float32 alone")
        layer = build(backend=backend)
        x = tokens_of(layer, count, closeness=0.05)  # half precision enters the same patches
        if kind == "bfloat16":
            layer, x = layer.bfloat16(), x.bfloat16()
        device = x.device.type
        x.requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=kind == "autocast"):
            update, stats = layer(x, return_stats=True)
            with torch.no_grad():
                alone = layer(x)
        outside = ~stats.touched
        assert outside.any()
        assert not outside.all()
        assert (update[outside] == 0).all()
        assert (alone[outside] == 0).all()
        assert (update[~outside] != 0).any(-1).all()
        upstream = torch.randn_like(update)
        gradients = torch.autograd.grad(
            (update, stats.weights), [x, *layer.parameters()], (upstream, torch.randn_like(stats.weights))
        )
        assert (gradients[0][outside] == 0).all()
        assert (gradients[0][~outside] != 0).any(-1).all()
        unused = torch.ones(layer.num_patches + 1, dtype=torch.bool, device=device)
        unused[stats.indices.flatten()] = False  # -1 is the extra one
        for (name, parameter), gradient in zip(layer.named_parameters(), gradients[1:], strict=True):
            assert gradient.shape == parameter.shape
            if name != "encoder":
                assert (gradient[unused[:-1]] == 0).all(), name
                assert gradient[~unused[:-1]].any(), name

    @every_backend
    def test_a_patch_that_nobody_entered_may_hold_anything(self, backend):
        """Another decoder there changes no bit: that is what a basin promises."""
        layer = build(backend=backend)
        with torch.no_grad():
            layer.radius[4] = 2.0
        for count in (3, FEW + 1):
            x = tokens_of(layer, count)
            with torch.no_grad():
                before = layer(x)
                changed = copy.deepcopy(layer)
                changed.decoder[4] += 7
                changed.gate_bias[4] -= 7
                changed.gate_slope[4] *= -1
                assert torch.equal(changed(x), before)


class TestGradients:
    @backends_and_variants("core", "dot", "shared decoder", "contextual groups", "everything")
    def test_against_the_equations(self, backend, variant):
        """With random upstream gradients for update and weights, of every parameter and of the input."""
        dtype = torch.float32 if backend == "triton" else torch.float64
        layer = build(backend=backend, **variant, dtype=dtype)
        x = tokens_of(layer, 20)
        inside_and_outside(layer, x)
        assert_gradients(layer, x, 2e-5 if backend == "triton" else 1e-11)

    @every_backend
    @pytest.mark.parametrize("cache", [2**24, 1], ids=["sums of rows", "groups"])
    def test_float32_and_many_tokens(self, backend, cache, monkeypatch):
        if backend != "grouped" and cache == 1:
            pytest.skip("only the grouped backend has two ways to decode")
        from attractor.ops import grouped

        monkeypatch.setattr(grouped, "CACHE", cache)
        layer = build(backend=backend, num_patches=17, dim=20, rank=5, top_k=4)
        assert_gradients(layer, tokens_of(layer, 80 if backend == "triton" else 300), 2e-5)

    @pytest.mark.parametrize("backend", EXACT)
    @every_variant
    def test_gradcheck(self, backend, variant):
        tiny = {"dim": 6, "num_patches": 5, "rank": 2, "top_k": min(variant.get("top_k", 2), 4)}
        if "routing_dim" in variant:
            tiny |= {"routing_dim": 4, "routing_groups": min(variant.get("routing_groups", 1), 2)}
        layer = build(backend=backend, **variant | tiny, dtype=torch.float64)
        names = [name for name, _ in layer.named_parameters()]
        x = tokens_of(layer, 8, closeness=1e-2).requires_grad_()
        inside_and_outside(layer, x)

        def compute(x, *values):
            update, stats = functional_call(
                layer, dict(zip(names, values, strict=True)), (x,), {"return_stats": True}
            )
            return update, stats.weights

        assert torch.autograd.gradcheck(
            compute, (x, *layer.parameters()), fast_mode=variant is not VARIANTS["core"]
        )

    @every_backend
    @pytest.mark.parametrize("name", ["core", "scalar gate", "shared decoder", "everything"])
    def test_second_derivatives(self, backend, name):
        dtype = torch.float32 if backend == "triton" else torch.float64
        layer = build(backend=backend, **VARIANTS[name], dtype=dtype)
        x = tokens_of(layer, 12)
        inside_and_outside(layer, x)

        def twice(forward, x, parameters):
            update, weights = forward(x)
            value = (x + update).square().sum() + weights.square().sum()
            (first,) = torch.autograd.grad(value, x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), [x, *parameters], allow_unused=True)

        def through_layer(x):
            update, stats = layer(x, return_stats=True)
            return update, stats.weights

        found = twice(through_layer, x.clone().requires_grad_(), list(layer.parameters()))
        p = tensors(layer)
        leaves = [p[name].requires_grad_() for name, _ in layer.named_parameters()]
        exact = twice(
            lambda x: equations(x, p, layer.config)[:2], x.detach().cpu().double().requires_grad_(), leaves
        )
        for got, wanted in zip(found, exact, strict=True):
            assert relative_rms(got, wanted) < (1e-4 if backend == "triton" else 1e-10)

    @every_backend
    def test_the_radius_gets_none(self, backend):
        layer = build(backend=backend, whiten=True)
        assert not {"radius", "whitening", "whitening_shift"} & {name for name, _ in layer.named_parameters()}
        update, stats = layer(tokens_of(layer, 5), return_stats=True)
        update.sum().backward()
        assert layer.radius.grad is None
        assert not layer.radius.requires_grad
        assert not stats.confidence.requires_grad


def assert_gradients(layer, x, limit, keep_from_weights=False):
    """Update, weights and the gradients of random upstream ones equal those of the equations."""
    x = x.detach().requires_grad_()
    update, stats = layer(x, return_stats=True)
    generator = torch.Generator().manual_seed(5)
    shapes = (update.shape, stats.weights.shape)
    upstream = [torch.randn(shape, generator=generator).to(layer.encoder.dtype) for shape in shapes]
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad((update, stats.weights), leaves, [u.to(update) for u in upstream])
    p = tensors(layer)
    exact_leaves = [x.detach().cpu().double().requires_grad_()]
    exact_leaves += [p[name].requires_grad_() for name, _ in layer.named_parameters()]
    keep = (stats.weights != 0).cpu() if keep_from_weights else None
    exact, weights, indices, _ = equations(exact_leaves[0], p, layer.config, keep)
    if not keep_from_weights:
        assert torch.equal(stats.indices.cpu(), indices)
    wanted = torch.autograd.grad((exact, weights), exact_leaves, [u.double() for u in upstream])
    assert relative_rms(update, exact) < limit
    assert relative_rms(stats.weights, weights) < limit
    names = ["input", *(name for name, _ in layer.named_parameters())]
    for name, got, right in zip(names, found, wanted, strict=True):
        assert right.any(), name
        assert relative_rms(got, right) < limit, name


class TestPatchDropout:
    def test_dropped_slots_have_no_weight(self):
        probability, k, count = 0.3, 4, 20_000
        layer = build(top_k=k, num_patches=9, dim=6, patch_dropout=probability, dtype=torch.float64)
        layer.radius -= 0.4
        x = torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(0)
        update, stats = layer.train()(x, return_stats=True)
        update, weights = update.detach(), stats.weights.detach()
        _, _, indices, best = equations(x, tensors(layer), layer.config)
        inside = indices >= 0
        keep = weights != 0
        assert not keep[~inside].any()
        exact, exact_weights, _, _ = equations(x, tensors(layer), layer.config, keep)
        torch.testing.assert_close(update, exact, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(weights, exact_weights, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(stats.confidence, best)
        assert (update[~keep.any(-1)] == 0).all()
        # A slot that is not dropped keeps its patch, and one never entered has none.
        assert torch.equal(stats.indices[keep], indices[keep])
        assert (stats.indices[~inside] == -1).all()
        assert torch.equal(stats.touched, keep.any(-1))
        dropped = (inside & ~keep)[inside].double().mean()
        spread = 5 * math.sqrt(probability * (1 - probability) / int(inside.sum()))
        assert 0 < dropped < probability + spread
        full = inside.all(-1)  # of those, one always stays
        assert full.sum() > 100
        assert keep[full].any(-1).all()
        rate = float((~keep[full]).double().mean())
        spread = 5 * math.sqrt(probability * (1 - probability) / int(full.sum()))
        assert probability - probability**k - spread < rate < probability + spread

    def test_evaluation_drops_nothing(self):
        layer = build(patch_dropout=0.9, dtype=torch.float64).eval()
        x = tokens_of(layer, 50)
        exact, weights, indices, _ = equations(x, tensors(layer), layer.config)
        update, stats = layer(x, return_stats=True)
        assert torch.equal(stats.indices, indices)
        torch.testing.assert_close(update.detach(), exact, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(stats.weights.detach(), weights, rtol=1e-10, atol=1e-10)

    @every_backend
    def test_gradients(self, backend):
        dtype = torch.float32 if backend == "triton" else torch.float64
        layer = build(backend=backend, patch_dropout=0.5, dtype=dtype).train()
        torch.manual_seed(2)
        limit = 2e-5 if backend == "triton" else 1e-11
        assert_gradients(layer, tokens_of(layer, 40), limit, keep_from_weights=True)


class TestNotFinite:
    @backends_and_variants("core", "everything")
    def test_rows(self, backend, variant):
        layer = build(backend=backend, **variant)
        x = tokens_of(layer, 24)
        damaged = x.clone()
        damaged[2::6, 3] = damaged[4::6, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30]).to(x)
        good = torch.tensor([True, True, False, True, False, True] * 4, device=x.device)
        expected, wanted = layer(x, return_stats=True)
        update, stats = layer(damaged, return_stats=True)
        torch.testing.assert_close(update[good], expected[good], rtol=1e-6, atol=1e-6)
        assert torch.equal(stats.indices[good], wanted.indices[good])
        assert torch.equal(stats.touched[good], wanted.touched[good])
        assert update[~good].isnan().all()
        assert (stats.indices[~good] == -1).all()
        assert (stats.weights[~good] == 0).all()
        assert not stats.touched[~good].any()
        assert stats.confidence[~good].isnan().all()
        assert stats.confidence[good].isfinite().all()
        assert_consistent(update, stats)
        parameters = list(layer.parameters())
        loss = (damaged + update).square().mean()  # also when nobody masks the loss
        for gradient in torch.autograd.grad(loss, parameters, retain_graph=True):
            assert gradient.isfinite().all()
        upstream = torch.randn_like(update[good])
        got = torch.autograd.grad(update[good], parameters, upstream)
        torch.testing.assert_close(
            got, torch.autograd.grad(expected[good], parameters, upstream), rtol=1e-5, atol=1e-5
        )
        some = torch.tensor([1, 2, 10, 14, 23], device=x.device)
        with torch.no_grad():  # the way of few tokens
            few, few_stats = layer(damaged[some], return_stats=True)
        assert torch.equal(few.isnan(), update[some].isnan())
        assert torch.equal(few_stats.indices, stats.indices[some])
        assert torch.equal(few_stats.confidence.isnan(), ~good[some])
        torch.testing.assert_close(few[good[some]], update[some][good[some]], rtol=1e-5, atol=1e-5)

    @every_backend
    @pytest.mark.parametrize("broken", [slice(None), slice(1, 2), slice(6, 7)], ids=["all", "one", "last"])
    @pytest.mark.parametrize("radius", [-1.0, 0.2, 2.0])
    def test_broken_prototypes_show(self, backend, broken, radius):
        """NaN > 0 is false, so a careless comparison would take a diverged router for a closed one."""
        if backend == "triton" and GPU == "cpu" and broken != slice(1, 2):
            pytest.skip("the interpreter takes its time")
        layer = build(backend=backend, dim=16, num_patches=7, top_k=2)
        with torch.no_grad():
            layer.radius.fill_(radius)
            layer.prototypes[broken] = torch.nan
            assert layer(torch.randn(2, 16).to(layer.encoder)).isnan().all()
        assert layer(torch.randn(FEW + 1, 16).to(layer.encoder)).isnan().all()


class TestModule:
    @pytest.mark.parametrize(
        ("backend", "compiler", "name"),
        [
            ("grouped", "aot_eager", "core"),
            ("reference", "eager", "everything"),
            pytest.param("triton", "eager", "core", marks=needs_triton),
        ],
    )
    def test_compiles_to_one_graph(self, backend, compiler, name):
        torch._dynamo.reset()
        layer = build(backend=backend, **VARIANTS[name])
        x = tokens_of(layer, 16).requires_grad_()
        upstream = torch.randn_like(x)

        def results(module):
            update, stats = module(x, return_stats=True)
            value = (update * upstream).sum() + stats.weights.square().sum()
            gradients = torch.autograd.grad(value, [x, *layer.parameters()])
            return update, stats.indices, stats.weights, stats.confidence, stats.touched, gradients

        compiled = torch.compile(layer, fullgraph=True, backend=compiler)
        for got, expected in zip(results(compiled), results(layer), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x[:2]), layer(x[:2]), rtol=1e-5, atol=1e-5)
            layer.radius.fill_(2000.0)  # a compiled graph reads the radius, it does not remember it
            assert (compiled(x[:2]) == 0).all()

    def test_state_dict_is_a_contract(self):
        sizes = {"num_patches": 10, "top_k": 3, "rank": 4}
        plain = {
            "prototypes": (10, 12),
            "encoder": (12, 4),
            "gate_slope": (10, 4),
            "gate_bias": (10, 4),
            "decoder": (10, 4, 12),
        }
        white = {"whitening": (12, 12), "whitening_shift": (12,)}
        for options, more in (
            ({}, {}),
            ({"radius": None, "whiten": False}, {}),
            ({"radius": 0.3}, {"radius": (10,)}),
            ({"whiten": True}, white),
            ({"radius": 0, "whiten": True}, {"radius": (10,)} | white),
        ):
            layer = APN(12, **sizes, **options)
            assert {name: tuple(v.shape) for name, v in layer.state_dict().items()} == plain | more
            assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == plain
        assert (layer.radius == 0).all()
        assert (APN(12, **sizes, radius=0.3).radius == torch.tensor(0.3)).all()

    def test_states_without_radius_load_where_they_did(self):
        sizes = {"num_patches": 10, "top_k": 3, "rank": 4}
        old, new = APN(12, **sizes), APN(12, **sizes)
        new.load_state_dict(load(save(old.state_dict())))
        x = torch.randn(5, 12)
        assert torch.equal(new(x), old(x))
        with pytest.raises(RuntimeError, match="radius"):
            APN(12, **sizes, radius=0.3).load_state_dict(old.state_dict())
        with pytest.raises(RuntimeError, match="radius"):
            old.load_state_dict(APN(12, **sizes, radius=0.3).state_dict())

    @every_variant
    def test_copies_and_checkpoints_are_exact(self, variant):
        layer, other = build(**variant), build(seed=1, **variant)
        x = tokens_of(layer, 20)
        inside_and_outside(layer, x)
        assert not torch.equal(other(x), layer(x))
        other.load_state_dict(load(save(layer.state_dict())))
        assert torch.equal(other.radius, layer.radius)
        assert torch.equal(other(x), layer(x))
        rebuilt = APN.from_config(12, APNConfig.from_json(layer.config.to_json()), backend="reference")
        assert rebuilt.config == layer.config
        rebuilt.load_state_dict(layer.state_dict())
        assert torch.equal(rebuilt(x), layer(x))
        twin = copy.deepcopy(layer)
        before = layer(x)
        assert torch.equal(twin(x), before)
        twin.radius.fill_(1e6)
        assert (twin(x) == 0).all()
        assert torch.equal(layer(x), before)

    def test_meta_device(self):
        layer = APN(**SMALL, whiten=True, device="meta")
        assert layer(torch.randn(3, 12, device="meta")).shape == (3, 12)
        layer.to_empty(device="cpu")
        for tensor in (*layer.parameters(), *layer.buffers()):
            nn.init.constant_(tensor, torch.nan)
        layer.reset_parameters()
        assert (layer.radius == torch.tensor(0.1)).all()
        assert torch.equal(layer.whitening, torch.eye(12))
        assert torch.equal(layer.whitening_shift, torch.zeros(12))
        assert layer(torch.randn(3, 12)).isfinite().all()

    @pytest.mark.parametrize("leading", [(), (1,), (2, 3), (0,), (2, 0)])
    @pytest.mark.parametrize("backend", EXACT)
    def test_any_leading_shape(self, leading, backend):
        layer = build(backend=backend)
        update, stats = layer(torch.randn(*leading, 12), return_stats=True)
        assert update.shape == (*leading, 12)
        assert stats.indices.shape == stats.weights.shape == (*leading, 3)
        assert stats.confidence.shape == stats.touched.shape == leading
        update.sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"radius": "x"}, "radius='x' must be"),
            ({"radius": math.nan}, "radius=nan must be"),
            ({"radius": math.inf}, "radius=inf must be"),
            ({"radius": True}, "radius=True must be"),
            ({"radius": np.float32(0.5)}, "radius=np.float32(0.5) must be"),
            ({"whiten": 1}, "whiten=1 must be True or False"),
            ({"whiten": None}, "whiten=None must be True or False"),
        ],
    )
    def test_bad_arguments(self, options, message):
        for make in (lambda **options: APN(8, **options), APNConfig):
            with pytest.raises(ValueError) as error:
                make(**options)
            assert message in str(error.value)


class TestGrowth:
    @every_variant
    def test_resize(self, variant):
        layer = build(**variant, radius=0.25)
        before = copy.deepcopy(layer)
        layer.resize(14)
        assert layer.radius.shape == (14,)
        assert torch.equal(layer.radius[:10], before.radius)
        assert (layer.radius[10:] == 0.25).all()
        layer.radius[10:] = 0.75
        layer.resize(6, shrink=True)
        assert torch.equal(layer.radius, before.radius[:6])
        layer.resize(12)  # what was dropped does not come back
        assert torch.equal(layer.radius[:6], before.radius[:6])
        assert (layer.radius[6:] == 0.25).all()
        assert layer.state_dict()["radius"].shape == (12,)
        if layer.config.whiten:
            assert torch.equal(layer.whitening, before.whitening)

    @backends_and_variants()
    def test_closed_patches_change_nothing(self, backend, variant):
        """Appended with a radius beyond every cosine, and then given any decoder: nobody enters them.

        What acts stays within the rounding of a product that has more columns; what does not stays zero.
        """
        layer, grown = grown_layers(backend, **variant)
        for count in (2, FEW + 1):
            x = tokens_of(layer, count)
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients):
                    update, stats = grown(x, return_stats=True)
                    wanted, wanted_stats = layer(x, return_stats=True)
                assert torch.equal(stats.indices, wanted_stats.indices)
                assert torch.equal(stats.touched, wanted_stats.touched)
                assert (update[~stats.touched] == 0).all()
                torch.testing.assert_close(stats.weights, wanted_stats.weights, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(update, wanted, rtol=1e-5, atol=1e-5)

    @backends_and_variants("everything")
    def test_closed_patches_change_no_bit_where_nobody_acts(self, backend, variant):
        layer, grown = grown_layers(backend, **variant)
        for module in (layer, grown):
            module.radius.fill_(2.0)
        for count in (2, FEW + 1):
            x = tokens_of(layer, count)
            with torch.no_grad():
                assert torch.equal(x + grown(x), x)
                assert torch.equal(grown(x), layer(x))

    def test_load_resized_takes_radii_over(self):
        small = nn.Sequential(nn.Linear(12, 12), build(seed=1, whiten=True))
        big = nn.Sequential(nn.Linear(12, 12), build(num_patches=16, whiten=True))
        with pytest.raises(RuntimeError, match="1 holds 10 patches, the checkpoint 16"):
            small.load_state_dict(big.state_dict())
        load_resized(small, big.state_dict())
        assert small[1].num_patches == 16
        assert torch.equal(small[1].radius, big[1].radius)
        assert torch.equal(small[1].whitening, big[1].whitening)
        x = torch.randn(20, 12)
        assert torch.equal(small(x), big(x))
        load_resized(big, nn.Sequential(nn.Linear(12, 12), build(seed=1, whiten=True)).state_dict())
        assert big[1].radius.shape == (10,)
        assert torch.equal(big[1].radius, build(seed=1, whiten=True).radius)

    def test_load_resized_refuses_a_radius_of_another_length(self):
        layer, state = build(), build(num_patches=16).state_dict()
        before = copy.deepcopy(layer.state_dict())
        state["radius"] = state["radius"][:10]
        with pytest.raises(ValueError, match="radius"):
            load_resized(layer, state)
        assert layer.num_patches == 10
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def grown_layers(backend, **variant):
    """A layer with open patches, and the same with closed ones appended whose decoders are loud."""
    layer = build(backend=backend, **(variant | {"routing": "cosine", "radius": 2.0}))
    grown = copy.deepcopy(layer)
    grown.resize(17)
    assert (grown.radius[10:] == 2).all()
    randomize_decoders(grown, 10)
    return layer, grown


@torch.no_grad()
def randomize_decoders(layer, first):
    """New patches that would be seen if they acted."""
    for name in ("decoder", "offset_in", "offset_out"):
        if (parameter := getattr(layer, name, None)) is not None:
            nn.init.normal_(parameter[first:])


try:
    import families
except pytest.skip.Exception:  # without transformers
    families = None
every_family = pytest.mark.parametrize("family", families.FAMILIES if families else [])


@pytest.mark.skipif(families is None, reason="transformers is not installed: the extra hf")
class TestRetrofit:
    @staticmethod
    def retrofitted(family, **options):
        config = APNConfig(num_patches=4, top_k=2, rank=2, **options)
        return families.teach(attractor.retrofit(families.tiny(family), config))

    @every_family
    def test_no_logit_changes_until_a_token_enters(self, family):
        """Closed patches change no logit, nor does one that is open where no token is; open ones do."""
        base = families.logits(families.tiny(family))
        net = self.retrofitted(family, radius=2.0)
        layers = net.apn_layers()
        assert all(layer.decoder.any() for layer in layers.values())
        seen = {}
        hooks = [
            layer.register_forward_pre_hook(lambda _, x, n=n: seen.update({n: x[0]}))
            for n, layer in layers.items()
        ]
        assert torch.equal(families.logits(net), base)
        for hook in hooks:
            hook.remove()
        for n, layer in layers.items():
            tokens, prototype = seen[n].reshape(-1, 32).double(), layer.prototypes[0].detach().double()
            cosines = functional.cosine_similarity(tokens, prototype, dim=-1)
            assert 0 < cosines.max() < 0.999
            layer.radius[0] = float(cosines.max() + 1) / 2
            assert torch.equal(families.logits(net), base)
        layer.radius[0] = float(cosines.max()) - 0.01
        assert not torch.equal(families.logits(net), base)
        for layer in layers.values():
            layer.radius.fill_(-1.0)
        assert not torch.allclose(families.logits(net), base, atol=1e-3)

    @pytest.mark.parametrize("whiten", [False, True])
    def test_saved_and_loaded_are_equal_to_the_last_bit(self, whiten, tmp_path):
        net = self.retrofitted("llama", radius=0.2, whiten=whiten)
        for number, layer in net.apn_layers().items():
            layer.radius.copy_(torch.tensor([-0.5, -0.1, 0.3, 2.0]) + number / 8)
            if whiten:
                layer.whitening += 0.1 * torch.randn(32, 32, generator=torch.Generator().manual_seed(number))
                layer.whitening_shift.fill_(0.25)
        net.apn_layers()[1].resize(6)
        expected = families.logits(net)
        assert not torch.allclose(expected, families.logits(families.tiny("llama")), atol=1e-3)
        net.save_pretrained(tmp_path / "saved")
        loaded = attractor.load_retrofit(families.tiny("llama"), tmp_path / "saved")
        assert torch.equal(families.logits(loaded), expected)
        for number, layer in loaded.apn_layers().items():
            wanted = net.apn_layers()[number]
            assert layer.config == wanted.config
            state = layer.state_dict()
            assert state.keys() == wanted.state_dict().keys()
            assert all(torch.equal(state[name], value) for name, value in wanted.state_dict().items())

    def test_growing_closed_patches_changes_no_logit(self):
        net = self.retrofitted("qwen3", radius=2.0)
        for layer in net.apn_layers().values():
            layer.radius[:2] = -0.5
        expected = families.logits(net)
        assert not torch.equal(expected, families.logits(families.tiny("qwen3")))
        for layer in net.apn_layers().values():
            layer.resize(9)
            randomize_decoders(layer, 4)
        assert torch.equal(families.logits(net), expected)
