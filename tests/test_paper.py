"""The layer, its monitoring and its counts against the loop transcription of the paper in paper.py."""

import math
from itertools import pairwise

import numpy as np
import paper
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attractor import APN, analysis, monitor

TOLERANCE = 1e-10
SMALL = {"dim": 6, "num_patches": 9, "rank": 3}
reproducible = settings(derandomize=True, deadline=None, database=None, max_examples=150)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def variants(draw):
    """Arguments of the layer that decide which arrays it has, as parameter_shapes takes them too."""
    groups = draw(st.integers(1, 3))
    contextual = draw(st.booleans())
    arguments = {
        # Two or more coordinates per cosine: in one coordinate every score is +-1/tau, a tie.
        "dim": groups * draw(st.integers(2, 5)),
        "num_patches": draw(st.integers(1, 12)),
        "rank": draw(st.integers(1, 6)),
        "gate": draw(st.sampled_from(["vector", "scalar"])),
        "decoder": draw(st.sampled_from(["independent", "shared"])),
        "prototypes": "contextual" if contextual else "static",
        "layer_norm": draw(st.booleans()),
    }
    if contextual:
        arguments |= {"routing_dim": groups * draw(st.integers(2, 4)), "routing_groups": groups}
    if arguments["decoder"] == "shared":
        arguments["offset_rank"] = draw(st.integers(1, min(3, arguments["rank"])))  # "low-rank offsets"
    return arguments


def build(arguments: dict, rng, **more):
    """A float64 layer whose every parameter is overwritten, and the same numbers as NumPy arrays."""
    layer = APN(**arguments, **more, dtype=torch.float64)
    parameters = {name: rng.standard_normal(tuple(p.shape)) for name, p in layer.named_parameters()}
    # The length of a prototype must not matter.
    parameters["prototypes"] *= 10.0 ** rng.uniform(-2, 2, (arguments["num_patches"], 1))
    fill(layer, parameters)
    return layer, parameters


def fill(layer, parameters: dict):
    layer.load_state_dict({name: torch.from_numpy(value) for name, value in parameters.items()}, strict=False)


def transcribe(tokens, parameters, keeps=None, **arguments) -> list:
    keeps = keeps or [None] * len(tokens)
    return [paper.apn(h, parameters, keep=keep, **arguments) for h, keep in zip(tokens, keeps, strict=True)]


def ambiguous(scores, k: int) -> bool:
    """Two of the k + 1 best scores too close for two summation orders to agree on their order."""
    best = sorted(scores, reverse=True)[: k + 1]
    return any(high - low < 1e-9 for high, low in pairwise(best))


def assert_close(got, expected):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else np.asarray(got)
    assert got.shape == np.shape(expected)
    assert np.all(np.isfinite(got))
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def assert_agrees(layer, x, expected: list):
    """Update and statistics of layer(x) equal the transcription's of the flattened tokens of x."""
    lead = x.shape[:-1]
    update, stats = layer(torch.from_numpy(x), return_stats=True)
    indices = np.array([e.indices for e in expected]).reshape(*lead, -1)
    assert stats.indices.dtype == torch.int64
    np.testing.assert_array_equal(stats.indices.numpy(), indices)
    assert_close(update, np.array([e.update for e in expected]).reshape(x.shape))
    assert_close(stats.weights, np.array([e.weights for e in expected]).reshape(indices.shape))
    assert_close(stats.confidence, np.array([max(e.scores) for e in expected]).reshape(lead))
    assert_close(stats.balance, paper.balance([e.scores for e in expected]))
    assert_close(stats.entropy, paper.weight_entropy([e.weights for e in expected]))
    assert_close(stats.update_norm, np.array([np.linalg.norm(e.update) for e in expected]).reshape(lead))
    assert_close(stats.input_norm, np.linalg.norm(x, axis=-1))
    assert_close(layer(torch.from_numpy(x)), update.detach())


@reproducible
@given(variants(), st.data(), seeds)
def test_forward_and_statistics(arguments, data, seed):
    rng = np.random.default_rng(seed)
    k = data.draw(st.integers(1, arguments["num_patches"]))
    run = {
        "temperature": data.draw(st.floats(0.05, 2.0)),
        "scale": data.draw(st.floats(-2.0, 2.0)),
        "routing": data.draw(st.sampled_from(["cosine", "dot"])),
    }
    lead = data.draw(st.sampled_from([(), (1,), (7,), (2, 3), (2, 1, 3)]))
    size = data.draw(st.sampled_from([1e-3, 1.0, 30.0]))
    backend = data.draw(st.sampled_from(["grouped", "reference"]))
    layer, parameters = build(arguments, rng, top_k=k, backend=backend, **run)
    x = size * rng.standard_normal((*lead, arguments["dim"]))
    expected = transcribe(x.reshape(-1, arguments["dim"]), parameters, k=k, **run)
    assume(not any(ambiguous(e.scores, k) for e in expected))
    assert_agrees(layer, x, expected)


