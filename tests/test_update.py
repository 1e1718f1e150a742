"""Patch-local steps: exact locality, agreement with torch's optimizers, caps, all or nothing."""

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_layer import build, every_variant

from attractor.continual.allocate import grow, reset_patch
from attractor.continual.config import UpdateConfig
from attractor.continual.delta import bits
from attractor.continual.update import (
    LocalUpdate,
    NotFiniteUpdate,
    all_finite,
    delta_of,
    most_specific,
    taught_patches,
    used_patches,
)
from attractor.layer import PATCH_ROLES, ROLES, RoutingStats

EVERYTHING_BY_PATCH = ("decoders", "gates", "prototypes")


def random_gradients(layer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def bytes_of(layer, update):
    return {k: v.clone() for k, v in (layer.state_dict() | update.state_dict()).items()}


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@every_variant
def test_untaught_patches_keep_their_bytes(variant, rule):
    """Hundreds of random steps; parameters and optimizer state alike, though every row has a gradient."""
    layer = build(**variant)
    trained = EVERYTHING_BY_PATCH
    update = LocalUpdate({0: layer}, UpdateConfig(train=trained, rule=rule, weight_decay=0.1, max_change=0.5))
    chance = torch.Generator().manual_seed(0)
    for step in range(200):
        random_gradients(layer, step)
        taught = (torch.rand(layer.num_patches, generator=chance) < 0.3).nonzero().flatten()
        before = bytes_of(layer, update)
        update.step({0: taught})
        after = bytes_of(layer, update)
        rest = torch.ones(layer.num_patches, dtype=torch.bool)
        rest[taught] = False
        for key, value in after.items():
            name = key.removeprefix("0.").rsplit(".", 1)[0] if key.startswith("0.") else key
            if ROLES[name] in PATCH_ROLES:
                assert torch.equal(value[rest], before[key][rest]), key
                if len(taught) and key in ("decoder", "gate_bias"):
                    assert not torch.equal(value[taught], before[key][taught]), key
            else:
                assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_what_an_attempt_changed_is_known_by_what_it_overwrote(rule):
    """Several steps, a patch that is made anew, growth: the rows that were written, as they are now."""
    layer = build(num_patches=8, top_k=2)
    trained = (*EVERYTHING_BY_PATCH, "encoder")
    update = LocalUpdate({0: layer}, UpdateConfig(train=trained, rule=rule))

    def named():
        return {**dict(layer.named_parameters()), **update.state_dict()}

    for taught, more in (([1, 5], None), ([], None), ([2], "forget"), ([0], "grow")):
        before, copied, undo = named(), bytes_of(layer, update), []
        for step in range(2):
            random_gradients(layer, step)
            update.step({0: torch.tensor(taught, dtype=torch.int64)}, undo=undo)
        if more == "forget":
            reset_patch(layer, 7, undo)
            update.forget(0, 7, undo)
        if more == "grow":
            grow(layer, undo)
            update.follow(0, undo)
        delta = delta_of(before, named(), undo)
        delta.check()
        delta.apply(copied)
        after = bytes_of(layer, update)
        assert all(torch.equal(bits(value), bits(copied[name])) for name, value in after.items())
        if more != "grow":
            rows = {row for numbers, _ in delta.rows.values() for row in numbers.tolist()}
            assert rows == {*taught, *([7] if more else [])}
            assert {ROLES[name.removeprefix("0.").split(".")[0]] for name in delta.whole} <= {"encoder"}


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_all_patches_at_once_or_row_by_row_are_the_same_bytes(rule):
    """In order they are taken as a whole, in another order they are gathered."""
    config = UpdateConfig(train=("decoders", "gates", "prototypes", "encoder"), rule=rule, weight_decay=0.1)
    layers = [build(), build()]
    updates = [LocalUpdate({0: layer}, config) for layer in layers]
    every = torch.arange(layers[0].num_patches)
    for step in range(5):
        for layer, update, taught in zip(layers, updates, (every, every.flip(0)), strict=True):
            random_gradients(layer, step)
            update.step({0: taught})
        whole, rows = (bytes_of(*pair) for pair in zip(layers, updates, strict=True))
        assert all(torch.equal(whole[key], rows[key]) for key in whole)


def test_a_step_on_all_patches_that_fails_midway_is_taken_back(monkeypatch):
    layer = build()
    update = LocalUpdate({0: layer}, UpdateConfig(train=("decoders", "gates", "encoder")))
    random_gradients(layer, 0)
    every = torch.arange(layer.num_patches)
    update.step({0: every})
    before = bytes_of(layer, update)

    def stops_after_three(targets, values):
        for target, value in zip(targets[:3], values[:3], strict=True):
            target.copy_(value)
        raise MemoryError

    monkeypatch.setattr(torch, "_foreach_copy_", stops_after_three)
    with pytest.raises(MemoryError):
        update.step({0: every})
    after = bytes_of(layer, update)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_gpu_makes_the_same_steps(share):
    """Bias corrections included: they are largest in the first steps, and each patch has its own."""
    layers = [build(), build().cuda()]
    config = UpdateConfig(train=("decoders", "gates", "prototypes", "encoder"), clip_norm=0.5)
    updates = [LocalUpdate({0: layer}, config) for layer in layers]
    chance = torch.Generator().manual_seed(0)
    for step in range(12):
        taught = (torch.rand(layers[0].num_patches, generator=chance) < share).nonzero().flatten()
        for layer, update in zip(layers, updates, strict=True):
            random_gradients(layer, step)
            update.step({0: taught})
        here, there = (bytes_of(*pair) for pair in zip(layers, updates, strict=True))
        for key, value in here.items():
            torch.testing.assert_close(there[key].cpu(), value, rtol=1e-4, atol=1e-6, msg=key)


def test_large_numbers_are_finite():
    """Their sum is not, but each of them is."""
    tensors = [torch.full((4,), 3e38), torch.ones(2)]
    assert all_finite(tensors)
    assert not all_finite([*tensors, torch.tensor([1.0, torch.nan])])
    assert not all_finite([torch.tensor([-torch.inf])])


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_teaching_every_patch_is_the_usual_optimizer(rule, clip_norm):
    """With a schedule and with clipped gradients, too."""
    layer = build()
    usual = copy.deepcopy(layer)
    roles = ("decoders", "gates", "prototypes", "encoder")
    update = LocalUpdate({0: layer}, UpdateConfig(train=roles, rule=rule, clip_norm=clip_norm))
    options = {"lr": 1e-2}
    optimizer = (
        torch.optim.SGD(usual.parameters(), **options)
        if rule == "sgd"
        else torch.optim.AdamW(usual.parameters(), betas=(0.9, 0.99), weight_decay=0.0, **options)
    )
    for step in range(20):
        random_gradients(layer, step)
        random_gradients(usual, step)
        update.learning_rate = optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 20)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(usual.parameters(), clip_norm)
        update.step({0: torch.arange(layer.num_patches)})
        optimizer.step()
    for ours, theirs in zip(layer.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_patch_counts_its_own_steps():
    """What a patch becomes depends on the steps it was taught in, not on those in between."""
    layer, other = build(), build()
    config = UpdateConfig(train=("decoders",))
    update, sparse = LocalUpdate({0: layer}, config), LocalUpdate({0: other}, config)
    for step in range(10):
        random_gradients(layer, step)
        random_gradients(other, step)
        update.step({0: torch.arange(layer.num_patches)} if step % 2 else {0: torch.tensor([1])})
        if step % 2:
            sparse.step({0: torch.tensor([0])})
    assert torch.equal(layer.decoder[0], other.decoder[0])
    assert not torch.equal(layer.decoder[1], other.decoder[1])


@given(st.floats(1e-3, 10), st.floats(1e-3, 10), st.sampled_from(["sgd", "adamw"]))
def test_caps(max_change, max_decoder, rule):
    layer = build()
    before = copy.deepcopy(layer)
    config = UpdateConfig(
        train=EVERYTHING_BY_PATCH,
        rule=rule,
        learning_rate=0.5,
        max_change=max_change,
        max_decoder=max_decoder,
    )
    update = LocalUpdate({0: layer}, config)
    random_gradients(layer, 3)
    taught = torch.tensor([0, 2])
    start = copy.deepcopy(layer)
    largest = update.step({0: taught})[0]
    moved = [
        (a - b)[taught].flatten(1)
        for a, b in zip(layer.parameters(), start.parameters(), strict=True)
        if a.shape[0] == layer.num_patches
    ]
    assert largest == pytest.approx(float(torch.cat(moved, 1).detach().norm(dim=1).max()), rel=1e-4, abs=1e-6)
    assert (layer.decoder[taught].flatten(1).norm(dim=1) <= max_decoder * (1 + 1e-5)).all()
    changes = [
        (new - old)[taught].flatten(1)
        for (name, new), old in zip(layer.named_parameters(), before.parameters(), strict=True)
        if ROLES[name] in ("gates", "prototypes")  # decoders may also shrink to their cap
    ]
    assert (torch.cat(changes, 1).norm(dim=1) <= max_change * (1 + 1e-5)).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_all_or_nothing(rule, bad):
    """The bad gradient is in the last layer: the first must not have learned either."""
    layers = {"first": build(), "second": build(seed=1)}
    update = LocalUpdate(layers, UpdateConfig(train=("decoders", "encoder"), rule=rule))
    for step in range(3):
        for layer in layers.values():
            random_gradients(layer, step)
        if step == 2:
            layers["second"].decoder.grad[1, 0, 0] = bad
        before = [bytes_of(layer, update) for layer in layers.values()]
        taught = {name: torch.tensor([0, 1]) for name in layers}
        if step < 2:
            update.step(taught)
            continue
        with pytest.raises(NotFiniteUpdate, match="nothing was changed"):
            update.step(taught)
        for layer, old in zip(layers.values(), before, strict=True):
            assert all(torch.equal(new, old[key]) for key, new in bytes_of(layer, update).items())
        update.step({"first": torch.tensor([0]), "second": torch.tensor([0])})  # the bad row is not asked for


def test_used_patches_of_unequal_layers():
    torch.manual_seed(0)
    nothing = torch.zeros(())
    stats = {}
    for number, (patches, active) in enumerate([(7, 2), (4, 3), (9, 1)]):
        indices = torch.rand(3, 5, patches).topk(active).indices
        indices[0, 0] = -1  # this token was not finite
        weights = torch.rand(3, 5, active)
        weights[weights < 0.3] = 0  # and these slots were dropped
        stats[number] = RoutingStats(indices, weights, nothing, nothing, nothing, nothing, nothing, patches)
    counted, admitted = torch.rand(3, 5) < 0.7, torch.rand(3, 5) < 0.5
    chosen, counts = used_patches(stats, counted, admitted)
    for number, found in stats.items():
        slots = [*itertools.product(range(3), range(5), range(found.indices.shape[-1]))]
        seen = [int(found.indices[slot]) for slot in slots if counted[slot[:2]]]
        taught = {
            int(found.indices[slot])
            for slot in slots
            if counted[slot[:2]] and admitted[slot[:2]] and found.weights[slot] > 0
        }
        assert counts[number].tolist() == [seen.count(patch) for patch in range(found.num_patches)]
        assert chosen[number].nonzero().flatten().tolist() == sorted(taught - {-1})


def test_taught_patches():
    layer = build(patch_dropout=0.5)
    x = torch.randn(3, 4, 12)
    x[0, 0, 0] = torch.nan
    _, stats = layer(x, return_stats=True)
    used = {int(i) for i, w in zip(stats.indices.flatten(), stats.weights.flatten(), strict=True) if w > 0}
    assert taught_patches(stats).tolist() == sorted(used)
    nobody = torch.zeros(3, 4, dtype=torch.bool)
    assert taught_patches(stats, nobody).tolist() == []
    one = nobody.clone()
    one[1, 2] = True
    kept = stats.indices[1, 2][stats.weights[1, 2] > 0]
    assert taught_patches(stats, one).tolist() == sorted(kept.tolist())


def test_most_specific():
    here, before = torch.tensor([50, 40, 10, 0]), torch.tensor([900, 0, 10, 90])
    patches = torch.tensor([0, 1, 2])
    assert most_specific(patches, here, before, 2).tolist() == [1, 2]
    assert most_specific(patches, here, before, 3) is patches


def test_state_travels():
    layer, other = build(), build(seed=5)
    config = UpdateConfig()
    update, fresh = LocalUpdate({0: layer}, config), LocalUpdate({0: other}, config)
    random_gradients(layer, 0)
    update.step({0: torch.tensor([1, 2])})
    fresh.load_state_dict(update.state_dict())
    assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in update.state_dict().items())
    broken = dict(update.state_dict())
    broken.popitem()
    with pytest.raises(ValueError, match="nothing was loaded"):
        fresh.load_state_dict(broken)


