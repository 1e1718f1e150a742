"""What all baselines promise, and that each behaves on a toy problem as its paper says."""

import copy
import doctest
import functools
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from attractor.config import APNConfig, GPTConfig
from attractor.continual import baselines
from attractor.continual.baselines import AGEM, EWC, GEM, Baseline, FineTune, LoRA, Replay
from attractor.continual.update import NotFiniteUpdate
from attractor.data import IGNORED, Batches
from attractor.evaluate import evaluate
from attractor.model import GPT

VOCABULARY, CONTEXT = 12, 16


def build(seed=0, dtype=torch.float32, **changes):
    sizes = {"vocab_size": VOCABULARY, "context": CONTEXT, "num_layers": 2, "num_heads": 2, "dim": 32}
    torch.manual_seed(seed)
    return GPT(GPTConfig(**(sizes | {"apn": APNConfig(num_patches=16, top_k=2, rank=8)} | changes))).to(dtype)


def batch(seed, rows=4, length=CONTEXT, vocabulary=VOCABULARY):
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def state_of(model, method):
    optimizer = {
        f"{number}.{name}": value
        for number, parts in method.optimizer.state_dict()["state"].items()
        for name, value in parts.items()
    }
    return {name: value.clone() for name, value in (model.state_dict() | optimizer).items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(value, right[key]) for key, value in left.items())


METHODS = {
    "fine-tune": FineTune,
    "fine-tune ffn": partial(FineTune, train="ffn"),
    "lora": partial(LoRA, targets="all", rank=2),
    "ewc": partial(EWC, anchor=[batch(7)], strength=10.0),
    "gem": partial(GEM, memories=[batch(7), batch(8)]),
    "agem": partial(AGEM, memory=batch(7, rows=9), batch_size=3),
    "gem, steps": partial(GEM, memories=[batch(7), batch(8)], of="step"),
    "replay": partial(Replay, memory=batch(7, rows=9), fraction=0.25),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def test_the_example_runs():
    assert doctest.testmod(baselines).failed == 0
    assert all(issubclass(getattr(baselines, name), Baseline) for name in baselines.__all__)


@pytest.mark.parametrize("ffn", ["mlp", "apn"])
@every_method
def test_one_interface(method, ffn):
    model = build(ffn=ffn, dropout=0.1)
    model.positions.weight.requires_grad_(False)
    before, keys = copy.deepcopy(model), list(model.state_dict())
    flags = [parameter.requires_grad for parameter in model.parameters()]
    model.eval()
    learner = method(model, learning_rate=1e-2, clip_norm=1.0, weight_decay=0.01)
    learning = set(learner.trainable)
    assert learning
    assert all(parameter.requires_grad == (parameter in learning) for parameter in model.parameters())
    losses = [learner.step(*batch(0)) for _ in range(12)]
    assert all(isinstance(loss, float) for loss in losses)
    assert losses[-1] < losses[0]
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    adapted = learner.finish()
    assert adapted is model
    assert list(model.state_dict()) == keys
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert not same(model.state_dict(), before.state_dict())
    before = copy.deepcopy(model.requires_grad_(False))
    assert learner.finish() is model  # a second time changes nothing
    assert same(model.state_dict(), before.state_dict())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="finished"):
        learner.step(*batch(0))


