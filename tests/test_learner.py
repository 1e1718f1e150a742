"""OnlineLearner: exact locality, all or nothing, streams in any pieces, files, bad input."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attractor.config import APNConfig, GPTConfig
from attractor.continual import learner as learner_module
from attractor.continual.config import (
    AllocationConfig,
    GateConfig,
    GuardConfig,
    LearnConfig,
    UpdateConfig,
)
from attractor.continual.learner import OnlineLearner
from attractor.continual.observation import contiguous_windows
from attractor.layer import PATCH_ROLES, ROLES
from attractor.model import GPT
from attractor.tokenizer import CharTokenizer

CONTEXT = 8
TOKENIZER = CharTokenizer("abcdefghij")


def model_of(seed=0, **apn):
    torch.manual_seed(seed)
    settings = {"num_patches": 12, "top_k": 2, "rank": 4, "temperature": 0.3} | apn
    config = GPTConfig(
        vocab_size=10,
        context=CONTEXT,
        num_layers=2,
        num_heads=2,
        dim=16,
        ffn="apn",
        apn=APNConfig(**settings),
    )
    return GPT(config)


def learner_of(*, seed=0, apn=None, update=None, **config):
    options = UpdateConfig(**({"learning_rate": 1e-2} | (update or {})))
    return OnlineLearner(
        model_of(seed, **(apn or {})), TOKENIZER, LearnConfig(update=options, **({"budget": 8} | config))
    )


def stream(count, seed=0):
    return np.random.default_rng(seed).integers(0, 10, count)


def state_of(learner):
    """Every tensor, counter and token a learner holds."""
    state = {f"model.{k}": v.clone() for k, v in learner.model.state_dict().items()}
    state |= {f"update.{k}": v.clone() for k, v in learner.update.state_dict().items()}
    for number, habits in learner.allocator.habits.items():
        for part in dataclasses.fields(habits):
            state[f"{number}.{part.name}"] = copy.deepcopy(getattr(habits, part.name))
        state[f"{number}.config"] = learner.layers[number].config
    for part in dataclasses.fields(learner.gathered):
        state[f"gathered.{part.name}"] = copy.deepcopy(getattr(learner.gathered, part.name))
    return state | {"totals": learner.totals, "history": learner.history.copy(), "source": learner.source}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        same(value, b[key], key)


def same(a, b, key):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), key
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b), key
    elif dataclasses.is_dataclass(a) and not isinstance(a, type):
        same(vars(a), vars(b), key)
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), key
        for inner in a:
            same(a[inner], b[inner], f"{key}.{inner}")
    else:
        assert a == b, key


@pytest.mark.parametrize(
    ("rule", "gates"),  # gates choose tokens before any rule sees them
    [("sgd", {}), ("adamw", {"max_entropy": 2.3, "min_confidence": 1.0})],
    ids=["sgd, open", "adamw, gated"],
)
def test_untouched_patches_keep_their_bytes(rule, gates):
    """A hundred updates. Who selected what is found by the model itself, one token at a time."""
    learner = learner_of(
        apn={"num_patches": 40},
        budget=4,
        gates=GateConfig(**gates),
        update={"train": ("decoders", "gates", "prototypes"), "rule": rule, "weight_decay": 0.1},
    )
    tokens = stream(440)
    spared = 0
    for start in range(0, len(tokens) - 4, 4):
        before = {k: v.clone() for k, v in learner.model.state_dict().items()}
        optimizer = {k: v.clone() for k, v in learner.update.state_dict().items()}
        history = learner.history
        selected = _selected(learner, history, tokens[start : start + 4])
        seen = learner.observe(tokens[start : start + 4])
        assert seen.tokens == 4
        after = learner.model.state_dict()
        for key, value in after.items():
            _, number, _, *name = key.split(".") if key.startswith("blocks.") else (0, 0, 0)
            role = ROLES.get(".".join(name)) if ".ffn." in key else None
            if role not in PATCH_ROLES:
                assert torch.equal(value, before[key]), key  # attention, embeddings, norms, head, encoder
                continue
            untouched = torch.ones(len(value), dtype=torch.bool)
            untouched[list(selected[int(number)])] = False
            spared += int(untouched.sum())
            assert torch.equal(value[untouched], before[key][untouched]), key
            for part in ("mean", "square", "steps") if rule == "adamw" else ():
                own = f"{number}.{name[0]}.{part}"
                assert torch.equal(learner.update.state[own][untouched], optimizer[own][untouched]), own
    assert learner.totals.updates > 100
    assert spared > 10_000
    if gates:
        assert 0 < learner.totals.held_back["max_entropy"] < 600


def _selected(learner, history, tokens):
    """Layer -> patches that the tokens which may teach select."""
    batch = contiguous_windows(history, tokens, CONTEXT)
    chosen = {number: set() for number in learner.layers}
    if batch is None:
        return chosen
    inputs, _, counted = batch
    learner.model.eval()
    with torch.no_grad():
        logits, stats = learner.model(inputs, return_stats=True)
    probabilities = logits.softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1)
    gates = learner.config.gates
    for row, column in counted.nonzero().tolist():
        if gates.max_entropy is not None and entropy[row, column] > gates.max_entropy:
            continue
        if any(
            gates.min_confidence is not None and s.confidence[row, column] < gates.min_confidence
            for s in stats.values()
        ):
            continue
        for number, layer_stats in stats.items():
            chosen[number] |= set(layer_stats.indices[row, column].tolist())
    return chosen


@pytest.mark.parametrize("budget", [5, CONTEXT, 3 * CONTEXT])
def test_loss_is_from_before_learning_and_counts_every_token_once(budget):
    """With a learning rate that changes everything: each block must be scored by the weights before it."""
    learner = learner_of(budget=budget, update={"learning_rate": 0.5})
    with torch.no_grad():
        learner.model.embedding.weight.mul_(20)
    tokens = stream(4 * CONTEXT + 1)
    seen, total, frozen = 0, 0.0, copy.deepcopy(learner.model).eval()
    for start in range(0, len(tokens), budget):
        block = tokens[start : start + budget]
        observed = learner.observe(block)
        assert observed.tokens == len(block)
        expected = 0.0
        for place in range(start, start + len(block)):
            first = max(start, 1) + (place - max(start, 1)) // CONTEXT * CONTEXT  # of its window
            stop = min(first + CONTEXT, start + len(block))
            begin = max(0, stop - 1 - CONTEXT)
            if place:
                with torch.no_grad():
                    logits = frozen(torch.from_numpy(tokens[begin:place])[None])[0, -1]
                expected -= float(logits.log_softmax(-1)[tokens[place]])
                seen += 1
        assert observed.loss_sum == pytest.approx(expected, rel=1e-3), start
        total += observed.loss_sum
        frozen = copy.deepcopy(learner.model).eval()
    assert learner.totals.scored == seen == len(tokens) - 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 12), st.integers(1, 9))
def test_windows_predict_each_new_token_once(sizes, past, context):
    history = np.arange(past)
    for size in sizes:
        tokens = np.arange(len(history) + 1000, len(history) + 1000 + size)
        batch = contiguous_windows(history, tokens, context)
        if batch is None:
            assert len(history) == 0
            assert size == 1
            continue
        inputs, targets, new = batch
        predicted = targets[new].tolist()
        assert predicted == (tokens if len(history) else tokens[1:]).tolist()
        whole = np.concatenate([history[-context:], tokens]).tolist()
        for row_in, row_out in zip(inputs.tolist(), targets.tolist(), strict=True):
            place = whole.index(row_in[0])
            assert whole[place : place + len(row_in)] == row_in
            assert whole[place + 1 : place + 1 + len(row_out)] == row_out
            assert len(row_in) <= context


@pytest.mark.parametrize("mode", ["off", "grow"])
def test_pieces_do_not_matter_between_updates(mode):
    """The same stream in one piece or in many: the same updates and allocations, up to rounding of sums.

    A large context, so that every token sees all of the past either way.
    """
    learners = []
    for _ in range(2):
        config = GPTConfig(
            vocab_size=10,
            context=128,
            num_layers=2,
            num_heads=2,
            dim=16,
            ffn="apn",
            apn=APNConfig(num_patches=12, top_k=2, rank=4, temperature=0.3),
        )
        torch.manual_seed(0)
        allocation = AllocationConfig(mode=mode, novelty=100.0, window=30, cooldown=1)
        update = UpdateConfig(learning_rate=1e-2)
        learn = LearnConfig(update=update, budget=24, allocation=allocation, rate_horizon=50)
        learners.append(OnlineLearner(GPT(config), TOKENIZER, learn))
    whole, pieces = learners
    tokens = stream(121)
    one = whole.observe(tokens)
    many = [pieces.observe(part) for part in np.split(tokens, [1, 8, 16, 24, 40, 48, 56, 64, 72, 96, 104])]
    assert sum(seen.updates for seen in many) == one.updates == 5
    assert sum(len(seen.allocations) for seen in many) == len(one.allocations) == (0 if mode == "off" else 4)
    assert many[-1].pending == one.pending == 1
    assert sum(seen.scored for seen in many) == one.scored
    assert pieces.totals.taught == whole.totals.taught
    for (name, a), b in zip(whole.model.named_parameters(), pieces.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-4, msg=name)


def test_learning_helps():
    learner = learner_of(budget=32, update={"train": ("decoders", "gates", "encoder"), "learning_rate": 2e-2})
    with torch.no_grad():  # an untrained head, which stays frozen, could hardly prefer one token
        learner.model.embedding.weight.mul_(20)
    text = "abcdefghij" * 400
    first = learner.observe(text[:400]).loss
    learner.observe(text[400:3600])
    assert learner.observe(text[3600:]).loss < first - 0.5
    assert learner.perplexity(text[:200]) < math.exp(first)
    assert learner.generate("abc", max_tokens=4, temperature=0).startswith("abc")
    assert torch.isclose(learner.predict("abc").sum(), torch.tensor(1.0), atol=1e-5)


def test_gates_report():
    learner = learner_of(gates=GateConfig(max_entropy=0.0))
    before = {k: v.clone() for k, v in learner.model.state_dict().items()}
    seen = learner.observe(stream(64))
    assert seen.held_back == {"max_entropy": 63}
    assert seen.taught == seen.updates == 0
    assert all(torch.equal(v, before[k]) for k, v in learner.model.state_dict().items())
    learner = learner_of(gates=GateConfig(min_confidence=-1e9, min_entropy=0.0))
    assert learner.observe(stream(64)).held_back == {}


def test_surprise_gate():
    learner = learner_of(gates=GateConfig(max_surprise=3.0), update={"learning_rate": 1e-2}, budget=32)
    learner.observe(np.zeros(2000, dtype=np.int64))  # very predictable
    seen = learner.observe(np.array([0] * 16 + [7] + [0] * 15))
    assert seen.held_back.get("max_surprise", 0) >= 1


def test_max_patches():
    learner = learner_of(max_patches=3, apn={"num_patches": 40})
    learner.set_background(stream(500, seed=4))
    before = {n: layer.decoder.clone() for n, layer in learner.layers.items()}
    seen = learner.observe(stream(9))
    assert seen.updates == 1
    for number, layer in learner.layers.items():
        changed = (layer.decoder != before[number]).flatten(1).any(1).sum()
        assert changed <= 3
        assert seen.patches[number] == 3


@pytest.mark.parametrize("apn", [{}, {"prototypes": "contextual", "routing_groups": 2}], ids=str)
def test_prototypes_follow_their_tokens(apn):
    """They turn towards the tokens that chose them, and keep their length however long it goes on."""
    learner = learner_of(prototype_rate=0.2, budget=16, apn=apn, update={"learning_rate": 1e-9})
    groups = apn.get("routing_groups", 1)
    start = {n: layer.prototypes.detach().clone() for n, layer in learner.layers.items()}
    first = learner.observe(stream(17))
    for number, layer in learner.layers.items():
        moved = (layer.prototypes != start[number]).any(1)
        assert moved.sum() == first.patches[number]
    confidence = learner_of(apn=apn).model(torch.from_numpy(stream(8))[None], return_stats=True)[1]
    for seed in range(60):
        learner.observe(stream(16, seed=seed))
    after = learner.model(torch.from_numpy(stream(8))[None], return_stats=True)[1]
    for number, layer in learner.layers.items():
        lengths = [p.unflatten(1, (groups, -1)).norm(dim=-1) for p in (layer.prototypes, start[number])]
        torch.testing.assert_close(lengths[0], lengths[1], rtol=1e-3, atol=1e-6)
        assert after[number].confidence.mean() > confidence[number].confidence.mean()


@pytest.mark.parametrize("update", [{"rule": "sgd"}, {"weight_decay": 0.1}], ids=str)
def test_a_rate_that_falls(update):
    """After 24 tokens and with a horizon of 8, a step is that of half the rates."""
    falling = learner_of(rate_horizon=8, prototype_rate=0.2, update=update)
    falling.observe(stream(24))
    whole = copy.deepcopy(falling)
    whole.config = dataclasses.replace(whole.config, rate_horizon=None)
    constant = copy.deepcopy(whole)
    constant.config = dataclasses.replace(constant.config, prototype_rate=0.1)
    constant.learning_rate *= 0.5
    for learner in (falling, constant, whole):
        assert learner.observe(stream(8, seed=1)).updates == 1
    assert_same(state_of(falling), state_of(constant))
    number = next(iter(whole.layers))
    assert not torch.equal(whole.layers[number].decoder, falling.layers[number].decoder)


def test_sources_do_not_share_context():
    learner = learner_of(budget=16)
    learner.observe(stream(21), source="first")
    seen = learner.observe(stream(3, seed=1), source="second")
    assert seen.updates == 1  # the five waiting tokens of the first
    assert seen.scored == 2  # nothing predicts the first token of a source
    assert seen.pending == 3
    assert len(learner.history) == 3
    assert seen.source == "second"


def test_scale_factor():
    plain, scaled = learner_of(), learner_of(scale_factor=0.0)
    x = torch.randn(3, 16)
    layer = next(iter(scaled.layers.values()))
    assert not layer(x).any()
    assert next(iter(plain.layers.values()))(x).any()


def test_a_learner_can_start_from_a_model(tmp_path):
    model_of().save_pretrained(tmp_path)
    learner = OnlineLearner.load(tmp_path, LearnConfig(budget=4))
    learner.observe([1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="no tokenizer"):
        learner.observe("abc")


def test_step_is_one_update():
    learner = learner_of(budget=1_000_000)
    x = torch.randint(0, 10, (4, CONTEXT))
    losses = [learner.step(x, x) for _ in range(30)]
    assert learner.totals.updates == 30
    assert learner.totals.tokens == 30 * x.numel()
    assert losses[-1] < losses[0]
    assert learner.gathered.tokens == 0


def test_step_leaves_ignored_targets_out():
    learner, x = learner_of(), torch.randint(0, 10, (2, CONTEXT))
    targets = torch.full_like(x, -100)
    targets[:, -1] = 3
    with torch.no_grad():
        wanted = -learner.model.eval()(x)[:, -1].log_softmax(-1)[:, 3].mean()
    assert learner.step(x, targets) == pytest.approx(float(wanted), rel=1e-5)
    assert learner.totals.taught == learner.totals.scored == 2
    for wrong in ((x, x + 90), (x[0], x[0]), (x, torch.full_like(x, -100)), (x[:0], x[:0])):
        with pytest.raises(ValueError):
            learner.step(*wrong)


def test_growth_in_a_step_with_tokens_waiting():
    allocation = AllocationConfig(mode="grow", novelty=100.0, window=1, cooldown=1000)
    learner = learner_of(budget=1000, allocation=allocation)
    learner.observe(stream(20))
    x = torch.randint(0, 10, (2, CONTEXT))
    learner.step(x, x)
    assert learner.totals.updates == 2
    learner.observe(stream(20))
    learner.flush()


def test_mixed_models(tmp_path):
    """APN in one layer, experts in the other."""
    config = GPTConfig(
        vocab_size=10,
        context=CONTEXT,
        num_layers=2,
        num_heads=2,
        dim=16,
        ffn="apn",
        apn=APNConfig(num_patches=6, top_k=2, rank=4),
        per_layer={"1": {"ffn": "moe"}},
    )
    learner = OnlineLearner(GPT(config), TOKENIZER, LearnConfig(budget=8))
    learner.set_background("abcdefghij")
    assert learner.observe(stream(40)).updates == 5
    assert "apn/0/omega" in learner.monitor("abcdef", "fedcba")


def test_release_gives_the_model_back():
    model = model_of()
    model.positions.requires_grad_(False)
    learner = OnlineLearner(model, config=LearnConfig(scale_factor=0.5))
    assert learner.release() is model
    assert not model.positions.weight.requires_grad
    assert model.embedding.weight.requires_grad
    assert float(next(iter(learner.layers.values())).scale_factor) == 1


def test_long_streams_take_constant_memory(monkeypatch):
    """Everything a learner keeps has the same size after 20 times the tokens."""
    learner = learner_of(budget=16, update={"learning_rate": 1e-4})
    monkeypatch.setattr(learner_module, "TOKENS_PER_PASS", 64)

    def size():
        tensors = [v for v in state_of(learner).values() if isinstance(v, torch.Tensor | np.ndarray)]
        return sum(v.nbytes for v in tensors), len(state_of(learner))

    learner.observe(stream(100))
    first = size()
    learner.observe(stream(2000))
    assert size() == first


def test_mistakes():
    learner = learner_of(max_observation=1000)
    before = state_of(learner)
    for wrong, message in (
        ("", "empty"),
        ([], "empty"),
        ([1, 10], "token 10 is outside the vocabulary, 0 to 9"),
        ([-1, 2], "token -1 is outside"),
        ([0.5], "expected a sequence of ids"),
        ([[1, 2]], "expected a sequence of ids"),
        ("abcz", "z"),
        (b"abc", "a bytes is neither text nor tokens: decode it"),
        (stream(1001), "give the stream in pieces"),
    ):
        with pytest.raises(ValueError, match=message):
            learner.observe(wrong)
    assert_same(state_of(learner), before)
    with pytest.raises(ValueError, match="no APN layers"):
        OnlineLearner(GPT(GPTConfig(vocab_size=10, context=8, num_layers=1, num_heads=1, dim=16)))
    with pytest.raises(ValueError, match="precision='bf16' is unknown"):
        OnlineLearner(model_of(), precision="bf16")
    with pytest.raises(ValueError, match="config is GuardConfig, and must be of the class LearnConfig"):
        OnlineLearner(model_of(), config=GuardConfig())
    with pytest.raises(ValueError, match="at least two tokens"):
        learner.perplexity("a")
    with pytest.raises(ValueError, match="below the 12 patches"):
        learner_of(allocation=AllocationConfig(mode="grow", most_patches=3))
    for wrong in (
        {"budget": 0},
        {"max_patches": 0},
        {"rate_horizon": 0},
        {"scale_factor": -1.0},
        {"prototype_rate": 1.0},
        {"prototype_rate": -0.1},
        {"update": {"max_change": 0.0}},
        {"update": {"max_decoder": -1.0}},
        {"prototype_rate": 0.1, "update": {"train": ("prototypes",)}},
        {"allocation": AllocationConfig(mode="grow"), "update": {"train": ("gates",)}},
    ):
        with pytest.raises(ValueError):
            learner_of(**wrong)
    for wrong in ({"min_entropy": -1.0}, {"min_entropy": 2.0, "max_entropy": 1.0}, {"max_surprise": 0.0}):
        with pytest.raises(ValueError):
            GateConfig(**wrong)
    for wrong in ({"mode": "x"}, {"window": 0}, {"most_patches": 5}, {"min_share": 0.5}, {"cooldown": 0}):
        with pytest.raises(ValueError):
            AllocationConfig(**wrong)
    config = LearnConfig(update=UpdateConfig(train=("gates",)), gates=GateConfig(max_entropy=1.0))
    assert LearnConfig.from_json(config.to_json()) == config


def test_monitor():
    learner = learner_of()
    learner.observe(stream(100))
    values = learner.monitor("abcdefghijabc", "jihgfedcba")
    assert values["tokens"] == 100
    assert values["updates"] == 12
    for number in learner.layers:
        assert 0 <= values[f"apn/{number}/omega"] <= 2
        assert 0 < values[f"apn/{number}/usage_entropy"] <= math.log(12) + 1e-9


@settings(max_examples=20)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 30))
def test_counters_add_up(sizes, budget):
    learner = learner_of(budget=budget)
    total = learner.observe(stream(sizes[0]))
    for number, size in enumerate(sizes[1:]):
        total = total.then(learner.observe(stream(size, seed=number)))
    assert total.tokens == learner.totals.tokens == sum(sizes)
    assert total.scored == learner.totals.scored == sum(sizes) - 1
    assert total.taught + sum(total.held_back.values()) == total.scored
    assert total.pending == sum(sizes) % budget
    assert learner.totals.tokens - learner.gathered.tokens == sum(sizes) // budget * budget
