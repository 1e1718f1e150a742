"""LoRA, EWC, GEM and A-GEM against their papers' equations, derived a second way."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_baselines import VOCABULARY, batch, build, same
from torch.nn import functional as F

from attractor.continual.baselines import AGEM, EWC, GEM, FineTune, LoRA
from attractor.continual.baselines.gem import solve_dual
from attractor.data import IGNORED

TINY = {"vocab_size": 5, "context": 4, "num_layers": 1, "num_heads": 1, "dim": 6, "bias": True}


def tiny(seed=0, **changes):
    """Float64, and far enough from its start that nothing is symmetric."""
    model = build(seed, torch.float64, **(TINY | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def tiny_batch(seed, rows=3):
    return batch(seed, rows=rows, length=4, vocabulary=5)


def log_likelihood(model, inputs, targets):
    """Of one sequence, summed over its tokens."""
    logs = model(inputs[None])[0].log_softmax(-1)
    return sum(logs[t, target] for t, target in enumerate(targets.tolist()) if target != IGNORED)


@pytest.mark.parametrize("ffn", ["mlp", "apn"])
def test_fisher_by_finite_differences(ffn):
    model = tiny(ffn=ffn)
    anchor = [tiny_batch(1), tiny_batch(2, rows=2)]
    anchor[0][1][0, :2] = IGNORED
    fisher = EWC(model, anchor, 1.0, labels="data").fisher
    sequences = [pair for part in anchor for pair in zip(*part, strict=True)]
    chance, width = np.random.default_rng(0), 1e-5
    with torch.no_grad():
        for measured, parameter in zip(fisher, model.parameters(), strict=True):
            flat = parameter.view(-1)
            for place in chance.integers(parameter.numel(), size=3):
                middle = float(flat[place])
                sides = []
                for shift in (width, -width):
                    flat[place] = middle + shift
                    sides.append([float(log_likelihood(model, *sequence)) for sequence in sequences])
                flat[place] = middle
                slopes = (np.array(sides[0]) - np.array(sides[1])) / (2 * width)
                expected = (slopes**2).mean()
                assert float(measured.view(-1)[place]) == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_fisher_in_closed_form():
    """Two tokens that the model finds equally likely: whichever is drawn, d log p / d bias = +-e."""
    model = tiny(vocab_size=2)
    row = torch.randn(6, dtype=torch.float64)
    with torch.no_grad():
        model.embedding.weight.copy_(torch.stack([row, -row]))
        model.norm.weight.zero_()
        model.norm.bias.zero_()
    one_token = torch.zeros(7, 1, dtype=torch.int64)
    fisher = EWC(model, [(one_token, one_token)], 1.0, train=[model.norm.bias]).fisher[0]
    torch.testing.assert_close(fisher, row.square())


def test_fisher_of_drawn_labels():
    """Labels are drawn alone at each position, so E (sum of scores)^2 is a sum of variances."""
    model = tiny()
    inputs, targets = tiny_batch(1, rows=1)
    targets[0, 1] = IGNORED
    copies = inputs.expand(1500, -1), targets.expand(1500, -1)
    fisher = EWC(model, [copies], 1.0, train=[model.norm.bias], seed=3).fisher[0]
    with torch.no_grad():
        chances, head = model(inputs)[0].softmax(-1), model.embedding.weight  # (T, V), (V, d)
        variances = chances @ head.square() - (chances @ head).square()  # of a head row's entry, by token
    expected = variances[[0, 2, 3]].sum(0)
    torch.testing.assert_close(fisher, expected, rtol=0.15, atol=0)
    assert float(fisher.sum()) == pytest.approx(float(expected.sum()), rel=0.05)
    few = [part[:50] for part in copies]
    one, again = (EWC(model, [few], 1.0, train=[model.norm.bias], seed=3).fisher[0] for _ in range(2))
    assert torch.equal(one, again)


def test_fisher_without_dropout():
    model = tiny(dropout=0.5)
    fisher, again = (EWC(model, [tiny_batch(1)], 1.0, labels="data").fisher for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(fisher, again, strict=True))
    assert model.training


def test_the_penalty_and_its_gradient():
    model = tiny()
    learner = EWC(model, [tiny_batch(1)], 5.0, labels="data")
    assert float(learner.penalty().detach()) == 0
    old = [parameter.detach().clone() for parameter in model.parameters()]
    learner.step(*tiny_batch(2))
    expected = 0.0
    for fisher, now, then in zip(learner.fisher, model.parameters(), old, strict=True):
        expected += 5.0 / 2 * float((fisher * (now - then) ** 2).detach().sum())
    assert float(learner.penalty().detach()) == pytest.approx(expected)
    for slope, fisher, now, then in zip(
        learner.gradients(learner.penalty()), learner.fisher, model.parameters(), old, strict=True
    ):
        torch.testing.assert_close(slope, (5.0 * fisher * (now - then)).detach())


def test_no_strength_is_fine_tuning_and_much_strength_stays():
    def learned(method):
        for number in range(40):
            method.step(*batch(number % 4))
        return method.finish()

    start, rate = build(), 1e-3
    plain = learned(FineTune(copy.deepcopy(start), learning_rate=rate))
    free = learned(EWC(copy.deepcopy(start), [batch(7)], 0.0, learning_rate=rate))
    assert same(plain.state_dict(), free.state_dict())
    tied = EWC(copy.deepcopy(start), [batch(7, rows=16)], 1e9, learning_rate=rate)
    known = torch.cat([fisher.flatten() for fisher in tied.fisher]) > 1e-3
    assert known.float().mean() > 0.5
    vectors = [torch.nn.utils.parameters_to_vector(m.parameters()) for m in (learned(tied), plain, start)]
    stayed, left = ((vector - vectors[2])[known] for vector in vectors[:2])
    assert stayed.abs().max() < 3 * rate  # the length of Adam's first steps, at any strength
    assert stayed.norm() < left.norm() / 4


def test_consolidate():
    model = tiny()
    learner = EWC(model, [tiny_batch(1)], 1.0, labels="data", fisher_decay=0.9)
    first = [fisher.clone() for fisher in learner.fisher]
    learner.step(*tiny_batch(2))
    second = EWC(copy.deepcopy(model), [tiny_batch(2)], 1.0, labels="data").fisher
    assert float(learner.penalty().detach()) > 0
    with pytest.raises(ValueError, match="anchor is empty"):
        learner.consolidate([])
    assert all(torch.equal(now, then) for now, then in zip(learner.fisher, first, strict=True))
    learner.consolidate([tiny_batch(2)])
    for total, old, new in zip(learner.fisher, first, second, strict=True):
        torch.testing.assert_close(total, 0.9 * old + new)
    assert float(learner.penalty().detach()) == 0


def nearest_allowed(old, gradient):
    """The nearest z with old z >= 0: on some face of that cone, so project on all and take the best."""
    candidates = []
    for size in range(len(old) + 1):
        for face in itertools.combinations(range(len(old)), size):
            span = old[list(face)].T  # the face is what is orthogonal to these
            z = gradient - span @ np.linalg.lstsq(span, gradient, rcond=1e-10)[0] if size else gradient
            if (old @ z >= -1e-9).all():
                candidates.append(z)
    return min(candidates, key=lambda z: ((z - gradient) ** 2).sum())


small = st.integers(-3, 3)  # parallel, opposite, repeated and zero gradients are all common


@settings(max_examples=150)
@given(st.data(), st.integers(1, 5), st.integers(1, 6), st.sampled_from([0.0, 0.5]))
def test_the_dual_is_solved(data, memories, width, margin):
    rows = st.lists(st.lists(small, min_size=width, max_size=width), min_size=memories, max_size=memories)
    old = np.array(data.draw(rows), dtype=np.float64)
    gradient = np.array(data.draw(st.lists(small, min_size=width, max_size=width)), dtype=np.float64)
    v = solve_dual(torch.tensor(old @ old.T), torch.tensor(old @ gradient), margin).numpy()
    projected = gradient + old.T @ v
    slope = old @ projected  # of the dual, and the inner product with each memory
    assert (v >= margin).all()
    assert (slope >= -1e-9).all()
    assert abs((v - margin) @ slope) < 1e-8
    if margin == 0:
        np.testing.assert_allclose(projected, nearest_allowed(old, gradient), atol=1e-8)


@pytest.mark.parametrize("margin", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_the_dual_by_descent(seed, margin):
    chance = np.random.default_rng(seed)
    old = chance.normal(size=(6, 40)) * chance.lognormal(size=(6, 1))
    gradient = -old.sum(0) + chance.normal(size=40)
    gram, inner = old @ old.T, old @ gradient
    v, steepest = np.full(6, margin), np.linalg.norm(gram, 2)
    for _ in range(20000):
        v = np.maximum(margin, v - (gram @ v + inner) / steepest)
    ours = solve_dual(torch.tensor(gram), torch.tensor(inner), margin)
    np.testing.assert_allclose(ours.numpy(), v, rtol=1e-6, atol=1e-8)


def test_nearly_parallel_memories():
    chance = np.random.default_rng(0)
    base = chance.normal(size=500)
    old = base + 1e-6 * chance.normal(size=(8, 500))
    gradient = -base + 0.1 * chance.normal(size=500)
    v = solve_dual(torch.tensor(old @ old.T), torch.tensor(old @ gradient)).numpy()
    assert (v >= 0).all()
    projected = gradient + old.T @ v
    assert (old @ projected / np.linalg.norm(old, axis=1)).min() > -1e-8 * np.linalg.norm(gradient)


def used_gradient(learner, inputs, targets):
    """What the optimizer would be given: one vector."""
    seen = []
    learner.optimizer.step = lambda: seen.append(
        torch.cat([parameter.grad.flatten() for parameter in learner.trainable])
    )
    learner.step(inputs, targets)
    return seen[0]


def gradient_of(model, inputs, targets):
    loss = F.cross_entropy(model(inputs).transpose(1, 2), targets)
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("ffn", ["mlp", "apn"])
def test_gem_projects_the_gradient(ffn):
    model = tiny(ffn=ffn)
    inputs, targets = tiny_batch(0)
    memories = [(inputs, (targets + 1) % 5), (inputs, (targets + 2) % 5), tiny_batch(3)]
    gradient = gradient_of(model, inputs, targets).numpy()
    old = np.stack([gradient_of(model, *memory).numpy() for memory in memories])
    assert (old @ gradient).min() < 0  # else nothing is tested
    got = used_gradient(GEM(model, memories), inputs, targets).numpy()
    np.testing.assert_allclose(got, nearest_allowed(old, gradient), rtol=1e-7, atol=1e-10)
    leaning = used_gradient(GEM(model, memories, margin=0.5), inputs, targets).numpy()
    assert (old @ leaning >= -1e-10).all()
    assert (old @ leaning).sum() > (old @ got).sum()
    agreeing = used_gradient(GEM(model, [(inputs, targets)], margin=0.5), inputs, targets).numpy()
    np.testing.assert_allclose(agreeing, gradient, rtol=1e-7, atol=1e-12)  # nothing is violated


def test_agem_is_gem_with_one_memory():
    memory = tiny_batch(7, rows=6)
    gem, agem = GEM(tiny(), [memory], learning_rate=1e-3), AGEM(tiny(), memory, 6, learning_rate=1e-3)
    plain = FineTune(tiny(), learning_rate=1e-3)
    for number in range(20):
        new = tiny_batch(number)
        assert gem.step(*new) == pytest.approx(agem.step(*new), rel=1e-9)
        plain.step(*new)
    weights = [torch.nn.utils.parameters_to_vector(m.finish().parameters()) for m in (gem, agem, plain)]
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-8)
    assert not torch.allclose(weights[0], weights[2], rtol=1e-3, atol=1e-4)  # there was something to project


def test_agem_projects_on_what_it_drew():
    model, inputs = tiny(), tiny_batch(0, rows=6)[0]
    targets, memory = torch.zeros_like(inputs), (inputs, torch.ones_like(inputs))  # these disagree
    learner = AGEM(model, memory, 2, seed=5)
    rows = torch.randperm(6, generator=torch.Generator().manual_seed(5))[:2]
    g, r = gradient_of(model, inputs, targets), gradient_of(model, memory[0][rows], memory[1][rows])
    assert g @ r < 0
    expected = g - (g @ r) / (r @ r) * r
    torch.testing.assert_close(used_gradient(learner, inputs, targets), expected)


def vector_of(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_the_step_that_is_taken_is_what_gem_may_project():
    """Along AdamW's steps the old losses rise though the gradient was projected; `of="step"` prevents it."""
    inputs, targets = tiny_batch(0)
    memories = [(inputs, (targets + 1) % 5), (inputs, (targets + 2) % 5)]
    rises = {}
    for of in ("gradient", "step"):
        model = tiny()
        learner, found = GEM(model, memories, of=of, learning_rate=1e-3), []
        for _ in range(30):
            old = torch.stack([gradient_of(model, *memory) for memory in memories])
            before = vector_of(model)
            learner.step(inputs, targets)
            found.append(float((old @ (vector_of(model) - before)).max()))
        rises[of] = np.array(found)
        assert gradient_of(model, inputs, targets).norm() > 0
    assert (rises["gradient"] > 1e-6).sum() > 5
    assert rises["step"].max() < 1e-12