@every_method
def test_autocast(method):
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    learner, exact = method(build(), autocast=autocast), method(build())
    assert learner.step(*batch(0)) == pytest.approx(exact.step(*batch(0)), rel=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_method
def test_on_a_gpu(method):
    learner, exact = method(build().cuda(), dropout=False), method(build())
    for number in range(3):  # batches come from the CPU
        assert learner.step(*batch(number)) == pytest.approx(exact.step(*batch(number)), rel=1e-2)
    assert learner.finish().embedding.weight.is_cuda


@every_method
def test_all_or_nothing(method):
    """A bad step in between is as if it had not been: parameters, optimizer and all."""
    model = build()
    learner = method(model)
    for number in range(2):
        learner.step(*batch(number))
    healthy = model.norm.weight[0].item()
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    before = state_of(model, learner)
    with pytest.raises(NotFiniteUpdate, match="the loss is nan; nothing was changed"):
        learner.step(*batch(2))
    after = state_of(model, learner)
    assert all(torch.equal(value.nan_to_num(), after[key].nan_to_num()) for key, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        model.norm.weight[0] = healthy
    assert np.isfinite(learner.step(*batch(2)))


@pytest.mark.parametrize("kind", [GEM, AGEM])
def test_a_bad_memory_changes_nothing(kind):
    model = build()
    memory = batch(7)
    learner = GEM(model, [memory]) if kind is GEM else AGEM(model, memory, 4)
    learner.step(*batch(0, length=8))
    with torch.no_grad():
        model.positions.weight[12] = torch.nan  # beyond the batch, within the memory
    before = state_of(model, learner)
    with pytest.raises(NotFiniteUpdate):
        learner.step(*batch(1, length=8))
    assert all(
        torch.equal(value.nan_to_num(), state_of(model, learner)[key].nan_to_num())
        for key, value in before.items()
    )


def test_a_gradient_that_is_not_finite_changes_nothing():
    class Cliff(Baseline):
        def penalty(self):
            return (self.trainable[0] * 0).abs().sqrt().sum()  # worth 0, of infinite slope

    model = build()
    learner = Cliff(model)
    before = state_of(model, learner)
    with pytest.raises(NotFiniteUpdate, match="a gradient is not finite"):
        learner.step(*batch(0))
    assert same(before, state_of(model, learner))


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_fine_tuning_is_the_usual_loop(clip_norm):
    model, usual = build(), build()
    learner = FineTune(model, learning_rate=1e-2, weight_decay=0.1, clip_norm=clip_norm)
    optimizer = torch.optim.AdamW(usual.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for number in range(5):
        inputs, targets = batch(number)
        targets[0, :3] = IGNORED
        loss = F.cross_entropy(usual(inputs).transpose(1, 2), targets)
        optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(usual.parameters(), clip_norm)
        optimizer.step()
        assert learner.step(inputs, targets) == pytest.approx(float(loss.detach()), rel=1e-6)
    for ours, theirs in zip(model.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_dropout_is_on_or_off():
    model = build(dropout=0.5)
    inputs, targets = batch(0)
    with torch.no_grad():
        quiet = F.cross_entropy(copy.deepcopy(model).eval()(inputs).transpose(1, 2), targets)
    assert FineTune(copy.deepcopy(model), dropout=False).step(inputs, targets) == pytest.approx(float(quiet))
    losses = {FineTune(copy.deepcopy(model)).step(inputs, targets) for _ in range(3)}
    assert len(losses) == 3
    assert model.training


@pytest.mark.parametrize("ffn", ["mlp", "apn"])
def test_what_is_not_trained_keeps_its_bytes(ffn):
    model = build(ffn=ffn, per_layer={"1": {"ffn": "apn"}})
    before = copy.deepcopy(model)
    chosen = {id(parameter) for block in model.blocks for parameter in block.ffn.parameters()}
    learner = FineTune(model, "ffn", weight_decay=0.1, learning_rate=1e-2)
    learner.step(*batch(0))
    learner.finish()
    for now, then in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(now, then) == (id(now) not in chosen)
    learner = FineTune(model, [model.norm.weight])
    before = copy.deepcopy(model)
    learner.step(*batch(0))
    learner.finish()
    changed = [
        name
        for (name, now), then in zip(model.named_parameters(), before.parameters(), strict=True)
        if not torch.equal(now, then)
    ]
    assert changed == ["norm.weight"]


@given(st.integers(1, 60), st.integers(0, 99), st.integers(1, 6))
def test_replay_mixes(rows, percent, steps):
    """The last of each batch are old ones, and over the steps exactly as many as were asked for."""
    model = build(num_layers=1, dim=2)
    memory = tuple(part % 3 for part in batch(7, rows=130, length=4))
    new = tuple(part % 3 + 6 for part in batch(0, rows=rows, length=4))
    learner = Replay(model, memory, percent / 100)
    old_rows = {(*inputs.tolist(), *targets.tolist()) for inputs, targets in zip(*memory, strict=True)}
    replayed = 0
    for step in range(1, steps + 1):
        mixed = learner.mix(*new)
        assert mixed[0].shape == mixed[1].shape == new[0].shape
        expected = step * rows * percent // 100 - replayed  # in integers
        replayed += expected
        kept = rows - expected
        for part, given_part in zip(mixed, new, strict=True):
            assert torch.equal(part[:kept], given_part[:kept])
        for inputs, targets in zip(mixed[0][kept:], mixed[1][kept:], strict=True):
            assert (*inputs.tolist(), *targets.tolist()) in old_rows


def test_replay_draws():
    model, new = build(), batch(0, rows=8)
    numbered = torch.arange(16).view(16, 1) % VOCABULARY * torch.ones(1, CONTEXT, dtype=torch.int64)
    learner, again = Replay(model, (numbered, numbered), 0.5), Replay(model, (numbered, numbered), 0.5)
    draws = [learner.mix(*new)[0][4:, 0].tolist() for _ in range(40)]
    assert draws == [again.mix(*new)[0][4:, 0].tolist() for _ in range(40)]
    assert {token for draw in draws for token in draw} == set(range(VOCABULARY))  # each has its turn
    without, plain = Replay(build(), batch(7), 0.0), FineTune(build())
    assert without.step(*new) == plain.step(*new)
    assert same(without.model.state_dict(), plain.model.state_dict())


def test_a_memory_that_remembers_keeps_each_with_the_same_chance():
    """5 of 20 sequences, the 5 it began with among them; offered a few at a time, over many seeds."""
    model = build(num_layers=1, dim=2)
    digits = torch.stack([torch.arange(20) // VOCABULARY, torch.arange(20) % VOCABULARY], dim=1)
    kept = torch.zeros(20)
    for seed in range(400):
        learner = Replay(model, (digits[:5], digits[:5]), 0.0, remember=True, seed=seed)
        for rows in digits[5:].split([4, 1, 7, 3]):
            assert torch.equal(learner.mix(rows, rows)[0], rows)
        held = learner.memory.inputs
        assert torch.equal(held, learner.memory.targets)
        numbers = held[:, 0] * VOCABULARY + held[:, 1]
        assert len(numbers.unique()) == 5
        kept[numbers] += 1
    assert kept.sum() == 5 * 400
    assert (
        (kept - 100).abs() < 4.5 * (400 * 0.25 * 0.75) ** 0.5
    ).all()  # the seeds are fixed: no test of luck
    assert torch.equal(digits[:5, 1], torch.arange(5))  # what it was given is not its own
    stayed = 0
    for seed in range(400):  # of two, one
        learner = Replay(model, (digits[:1], digits[:1]), 0.0, remember=True, seed=seed)
        learner.mix(digits[1:2], digits[1:2])
        stayed += int(torch.equal(learner.memory.inputs, digits[:1]))
    assert 160 < stayed < 240


def test_mistakes():
    model = build()
    model.positions.weight.requires_grad_(False)
    inputs, targets = batch(0)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    good = batch(7)
    no_rows = (inputs[:0], targets[:0])
    for make, message in (
        (partial(FineTune, train="head"), "train='head' is unknown; allowed: 'all', 'ffn'"),
        (partial(FineTune, train=[]), "parameters of this model"),
        (partial(FineTune, train=[build().norm.weight]), "parameters of this model"),
        (partial(FineTune, train=[model.norm.weight] * 2), "each once"),
        (partial(FineTune, learning_rate=0.0), "learning_rate=0.0 must be a positive number"),
        (partial(FineTune, weight_decay=-1.0), "weight_decay=-1.0"),
        (partial(FineTune, clip_norm=0.0), "clip_norm=0.0"),
        (partial(LoRA, learning_rate=0.0), "learning_rate=0.0"),
        (partial(LoRA, rank=0), "rank=0"),
        (partial(LoRA, targets="head"), "targets='head' is unknown"),
        (partial(LoRA, adapter_dropout=1.0), "adapter_dropout=1.0"),
        (partial(EWC, anchor=[], strength=1.0), "anchor is empty"),
        (partial(EWC, anchor=[no_rows], strength=1.0), "not empty"),
        (partial(EWC, anchor=[good], strength=-1.0), "strength=-1.0 must be a number, 0 or more"),
        (partial(EWC, anchor=[good], strength=float("nan")), "strength=nan"),
        (partial(EWC, anchor=[good], strength=1.0, labels="true"), "labels='true'"),
        (partial(EWC, anchor=[good], strength=1.0, fisher_decay=2.0), "fisher_decay=2.0"),
        (partial(EWC, anchor=Batches(np.arange(99), 2, 4, 0), strength=1.0), "never ends"),
        (partial(GEM, memories=[]), "0 memories: give 1 to 10"),
        (partial(GEM, memories=[good] * 11), "11 memories"),
        (partial(GEM, memories=[good, no_rows]), "memory 1 has inputs of shape"),
        (partial(GEM, memories=[good], margin=-0.1), "margin=-0.1"),
        (partial(AGEM, memory=no_rows), "the memory has inputs of shape"),
        (partial(AGEM, memory=good, batch_size=5), "batch_size=5 is more than the memory's 4"),
        (partial(Replay, memory=no_rows), "the memory has inputs of shape"),
        (partial(Replay, memory=good, fraction=1.0), "fraction=1.0"),
        (partial(Replay, memory=good, fraction=-0.1), "fraction=-0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            make(model)
        assert [parameter.requires_grad for parameter in model.parameters()] == flags, message
        assert list(model.state_dict()) == list(build().state_dict()), message
    learner = FineTune(model)
    for wrong, message in (
        ((inputs, targets[:2]), "both must be the same"),
        ((inputs[0], targets[0]), "both must be the same"),
        ((inputs, targets.float()), "both must be torch.int64"),
        ((inputs + VOCABULARY, targets), "tokens outside 0 to 11"),
        ((inputs, targets - VOCABULARY), "tokens outside 0 to 11"),
        (batch(0, length=CONTEXT + 1), "the model's context is 16"),
        ((inputs, targets.tolist()), "two tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            learner.step(*wrong)
    with pytest.raises(ValueError, match="sequences of 8 tokens, the batch of 16"):
        Replay(model, batch(7, length=8)).step(inputs, targets)
    with pytest.raises(ValueError, match="holds 1 sequences, 2 were asked for"):
        Replay(model, batch(7, rows=1), 0.5).step(inputs, targets)


def markov(alphabet, order_seed, seed, length):
    """A cycle through the alphabet in a random order, with one step in seven to anywhere."""
    order = np.random.default_rng(order_seed).permutation(alphabet)
    chance = np.random.default_rng(seed)
    jumps, landing = chance.random(length) < 0.15, chance.integers(len(order), size=length)
    places = [0]
    for jump, place in zip(jumps[1:], landing[1:], strict=True):
        places.append(place if jump else (places[-1] + 1) % len(order))
    return order[places]


ALPHABETS = {"A": (range(8), 1), "B": (range(4, 12), 2)}
TEXT = {name: markov(*source, 3, 6000) for name, source in ALPHABETS.items()}
HELD_OUT = {name: markov(*source, 4, 1500) for name, source in ALPHABETS.items()}
MEMORY = Batches(TEXT["A"], 64, CONTEXT, 9).batch(0)
AFTER_A = {
    "fine-tune": FineTune,
    "ewc": partial(EWC, anchor=[MEMORY], strength=100.0),
    "gem": partial(GEM, memories=[MEMORY]),
    "agem": partial(AGEM, memory=MEMORY, batch_size=32),
    "gem, steps": partial(GEM, memories=[MEMORY], of="step"),
    "agem, steps": partial(AGEM, memory=MEMORY, batch_size=32, of="step"),
    "replay": partial(Replay, memory=MEMORY, fraction=0.25),
    "lora": partial(LoRA, rank=4, targets="all"),
}


def losses_of(model):
    return {name: evaluate(model, tokens) for name, tokens in HELD_OUT.items()}


@functools.cache
def knows_a():
    learner = FineTune(build(), learning_rate=3e-3)
    for tokens in itertools.islice(Batches(TEXT["A"], 16, CONTEXT, 0), 200):
        learner.step(*tokens)
    return learner.finish()


@functools.cache
def losses_at_the_start():
    return losses_of(knows_a())


@functools.cache
def then_b(name):
    """Who knows A learns B, which has half of A's alphabet in another order: losses, and parameters."""
    learner = AFTER_A[name](copy.deepcopy(knows_a()), learning_rate=1e-3)
    for tokens in itertools.islice(Batches(TEXT["B"], 16, CONTEXT, 0), 120):
        learner.step(*tokens)
    size = sum(parameter.numel() for parameter in learner.trainable)
    return losses_of(learner.finish()), size


@pytest.mark.parametrize("name", ["ewc", "gem", "agem", "gem, steps", "agem, steps", "replay"])
def test_forgets_less_than_fine_tuning(name):
    start, (plain, _), (guarded, _) = losses_at_the_start(), then_b("fine-tune"), then_b(name)
    assert plain["A"] > start["A"] + 1.0  # fine-tuning forgets
    assert start["B"] > plain["B"] + 3.0  # and learns
    assert guarded["A"] - start["A"] < (plain["A"] - start["A"]) / 2
    assert guarded["B"] < plain["B"] + 0.2


def test_lora_learns_with_few_parameters():
    lora, size = then_b("lora")
    assert lora["B"] < losses_at_the_start()["B"] - 2.0
    assert size < then_b("fine-tune")[1] / 3
