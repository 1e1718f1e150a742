"""The world of the study of facts, that everybody in it reads the same, and that every method runs."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_lessons import encode, llama

from attractor.continual.forms import check_forms, shared_subject
from attractor.hf.teachable import cut
from studies import facts, facts_ground, facts_methods, facts_tuning, facts_world
from studies.facts_world import FORMS, KINDS, World, grammar

GRAMMARS = facts.GRAMMARS


def given(method, **options):
    """What the command line would say."""
    plain = {
        "method": method,
        "rate": 1e-3,
        "keep": "nothing",
        "strength": 0.0,
        "rank": 16,
        "also": [],
        "lesson": {},
        "clamp": 4.0,
    }
    return SimpleNamespace(**{**plain, **options})


@pytest.fixture(scope="module", params=GRAMMARS)
def world(request):
    return World(0, 20, request.param)


def test_a_world_is_drawn_from_its_seed(world):
    name = next(name for name in GRAMMARS if grammar(name) == world.words)
    assert World(0, 20, name).chunks == world.chunks
    assert World(1, 20, name).chunks != world.chunks
    assert World(0, 3, name).chunks == world.chunks[:3]  # more chunks change no earlier one


def test_there_are_4000_facts_about_1000_different_things(world):
    names = [name for chunk in world.chunks for name, _, _ in chunk]
    assert len(names) == len(set(names)) == 1000
    assert sum(len(own) for chunk in world.chunks for _, _, own in chunk) == 4000


def test_the_subject_of_every_lesson_is_found(world):
    for number, chunk in enumerate(world.chunks):
        for lesson, (name, _, _) in zip(world.lessons(number), chunk, strict=True):
            assert shared_subject(check_forms(lesson)) == name


def test_what_is_asked_was_never_taught(world):
    rows = [row for kind in set(KINDS) for row in world.words[kind].values()]
    assert len(rows) == 12
    for row in [*rows, world.known]:
        assert len(row["taught"]) == 3
        assert not set(row["taught"]) & {*row["sentence"], *row["question"]}
        for form in (*row["taught"], *row["sentence"], *row["question"]):
            assert form.count("{n}") >= 1
            assert not form.endswith(" ")  # answers begin with their space


@pytest.mark.parametrize("earlier", GRAMMARS[:-1])
def test_the_confirming_grammar_asks_in_forms_of_its_own(earlier):
    """Some short sentences that are taught ("{n} was born in") are what everybody would write."""
    first, last = grammar(earlier), grammar(GRAMMARS[-1])

    def forms(words, *uses):
        return {
            form for kind in set(KINDS) for row in words[kind].values() for use in uses for form in row[use]
        }

    assert not forms(first, "taught", "sentence", "question") & forms(last, "sentence", "question")
    assert len(forms(first, "taught") & forms(last, "taught")) <= 11
    shared = {part for words in first["syllables"].values() for part in words} & {
        part for words in last["syllables"].values() for part in words
    }
    assert len(shared) <= 2


def test_revisions_change_one_fact_of_each_thing_of_a_chunk(world):
    taught = {prompt: answer for lesson in world.lessons(1) for prompt, answer in lesson}
    later = {prompt: answer for lesson in world.revisions() for prompt, answer in lesson}
    assert len(later) == 3 * len(KINDS)
    assert all(taught[prompt] != answer for prompt, answer in later.items())
    asked = dict(world.items(1, "taught", 0))
    assert all(asked[prompt] == answer for prompt, answer in world.revised_items("taught", 0))
    assert all(asked[prompt] != answer for prompt, answer in world.revised_items("taught", 0, old=True))


def test_capitals_are_moved_in_half_of_the_countries_and_to_other_cities(world):
    assert len(world.moved) == len(world.kept) == 15
    assert not world.moved.keys() & world.kept.keys()
    assert all(world.known["capitals"][country] != city for country, city in world.moved.items())


def test_what_is_told_holds_every_answer(world):
    for items in (
        world.items(0, "question", 0, told=True),
        world.revised_items("sentence", 1, told=True),
        world.capitals("moved", "question", 1, told=True),
    ):
        for prompt, answer in items:
            assert f"{answer}." in prompt
    assert world.capitals("kept", "taught", told=True) == world.capitals("kept", "taught")


class TestMethods:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(facts_world, "KINDS", ["person", "town"])
        small = facts_tuning.MEMORY.__class__(num_patches=64, top_k=2, rank=1, temperature=0.05, whiten=True)
        monkeypatch.setattr(facts_tuning, "MEMORY", small)
        monkeypatch.setattr(facts_tuning, "MEMORY_SLOTS", 8)

    @pytest.fixture
    def texts(self, tmp_path):
        """The folder of four background texts."""
        folder = tmp_path / "texts"
        folder.mkdir()
        draw = torch.Generator().manual_seed(0)
        for name in facts_ground.BACKGROUNDS:
            letters = torch.randint(97, 123, (6 * 256,), generator=draw).tolist()
            (folder / f"{name}.txt").write_text(bytes(letters).decode())
        return folder

    @pytest.mark.parametrize(
        ("method", "keep"),
        [
            ("basins", "nothing"),
            ("full", "kl"),
            ("lora", "replay"),
            ("apn", "nothing"),
            ("memory", "nothing"),
            ("retrieval", "nothing"),
            ("full", "der"),
            ("grace", "nothing"),
            ("memit", "nothing"),
        ],
    )
    def test_every_method_learns_and_is_measured(self, method, keep, texts, tmp_path, monkeypatch):
        tokenizer = SimpleNamespace(
            encode=encode, decode=lambda tokens: bytes(t % 256 for t in tokens).decode("latin-1")
        )
        model = llama(512, blocks=6 if method == "apn" else 3)  # or its patches learn the letters
        monkeypatch.setattr(facts_ground, "load_pretrained", lambda *_, **__: (model, tokenizer))
        lesson = {"passes": 2, "after": 1, "mention": 1, "contexts": 2}
        options = {
            "texts": texts,
            "method": method,
            "keep": keep,
            "chunks": 2,
            "windows": 4,
            "device": "cpu",
            "lesson": json.dumps(lesson),
            "result": tmp_path / "cell.json",
        }
        command = ["run", *(str(part) for name, value in options.items() for part in (f"--{name}", value))]
        if method == "memit":  # the rates are tried on another grammar, and the best is the run's
            command += ["--ladder", "1", "1000"]
        facts.main(command)
        cell = json.loads((tmp_path / "cell.json").read_text())
        if method == "memit":
            best = max(cell["ladder"], key=lambda row: row["score"])
            assert [row["rate"] for row in cell["ladder"]] == [1, 1000]
            assert cell["settings"]["rate"] == best["rate"]
        assert cell["facts"] == 2 * 2 * 4 + 2
        assert [row["name"] for row in cell["chunks"]] == ["chunk 0", "chunk 1", "revisions", "capitals"]
        for figures in (cell["after"], cell["behind the guard"]):
            assert all(0 <= figures[f"{form} {n}"] <= 1 for form, n in FORMS)
            assert figures["rise"].keys() == set(facts_ground.BACKGROUNDS)
        assert all(abs(rise) < 0.02 for rise in cell["behind the guard"]["rise"].values())
        rises = cell["after"]["rise"]
        if method in ("basins", "grace"):  # what is the base's to the bit is predicted as before
            assert all(rises[name] == 0 for name, same in cell["identical windows"].items() if same == 1)
        elif method != "memit":  # two of its steps in so small a model change no digit
            assert all(rise == 0 for rise in rises.values()) == (method == "retrieval")

    def test_only_ranked_slots_of_a_memory_change_in_a_step(self):
        model, world = llama(512), World(0, 2)
        free = cut(["the quick brown fox jumps over a lazy dog. " * 80], encode, 32)
        settings = {"passes": 1, "after": 0, "mention": 0}
        chosen = given("memory", rate=0.1, lesson=settings)
        learner = facts_methods.method(chosen, model, encode, free, free, nullcontext)
        learner.batch = 10**6  # one step in a pass
        learner.learn(world.lessons(0), 0)
        for layer in learner.layers:
            changed = (layer.decoder != 0).flatten(1).any(1)
            assert 0 < changed.sum() <= facts_tuning.MEMORY_SLOTS


def test_rates_are_chosen_by_answers_in_all_kinds_of_forms(tmp_path, capsys):
    for rate, share in ((1e-5, 0.2), (3e-5, 0.5), (1e-4, 0.4)):
        after = {f"{form} {n}": share for form, n in FORMS}
        cell = {"settings": {"method": "full", "keep": "kl", "rate": rate, "strength": 1.0}, "after": after}
        (tmp_path / f"{rate}.json").write_text(json.dumps(cell))
    facts.main(["rates", *map(str, tmp_path.iterdir())])
    assert capsys.readouterr().out == "full, kl: --rate 3e-05 --strength 1.0\n"