@reproducible
@given(st.sampled_from([4, 16, 64]), st.sampled_from(["cosine", "dot"]), st.integers(1, 20), st.data(), seeds)
def test_lower_index_wins_a_tie(dim, routing, num_patches, data, seed):
    rng = np.random.default_rng(seed)
    k = data.draw(st.integers(1, num_patches))
    arguments = {"dim": dim, "num_patches": num_patches, "rank": 3}
    layer, parameters = build(arguments, rng, top_k=k, temperature=0.5, routing=routing)
    # Signs over sqrt(d), a power of two, make every score exact, so duplicates tie in any order of summation.
    distinct = rng.choice([-1.0, 1.0], (1 + num_patches // 3, dim))
    parameters["prototypes"] = distinct[rng.integers(len(distinct), size=num_patches)]
    fill(layer, parameters)
    x = rng.choice([-1.0, 1.0], (6, dim))
    assert_agrees(layer, x, transcribe(x, parameters, k=k, temperature=0.5, routing=routing))


@reproducible
@given(variants(), seeds)
def test_zero_token_and_zero_prototype(arguments, seed):
    rng = np.random.default_rng(seed)
    k = min(3, arguments["num_patches"])
    layer, parameters = build(arguments, rng, top_k=k, temperature=0.3)
    parameters["prototypes"][-1] = 0.0
    fill(layer, parameters)
    x = rng.standard_normal((3, arguments["dim"]))
    x[1] = 0.0
    expected = transcribe(x, parameters, k=k, temperature=0.3)
    # Without a LayerNorm bias the zero token ties all scores at exactly 0, which is no ambiguity.
    assume(not any(ambiguous(e.scores, k) for e in expected if any(e.scores)))
    assert_agrees(layer, x, expected)
    layer(torch.from_numpy(x)).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


def test_patch_dropout():
    probability, k, tokens = 0.3, 4, 20_000
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    run = {"temperature": 0.5, "scale": 0.7}
    layer, parameters = build(SMALL, rng, top_k=k, patch_dropout=probability, **run)
    x = rng.standard_normal((tokens, 6))
    update, stats = layer.train()(torch.from_numpy(x), return_stats=True)
    keep = stats.weights.detach().numpy() != 0  # cosine scores at this temperature cannot underflow
    assert keep.any(axis=1).all()
    some = slice(0, 400)
    expected = transcribe(x[some], parameters, keeps=keep[some].tolist(), k=k, **run)
    assert_close(stats.weights[some], np.array([e.weights for e in expected]))
    assert_close(update[some], np.array([e.update for e in expected]))
    np.testing.assert_array_equal(stats.indices[some].numpy(), np.array([e.indices for e in expected]))

    # Dropped slots per token are binomial, except that "all" leaves one survivor: its mass moves to k - 1.
    chance = [math.comb(k, n) * probability**n * (1 - probability) ** (k - n) for n in range(k + 1)]
    chance[k - 1] += chance.pop()
    dropped = np.bincount((~keep).sum(axis=1)) / tokens
    for got, p in zip(dropped, chance, strict=True):
        assert abs(got - p) < 5 * math.sqrt(p * (1 - p) / tokens)
    # How the survivor is chosen is free, so each slot alone has a known range only.
    rate = (~keep).mean(axis=0)
    margin = 5 * math.sqrt(probability * (1 - probability) / tokens)
    assert probability - probability**k - margin < rate.min()
    assert rate.max() < probability + margin


@pytest.mark.parametrize(("k", "training", "dropout"), [(1, True, 0.0), (4, False, 0.5)])
def test_neither_a_lone_patch_nor_evaluation_drops(k, training, dropout):
    rng = np.random.default_rng(1)
    layer, parameters = build(SMALL, rng, top_k=k, patch_dropout=0.9, dropout=dropout)
    x = rng.standard_normal((50, 6))
    assert_agrees(layer.train(training), x, transcribe(x, parameters, k=k, temperature=0.07))


@reproducible
@given(st.integers(1, 10), st.integers(2, 12), st.integers(1, 9), st.data(), seeds)
def test_monitoring(num_patches, tokens, others, data, seed):
    rng = np.random.default_rng(seed)
    k = data.draw(st.integers(1, num_patches))
    a, b = (rng.random((count, num_patches)).argsort(axis=1)[:, :k] for count in (tokens, others))
    # A batch of sequences counts as the set of its tokens.
    batch = torch.from_numpy(a).reshape((2, -1, k) if tokens % 2 == 0 else (-1, k))
    both = batch, torch.from_numpy(b), num_patches
    a, b = a.tolist(), b.tolist()
    assert_close(monitor.usage(batch, num_patches), paper.usage(a, num_patches))
    assert_close(monitor.mean_overlap(batch, num_patches), paper.mean_overlap(a))
    assert_close(monitor.overlap_histogram(batch, num_patches), paper.overlap_histogram(a, k))
    assert_close(monitor.expected_overlap(*both), paper.expected_overlap(a, b))
    assert_close(monitor.overlap_score(*both), paper.overlap_score(a, b, k))
    q = rng.dirichlet(np.full(num_patches, 0.5))
    q[rng.integers(num_patches)] = 0.0  # eps is there for a patch that is never used
    assert_close(monitor.usage_entropy(torch.from_numpy(q)), paper.usage_entropy(q))


@reproducible
@given(variants())
def test_parameters(arguments):
    layer = APN(**arguments, top_k=1)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == paper.parameter_shapes(**arguments)
    assert set(shapes) <= set(layer.state_dict())
    total = analysis.parameter_counts(layer)["total"]
    assert total == paper.parameter_count(**arguments) == sum(p.numel() for p in layer.parameters())
    assert arguments["decoder"] == "independent" or not layer.offset_out.any()


@reproducible
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20), st.data())
def test_multiply_adds(dim, num_patches, rank, data):
    k = data.draw(st.integers(1, num_patches))
    layer = APN(dim, num_patches=num_patches, top_k=k, rank=rank)
    assert analysis.multiply_adds(layer)["total"] == paper.multiply_adds(dim, num_patches, k, rank)


