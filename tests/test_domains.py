"""Domains without labels, overlays that make room, and consolidation."""

import copy
import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_learner import TOKENIZER, model_of, stream
from test_overlay import guarded, same, weights

from attractor.continual.config import GuardConfig, LearnConfig, UpdateConfig
from attractor.continual.domains import Usual, owner, usual_in
from attractor.continual.gates import Surprise
from attractor.continual.guarded import GuardedLearner
from attractor.continual.overlay import Overlay
from attractor.data import Batches


def domain(number, count, seed=0):
    """Texts that are easy to tell apart: each repeats words of its own, with some noise."""
    generator = np.random.default_rng([number, seed])
    words = np.random.default_rng(number).permutation(10)[:5].reshape(1, 5)
    text = np.tile(words, (count // 5 + 1, 1)).ravel()[:count]
    noise = generator.random(count) < 0.1
    return np.where(noise, generator.integers(0, 10, count), text)


@pytest.fixture(scope="module")
def home():
    """A small model that has learned domain 0."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in itertools.islice(Batches(domain(0, 4000), 16, 8, 0), 150):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    return model


def by_itself(model, archive=None, **options):
    learn = LearnConfig(
        budget=64, update=UpdateConfig(train=("decoders", "gates", "encoder"), learning_rate=1e-2)
    )
    config = GuardConfig(learn=learn, attention="whole", piece=100, patience=2, tolerance=0.3, **options)
    learner = GuardedLearner(copy.deepcopy(model), TOKENIZER, config, archive=archive)
    learner.calibrate(domain(0, 500, seed=9))
    return learner


def test_domains_are_found_without_labels(home, tmp_path):
    """A, B, C, A, B: overlays open for B and C only, and B's is found again when B comes back."""
    learner = by_itself(home)
    before = {n: learner.perplexity(domain(n, 500, seed=5)) for n in (0, 1, 2)}
    sources = []
    for step, number in enumerate((0, 1, 2, 0, 1)):
        for part in range(4):
            seen = learner.observe(domain(number, 500, seed=10 * step + part + 20), source=None)
        sources.append(seen.source)
    assert sources == ["base", "domain-1", "domain-2", "base", "domain-1"]
    assert learner.overlays().keys() == {"domain-1", "domain-2"}
    after = {n: learner.perplexity(domain(n, 500, seed=5)) for n in (0, 1, 2)}
    assert math.log(after[0] / before[0]) <= learner.guard.bound(8) / 8
    assert after[1] < 0.7 * before[1]
    assert after[2] < 0.7 * before[2]
    learner.save(tmp_path / "saved")
    loaded = GuardedLearner.load(tmp_path / "saved")
    assert loaded.explained_by(domain(1, 100, seed=99)) == "domain-1"
    assert loaded.explained_by(domain(0, 100, seed=99)) == "base"
    assert loaded.explained_by(domain(3, 100, seed=99)) is None


def test_a_single_odd_piece_opens_nothing(home):
    learner = by_itself(home)
    for number in (0, 1, 0, 2, 0, 3, 0):
        learner.observe(domain(number, 100, seed=number + 40), source=None)
    assert not learner.sources
    assert learner.totals.tokens == 700
    assert learner.totals.held_back == {"unclaimed": 300}  # the odd pieces taught nobody
    seen = learner.observe(np.concatenate([domain(1, 100), domain(0, 100), domain(2, 100)]), source=None)
    assert (seen.tokens, seen.held_back, seen.source) == (
        200,
        {"unclaimed": 100},
        "base",
    )  # the last one waits


def test_overlays_that_make_room_are_archived(home, tmp_path):
    learner = by_itself(home, archive=tmp_path / "archive", max_overlays=2)
    for number in (1, 2, 3):
        learner.observe(domain(number, 600), source=f"d{number}")
    assert learner.sources.keys() == {"d2", "d3"}
    learner.drop("d2")
    learner.import_overlay(tmp_path / "archive" / "d1", "d1")
    assert learner.overlays()["d1"]["tokens"] == 600
    closed = by_itself(home, max_overlays=1)
    closed.observe(domain(1, 100), source="d1")
    with pytest.raises(ValueError, match="or give an archive"):
        closed.observe(domain(2, 100), source="d2")
    assert closed.sources.keys() == {"d1"}


def test_what_waits_for_an_update_is_learned_before_it_leaves(home, tmp_path):
    """64 tokens make an update: of 100, 36 wait when the overlay has to make room."""
    learner = by_itself(home, archive=tmp_path / "archive", max_overlays=1)
    learner.observe(domain(1, 100), source="d1")
    assert learner.sources["d1"].version == 1
    learner.export("d1", tmp_path / "exported")
    known = learner.overlays()["d1"]
    assert (known["version"], known["kept"]) == (2, [1, 2])
    exported, model = Overlay.load(tmp_path / "exported"), learner.sources["d1"].model
    assert exported.notes["tokens"] == 100
    assert same(weights(learner.new_source(exported).model), weights(model))
    learner.observe(domain(2, 100), source="d2")
    learner.observe(domain(1, 28, seed=4), source="d1")  # back again: it goes on to count
    assert learner.overlays()["d1"]["version"] == 2
    learner.observe(domain(1, 64, seed=5), source="d1")
    learner.rollback("d1", 2)
    assert same(weights(learner.sources["d1"].model), weights(model))
    assert learner.overlays()["d1"]["tokens"] == 100
    assert learner.flush().updates == 0


def test_an_overlay_comes_back_from_the_archive_without_labels(home, tmp_path, caplog):
    """There is room for one overlay, and two domains take turns: each finds its own again."""
    learner = by_itself(home, archive=tmp_path / "archive", max_overlays=1)
    for number, name in ((1, "domain-1"), (2, "domain-2"), (1, "domain-1"), (2, "domain-2")):
        for part in range(3):
            seen = learner.observe(domain(number, 500, seed=part + 20), source=None)
        assert seen.source == name
        assert learner.sources.keys() == {name}
    assert learner.overlays()["domain-2"]["tokens"] > 1500  # of both visits
    (tmp_path / "archive" / "domain-1" / "overlay.safetensors").write_bytes(b"damaged")
    (tmp_path / "archive" / "not a name").mkdir()
    (tmp_path / "archive" / "not a name" / "overlay.json").write_text("{}")
    for part in range(3):
        seen = learner.observe(domain(1, 500, seed=part + 40), source=None)
    assert seen.source == "domain-3"  # nothing is lost: what could not be read is still there
    assert "'domain-1' stays in the archive" in caplog.text
    assert "'not a name' stays in the archive" in caplog.text
    assert (tmp_path / "archive" / "domain-1").is_dir()


def test_a_crash_after_an_overlay_came_back_loses_neither(home, tmp_path):
    learner = by_itself(home, archive=tmp_path / "archive", max_overlays=1)
    for number in (1, 2):
        for part in range(3):
            learner.observe(domain(number, 500, seed=part + 20), source=None)
    learner.save(tmp_path / "saved")
    for part in range(3):
        assert learner.observe(domain(1, 500, seed=part + 30), source=None).tokens
    assert learner.sources.keys() == {"domain-1"}
    after = GuardedLearner.load(tmp_path / "saved", archive=tmp_path / "archive")  # nobody saved in between
    assert after.sources.keys() == {"domain-2"}
    for part in range(3):
        seen = after.observe(domain(1, 500, seed=part + 30), source=None)
    assert seen.source == "domain-1"
    after.forget("domain-1")
    after.forget("domain-2")
    for part in range(3):
        seen = after.observe(domain(1, 500, seed=part + 50), source=None)
    assert after.overlays()[seen.source]["tokens"] <= 1500  # of these texts alone: what was forgotten is gone


def test_unlabelled_texts_need_a_calibrated_base():
    learner = guarded()
    with pytest.raises(ValueError, match="call calibrate"):
        learner.observe(stream(50), source=None)
    learner.calibrate(stream(100))
    with pytest.raises(ValueError, match="two tokens"):
        learner.observe([1], source=None)


def test_overlays_out_of_the_archive_are_known_again(home, tmp_path):
    learner = by_itself(home, archive=tmp_path / "archive", max_overlays=1)
    learner.observe(domain(1, 1500), source="d1")
    assert learner.explained_by(domain(1, 100, seed=3)) == "d1"
    learner.observe(domain(2, 1500), source="d2")
    assert (tmp_path / "archive" / "d1").is_dir()
    learner.observe(domain(1, 100, seed=4), source="d1")  # back again, with what it knew
    assert learner.overlays()["d1"]["tokens"] == 1600
    assert learner.explained_by(domain(1, 100, seed=3)) == "d1"
    assert {folder.name for folder in (tmp_path / "archive").iterdir()} == {"d1", "d2"}  # not saved yet
    with pytest.raises(ValueError, match="would not fit another base"):
        learner.consolidate("d1", {"x": domain(1, 100)}, tolerance=10.0)
    twin = by_itself(home, archive=tmp_path / "other", max_overlays=2)
    for number in (1, 2, 3):
        twin.observe(domain(number, 500), source=f"d{number}")
    twin.observe(domain(1, 500), source="d1")  # and so d2 had to make room
    twin.forget("d2")
    twin.consolidate("d3", {"x": domain(3, 100)}, tolerance=10.0).confirm()  # d1's own copy hinders nobody
    assert [place.name for place in (tmp_path / "other").iterdir()] == ["d1"]
    twin.save(tmp_path / "saved")  # only now is there another
    assert not list((tmp_path / "other").iterdir())
    assert GuardedLearner.load(tmp_path / "saved", archive=tmp_path / "other").sources.keys() == {"d1"}
    with pytest.raises(ValueError, match="which saving replaces"):
        learner.save(tmp_path)
    assert "1,500 tokens of 'd2'" in learner.forget("d2")
    learner.export("d1", tmp_path / "d1")
    assert "1,600 tokens of 'd1'" in learner.forget("d1")
    assert not list((tmp_path / "archive").iterdir())  # nothing of it comes back
    learner.import_overlay(tmp_path / "d1", "d1")
    learner.import_overlay(tmp_path / "d1", "again")  # the limit holds for imports too
    assert learner.sources.keys() == {"again"}


def test_a_young_overlay_does_not_claim_everything(home):
    learner = by_itself(home)
    for number, count in ((1, 2), (2, 6)):
        for part in range(count):
            seen = learner.observe(domain(number, 100, seed=part + 50), source=None)
    assert seen.source == "domain-2"
    assert learner.sources.keys() == {"domain-1", "domain-2"}


@pytest.mark.parametrize(
    "kind", ["patches", "encoder", "prototypes", "whole attention", "everything", "low rank", "grown"]
)
def test_consolidation(kind, tmp_path):
    """The base becomes the path; everything else predicts as before; and it can be taken back."""
    alone = kind in ("low rank", "grown")
    learner = guarded(kind)
    learner.observe(stream(120), source="web")
    if not alone:
        learner.observe(stream(90, seed=1), source="mail")
    learner.flush()
    text, tokens = stream(64, seed=5), torch.from_numpy(stream(8))[None]
    before, base = learner.perplexity(text), weights(learner.base)
    expected = learner.sources["web"].branch.model.eval()(tokens)
    others = {} if alone else {"mail": learner.sources["mail"].branch.model.eval()(tokens)}
    pending = learner.consolidate("web", {"old": text}, tolerance=10.0)
    torch.testing.assert_close(learner.base(tokens), expected, rtol=1e-5, atol=1e-5)
    assert pending.figures.keys() == {"old"}
    assert learner.sources.keys() == others.keys()
    for name, logits in others.items():
        assert torch.equal(learner.sources[name].branch.model.eval()(tokens), logits)
        assert learner.sources[name].branch.overlay().base == learner.base_hash
    with pytest.raises(ValueError, match="before saving"):
        learner.save(tmp_path / "saved")
    with pytest.raises(ValueError, match="a consolidation waits"):
        learner.consolidate("mail", {"old": text})
    for act in (
        lambda: learner.forget("mail"),
        lambda: learner.observe(stream(9)),
        lambda: learner.drop("mail"),
        lambda: learner.rollback("mail", 1),
    ):
        with pytest.raises(ValueError, match="a consolidation waits"):
            act()
    pending.revert()
    assert same(weights(learner.base), base)
    assert learner.perplexity(text) == before
    with pytest.raises(ValueError, match="already"):
        pending.confirm()
    learner.consolidate("web", {"old": text}, tolerance=10.0).confirm()
    with pytest.raises(ValueError, match="part of the base"):
        learner.forget("web")
    learner.observe(stream(40, seed=8), source="more")
    learner.save(tmp_path / "saved")
    loaded = GuardedLearner.load(tmp_path / "saved")
    assert loaded.perplexity(text) == learner.perplexity(text)


def test_consolidation_is_refused_where_it_hurts(home):
    learner = by_itself(home)
    learner.observe(domain(1, 3000), source="d1")
    base = weights(learner.base)
    with pytest.raises(ValueError, match=r"stays an overlay: more than 0\.3 % worse on home"):
        learner.consolidate("d1", {"home": domain(0, 500)})
    assert same(weights(learner.base), base)
    assert "d1" in learner.sources
    with pytest.raises(ValueError, match="no canaries"):
        learner.consolidate("d1", {})
    with pytest.raises(ValueError, match="there is no overlay 'd9'"):
        learner.consolidate("d9", {"home": domain(0, 500)})
    learner.consolidate("d1", {"its own": domain(1, 500)}).confirm()  # nobody was asked about home
    low = guarded("low rank")
    low.observe(stream(50), source="a")
    low.observe(stream(50), source="b")
    with pytest.raises(ValueError, match="drop or export them first"):
        low.consolidate("a", {"x": stream(50)}, tolerance=10.0)


def test_consolidation_needs_a_plain_scale():
    learner = guarded()
    learner.config = dataclasses.replace(
        learner.config, learn=dataclasses.replace(learner.config.learn, scale_factor=0.5)
    )
    learner.observe(stream(40), source="web")
    with pytest.raises(ValueError, match="needs scale_factor=1"):
        learner.consolidate("web", {"x": stream(40)})


class Known:
    """A learner whose paths predict every text with the losses they are told to have."""

    def __init__(self, base, usual, paths, deviation=0.0):
        square = usual**2 + deviation**2
        self.base, self.usual, self.config = "base", Surprise(usual, square, 1000), GuardConfig()
        self.sources = {
            name: SimpleNamespace(
                model=name, usual=tuple(Usual(loss, deviation, was) for loss, was in used_to)
            )
            for name, (used_to, _) in paths.items()
        }
        self.now = {"base": base} | {name: loss for name, (_, loss) in paths.items()}

    def losses(self, path, tokens):
        return torch.full((len(tokens) - 1,), self.now[path], dtype=torch.float64)


LOSS = st.floats(0.1, 8.0)
USED_TO = st.lists(st.tuples(LOSS, LOSS), max_size=3)  # loss, and that of the base
TEXT = np.zeros(101, dtype=np.int64)


@settings(deadline=None)
@given(LOSS, LOSS, st.dictionaries(st.sampled_from("abc"), st.tuples(USED_TO, LOSS)), st.floats(0, 2))
def test_who_owns_a_text(base, usual, paths, deviation):
    """The best of those that explain it."""
    learner = Known(base, usual, paths, deviation)
    found = owner(learner, TEXT)
    slack = learner.config.tolerance + 3 * deviation / 10
    explains = {"base": base <= usual + slack}
    for name, (used_to, loss) in paths.items():
        familiar = any(loss <= before + slack for before, _ in used_to)
        behind = max([0.0, *(before - was for before, was in used_to)])
        explains[name] = familiar and loss <= base + behind + learner.config.tolerance
    if found is None:
        assert not any(explains.values())
    else:
        assert explains[found]
        assert learner.now[found] == min(loss for name, loss in learner.now.items() if explains[name])


def test_what_an_overlay_is_used_to():
    def found(base, **paths):
        return owner(Known(base, 1.0, paths), TEXT)

    python = [(1.4, 5.0), (2.2, 4.0)]
    assert found(4.6, python=(python, 2.1)) == "python"  # pieces of one domain differ
    assert found(7.0, python=(python, 3.0)) is None  # and other domains more
    assert found(1.9, python=(python, 2.1)) is None  # no harder than Python, but the base does better
    assert found(1.9, python=(python, 1.8), bible=([(1.2, 1.9)], 1.25)) == "bible"
    assert found(3.0, new=([(3.0, 3.0)], 3.0)) == "new"  # it has not learned anything yet
    assert found(3.0, wild=([(4.0, 3.0)], 3.9)) == "wild"  # or it overshot, and may go on
    assert found(3.0, unknown=([], 0.5)) is None


@pytest.mark.parametrize("budget", [64, 1024])
def test_short_texts_go_on_in_the_overlay_they_opened(home, budget):
    """Also while nothing was learned because the tokens of an update are not together yet."""
    config = GuardConfig(learn=LearnConfig(budget=budget, update=UpdateConfig(learning_rate=1e-2)))
    learner = GuardedLearner(copy.deepcopy(home), TOKENIZER, config)
    learner.calibrate(domain(0, 500, seed=9))
    for part in range(12):
        learner.observe(domain(1, 200, seed=part + 50), source=None)
    assert learner.sources.keys() == {"domain-1"}
    assert learner.totals.updates == 12 * 200 // budget


def test_naming_every_source_costs_nothing_for_texts_without_one(home, monkeypatch):
    learner = GuardedLearner(copy.deepcopy(home), TOKENIZER, by_itself(home).config)
    with monkeypatch.context() as patched:
        patched.setattr(GuardedLearner, "losses", lambda *_: pytest.fail("nobody asked"))
        for part in range(6):
            learner.observe(domain(1, 250, seed=part + 50), source="d1")
    learner.calibrate(domain(0, 500, seed=9))  # and now somebody may
    assert learner.explained_by(domain(1, 100, seed=99)) == "d1"
    assert learner.explained_by(domain(0, 100, seed=99)) == "base"


def test_rolling_back_tells_what_it_is_used_to_again(home):
    learner = by_itself(home)
    for part in range(6):
        learner.observe(domain(1, 100, seed=part + 50), source="d1")
    learner.observe(domain(2, 100, seed=9), source="d1")
    held = learner.sources["d1"]
    later = held.usual
    learner.rollback("d1", version=1)
    (now,) = held.usual
    assert now.loss == pytest.approx(float(learner.losses(held.model, held.recent).mean()))
    assert now not in later


@pytest.mark.parametrize("wrong", [[1.0, 2.0, 3], [[1.0, 2.0]], [[1.0, 2.0, "x"]], [[1.0, 0.5, math.inf]], 3])
def test_what_an_overlay_is_used_to_comes_from_a_file(home, tmp_path, wrong):
    learner = by_itself(home)
    learner.observe(domain(1, 300), source="d1")
    learner.export("d1", tmp_path / "d1")
    told = json.loads((tmp_path / "d1" / "overlay.json").read_text())
    assert usual_in(told["notes"]["usual"]) == learner.sources["d1"].usual
    told["notes"]["usual"] = wrong
    (tmp_path / "d1" / "overlay.json").write_text(json.dumps(told))
    (tmp_path / "d1" / "hashes.json").unlink()
    with pytest.raises(ValueError, match=r"used to|convert"):
        learner.import_overlay(tmp_path / "d1", "again")
    assert learner.sources.keys() == {"d1"}
