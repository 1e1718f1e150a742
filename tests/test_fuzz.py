"""Damaged files of every kind: refused, or read as they were. benchmarks/fuzz.py does this for longer."""

import functools
import json
import random
import resource
import shutil

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

pytest.importorskip("transformers", reason="transformers is not installed: the extra hf")
for package in ("fastapi", "tokenizers"):
    pytest.importorskip(package, reason=f"{package} is not installed: the extra dev")

import fuzz  # noqa: E402 (it needs them)

LAYER = ("layers", "model.layers.1.mlp")
FOUND = [
    ("config", "learn.json", ("update", "train"), 0.5),
    ("config", "guard.json", ("also",), [{}]),
    ("config", "run.json", ("model", "per_layer"), True),
    ("config", "run.json", ("model", "num_layers"), 10**12),
    ("config", "run.json", ("model", "apn"), "@deep-list@"),
    ("model", "model/config.json", ("context",), 10**30),
    ("model", "model/config.json", ("vocab_size",), 2**62),
    ("model", "model/config.json", ("num_layers",), 10**12),
    ("auto retrofit, base too", "base/config.json", ("num_hidden_layers",), 10**9),
    ("auto retrofit, base too", "base/generation_config.json", ("bos_token_id",), "@deep-list@"),
    ("hub", "hub/config.json", ("gpt", "apn", "rank"), 10**12),
    ("hub", "hub/config.json", ("architectures",), [-1]),
    ("guarded", "guarded/guard.json", ("notes",), "@deep-object@"),
    ("learner", "learner/learner.json", ("history",), "@deep-list@"),
    ("tokenizer", "tokenizer.json", ("characters",), "@deep-list@"),
    ("bpe tokenizer", "tokenizer.json", ("tokenizers", "model", "continuing_subword_prefix"), "x" * 10_000),
    ("retrofit", "adapter/adapter_config.json", ("base",), "@deep-list@"),
    ("lessons", "lessons/lessons.json", ("lessons",), "@deep-list@"),
    ("keys", "keys.json", ("keys",), "@deep-list@"),
    ("data", "data/meta.json", ("unknown_characters",), "@deep-object@"),
    ("data", "data/meta.json", ("unknown_characters",), {"a": {}}),
    ("auto retrofit", "adapter/adapter_config.json", (*LAYER, "temperature"), 2**64),
    ("retrofit", "adapter/adapter_config.json", (*LAYER, "num_layers"), 10**400),
]
"""What crashed a reader, took gigabytes or never came to an end: kind, file, where in its JSON, and what."""
LOST = [
    ("guarded", ("guarded/guard.json",)),
    ("learner", ("learner/learner.json",)),
    ("store", ("store/lessons.db", "store/acknowledged")),
]
"""Files without which a reader once began anew, in silence."""


@pytest.fixture(scope="module", autouse=True)
def no_progress_bars():
    fuzz.disable_progress_bar()


@pytest.fixture(scope="module", autouse=True)
def templates():
    yield
    for name in fuzz.KINDS:
        shutil.rmtree(fuzz.saved(name)[0], ignore_errors=True)
    fuzz.saved.cache_clear()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", fuzz.KINDS)
def test_any_damage(name):
    @settings(max_examples=10)
    @given(st.randoms(use_true_random=False), st.booleans())
    def damaged(chance, fits):
        outcome = fuzz.run(name, chance, 0, fits=fits)
        assert not outcome.is_bad, outcome

    damaged()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "file", "where", "value"), FOUND)
def test_what_was_found(name, file, where, value, monkeypatch):
    def damage(folder, chance):
        path = folder / file
        content = json.loads(path.read_text())
        holder = functools.reduce(lambda inner, key: inner[key], where[:-1], content)
        holder[where[-1]] = value
        path.write_bytes(fuzz.with_depth(json.dumps(content)))
        return f"{where} of {file}"

    monkeypatch.setattr(fuzz, "damage", damage)
    outcome = fuzz.run(name, random.Random(0), 0, fits=True)
    assert outcome.verdict in ("refused", "other"), outcome


@pytest.fixture
def little_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    fuzz.limit_memory()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("value", "verdict"), [(10**9, "other"), (10**30, "refused"), (1.5, "refused")])
def test_the_number_of_the_next_lesson_takes_no_memory(value, verdict, little_memory, monkeypatch):
    def damage(folder, chance):
        path = folder / "lessons" / "lessons.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"next": value}))
        return "next"

    fuzz.saved("lessons")
    monkeypatch.setattr(fuzz, "damage", damage)
    outcome = fuzz.run("lessons", random.Random(0), 0, fits=True)
    assert outcome.verdict == verdict, outcome


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", [[-1], "@deep-list@", {}])
def test_a_retrofit_says_no_more_than_its_type_to_the_auto_classes(value, monkeypatch):
    def damage(folder, chance):
        path = folder / "adapter" / "config.json"
        path.write_bytes(fuzz.with_depth(json.dumps(json.loads(path.read_text()) | {"architectures": value})))
        return "architectures"

    monkeypatch.setattr(fuzz, "damage", damage)
    outcome = fuzz.run("auto retrofit", random.Random(0), 0, fits=False)
    assert outcome.verdict == ("refused" if value == "@deep-list@" else "same"), outcome


@pytest.mark.parametrize(("name", "files"), LOST)
def test_what_was_lost(name, files, monkeypatch):
    def damage(folder, chance):
        for file in files:
            (folder / file).unlink()
        return f"without {files}"

    monkeypatch.setattr(fuzz, "damage", damage)
    assert fuzz.run(name, random.Random(0), 0, fits=False).verdict == "refused"
