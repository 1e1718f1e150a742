"""The guard's bound holds for any overlay; caches, pauses and switches give what the definition says."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attractor.config import APNConfig, GPTConfig
from attractor.continual.guard import Guard
from attractor.evaluate import evaluate
from attractor.generate import generate
from attractor.model import GPT

VOCABULARY, CONTEXT = 11, 32


def model_of(seed, scale=1.0):
    torch.manual_seed(seed)
    config = GPTConfig(
        vocab_size=VOCABULARY,
        context=CONTEXT,
        num_layers=1,
        num_heads=1,
        dim=8,
        ffn="apn",
        apn=APNConfig(num_patches=4, top_k=2, rank=2),
    )
    model = GPT(config)
    with torch.no_grad():
        model.embedding.weight.mul_(scale)
    return model.eval()


class Oracle(GPT):
    """Knows one text by heart: predicts it with certainty, and everything else as nearly impossible."""

    def __init__(self, text, sharpness=50.0, **changes):
        super().__init__(model_of(0).config)
        self.text, self.sharpness = text, sharpness

    def forward(self, tokens, *, cache=None, return_stats=False):
        start = 0 if cache is None else cache.length
        if cache is not None:
            cache.length += tokens.shape[1]
        following = self.text[start + 1 : start + 1 + tokens.shape[1]]
        following = torch.cat([following, following.new_zeros(tokens.shape[1] - len(following))])
        logits = torch.zeros(*tokens.shape, VOCABULARY)
        return logits.scatter(-1, following.expand_as(tokens)[..., None], self.sharpness)


def losses(predictor, tokens):
    """NLL of each token after the first, straight from the definition of a log-probability."""
    with torch.no_grad():
        log_p = predictor(tokens).double().log_softmax(-1)
    return -log_p[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


def text_of(seed, length=CONTEXT, batch=1):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCABULARY, (batch, length)))


@given(
    st.integers(0, 10**6),
    st.floats(0.1, 60),
    st.floats(0.01, 0.99),
    st.floats(0, 0.2),
    st.integers(1, 40),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_the_bound_holds_for_any_overlay(seed, scale, prior, switch_rate, window, overlays):
    """Random weights, however sharp: never more than the bound over the base, nor over any overlay."""
    paths = {"base": model_of(0, 5.0)} | {f"o{i}": model_of(seed + i, scale) for i in range(overlays)}
    guard = Guard(paths, prior=prior, switch_rate=switch_rate, window=window)
    tokens = text_of(seed, batch=3)
    ours = losses(guard, tokens).sum(1)
    for name, path in paths.items():
        excess = ours - losses(path, tokens).sum(1)
        assert (excess <= guard.bound(CONTEXT - 1, name) + 1e-3).all(), name


@pytest.mark.parametrize("honest", [0, 5, 15])
def test_the_bound_holds_for_the_most_harmful_overlay(honest):
    """It is right for a while, to win trust, and then certain of what will not come."""
    base, tokens = model_of(0, 5.0), text_of(3)
    lies = (tokens[0] + 1) % VOCABULARY
    lies[: honest + 1] = tokens[0, : honest + 1]
    for window in (None, 8):
        guard = Guard({"base": base, "liar": Oracle(lies)}, window=window)
        excess = float((losses(guard, tokens) - losses(base, tokens)).sum())
        assert excess <= guard.bound(CONTEXT - 1) + 1e-4
        if honest == 0:
            assert excess > 0.9 * math.log(2)  # the bound is not loose: a liar costs one bit


def test_the_mixture_is_the_definition():
    """Token by token with Python's own logarithms, for fixed share and windows."""
    paths = {"base": model_of(0, 20.0), "x": model_of(1, 20.0), "y": model_of(2, 30.0)}
    tokens = text_of(5)
    for options in (
        {},
        {"window": 7},
        {"switch_rate": 0.05},
        {"window": 9, "switch_rate": 0.2, "prior": 0.7},
    ):
        guard = Guard(paths, **options)
        with torch.no_grad():
            each = [path(tokens).double().softmax(-1)[0] for path in paths.values()]
            got = guard(tokens).double().exp()[0]
        prior = options.get("prior", 0.5)
        shares = [prior, (1 - prior) / 2, (1 - prior) / 2]
        rate, weights = options.get("switch_rate", 0.0), list(shares)
        for t in range(CONTEXT):
            if t and t % options.get("window", CONTEXT) == 0:
                weights = list(shares)
            elif t:
                weights = [w * float(p[t - 1, tokens[0, t]]) for w, p in zip(weights, each, strict=True)]
                total = sum(weights)
                weights = [(1 - rate) * w / total + rate * s for w, s in zip(weights, shares, strict=True)]
            wanted = sum(w * p[t] for w, p in zip(weights, each, strict=True))
            assert torch.allclose(got[t], wanted, atol=1e-5), t
            assert torch.allclose(guard.posterior(tokens)[0, t], torch.tensor(weights).double(), atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("switch_rate", [0.0, 0.1])
@pytest.mark.parametrize(
    "pieces",
    [[1] * CONTEXT, [9, 1, 1, 7, 14], [3, 29], [6, *[1] * 26], [11, 5, *[1] * 16], [CONTEXT]],
    ids=str,
)
def test_caches_change_nothing(window, switch_rate, pieces):
    guard = Guard({"base": model_of(0, 20.0), "x": model_of(1, 20.0)}, window=window, switch_rate=switch_rate)
    tokens = text_of(1, batch=2)
    with torch.no_grad():
        wanted, cache = guard(tokens), guard.new_cache(2)
        got = torch.cat([guard(piece, cache=cache) for piece in tokens.split(pieces, 1)], 1)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert guard.log_prior.exp().tolist() == [0.5, 0.5]  # nothing wrote into the prior


@pytest.mark.parametrize("window", [None, 8, 20, 24, 64, 320])
def test_the_bound_of_a_long_text(window):
    """Every sequence of the context pays anew, wherever windows end."""
    base, text = model_of(0, 5.0), text_of(3, length=10 * CONTEXT + 1)[0]
    liar = Oracle((text + 1) % VOCABULARY)

    class Liar(Oracle):
        def forward(self, tokens, *, cache=None, return_stats=False):
            return super().forward(tokens) * 0 - 30.0 * torch.nn.functional.one_hot(
                torch.roll(tokens, -1, 1), VOCABULARY
            )

    guard = Guard({"base": base, "liar": Liar(text), "other": liar}, window=window)
    count = 10 * CONTEXT
    excess = count * (evaluate(guard, text.numpy()) - evaluate(base, text.numpy()))
    assert excess <= guard.bound(count) + 1e-2
    assert excess > 0.5 * 10 * math.log(2)


def test_the_bound_of_writing_past_the_context():
    """A cache that is full is replaced by one that reads the end again; what it read is not counted twice."""
    length = 4 * CONTEXT
    text = text_of(8, length=length)[0]
    half = CONTEXT // 2

    class Turning(GPT):
        """Right in every other half context, counted over the whole text."""

        def __init__(self, right_first):
            super().__init__(model_of(0).config)
            self.right_first = right_first

        def forward(self, tokens, *, cache=None, return_stats=False):
            start = cache.start + cache.length
            cache.length += tokens.shape[1]
            places = torch.arange(start, start + tokens.shape[1]) + 1
            right = ((places // half) % 2 == 0) == self.right_first
            following = text[places.clamp(max=length - 1)]
            wanted = torch.where(right, following, (following + 1) % VOCABULARY)
            return 5.0 * torch.nn.functional.one_hot(wanted, VOCABULARY)[None].float()

    guard = Guard({"base": Turning(True), "other": Turning(False)})

    def excess_over(path):
        total, cache, unread = 0.0, guard.new_cache(1), text[None, :1]

        def locate(cache, start):
            for reader in cache.readers:
                reader.cache.start = start

        locate(cache, 0)
        for step in range(1, length):
            if cache.length + unread.shape[1] > CONTEXT:
                unread = text[None, step - half : step]
                cache = guard.new_cache(1, after=cache)
                locate(cache, step - half)
            with torch.no_grad():
                ours = guard(unread, cache=cache)[0, -1]
            right = ((step // half) % 2 == 0) == path.right_first
            best = torch.full((VOCABULARY,), 0.0)
            best[text[step] if right else (text[step] + 1) % VOCABULARY] = 5.0
            total += float(best.log_softmax(-1)[text[step]] - ours[text[step]])
            unread = text[None, step : step + 1]
        return total

    for path in guard.paths:
        assert excess_over(path) <= guard.bound(length - 1) + 1e-3


def test_a_path_that_diverged_is_left_out():
    base, broken = model_of(0, 5.0), model_of(1)
    with torch.no_grad():
        broken.norm.weight.fill_(torch.nan)
    guard, tokens = Guard({"base": base, "broken": broken}), text_of(1)
    assert (losses(guard, tokens).sum() - losses(base, tokens).sum()) <= guard.bound(CONTEXT - 1) + 1e-4


def test_paths_that_hardly_count_rest():
    """One path is sure and right: the other reads in a few passes, at less than the cost that was allowed."""
    tokens = text_of(2)
    base, sure = model_of(0, 20.0), Oracle(tokens[0], sharpness=6.0)
    exact, resting = (Guard({"base": base, "sure": sure}, pause=nats) for nats in (0.0, 0.01))
    results = []
    for guard in (exact, resting):
        cache = guard.new_cache(1)
        with torch.no_grad():
            out = torch.cat([guard(token, cache=cache) for token in tokens.split(1, 1)], 1)
        results.append((out, cache.passes))
    (wanted, many), (got, few) = results
    assert many == 2 * CONTEXT
    assert few < 1.6 * CONTEXT
    given = [float(out[:, :-1].gather(-1, tokens[:, 1:, None]).sum()) for out in (wanted, got)]
    assert given[0] - given[1] <= 0.01
    assert resting.bound(CONTEXT) == pytest.approx(math.log(2) + 0.01)


def against_a_turncoat(seed, turn, sharpness, pause=0.05):
    """The base is wrong until `turn` and then right; the overlay the other way round. Excess, and passes."""
    tokens = text_of(seed)
    early, late = tokens[0].clone(), tokens[0].clone()
    early[: turn + 1] = (early[: turn + 1] + 1) % VOCABULARY
    late[turn + 1 :] = (late[turn + 1 :] + 1) % VOCABULARY
    base = Oracle(early, sharpness=5.0)
    guard = Guard({"base": base, "turncoat": Oracle(late, sharpness)}, pause=pause)
    cache = guard.new_cache(1)
    with torch.no_grad():
        out = torch.cat([guard(token, cache=cache) for token in tokens.split(1, 1)], 1).double()
    ours = -float(out[:, :-1].gather(-1, tokens[:, 1:, None]).sum())
    return ours - float(losses(base, tokens).sum()), guard.bound(CONTEXT - 1), cache.passes


@given(st.integers(0, 1000), st.integers(3, 25), st.floats(3.0, 40.0))
@settings(max_examples=60, deadline=None)
def test_resting_cannot_be_exploited(seed, turn, sharpness):
    """The overlay is sure and right until the base rests, and then sure and wrong: still bounded."""
    excess, bound, _ = against_a_turncoat(seed, turn, sharpness)
    assert excess <= bound + 1e-4


def test_the_exploit_does_send_the_base_to_rest():
    excess, bound, passes = against_a_turncoat(0, 20, 30.0)
    assert passes < 2 * CONTEXT - 5
    assert excess <= bound
    assert against_a_turncoat(0, 20, 30.0, pause=0.0)[2] == 2 * CONTEXT


def test_switching_is_paid_once():
    first, second = text_of(1)[0], text_of(2)[0]
    mixed_text = torch.cat([first[:16], second[16:]])[None]
    paths = {"base": Oracle(first, 4.0), "other": Oracle(second, 4.0)}
    best = losses(paths["base"], mixed_text)[:, :15].sum() + losses(paths["other"], mixed_text)[:, 15:].sum()
    guard = Guard(paths, switch_rate=0.05)
    excess = float(losses(guard, mixed_text).sum() - best)
    assert excess <= guard.switching_bound(CONTEXT - 1, 1) + 1e-4
    stubborn = float(losses(Guard(paths), mixed_text).sum() - best)
    assert excess < stubborn
    assert Guard(paths).switching_bound(10, 1) == math.inf
    assert guard.switching_bound(10, 0) == pytest.approx(guard.bound(10))


def test_evaluation_and_generation_work():
    base, other = model_of(0, 20.0), model_of(1, 20.0)
    tokens = text_of(9, length=400)[0].numpy()
    guard = Guard({"base": base, "other": other})
    rises = evaluate(guard, tokens) - evaluate(base, tokens)
    assert rises <= guard.bound(CONTEXT) / CONTEXT + 1e-6
    assert evaluate(guard, tokens) - evaluate(other, tokens) <= guard.bound(CONTEXT) / CONTEXT + 1e-6
    written = [int(token) for token in generate(guard, torch.zeros(1, 3).long(), max_tokens=60, seed=0)]
    assert len(written) == 60
    alone = Guard({"base": base})
    assert alone.bound(1000) == 0
    torch.testing.assert_close(alone(text_of(1)), base(text_of(1)).log_softmax(-1), rtol=1e-5, atol=1e-5)


def test_gradients_flow():
    base, other = model_of(0), copy.deepcopy(model_of(1))
    tokens = text_of(0)
    torch.nn.functional.cross_entropy(
        Guard({"base": base, "o": other})(tokens)[0, :-1], tokens[0, 1:]
    ).backward()
    assert other.embedding.weight.grad.isfinite().all()
    assert other.embedding.weight.grad.any()


def test_mistakes():
    base = model_of(0)
    with pytest.raises(ValueError, match='must be called "base"'):
        Guard({"x": base})
    small = GPT(GPTConfig(vocab_size=7, context=CONTEXT, num_layers=1, num_heads=1, dim=8))
    with pytest.raises(ValueError, match="do not mix"):
        Guard({"base": base, "x": small})
    for wrong in (
        {"prior": 0.0},
        {"prior": 1.0},
        {"switch_rate": 1.0},
        {"pause": -1.0},
        {"window": 0},
        {"pause": 0.1, "switch_rate": 0.1},
        {"pause": 40.0},
    ):
        with pytest.raises(ValueError):
            Guard({"base": base}, **wrong)
