"""Paths that share memory, run as one batch, predict what they predict alone."""

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
        vocab_size=VOCABULARY, context=CONTEXT, num_layers=3, num_heads=2, dim=8, ffn="apn",
        apn=APNConfig(num_patches=6, top_k=2, rank=4), per_layer={"1": {"ffn": "mlp"}}, **changes,
    )  # fmt: skip
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
        return
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
    for name in ["other"] * 6 + ["base"] * 17:
        text = torch.cat([text, paths[name](text)[:, -1:].argmax(-1)], 1)
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
