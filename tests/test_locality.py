"""Streams without labels by sparse patches and basins, and what the guard's bound does not cover."""

import json

import numpy as np
import pytest
import torch

from attractor.model import GPT
from studies import gaps, locality
from studies.beside import BesideBase, BesideLearner
from studies.cells import Benchmark
from studies.plan import HOME, PLANS
from studies.report import study_tables
from studies.report.readings import read


def words(letters, count, seed=0):
    """A text in an alphabet of its own."""
    return np.random.default_rng(seed).choice(np.frombuffer(letters, np.uint8), count).astype(np.int64)


@pytest.fixture
def base():
    torch.manual_seed(0)
    return GPT(PLANS["smoke"].config("dense", 0).model).eval()


@pytest.fixture
def learner(base):
    return BesideLearner(
        BesideBase(base), words(b"abcd ", 8193), words(b"abcd ", 4097, 1), rate=1e-2, batch_size=4
    )


def losses(model, text):
    inputs = torch.from_numpy(text[:320]).view(10, 32)
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(inputs)[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())


class TestBasins:
    def test_a_new_domain_opens_a_basin_and_leaves_the_rest_to_the_bit(self, base, learner):
        home, new, other = words(b"abcd ", 400, 2), words(b"WXYZ?", 4097, 3), words(b"01234", 4097, 4)
        inputs = torch.from_numpy(home[:320]).view(10, 32)
        assert learner.learn(home) == "the base"
        assert {learner.learn(new[at : at + 513]) for at in range(0, 4096, 512)} == {"basin 0"}
        assert torch.equal(learner.model(inputs), base(inputs))
        assert losses(learner.model, new) < losses(base, new) - 0.1
        before = [parameter.clone() for parameter in learner.model.patches[0].parameters()]
        assert learner.learn(other[:513]) == "basin 1"
        pairs = zip(before, learner.model.patches[0].parameters(), strict=True)
        assert all(torch.equal(was, now) for was, now in pairs)
        assert learner.model.owners(learner.model.contexts(torch.from_numpy(new[None, :32]))).max() == 0

    def test_a_context_knows_nothing_of_what_follows(self, learner):
        learner.learn(words(b"WXYZ?", 513))
        text = torch.from_numpy(words(b"WXYZ?", 32, 5))[None]
        assert torch.allclose(learner.model(text[:, :20]), learner.model(text)[:, :20], atol=1e-5)
        cache = learner.model.new_cache(1)
        parts = [learner.model(part, cache=cache) for part in text.split(8, 1)]
        assert torch.allclose(torch.cat(parts, 1), learner.model(text), atol=1e-5)

    def test_mixtures_have_no_ffn_to_stand_beside(self):
        with pytest.raises(ValueError, match="beside dense FFNs"):
            BesideBase(GPT(PLANS["smoke"].config("apn", 0).model))


def test_rises_are_from_when_a_domain_was_learned():
    matrix = [
        {"a": 1.0, "b": 3.0, "c": 3.0},
        {"a": 1.5, "b": 2.0, "c": 3.25},
        {"a": 1.25, "b": 2.5, "c": 2.0},
    ]
    assert locality.rises_of(matrix, ["a", "b", "c"]) == [
        {"a": 0.5, "b": 0.0, "c": 0.25},
        {"a": 0.25, "b": 0.5, "c": 0.0},
    ]


def test_interpolated_weights_lie_between(base):
    learner = locality.start(
        "dense, WiSE-FT 0.5",
        PLANS["smoke"],
        {"method": "", "rate": 1e-2, "seed": 0},
        base,
        locality.Text(words(b"abcd ", 9000), words(b"abcd ", 99), words(b"abcd ", 99)),
    )
    learner.learn(words(b"WXYZ?", 513))
    learned, asked = learner.adapter.model, learner.predictor()
    half = (base.embedding.weight + learned.embedding.weight) / 2
    assert torch.allclose(asked.embedding.weight, half)


def test_small_patches_have_the_parameters_of_large_ones():
    for size in ("small", "full"):
        shape = locality.variant_of(PLANS[size], 1024)
        assert shape["top_k"] / shape["num_patches"] <= 1 / 256
        dim, apn = PLANS[size].model.dim, PLANS[size].apn
        own = 1024 * (shape["rank"] * (dim + 2) + dim)
        assert own == pytest.approx(apn.num_patches * (apn.rank * (dim + 2) + dim), rel=0.1)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    letters = {
        HOME: b"abcd ",
        "kjv": b"WXYZ?",
        "python": b"01234",
        "first-folio": b"abcde",
        "paper-shift": b"xy",
    }
    domains = {}
    for name, own in letters.items():
        place = tmp_path / f"{name}.txt"
        place.write_bytes(words(own, 30_000).astype(np.uint8).tobytes())
        domains[name] = str(place)
    monkeypatch.setattr(locality, "PATCHES", (1024,))
    return Benchmark("smoke", tmp_path / "grid", domains=domains, device="cpu")


def test_the_stream_from_end_to_end(bench, tmp_path):
    methods = [
        "APN, strictly local, 4 of 1024 patches",
        locality.BASINS,
        "dense, WiSE-FT 0.5",
        "dense, KL to the base",
    ]
    found = locality.study(bench, tmp_path / "r.json", stream=["kjv", "python"], methods=methods)
    assert found["order"] == [HOME, "kjv", "python"]
    basins = found["rows"][locality.BASINS]
    assert basins["old_text"] == "before"
    assert basins["touched"]
    assert basins["worst_ever"] >= basins["worst"]
    assert found["rows"]["dense, KL to the base"]["overlap"] is None
    tables = study_tables.TABLES["locality"](read(tmp_path / "r.json"))
    assert [len(table.rows) for table in tables] == [4, 4]
    (chart,) = study_tables.CHARTS["locality"](read(tmp_path / "r.json")).values()
    assert "<svg" in chart


def test_an_unknown_domain_or_learner_is_named(bench, tmp_path):
    with pytest.raises(ValueError, match="stream names"):
        locality.study(bench, tmp_path / "r.json", stream=["latin"])
    with pytest.raises(ValueError, match="unknown learners"):
        locality.study(bench, tmp_path / "r.json", methods=["prayer"])


def test_gaps_from_end_to_end(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(gaps, "OVERLAYS", 2)
    monkeypatch.setitem(gaps.ANSWERS, "smoke", 2)
    found = gaps.run(bench, tmp_path / "g.json", stream=["kjv", "python"])
    base, alone = found["models"]["base"], found["models"]["no guard"]
    assert base["same"] == 1
    assert base["until"] == found["answer"]
    assert max(map(abs, base["by_position"])) == 0
    assert alone["written"] is None
    assert all(0 <= share <= 1 for share in found["models"]["guard"]["written"].values())
    (table,) = study_tables.TABLES["gaps"](read(tmp_path / "g.json"))
    assert len(table.rows) == len(found["models"])
    assert json.loads((tmp_path / "g.json").read_text())["experiment"] == "gaps"
    (chart,) = study_tables.CHARTS["gaps"](read(tmp_path / "g.json")).values()
    assert "<svg" in chart