def test_figures_of_the_paper():
    layer = APN(384)  # K = 256, k = 4, r = 32 are the defaults
    total = analysis.parameter_counts(layer)["total"]
    assert total == 256 * 384 + 256 * 384 * 32 + 2 * 256 * 32 + 384 * 32
    assert round(6 * total / 1e6, 1) == 19.6  # "19.6M trainable parameters" in six layers
    assert round(10.65 + 6 * (total - 8 * 384**2) / 1e6, 2) == 23.21  # the parameter column of Table 1
    dense = paper.dense_multiply_adds(384)
    assert dense / analysis.multiply_adds(layer)["total"] == pytest.approx(7.4, abs=0.05)


def test_paper_initialization():
    torch.manual_seed(3)
    layer = APN(384, init="paper", num_layers=6)
    state = {name: value.double().numpy() for name, value in layer.state_dict().items()}
    for name in ("prototypes", "encoder", "gate_slope"):
        assert state[name].std() == pytest.approx(0.02, rel=0.05)
        assert abs(state[name].mean()) < 0.002
    assert state["decoder"].std() == pytest.approx(0.02 / math.sqrt(2 * 6), rel=0.02)
    assert not state["gate_bias"].any()
    gates = []
    for h in np.random.default_rng(3).standard_normal((8, 384)):
        u = paper.project(paper.layer_norm(h, np.ones(384), np.zeros(384)), state["encoder"])
        gates += [paper.gate(u, state, i) for i in range(256)]
    assert np.abs(np.array(gates) - 0.5).max() < 0.05
    assert abs(np.mean(gates) - 0.5) < 1e-3


def test_silu_initialization():
    torch.manual_seed(4)
    layer = APN(384, init="silu")
    assert float(layer.encoder.detach().std()) == pytest.approx(384**-0.5, rel=0.05)
    assert (layer.gate_slope == 1).all()
    assert not layer.gate_bias.any()
    # One patch that decodes with the identity shows its features.
    layer = APN(16, num_patches=1, top_k=1, rank=16, init="silu", dtype=torch.float64)
    layer.load_state_dict({"decoder": torch.eye(16, dtype=torch.float64)[None]}, strict=False)
    x = np.random.default_rng(4).standard_normal((5, 16))
    codes = [paper.project(h, layer.encoder.detach().numpy()) for h in x]
    assert_close(layer(torch.from_numpy(x)), [[t * paper.sigmoid(t) for t in u] for u in codes])
