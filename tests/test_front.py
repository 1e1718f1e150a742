"""The front door: one object for pretrained models, taught ones and models of our own."""

import json

import pytest
import torch
from test_lessons import CONFIG, background, forms, llama

import attractor
from attractor import front
from attractor.config import GPTConfig
from attractor.hf import pretrained, teachable
from attractor.model import GPT
from attractor.tokenizer import ByteTokenizer


class Tokenizer(ByteTokenizer):
    """Bytes, a chat template and an end."""

    ends = (ord("\n"),)

    @staticmethod
    def chat(messages):
        return f"<{messages[0]['content']}>"


@pytest.fixture
def door(monkeypatch):
    """Loads a tiny Llama under the name "tiny"; lessons are small."""
    real = teachable.teachable

    def small(model, encode, **options):
        return real(model, encode, background(), act_at=3, config=CONFIG, **options)

    monkeypatch.setattr(
        pretrained, "load_pretrained", lambda source, device: (llama().to(device), Tokenizer())
    )
    monkeypatch.setattr(teachable, "teachable", small)
    return attractor.load("tiny")


def test_every_name_of_the_package_is_there():
    for name in attractor.__all__:
        assert getattr(attractor, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = attractor.nothing


def test_a_model_writes_and_is_measured(door):
    written = door.generate("we say", max_tokens=5)
    assert written == door.generate("we say", max_tokens=5)
    assert door.generate("we say", max_tokens=5, temperature=1.0, seed=1) == door.generate(
        "we say", max_tokens=5, temperature=1.0, seed=1
    )
    assert 1 < door.perplexity("we say QZX is 5") < 2000
    assert door.lessons() == []
    assert door.touching("we say") == [None] * 6


def test_an_answer_ends_where_the_model_ends_it(door, monkeypatch):
    asked = []

    def written(model, tokens, **_):
        asked.append(bytes(tokens[0].tolist()).decode())
        yield from (torch.tensor([ord(letter)]) for letter in "yes\nno")

    monkeypatch.setattr(front, "generate", written)
    assert door.ask("is it?") == "yes"
    door.tokenizer = ByteTokenizer()  # has no chat template, and no end
    assert door.ask("is it?") == "yes"
    assert asked == ["<is it?>", "Question: is it?\nAnswer:"]


def test_a_lesson_is_taught_saved_read_again_and_taken_back(door, tmp_path):
    text = "we say QZX is "
    before = door.perplexity(text)
    lesson = door.learn(forms("QZX", "5"))
    assert door.lessons() == [lesson]
    assert lesson.number in door.touching(text)
    after = door.perplexity(text)
    assert after != before
    door.save(tmp_path / "school")
    again = attractor.load(tmp_path / "school")
    assert again.perplexity(text) == after
    assert again.lessons() == [lesson]
    assert again.learn(forms("WJK", "8")).number == 1
    again.forget(1)
    for taught, what in ((door, lesson), (again, lesson.number)):
        taught.forget(what)
        assert taught.perplexity(text) == before
    with pytest.raises(ValueError, match="there is no lesson 0"):
        door.forget(lesson)


def test_a_model_that_chats_reads_lessons_as_answers_in_a_chat(door):
    frames = front.frames_of(door.tokenizer)
    assert frames[0] == "{}"
    assert "<{}?>{}" in frames
    door.learn(forms("QZX", "5"))
    rows = [row for turn in door.school.reading.texts([forms("QZX", "5")], ["QZX"]) for row in turn]
    chat = [row for row in rows if row.repeated]
    assert chat
    for row in chat:  # the prompt is said again before the answer, and is learned too
        said = bytes(row.tokens[row.answer.start - row.repeated : row.answer.start]).decode()
        assert any(said.strip() == prompt.strip() for prompt, _ in forms("QZX", "5"))


def test_a_model_of_our_own_is_loaded_and_says_how_it_learns(tmp_path):
    torch.manual_seed(0)
    GPT(GPTConfig(vocab_size=256, context=32, num_layers=1, num_heads=2, dim=16)).save_pretrained(
        tmp_path / "gpt"
    )
    ByteTokenizer().save(tmp_path / "gpt" / "tokenizer.json")
    model = attractor.load(tmp_path / "gpt")
    assert len(model.generate("to be", max_tokens=3, temperature=1.0, seed=0)) >= 1
    assert model.perplexity("to be or not to be") > 1
    with pytest.raises(ValueError, match="OnlineLearner"):
        model.learn(forms("QZX", "5"))
    (tmp_path / "gpt" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        attractor.load(tmp_path / "gpt")


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (lambda model: model.ask(" "), "question is empty"),
        (lambda model: model.generate(""), "prompt is empty"),
        (lambda model: model.generate("a", max_tokens=0), "max_tokens=0"),
        (lambda model: model.perplexity("a"), "at least two"),
        (lambda model: model.forget(3), "no lessons yet"),
        (lambda model: model.save("nowhere"), "no lessons yet"),
        (lambda model: model.learn("a text"), "list of one or more forms"),
    ],
)
def test_mistakes_are_told(door, ask, problem):
    with pytest.raises(ValueError, match=problem):
        ask(door)


@pytest.mark.parametrize("base", ["{", "[]", '{"source": 3}', "{}"])
def test_a_folder_that_does_not_name_its_base_is_refused(door, base, tmp_path):
    door.learn(forms("QZX", "5"))
    door.save(tmp_path / "school")
    assert json.loads((tmp_path / "school" / "base.json").read_text()) == {"source": "tiny"}
    (tmp_path / "school" / "base.json").write_text(base)
    with pytest.raises(ValueError, match="does not say where the base is"):
        attractor.load(tmp_path / "school")


def test_a_broken_configuration_is_told(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no configuration"):
        attractor.load(tmp_path)


def test_a_retrofit_without_its_base_is_told(door, tmp_path):
    door.learn(forms("QZX", "5"))
    door.net.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="load_retrofit"):
        attractor.load(tmp_path / "adapter")
