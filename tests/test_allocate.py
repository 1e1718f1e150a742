"""Allocation: when, where the new prototype points, what it replaces, and what exactly changes."""

import copy

import pytest
import torch
from test_layer import build

from attractor.continual.allocate import Allocator
from attractor.continual.config import AllocationConfig, GateConfig, UpdateConfig
from attractor.continual.gates import WARM_UP, Surprise, admit
from attractor.continual.update import LocalUpdate

DIM = 12


def scene(mode="grow", novelty=100.0, count=40, layer=None, **config):
    layer = layer or build(num_patches=8, top_k=2)
    settings = AllocationConfig(mode=mode, novelty=novelty, **({"window": 40, "cooldown": 100} | config))
    allocator = Allocator({0: layer}, settings)
    update = LocalUpdate({0: layer}, UpdateConfig(train=("decoders", "gates", "prototypes")))
    torch.manual_seed(3)
    return layer, allocator, update, look(allocator, torch.randn(count, layer.dim))


def look(allocator, inputs, indices=None, confidence=None):
    with torch.no_grad():
        _, stats = allocator.layers[0](inputs, return_stats=True)
    confidence = stats.confidence if confidence is None else torch.full_like(stats.confidence, confidence)
    return allocator.outlook(0, inputs, stats.indices if indices is None else indices, confidence)


def allocate(allocator, update, seen, token, undo=None):
    habits, event = allocator.allocate(
        0, allocator.habits[0], seen, token, update, [] if undo is None else undo
    )
    allocator.habits[0] = habits
    return event


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"decoder": "shared"},
        {"gate": "scalar"},
        {"layer_norm": True},
        {"prototypes": "contextual", "routing_groups": 2},
    ],
    ids=str,
)
def test_growth(variant):
    layer = build(num_patches=8, top_k=2, **variant)
    layer, allocator, update, seen = scene(layer=layer)
    before = copy.deepcopy(layer)
    event = allocate(allocator, update, seen, token=0)
    assert (event.mode, event.reason, event.patch, layer.num_patches) == ("grow", "novelty", 8, 9)
    for name, value in layer.named_parameters():
        old = dict(before.named_parameters())[name]
        assert torch.equal(value[: len(old)], old), name  # nothing else moved
    # the prototype points where the tokens point on average
    direction = torch.nn.functional.normalize(layer.represent(seen.inputs).mean(0), dim=0)
    assert torch.allclose(torch.nn.functional.normalize(layer.prototypes[8], dim=0), direction, atol=1e-5)
    assert update.state["0.prototypes.mean"].shape[0] == 9
    assert (layer.decoder if layer.decoder is not None else layer.offset_out)[8].abs().max() == 0
    assert allocator.habits[0].usage.sum() == pytest.approx(1)
    # the event tells the truth about what changed
    with torch.no_grad():
        after, stats = layer(seen.inputs, return_stats=True)
        base = before(seen.inputs)
    takes = (stats.indices == 8).any(-1)
    assert event.selected_by == pytest.approx(float(takes.double().mean()))
    assert torch.allclose(after[~takes], base[~takes], atol=1e-6)
    assert event.moved == pytest.approx(float((after - base).norm() / base.norm()), rel=1e-4)


def test_replacement_takes_the_least_used():
    layer, allocator, update, seen = scene(mode="replace", usage_horizon=10)
    counts = torch.tensor([5, 5, 5, 0, 5, 5, 5, 5])
    allocator.habits[0] = allocator.with_usage(0, counts, tokens=20)
    before = copy.deepcopy(layer)
    for state in update.state.values():
        state.fill_(3)
    event = allocate(allocator, update, seen, token=0)
    assert event.patch == 3
    assert event.replaced_usage == pytest.approx(float(1 / 8 * 0.9**20), rel=1e-6)
    rest = torch.arange(8) != 3
    for name, old in before.named_parameters():
        if name in ("prototypes", "decoder", "gate_slope", "gate_bias"):
            assert torch.equal(dict(layer.named_parameters())[name][rest], old[rest])
    assert not layer.decoder[3].any()
    assert not update.state["0.decoder.mean"][3].any()
    assert update.state["0.decoder.steps"].tolist() == [3, 3, 3, 0, 3, 3, 3, 3]
    # it is neither the least used now, nor may it be recycled before it has rested
    later = look(allocator, seen.inputs)
    assert allocate(allocator, update, later, token=50) is None
    assert allocate(allocator, update, later, token=120).patch != 3


