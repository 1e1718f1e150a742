"""OnlineLearner when something goes wrong: all or nothing, files, damage, kills."""

import copy
import json

import pytest
import torch
from test_learner import assert_same, learner_of, state_of, stream

from attractor.continual.config import AllocationConfig, GateConfig
from attractor.continual.learner import OnlineLearner
from attractor.continual.update import NotFiniteUpdate
from attractor.model import GPT

STAGES = {
    "forward": ("attractor.model.GPT.forward", 1),
    "second layer": ("attractor.layer.APN.forward", 2),
    "gates": ("attractor.continual.learner.admit", 1),
    "gradients": ("torch.autograd.grad", 1),
    "planning the last layer": ("attractor.continual.update.LocalUpdate._place", 2),
    "writing": ("attractor.continual.update.write_rows", 3),
    "writing late": ("attractor.continual.update.write_rows", 10),
    "prototypes": ("attractor.continual.prototypes.write_rows", 2),
    "allocating the second": ("attractor.continual.allocate.Allocator.allocate", 2),
    "growing": ("attractor.continual.update.LocalUpdate.follow", 1),
    "in the middle of growing": ("torch.Tensor.new_zeros", 6),
    "after growing": ("attractor.continual.allocate.write_rows", 1),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("pending", [False, True])
def test_all_or_nothing(stage, pending, monkeypatch):
    """A failure at any stage leaves model, optimizer, counters and waiting tokens as they were."""
    learner = learner_of(
        budget=12,
        prototype_rate=0.05,
        allocation=AllocationConfig(mode="grow", novelty=100.0, window=1, cooldown=13),
    )
    learner.observe(stream(25))
    assert learner.totals.updates == 2
    assert learner.totals.allocations == 2  # once in both layers
    if pending:
        learner.observe(stream(5, seed=1))
        assert learner.gathered.tokens == 6
    before = state_of(learner) | around(learner)
    target, call = STAGES[stage]
    original = _find(target)
    calls = []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            raise MemoryError("injected")
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(target, failing)
        with pytest.raises(MemoryError, match="injected"):
            learner.observe(stream(11 - 5 * pending, seed=2))
    assert_same(state_of(learner) | around(learner), before)
    twin = copy.deepcopy(learner)
    assert learner.observe(stream(11 - 5 * pending, seed=2)).updates == 1
    twin.observe(stream(11 - 5 * pending, seed=2))
    assert_same(state_of(learner), state_of(twin))


def around(learner):
    """What is not the learner's own state, and must not be disturbed either."""
    return {
        "random": torch.get_rng_state(),
        "modes": [module.training for module in learner.model.modules()],
        "gradients": [parameter.grad for parameter in learner.model.parameters()],
        "trained": [parameter.requires_grad for parameter in learner.model.parameters()],
        "hooks": [len(layer._forward_pre_hooks) for layer in learner.layers.values()],
    }


def test_a_failure_after_a_change_of_source(monkeypatch):
    learner = learner_of(budget=4)
    learner.observe(stream(12), source="first")
    before = state_of(learner)
    monkeypatch.setattr(learner, "_score", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        learner.observe(stream(5), source="second")
    assert_same(state_of(learner), before)


def _find(dotted):
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = __import__(".".join(parts[:cut]), fromlist=["_"])
        except ImportError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise AssertionError(dotted)


def test_a_failed_piece_tells_what_was_learned_before():
    learner = learner_of(budget=8)
    original, calls = learner._score, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise NotFiniteUpdate("injected")
        return original(*arguments)

    learner._score = failing
    with pytest.raises(NotFiniteUpdate) as caught:
        learner.observe(stream(40))
    assert caught.value.observed.updates == 2
    assert caught.value.observed.tokens == learner.totals.tokens == 16


def test_not_finite():
    learner = learner_of()
    learner.observe(stream(20))
    before = state_of(learner)
    with torch.no_grad():
        kept = learner.model.norm.weight.clone()
        learner.model.norm.weight[0] = torch.nan
    with pytest.raises(NotFiniteUpdate, match="loss of this text is not finite"):
        learner.observe(stream(20))
    with torch.no_grad():
        learner.model.norm.weight.copy_(kept)
    assert_same(state_of(learner), before)


@pytest.mark.parametrize("mode", ["off", "grow", "replace"])
def test_files(mode, tmp_path):
    """Saved and loaded, a learner goes on exactly as it would have."""
    allocation = AllocationConfig(mode=mode, novelty=100.0, window=1, cooldown=20)
    learner = learner_of(budget=8, allocation=allocation, gates=GateConfig(max_surprise=4.0))
    learner.observe(stream(300), source="web")
    assert (learner.totals.allocations > 3) == (mode != "off")
    learner.save(tmp_path / "saved")
    assert learner.gathered.tokens == 0
    loaded = OnlineLearner.load(tmp_path / "saved")
    assert_same(state_of(loaded), state_of(learner))
    assert loaded.config == learner.config
    for one in (learner, loaded):
        one.observe(stream(100, seed=1), source="web")
    assert_same(state_of(loaded), state_of(learner))
    GPT.from_pretrained(tmp_path / "saved")
    learner.save(tmp_path / "saved")  # over an old one
    (tmp_path / "saved" / "learner.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged learner"):
        OnlineLearner.load(tmp_path / "saved")


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("totals"),
        lambda state: state.update(history=[10**6]),
        lambda state: state.update(history="x"),
        lambda state: state["totals"].update(tokens=-1),
        lambda state: state["totals"].update(surprise=[1]),
        lambda state: state.update(unfamiliar={"0": "a"}),
        lambda state: state.update(most={"0": 1.5, "1": 1}),
        lambda state: state.update(notes=3),
        lambda state: state["config"].update(budget=-4),
        lambda state: state.update(config=7),
    ],
)
def test_damaged_learners_are_refused(damage, tmp_path):
    learner = learner_of()
    learner.observe(stream(40))
    learner.save(tmp_path / "saved")
    path = tmp_path / "saved" / "learner.json"
    state = json.loads(path.read_text())
    damage(state)
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"damaged learner.*learner\.json is not what was saved"):
        OnlineLearner.load(tmp_path / "saved")
    path.with_name("hashes.json").unlink()
    with pytest.raises(ValueError, match="damaged learner"):
        OnlineLearner.load(tmp_path / "saved")


def test_a_kill_while_saving_loses_nothing(tmp_path):
    """Between the two renames of a replacement, and after them."""
    learner = learner_of()
    learner.save(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / ".replaced-saved")
    OnlineLearner.load(tmp_path / "saved")
    learner.save(tmp_path / "saved")
    learner.save(tmp_path / ".replaced-saved")
    learner.save(tmp_path / "saved")
    assert not (tmp_path / ".replaced-saved").exists()