def test_mistakes():
    layer = build()
    with pytest.raises(ValueError, match="no APN layers"):
        LocalUpdate({}, UpdateConfig())
    with pytest.raises(ValueError, match=r"train: unknown roles \['decoder'\]; allowed: .*decoders"):
        UpdateConfig(train=("decoder",))
    with pytest.raises(ValueError, match="no parameters with the roles"):
        LocalUpdate({0: layer}, UpdateConfig(train=("base",)))
    with pytest.raises(ValueError, match="needs independent decoders"):
        LocalUpdate({0: build(decoder="shared")}, UpdateConfig(max_decoder=1.0))
    update = LocalUpdate({0: layer}, UpdateConfig())
    with pytest.raises(ValueError, match=r"call backward\(\) first"):
        update.step({0: torch.tensor([0])})
    random_gradients(layer, 0)
    with pytest.raises(ValueError, match="must lie in 0 to"):
        update.step({0: torch.tensor([layer.num_patches])})
    with pytest.raises(ValueError, match="unknown layers"):
        update.step({7: torch.tensor([0])})
    with pytest.raises(ValueError, match="has no patches"):
        LocalUpdate({0: layer}, UpdateConfig(train=("encoder",), max_change=1.0))
    for wrong in (
        {"train": "decoders"},
        {"train": ("gates",), "max_decoder": 1.0},
        {"train": ("gates",), "weight_decay": 0.1},
        {"max_change": 0.0},
        {"learning_rate": -1.0},
        {"train": ()},
        {"rule": "adam"},
    ):
        with pytest.raises(ValueError):
            UpdateConfig(**wrong)
    assert UpdateConfig.from_json(UpdateConfig(train=("gates",)).to_json()) == UpdateConfig(train=("gates",))