def test_only_after_a_window_of_low_confidence():
    layer, allocator, update, seen = scene(window=100)
    for token, confidence, expected in (
        (0, 1.0, False),
        (40, 1.0, False),
        (80, 1e3, False),
        (120, 1.0, False),
        (160, 1.0, False),
        (200, 1.0, True),
        (240, 1.0, False),
        (290, 1.0, False),
        (310, 1.0, True),
    ):
        now = look(allocator, seen.inputs, confidence=confidence)
        assert (allocate(allocator, update, now, token) is not None) == expected, token
    assert layer.num_patches == 10


def test_outlooks_add_up():
    _, allocator, _, seen = scene(novelty=3.0)
    parts = [look(allocator, piece) for piece in seen.inputs.split([7, 20, 13])]
    total = parts[0] + parts[1] + parts[2]
    assert total.tokens == seen.tokens == 40
    assert total.confidence == pytest.approx(seen.confidence)
    for name in ("far", "busy", "inputs"):
        assert torch.allclose(getattr(total, name), getattr(seen, name), atol=1e-5), name


def test_growth_ends():
    _, allocator, update, seen = scene(most_patches=9, cooldown=1)
    layer = allocator.layers[0]
    events = [allocate(allocator, update, look(allocator, seen.inputs), token) for token in range(0, 400, 40)]
    assert sum(event is not None for event in events) == 1
    assert layer.num_patches == 9


def test_a_target_usage_can_be_kept():
    """Recycle a patch that nobody uses, next to the busiest one, though everything is familiar."""
    _, allocator, update, seen = scene(mode="replace", novelty=-1e9, min_share=0.5, usage_horizon=10)
    allocator.habits[0] = allocator.with_usage(0, torch.tensor([30, 9, 9, 9, 9, 0, 9, 9]), tokens=100)
    busiest = look(allocator, seen.inputs, indices=torch.zeros(40, 2, dtype=torch.int64))
    event = allocate(allocator, update, busiest, token=0)
    assert (event.reason, event.patch) == ("idle", 5)
    assert event.selected_by > 0


def test_taking_back():
    for mode in ("grow", "replace"):
        layer, allocator, update, seen = scene(mode=mode)
        parameters, config = dict(layer.named_parameters()), layer.config
        before = {k: v.clone() for k, v in layer.state_dict().items()}
        state = {k: v.clone() for k, v in update.state.items()}
        undo = []
        assert allocate(allocator, update, seen, token=0, undo=undo) is not None
        for take_back in reversed(undo):
            take_back()
        assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
        assert all(torch.equal(v, state[k]) for k, v in update.state.items())
        assert layer.config == config
        assert dict(layer.named_parameters()).keys() == parameters.keys()


def test_off_never_allocates():
    _, allocator, update, seen = scene(mode="off")
    assert allocate(allocator, update, seen, token=0) is None


def test_gates_one_by_one():
    logits = torch.tensor([[0.0, 0, 0, 0], [9.0, 0, 0, 0], [1.0, 0, 0, 0], [0.0, 0, 0, 0]])[None]
    losses = torch.tensor([[1.0, 1.0, 50.0, 1.0]])
    confidence = torch.tensor([[5.0, 5.0, 5.0, torch.nan]])
    candidates = torch.tensor([[True, True, True, True]])

    def ask(surprise=Surprise(), **config):  # noqa: B008 (a tuple)
        return admit(GateConfig(**config), candidates, losses, logits, confidence, surprise)

    assert ask().admitted.tolist() == [[True, True, True, False]]
    assert ask().held_back == {"not_routed": 1}
    assert ask(max_entropy=1.35).admitted.tolist() == [[False, True, True, False]]
    assert ask(min_entropy=0.1).admitted.tolist() == [[True, False, True, False]]
    assert not ask(min_confidence=5.1).admitted.any()
    assert ask(max_surprise=2.0).admitted.tolist() == [[True, True, True, False]]  # too early to tell
    usual = Surprise().after(torch.rand(WARM_UP))
    assert ask(usual, max_surprise=1.0).held_back["max_surprise"] == 4
    assert ask(usual, max_surprise=10.0).held_back["max_surprise"] == 1


def test_surprise_is_a_mean_and_a_deviation():
    losses = torch.randn(4000) * 2 + 5
    together = Surprise().after(losses)
    pieces = Surprise()
    for piece in losses.split(100):
        pieces = pieces.after(piece)
    for one in (together, pieces):
        assert one.limit(0.0) == pytest.approx(float(losses.mean()), rel=1e-6)
        assert one.limit(1.0) - one.limit(0.0) == pytest.approx(float(losses.std(correction=0)), rel=1e-4)
    assert Surprise().after(losses[:0]) == Surprise()
