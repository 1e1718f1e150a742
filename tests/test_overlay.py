"""Overlays: the base keeps its bytes, what changed is exactly what is kept, all of it can be taken back."""

import dataclasses
import hashlib
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from test_learner import TOKENIZER, model_of, stream

from attractor.continual.config import AllocationConfig, GuardConfig, LearnConfig, UpdateConfig
from attractor.continual.delta import Delta
from attractor.continual.guard import Guard
from attractor.continual.guarded import GuardedLearner
from attractor.continual.learner import OnlineLearner
from attractor.continual.overlay import Branch, Overlay, fingerprint
from attractor.continual.update import LocalUpdate
from attractor.evaluate import evaluate

KINDS = {
    "patches": {},
    "encoder": {"train": ("decoders", "gates", "encoder")},
    "prototypes": {"train": ("decoders", "prototypes")},
    "low rank": {"attention": "low_rank"},
    "whole attention": {"attention": "whole"},
    "everything": {"attention": "whole", "also": ("embedding", "norms")},
    "embedding": {"attention": "low_rank", "also": ("embedding",)},
    "grown": {"allocation": {"mode": "grow", "novelty": 100.0, "window": 1, "cooldown": 40}},
    "recycled": {"allocation": {"mode": "replace", "novelty": 100.0, "window": 1, "cooldown": 40}},
    "following": {"prototype_rate": 0.1},
    "norm": {"train": ("decoders", "norm")},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def guarded(kind="patches", seed=0, **options):
    given = dict(KINDS[kind])
    update = UpdateConfig(train=given.pop("train", ("decoders", "gates")), learning_rate=1e-2)
    allocation = AllocationConfig(**given.pop("allocation", {"mode": "off"}))
    learn = LearnConfig(
        update=update, allocation=allocation, budget=8, prototype_rate=given.pop("prototype_rate", 0.0)
    )
    model = model_of(seed, layer_norm=kind == "norm")
    return GuardedLearner(model, TOKENIZER, GuardConfig(learn=learn, **given, **options))


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


@every_kind
def test_the_base_keeps_its_bytes(kind):
    learner = guarded(kind)
    before, predicted = weights(learner.base), learner.perplexity(stream(64))
    learner.observe(stream(64), source="web")
    learner.observe(stream(40, seed=1), source="mail")
    assert same(weights(learner.base), before)
    assert not same(weights(learner.sources["web"].branch.model), before)
    assert learner.perplexity(stream(64)) != predicted
    for name in ("web", "mail"):
        learner.drop(name)
    assert fingerprint(learner.base) == learner.base_hash
    assert learner.perplexity(stream(64)) == predicted
    assert same(weights(learner.base), before)


@every_kind
def test_an_overlay_is_exactly_what_changed(kind):
    """Applied to a fresh branch it gives the same weights; and it holds no row that the base has too."""
    learner = guarded(kind)
    learner.observe(stream(64), source="web")
    branch = learner.sources["web"].branch
    overlay = branch.overlay()
    base = weights(learner.base)
    for name, (numbers, rows) in overlay.delta.rows.items():
        for number, row in zip(numbers.tolist(), rows, strict=True):
            assert number >= len(base[name]) or not torch.equal(row, base[name][number])
    assert overlay.nbytes > 0
    fresh = Branch(
        learner.base,
        roles=learner.config.learn.update.train,
        attention=learner.config.attention,
        also=learner.config.also,
        seed=7,
    )
    fresh.apply(overlay)
    assert same(weights(fresh.model), weights(branch.model))
    fresh.apply(None)
    tokens = torch.from_numpy(stream(8))[None]
    assert torch.equal(fresh.model.eval()(tokens), learner.base(tokens))
    assert fresh.overlay().nbytes == 0


def test_size_is_what_was_touched():
    learner = guarded()
    learner.observe(stream(200)[:9], source="web")  # one update
    told = learner.overlays()["web"]
    row = sum(p[0].nbytes for n, p in learner.base.apn_layers()[0].named_parameters() if n != "prototypes")
    row -= learner.base.apn_layers()[0].encoder[0].nbytes
    patches = sum(told["patches"].values())
    assert patches < 24
    assert told["bytes"] <= patches * (row + 3 * 8)


@every_kind
def test_files(kind, tmp_path):
    learner = guarded(kind)
    learner.observe(stream(64), source="web")
    learner.observe(stream(40, seed=1), source="mail")
    learner.save(tmp_path / "saved")
    loaded = GuardedLearner.load(tmp_path / "saved")
    assert loaded.config == learner.config
    assert loaded.overlays().keys() == learner.overlays().keys()
    for name, held in learner.sources.items():
        assert same(weights(loaded.sources[name].branch.model), weights(held.branch.model))
        assert loaded.overlays()[name]["kept"] == learner.overlays()[name]["kept"]
    assert loaded.perplexity(stream(50, seed=3)) == learner.perplexity(stream(50, seed=3))
    learner.export("web", tmp_path / "web")
    other = guarded(kind)
    other.import_overlay(tmp_path / "web", "imported")
    assert same(weights(other.sources["imported"].branch.model), weights(learner.sources["web"].branch.model))
    with pytest.raises(ValueError, match="another base"):
        guarded(kind, seed=1).import_overlay(tmp_path / "web", "imported")


def test_rollback_is_exact():
    learner = guarded("encoder", keep_versions=5)
    seen = []
    for step in range(8):
        learner.observe(stream(16, seed=step), source="web")
        seen.append(weights(learner.sources["web"].branch.model))
    assert learner.overlays()["web"]["kept"] == [4, 5, 6, 7, 8]
    learner.rollback("web", 6)
    assert same(weights(learner.sources["web"].branch.model), seen[5])
    assert learner.overlays()["web"]["kept"] == [4, 5, 6]
    learner.observe(stream(16, seed=9), source="web")
    assert learner.overlays()["web"]["version"] == 7
    with pytest.raises(ValueError, match="version 8 of 'web' is not kept"):
        learner.rollback("web", 8)


def test_forgetting_a_source_is_exact():
    learner, twin = guarded(), guarded()
    learner.observe(stream(100), source="a")
    twin.observe(stream(100), source="a")
    learner.observe(stream(100, seed=1), source="b")
    assert "100 tokens of 'b'" in learner.forget("b")
    assert learner.perplexity(stream(64)) == twin.perplexity(stream(64))
    with pytest.raises(ValueError, match="nothing is kept apart for 'b'"):
        learner.forget("b")


def test_the_guard_protects_and_lets_learn():
    """B improves nearly as much as unguarded, and A costs no more than the bound."""
    learner = guarded("encoder")
    with torch.no_grad():
        learner.base.embedding.weight.mul_(20)
    learner = GuardedLearner(learner.base, TOKENIZER, learner.config)
    a, b = stream(400), TOKENIZER.encode("abcdefghij" * 120)
    before = evaluate(learner.base, a)
    learner.observe(b, source="b")
    path = learner.sources["b"].branch.model
    bound = learner.guard.bound(8) / 8
    assert evaluate(learner.guard, a) <= before + bound
    assert evaluate(learner.guard, b) <= evaluate(path, b) + bound
    assert evaluate(path, b) < evaluate(learner.base, b) - 0.5
    assert learner.posterior("abcdefgh")["b"] > 0.9
    assert sum(learner.posterior("abcdefgh").values()) == pytest.approx(1)
    assert learner.generate("abc", max_tokens=6, temperature=0).startswith("abc")
    assert isinstance(learner.guard, Guard)


def test_damage_is_refused(tmp_path):
    learner = guarded()
    learner.observe(stream(40), source="web")
    learner.export("web", tmp_path / "web")
    (tmp_path / "web" / "hashes.json").unlink()  # what it finds, the overlay's own hash finds too
    file, described = tmp_path / "web" / "overlay.safetensors", tmp_path / "web" / "overlay.json"
    whole, text = file.read_bytes(), described.read_text()
    tensors = {name: value.clone() for name, value in load_file(file).items()}  # not a map of the file
    changes = {
        "cut short": whole[: len(whole) // 2],
        "not a file of tensors": b"no",
    }
    for content in changes.values():
        file.write_bytes(content)
        with pytest.raises(ValueError, match="no overlay that can be read"):
            Overlay.load(tmp_path / "web")
    for other in (b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(other)
        with pytest.raises(ValueError, match="different overlays, or one is damaged"):
            Overlay.load(tmp_path / "web")

    def written(tensors):
        file.write_bytes(save(tensors))
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        described.write_text(json.dumps(json.loads(text) | {"sha256": sha256}))

    first = next(name for name in tensors if name.startswith("0/"))
    for wrong in (
        {k: v for k, v in tensors.items() if k != "rows/0"},
        tensors | {first: tensors[first][:1]},
        tensors | {"strange/x": torch.zeros(1)},
        tensors | {"rows/0": -tensors["rows/0"] - 1},
        tensors | {first: tensors[first] * torch.nan},
    ):
        written(wrong)
        with pytest.raises(ValueError, match="no overlay that can be read"):
            Overlay.load(tmp_path / "web")
    written(tensors | {first: tensors[first][:, :1].contiguous()})
    before = weights(learner.sources["web"].branch.model)
    with pytest.raises(ValueError, match="do not fit; nothing was changed"):
        learner.import_overlay(tmp_path / "web", "other")
    assert "other" not in learner.sources
    assert same(weights(learner.sources["web"].branch.model), before)
    file.write_bytes(whole)
    described.write_text(json.dumps(json.loads(text) | {"format": 3}))
    with pytest.raises(ValueError, match="format 3"):
        Overlay.load(tmp_path / "web")


@every_kind
def test_format_1_is_read(kind, tmp_path):
    """As the first releases wrote it: patches of every bank by themselves, low-rank factors apart."""
    learner = guarded(kind)
    learner.observe(stream(64), source="web")
    branch = learner.sources["web"].branch
    learner.export("web", tmp_path / "web")
    (tmp_path / "web" / "hashes.json").unlink()
    new = Overlay.load(tmp_path / "web")
    old = {f"{'factor' if n in branch.factors else 'whole'}/{n}": x for n, x in new.delta.whole.items()}
    for name, (numbers, values) in new.delta.rows.items():
        old |= {f"patch/{name}": numbers.clone(), f"rows/{name}": values}
    save_file(old, tmp_path / "web" / "overlay.safetensors", metadata={"base": new.base})
    told = {"format": 1, "attractor": "0.1", "base": new.base, "bytes": 1, "patches": {}, "notes": new.notes}
    (tmp_path / "web" / "overlay.json").write_text(json.dumps(told))
    read = Overlay.load(tmp_path / "web")
    assert read.delta.to_bytes() == new.delta.to_bytes()
    other = guarded(kind)
    other.import_overlay(tmp_path / "web", "web")
    assert same(weights(other.sources["web"].branch.model), weights(branch.model))
    save_file(old | {"rows/more": torch.ones(1)}, tmp_path / "web" / "overlay.safetensors")
    with pytest.raises(ValueError, match="rows without their patches"):
        Overlay.load(tmp_path / "web")


def test_mistakes(tmp_path):
    learner = guarded(max_overlays=1)
    for name in ("", "../x", "a/b", "base", "x" * 65, ".hidden"):
        with pytest.raises(ValueError, match="cannot name an overlay"):
            learner.observe(stream(9), source=name)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        learner.observe([99], source="web")
    assert not learner.sources  # a failed first lesson leaves no overlay behind
    learner.observe(stream(9), source="web")
    with pytest.raises(ValueError, match="as many as max_overlays"):
        learner.observe(stream(9), source="other")
    for act in (learner.drop, lambda n: learner.rollback(n, 1), lambda n: learner.export(n, tmp_path / "x")):
        with pytest.raises(ValueError, match="there is no overlay 'nobody'"):
            act("nobody")
    with pytest.raises(ValueError, match="the text is empty"):
        learner.perplexity([])
    for wrong in (
        {"prior": 1.0},
        {"pause": 0.1, "switch_rate": 0.1},
        {"attention": "some"},
        {"window": 0},
        {"also": "norms"},
        {"also": ("heads",)},
        {"learn": UpdateConfig()},
    ):
        with pytest.raises(ValueError):
            GuardConfig(**wrong)
    learner.save(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"GuardConfig\(learn=...\) takes a LearnConfig"):
        GuardedLearner.load(tmp_path / "saved", config=LearnConfig())
    config = GuardConfig(attention="whole", learn=LearnConfig(budget=5))
    assert GuardConfig.from_json(config.to_json()) == config
    whole = guarded("whole attention")
    whole.observe(stream(40), source="web")
    with pytest.raises(ValueError, match="the same roles"):
        guarded().new_source(whole.sources["web"].branch.overlay())
    assert fingerprint(model_of()) == fingerprint(model_of()) != fingerprint(model_of(1))


def test_a_failed_lesson_is_accounted_for(monkeypatch):
    """What stays learned is counted and has a version; a new overlay that fails is not there at all."""
    learner = guarded()
    original, calls = OnlineLearner._score, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("injected")
        return original(*arguments)

    monkeypatch.setattr(OnlineLearner, "_score", failing)
    with pytest.raises(MemoryError) as caught:
        learner.observe(stream(80), source="new")
    assert caught.value.observed.tokens == 0
    assert not learner.sources
    assert learner.totals.tokens == 0
    calls[:] = [1] * 10
    learner.observe(stream(40), source="web")
    calls.clear()
    with pytest.raises(MemoryError) as caught:
        learner.observe(stream(80, seed=1), source="web")
    held = learner.sources["web"]
    assert caught.value.observed.tokens == 24
    assert learner.totals.tokens == held.tokens == held.learner.totals.tokens == 64
    assert held.version == 2
    fresh = Branch(learner.base, roles=learner.config.learn.update.train)
    fresh.apply(held.versions[2])
    assert same(weights(fresh.model), weights(held.branch.model))


def test_a_falling_rate_goes_on_where_it_was(tmp_path, monkeypatch):
    """It is the overlay's age that counts, whatever became of the learner in between."""
    scales, step = [], LocalUpdate.step

    def spy(self, *arguments, rate_scale, **options):
        scales.append(rate_scale)
        return step(self, *arguments, rate_scale=rate_scale, **options)

    monkeypatch.setattr(LocalUpdate, "step", spy)
    learner = guarded()
    config = dataclasses.replace(
        learner.config, learn=dataclasses.replace(learner.config.learn, rate_horizon=8)
    )
    learner = GuardedLearner(learner.base, TOKENIZER, config)
    learner.observe(stream(12), source="web")  # of which four wait, and are not of the first version
    for count in (4, 8):
        learner.observe(stream(count), source="web")
    learner.save(tmp_path / "saved")
    learner.export("web", tmp_path / "web")
    learner.observe(stream(8), source="mail")  # is young
    other = GuardedLearner(learner.base, TOKENIZER, config)
    other.import_overlay(tmp_path / "web", "web")
    for heir in (GuardedLearner.load(tmp_path / "saved"), other):
        heir.observe(stream(8), source="web")
    learner.rollback("web", 1)
    learner.observe(stream(8), source="web")
    ages = [0, 8, 16, 0, 24, 24, 8]
    assert scales == pytest.approx([(1 + age / 8) ** -0.5 for age in ages])


def test_growth_ends_however_often_it_is_loaded(tmp_path):
    learner = guarded("grown")
    for count in (500, 200, 200):
        learner.observe(stream(count), source="web")  # the first time grows as far as it may
        learner.save(tmp_path / "saved")
        learner = GuardedLearner.load(tmp_path / "saved")
    sizes = {layer.num_patches for layer in learner.sources["web"].branch.model.apn_layers().values()}
    assert sizes == {24}


def test_hostile_rows_are_refused():
    learner = guarded("grown")
    learner.observe(stream(200), source="web")
    overlay = learner.sources["web"].branch.overlay()
    name = "blocks.0.ffn.decoder"
    numbers, rows = overlay.delta.rows[name]
    for wrong in (
        (numbers + 10**13, rows),
        (torch.cat([numbers[:-1], numbers[-1:] + 400_000]), rows),
        (numbers[:-1], rows[:-1]),
        (torch.cat([numbers[:1], numbers[:-1]]), rows),
        (numbers, rows * torch.nan),
    ):
        delta = Delta({**overlay.delta.rows, name: wrong}, overlay.delta.whole)
        with pytest.raises(ValueError, match="nothing was changed"):
            learner.new_source(dataclasses.replace(overlay, delta=delta))


def test_a_diverged_overlay_does_not_hurt():
    learner = guarded()
    before = learner.perplexity(stream(64))
    learner.observe(stream(40), source="web")
    with torch.no_grad():
        learner.sources["web"].branch.model.apn_layers()[0].decoder.fill_(3e38)
    assert learner.perplexity(stream(64)) <= before * math.exp(learner.guard.bound(8) / 8)
