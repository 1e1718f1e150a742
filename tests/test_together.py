"""Paths that share memory, run as one batch, predict what they predict alone."""

import copy
import random

import pytest
import torch

from attractor.config import APNConfig, GPTConfig
from attractor.continual.guard import Guard
from attractor.continual.overlay import Branch
from attractor.continual.together import Together
from attractor.model import GPT

VOCABULARY, CONTEXT = 13, 24


def base_of(seed=0, sharpness=1.0, **changes):
    torch.manual_seed(seed)
    config = GPTConfig(
        vocab_size=VOCABULARY,
        context=CONTEXT,
        num_layers=3,
        num_heads=2,
        dim=8,
        ffn="apn",
        apn=APNConfig(num_patches=6, top_k=2, rank=4),
        per_layer={"1": {"ffn": "mlp"}},
        **changes,
    )
    model = GPT(config)
    with torch.no_grad():
        model.embedding.weight.mul_(sharpness)
    return model.eval().requires_grad_(False)


def branch_of(base, seed, **options):
    branch = Branch(base, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        own = [layer.get_parameter(name) for _, layer, name in branch._own()]
        for parameter in [*branch.others.values(), *own]:
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return branch.model.eval().requires_grad_(False)


def tokens_of(seed, batch=2, length=CONTEXT):
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ["off", "low_rank", "whole"])
@pytest.mark.parametrize("also", [(), ("norms",), ("embedding",)])
def test_one_batch_is_every_path_alone(attention, also):
    base = base_of()
    paths = [base, *(branch_of(base, seed, attention=attention, also=also) for seed in (1, 2))]
    together, tokens = Together(paths), tokens_of(0)
    assert together.worthwhile == (attention == "off" and "embedding" not in also)
    guard = Guard({str(i) if i else "base": path for i, path in enumerate(paths)})
    alone = torch.stack([path(tokens) for path in paths])
    torch.testing.assert_close(guard._predictions(tokens), alone.log_softmax(-1))
    if "embedding" in also:
        return  # not one batch: the guard asks each path
    torch.testing.assert_close(together(tokens), alone)
    cache = together.new_cache(2)
    own = cache.split(3)
    pieces = [together(piece, cache, own) for piece in tokens.split([5, 1, 1, 9, 8], 1)]
    torch.testing.assert_close(torch.cat(pieces, 2), alone, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="do not fit"):
        together(tokens[:, :1], cache, own)


def test_one_goes_on_alone_and_comes_back():
    base = base_of()
    paths = [base, branch_of(base, 1)]
    together, tokens = Together(paths), tokens_of(1)
    cache = together.new_cache(2)
    own = cache.split(2)
    together(tokens[:, :9], cache, own)
    alone = torch.cat([paths[1](token, cache=own[1]) for token in tokens[:, 9:15].split(1, 1)], 1)
    torch.testing.assert_close(alone, paths[1](tokens)[:, 9:15])
    paths[0](tokens[:, 9:15], cache=own[0])  # reads what it missed
    cache.length = 15
    torch.testing.assert_close(
        together(tokens[:, 15:], cache, own), torch.stack([path(tokens)[:, 15:] for path in paths])
    )


def test_paths_of_one_batch_rest_and_wake():
    """Text of the one, then of the other: the base rests, wakes, and the mixture is nearly exact."""
    base = base_of(sharpness=40.0)
    paths = {"base": base, "other": branch_of(base, 1)}
    text = tokens_of(3, batch=1, length=1)
    for sign in [1] * 8 + [-1] * 15:  # what the one finds likelier than the other does
        told = [paths[name](text)[:, -1:].log_softmax(-1) for name in ("other", "base")]
        text = torch.cat([text, (sign * (told[0] - told[1])).argmax(-1)], 1)
    seen = []
    for pause in (0.0, 8.0):
        cache = Guard(paths, pause=pause).new_cache(1)
        out, rests = [], []
        for token in text.split(1, 1):
            out.append(cache.read(token))
            rests.append(set(cache.at_rest))
        seen.append((torch.cat(out, 1)[:, :-1].gather(-1, text[:, 1:, None]).sum(), rests))
    (exact, never), (rested, sometimes) = seen
    assert not any(never)
    assert {0} in sometimes
    assert sometimes[-1] != {0}  # the base woke up when the text became its own
    assert exact - rested <= 8.0


def test_paths_that_do_not_fit_together():
    base = base_of()
    assert not Together([base]).worthwhile
    assert not Together([base, base_of(seed=1)]).worthwhile  # nothing shared

    class Other(GPT):
        pass

    assert not Together([base, Other(base.config)]).worthwhile


def test_paths_that_only_look_alike():
    """The same memory, another factor on the updates: not one model."""
    base = base_of()
    alias = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
    for layer in alias.apn_layers().values():
        layer.set_scale_factor(0.0)
    guard, tokens = Guard({"base": base, "other": alias}), tokens_of(0)
    alone = torch.stack([path(tokens).log_softmax(-1) for path in guard.paths])
    torch.testing.assert_close(guard._predictions(tokens), alone)


TRIALS = (0, 1, 3, 6, 7, 8, 11, 13, 14, 16, 18, 19, 21, 25, 30, 32, 35, 38)
"""Of forty, those that hold every pair of sharpness, attention, batch, window and pause that the forty do."""


@pytest.mark.parametrize("trial", TRIALS)
def test_several_texts_rest_and_wake_together(trial):
    """Texts that change their author in between, read in pieces: within the pause and within the bound.

    And whoever woke up has the evidence that it would have had awake.
    """
    chance = random.Random(trial)
    base = base_of(seed=trial % 5, sharpness=chance.choice([5.0, 20.0, 40.0, 80.0]))
    attention = chance.choice(["off", "whole", "low_rank"])
    paths = {"base": base} | {f"o{i}": branch_of(base, i + 1, attention=attention) for i in range(2)}
    batch, window, pause = chance.choice([1, 2, 3]), chance.choice([None, 11]), chance.choice([0.5, 2.0, 4.0])
    text, authors = (
        tokens_of(trial, batch=batch, length=1),
        [chance.choice(list(paths)) for _ in range(batch)],
    )
    for _ in range(CONTEXT - 1):
        if chance.random() < 0.15:
            authors = [chance.choice(list(paths)) for _ in range(batch)]
        following = [paths[name](text[row : row + 1])[:, -1:].argmax(-1) for row, name in enumerate(authors)]
        text = torch.cat([text, torch.cat(following)], 1)
    exact, resting = (Guard(paths, window=window, pause=nats) for nats in (0.0, pause))
    caches = [guard.new_cache(batch) for guard in (exact, resting)]
    outs, place = ([], []), 0
    while place < CONTEXT:
        count = chance.choice([1, 1, 1, 1, 3])
        for cache, out in zip(caches, outs, strict=True):
            out.append(cache.read(text[:, place : place + count]))
        place += count
        awake = sorted(set(range(3)) - caches[1].at_rest)
        odds = [cache.evidence[awake].log_softmax(0) for cache in caches]  # all that evidence is good for
        torch.testing.assert_close(*odds, rtol=1e-3, atol=1e-2)

    def given(out):
        return torch.cat(out, 1)[:, :-1].gather(-1, text[:, 1:, None])[..., 0].sum(1)

    windows = -(-CONTEXT // resting.window)
    assert (given(outs[0]) - given(outs[1]) <= pause * windows + 1e-3).all()
    alone = base(text).log_softmax(-1)[:, :-1].gather(-1, text[:, 1:, None])[..., 0].sum(1)
    assert (alone - given(outs[1]) <= resting.bound(CONTEXT) + 1e-3).all()
