"""Changing the number of patches, in place and while loading a checkpoint."""

import copy

import pytest
import torch
from test_layer import build, every_variant
from torch import nn

from attractor import APN, load_resized


@every_variant
def test_resize(variant):
    layer = build(**variant)
    grown = copy.deepcopy(layer)
    grown.prototypes.requires_grad_(False)
    grown.resize(14)
    assert grown.num_patches == grown.config.num_patches == 14
    assert not grown.prototypes.requires_grad
    x = torch.randn(30, 12)
    _, stats = grown(x, return_stats=True)
    old_only = (stats.indices < 10).all(-1)
    assert old_only.any()
    assert (stats.indices >= 10).any()
    torch.testing.assert_close(grown(x)[old_only], layer(x)[old_only])
    with pytest.raises(ValueError, match=r"would drop the last 4 .* resize\(10, shrink=True\) does that"):
        grown.resize(10)
    assert grown.num_patches == 14
    grown.resize(10, shrink=True)
    assert torch.equal(grown(x), layer(x))
    with pytest.raises(ValueError, match="top_k=3 must not exceed num_patches=2"):
        grown.resize(2, shrink=True)
    assert grown.num_patches == grown.config.num_patches == 10


@pytest.mark.parametrize("decoder", ["independent", "shared"])
def test_appended_patches_add_nothing_of_their_own(decoder):
    layer = build(top_k=2, decoder=decoder)
    layer.resize(200)
    x = torch.randn(300, 12)
    update, stats = layer(x, return_stats=True)
    all_new = (stats.indices >= 10).all(-1)
    assert all_new.any()
    expected = torch.zeros_like(update)
    if decoder == "shared":  # new patches have fresh gates: slope 1, bias 0
        u = x @ layer.encoder
        expected = u * u.sigmoid() @ layer.decoder_base
    torch.testing.assert_close(update[all_new], expected[all_new])


def test_resize_changes_everything_or_nothing(monkeypatch):
    layer = build()
    before = copy.deepcopy(layer.state_dict())
    monkeypatch.setattr(APN, "_start", None)
    with pytest.raises(TypeError):
        layer.resize(20)
    assert layer.config.num_patches == 10
    assert {name: value.shape for name, value in layer.state_dict().items()} == {
        name: value.shape for name, value in before.items()
    }


def test_load_resized_takes_ordinary_models():
    class Model(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.first = self.second = layer  # shared weights appear twice in a state dict

        def get_extra_state(self):
            return {"epoch": 3}

        def set_extra_state(self, state):
            self.epoch = state["epoch"]

    small, big = Model(build()), Model(build(num_patches=16, seed=1))
    load_resized(small, big.state_dict())
    assert small.first is small.second
    assert small.epoch == 3
    x = torch.randn(3, 12)
    assert torch.equal(small.first(x), big.first(x))
    empty = build(device="meta")
    load_resized(empty, big.first.state_dict(), assign=True)
    assert torch.equal(empty(x), big.first(x))


def test_load_hooks_may_change_the_patch_count():
    layer, state = build(), build(num_patches=16).state_dict()

    def trim(module, state_dict, prefix, *_):
        for name in ("prototypes", "gate_slope", "gate_bias", "decoder"):
            state_dict[prefix + name] = state_dict[prefix + name][:10]

    layer.register_load_state_dict_pre_hook(trim)
    layer.load_state_dict(state)
    assert torch.equal(layer.decoder, state["decoder"][:10])


def test_loading_another_patch_count():
    big = nn.Sequential(nn.Linear(12, 12), build(num_patches=16, decoder="shared"))
    small = nn.Sequential(nn.Linear(12, 12), build(seed=1, decoder="shared"))
    x = torch.randn(5, 12)
    with pytest.raises(RuntimeError, match=r"1 holds 10 patches, the checkpoint 16: attractor\.load_resized"):
        small.load_state_dict(big.state_dict())
    load_resized(small, big.state_dict())
    assert torch.equal(small(x), big(x))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("encoder"), r"encoder: the model has \(12, 4\), the checkpoint nothing"),
        (
            lambda state: state.pop("prototypes"),
            r"prototypes: the model has \(10, 12\), the checkpoint nothing",
        ),
        (lambda state: state.update(extra=torch.ones(1)), r"extra: the model has nothing"),
        (lambda state: state.update(encoder=torch.ones(12, 5)), r"encoder: .*\(12, 5\)"),
        (lambda state: state.update(decoder=torch.ones(10, 4, 12)), r"decoder: the model has \(16, 4, 12\)"),
        (lambda state: state.update(prototypes=torch.ones(2, 12)), r"top_k=3 must not exceed num_patches=2"),
        (lambda state: state.update(prototypes=torch.ones(())), r"prototypes: the model has \(10, 12\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(damage, message):
    layer, state = build(), build(num_patches=16).state_dict()
    before = copy.deepcopy(layer.state_dict())
    damage(state)
    with pytest.raises(ValueError, match=message):
        load_resized(layer, state)
    assert layer.num_patches == 10
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