def test_float64_is_not_rounded():
    layer = build().double()
    update = LocalUpdate({0: layer}, UpdateConfig(rule="sgd", learning_rate=1e-30))
    random_gradients(layer, 0)
    before = copy.deepcopy(layer)
    update.step({0: torch.arange(layer.num_patches)})
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), before.parameters(), strict=True))


def test_follow_is_all_or_nothing(monkeypatch):
    """Memory runs out in the middle of resizing the optimizer's state."""
    layer = build()
    update = LocalUpdate({0: layer}, UpdateConfig(train=EVERYTHING_BY_PATCH))
    before = dict(update.state)
    original, calls, undo = torch.Tensor.new_zeros, [], []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError
        return original(*arguments, **options)

    layer.resize(layer.num_patches + 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", failing)
        with pytest.raises(MemoryError):
            update.follow(0, undo)
    for take_back in reversed(undo):
        take_back()
    assert update.state.keys() == before.keys()
    assert all(update.state[key] is value for key, value in before.items())


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_what_is_no_patch_may_learn_at_a_rate_of_its_own(rule):
    """Against torch's optimizer with two groups, over several steps."""
    layer = build()
    other = torch.nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    twin, twin_other = copy.deepcopy(layer), torch.nn.Parameter(other.detach().clone())
    config = UpdateConfig(train=("decoders",), rule=rule, learning_rate=0.1, others_rate=0.25)
    update = LocalUpdate({0: layer}, config, {"other": other})
    groups = [{"params": [twin.decoder], "lr": 0.1}, {"params": [twin_other], "lr": 0.025}]
    if rule == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups)
    else:
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(5):
        for own, leaf in ((layer, other), (twin, twin_other)):
            random_gradients(own, step)
            leaf.grad = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(step))
        update.step({0: torch.arange(layer.num_patches)})
        optimizer.step()
    torch.testing.assert_close(layer.decoder, twin.decoder)
    torch.testing.assert_close(other, twin_other)