@pytest.mark.parametrize("kind", ["gem", "agem"])
def test_what_is_projected_is_the_nearest_step(kind):
    inputs = tiny_batch(0, rows=6)[0]
    targets, memory = torch.zeros_like(inputs), (inputs, torch.ones_like(inputs))  # these disagree
    plain, model = tiny(), tiny()
    old, start = gradient_of(model, *memory), vector_of(model)
    FineTune(plain, learning_rate=1e-3).step(inputs, targets)
    way = start - vector_of(plain)
    assert way @ old < 0
    learner = (
        GEM(model, [memory], of="step", learning_rate=1e-3)
        if kind == "gem"
        else AGEM(model, memory, 6, of="step", learning_rate=1e-3)
    )
    learner.step(inputs, targets)
    torch.testing.assert_close(vector_of(model), start - (way - (way @ old) / (old @ old) * old))
    with pytest.raises(ValueError, match="margin is on the scale"):
        GEM(model, [memory], margin=0.5, of="step")


def test_a_step_that_cannot_be_projected_is_not_taken(monkeypatch):
    inputs = tiny_batch(0, rows=6)[0]
    targets, memory = torch.zeros_like(inputs), (inputs, torch.ones_like(inputs))
    model, other = tiny(), tiny()
    learner, twin = (GEM(m, [memory], of="step", learning_rate=1e-3) for m in (model, other))
    for method in (learner, twin):
        method.step(inputs, targets)
    before = vector_of(model)
    with monkeypatch.context() as patch:
        patch.setattr(GEM, "project", raising(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            learner.step(inputs, targets)
    assert torch.equal(vector_of(model), before)
    for method in (learner, twin):  # the moments, too, are as if nothing had been tried
        method.step(inputs, targets)
    assert torch.equal(vector_of(model), vector_of(other))


def raising(error):
    def call(*args):
        raise error

    return call


@pytest.mark.parametrize("kind", ["gem", "agem"])
def test_a_step_that_hurts_nobody_stays_as_it_is(kind):
    new = tiny_batch(0, rows=6)
    plain, model = tiny(), tiny()
    FineTune(plain, learning_rate=1e-3).step(*new)
    learner = (
        GEM(model, [new], of="step", learning_rate=1e-3)
        if kind == "gem"
        else AGEM(model, new, 6, of="step", learning_rate=1e-3)
    )
    learner.step(*new)
    assert torch.equal(vector_of(model), vector_of(plain))


@pytest.mark.parametrize("targets", ["ffn", "attention", "all"])
def test_lora(targets):
    model = build(bias=True)
    original, modules = copy.deepcopy(model), dict(model.named_modules())
    tokens = batch(0)[0]
    learner = LoRA(model, rank=4, alpha=8, targets=targets)
    assert len(learner.trainable) == {"ffn": 8, "attention": 8, "all": 16}[targets]
    assert all(parameter.requires_grad for parameter in learner.trainable)
    with torch.no_grad():
        assert torch.equal(model(tokens), original(tokens))  # B is zero
    for number in range(5):
        learner.step(*batch(number))
    _, _, adapter = learner.adapters[0]
    bound = math.sqrt(1 / adapter.linear.in_features)  # kaiming_uniform with a = sqrt(5)
    assert 0.8 * bound < adapter.down.abs().max() < bound + 0.01
    dropped = LoRA(copy.deepcopy(original), rank=4, alpha=8, targets=targets)
    dropped.step(*batch(0))
    assert same(dropped.unload().state_dict(), original.state_dict())
    with torch.no_grad():
        unmerged = model(tokens)
        merged = learner.finish()(tokens)
    torch.testing.assert_close(merged, unmerged, rtol=1e-5, atol=1e-5)
    assert dict(model.named_modules()) == modules  # the very objects
    touched = {name for name in modules if not same(modules[name].state_dict(), _at(original, name))}
    inside = {"ffn": "ffn", "attention": "attention"}.get(targets, "")
    assert {name for name in touched if "blocks." in name and inside in name}
    assert not [name for name in touched if name.endswith(("norm_1", "norm_2", "embedding", "positions"))]
    torch.testing.assert_close(model.blocks[0].ffn.up.bias, original.blocks[0].ffn.up.bias, rtol=0, atol=0)


def _at(model, name):
    return model.get_submodule(name).state_dict()


def test_lora_gradients_by_the_chain_rule():
    """With W' = W + s B A: dL/dB = s dL/dW' A^T and dL/dA = s B^T dL/dW', in the plain model with W'."""
    model = tiny()
    learner = LoRA(model, rank=2, alpha=6, targets="all", learning_rate=0.1)
    for number in range(3):
        learner.step(*tiny_batch(number))
    inputs, targets = tiny_batch(9)
    ours = learner.gradients(learner.loss(inputs, targets))
    factors = [parameter.detach().clone() for parameter in learner.trainable]
    plain = learner.finish()
    weights = [
        linear.weight
        for block in plain.blocks
        for linear in (block.attention.qkv, block.attention.out, block.ffn.up, block.ffn.out)
    ]
    slopes = torch.autograd.grad(F.cross_entropy(plain(inputs).transpose(1, 2), targets), weights)
    for number, slope in enumerate(slopes):
        down, up = factors[2 * number : 2 * number + 2]
        torch.testing.assert_close(ours[2 * number], 3 * up.T @ slope)
        torch.testing.assert_close(ours[2 * number + 1], 3 * slope @ down.T)


def test_lora_where_it_fits():
    with pytest.raises(ValueError, match="a routed FFN is not dense"):
        LoRA(build(ffn="apn"))
    mixed = build(ffn="apn", per_layer={"1": {"ffn": "mlp"}})
    assert len(LoRA(mixed).trainable) == 4
    with pytest.raises(ValueError, match="not adapted yet"):
        LoRA(mixed)
    dropping = LoRA(build(), adapter_dropout=0.5, learning_rate=0.1)
    dropping.step(*batch(0))
    tokens = batch(0)[0]
    model = dropping.model.train()
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))
    seeds = [LoRA(build(), seed=seed).trainable[0] for seed in (0, 0, 1)]
    assert torch.equal(seeds[0], seeds[1])
    assert not torch.equal(seeds[0], seeds[2])


@pytest.mark.filterwarnings("ignore")  # another library's
def test_lora_is_that_of_peft():
    peft = pytest.importorskip("peft")
    model, theirs = build(), build()
    learner = LoRA(model, rank=4, alpha=8, targets="ffn", learning_rate=1e-2)
    for number in range(3):
        learner.step(*batch(number))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=r".*\.ffn\.(up|out)", lora_dropout=0.0)
    theirs = peft.inject_adapter_in_model(config, theirs)
    layers = [layer for block in theirs.blocks for layer in (block.ffn.up, block.ffn.out)]
    factors = [part["default"].weight for layer in layers for part in (layer.lora_A, layer.lora_B)]
    with torch.no_grad():
        for own, other in zip(learner.trainable, factors, strict=True):
            assert own.shape == other.shape
            other.copy_(own)
    inputs, targets = batch(5)
    torch.testing.assert_close(model(inputs), theirs(inputs), rtol=0, atol=0)
    loss = F.cross_entropy(theirs(inputs).flatten(0, 1), targets.flatten())
    for own, other in zip(
        learner.gradients(learner.loss(inputs, targets)), torch.autograd.grad(loss, factors), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=0, atol=0)
    learner.finish()
    for block, layer in zip(model.blocks, layers[::2], strict=True):
        layer.merge()
        torch.testing.assert_close(block.ffn.up.weight, layer.get_base_layer().weight, rtol=0, atol=0)
    assert model.config.vocab_size == VOCABULARY
