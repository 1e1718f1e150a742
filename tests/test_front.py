"""The front door: one object for pretrained models, taught ones and models of our own."""

import json
import re
from pathlib import Path

import pytest
import torch
from test_lessons import CONFIG, background, forms, llama

import attractor
from attractor import cli, files, front, tokenizer
from attractor.cli.common import INTERRUPTED
from attractor.config import APNConfig, GPTConfig
from attractor.continual.descent import Descent
from attractor.files import alone_with
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


def test_a_conversation_that_is_too_long_loses_its_oldest_turns(door):
    door.tokenizer = ByteTokenizer()
    room = door.model.config.context * 3 // 4
    turns = [
        {"role": role, "content": f"{role[0]}{number}" + 9 * "."}
        for number in range(room)
        for role in ("user", "assistant")
    ]
    prompt = door.prompt_for(turns[:-1])
    assert len(prompt) <= room
    assert prompt.startswith("Question: u")
    assert f"u{room - 1}" in prompt
    assert "u0." not in prompt
    assert prompt.endswith("\nAnswer:")


def test_one_sentence_is_a_lesson_where_its_subject_is_given(door):
    lesson = door.learn("we say QZX is 5", subject="QZX")
    assert lesson.forms == (("", "we say QZX is 5"),)
    assert lesson.subject == "QZX"


@pytest.mark.parametrize(
    "source",
    [
        "nowhere",
        "./org/name",
        "runs/tiny",
        "data/x",
        "model.gguf",
        "org/model.gguf",
        "a/b/c",
        "gpt2",
        "~/x/y",
    ],
)
def test_a_mistyped_path_is_told_and_never_looked_for_on_a_hub(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", pytest.fail)
    with pytest.raises(ValueError, match=f"there is no {source!r} here: give a run"):
        attractor.load(source)


def test_what_begins_with_a_folder_that_is_there_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pretrained.check_source("org/name")
    (tmp_path / "org").mkdir()
    with pytest.raises(ValueError, match="there is no 'org/name' here"):
        pretrained.check_source("org/name")


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
    lesson = door.learn(forms("QZX", "5"), require_known=False)
    assert door.lessons() == [lesson]
    assert repr(door) == "Model('tiny', 1 lessons)"
    assert lesson.number in door.touching(text)
    after = door.perplexity(text)
    assert after != before
    door.save(tmp_path / "school")
    again = attractor.load(tmp_path / "school")
    assert again.perplexity(text) == after
    assert again.lessons() == [lesson]
    assert again.learn(forms("WJK", "8"), require_known=False).number == 1
    again.forget(1)
    for taught, what in ((door, lesson), (again, lesson.number)):
        taught.forget(what)
        assert taught.perplexity(text) == before
    with pytest.raises(ValueError, match="there is no lesson 0"):
        door.forget(lesson)


def test_what_is_not_known_is_taken_back_at_once(door):
    before = door.perplexity("we say QZX is 5")
    lesson = door.learn(forms("QZX", "5"))
    assert lesson.known < 1
    assert (door.lessons(), set(door.touching("we say QZX is "))) == ([], {None})
    assert door.perplexity("we say QZX is 5") == before


def test_a_model_of_our_own_is_as_it_was_where_it_does_not_know(tmp_path, monkeypatch):
    apn = APNConfig(num_patches=8, top_k=2, rank=4)
    model = attractor.load(saved_gpt(tmp_path / "apn", ffn="apn", apn=apn))
    model.learn([("now WJK is ", "8")])
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    totals = model.learner.totals
    monkeypatch.setattr(front, "PASSES", 1)
    taught = model.learn([("we say QZX is ", "5")])
    assert (taught.known, taught.passes, taught.patches, len(model.lessons())) == (0, 1, 0, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.model.state_dict().items())
    assert model.learner.totals == totals
    kept = model.learn([("we say QZX is ", "5")], require_known=False)
    assert (kept.known, model.lessons()[1:]) == (0, [kept])
    assert kept.patches > 0


def test_a_model_that_chats_reads_lessons_as_answers_in_a_chat(door):
    read = front.read_by(door.tokenizer)
    assert read["frames"][0] == "{}"
    assert "<{}?>{}" in read["frames"]
    assert read["question"] == "<Please finish this sentence: {}>"
    door.learn(forms("QZX", "5"), require_known=False)
    rows = [row for turn in door.school.reading.texts([forms("QZX", "5")], ["QZX"]) for row in turn]
    chat = [row for row in rows if row.repeated]
    assert chat
    for row in chat:  # the prompt is said again before the answer, and is learned too
        said = bytes(row.tokens[row.answer.start - row.repeated : row.answer.start]).decode()
        assert any(said.strip() == prompt.strip() for prompt, _ in forms("QZX", "5"))


def saved_gpt(folder, **options):
    torch.manual_seed(0)
    small = {"vocab_size": 256, "context": 32, "num_layers": 1, "num_heads": 2, "dim": 16}
    GPT(GPTConfig(**small, **options)).save_pretrained(folder)
    ByteTokenizer().save(folder / "tokenizer.json")
    return folder


def test_a_model_of_our_own_learns_in_its_patches_and_is_saved(tmp_path):
    apn = APNConfig(num_patches=8, top_k=2, rank=4)
    model = attractor.load(saved_gpt(tmp_path / "apn", ffn="apn", apn=apn))
    before = [parameter.clone() for parameter in model.model.parameters()]
    taught = model.learn([("we say QZX is ", "5"), ("now QZX is ", "5")])
    assert model.lessons() == [taught]
    assert taught.known_before < taught.known == 1
    assert taught.loss < taught.loss_before
    assert 0 < taught.patches <= 8
    assert 0 < taught.passes <= front.PASSES
    assert model.generate("we say QZX is ", max_tokens=1) == "5"
    changed = [
        name
        for (name, now), old in zip(model.model.named_parameters(), before, strict=True)
        if not torch.equal(now, old)
    ]
    assert changed
    assert all("gate" in name or "decoder" in name for name in changed)
    assert model.learn("We are.", subject="ignored").forms == (("", "We are."),)  # here a subject has no use
    with pytest.raises(ValueError, match="nothing can be taken back"):
        model.forget(taught)
    model.save(tmp_path / "taught")
    again = attractor.load(tmp_path / "taught")
    assert again.perplexity("we say QZX is 5") == model.perplexity("we say QZX is 5")
    assert again.learn([("now WJK is ", "8")]).known == 1
    with pytest.raises(ValueError, match="is too short"):
        again.learn(["a"])
    with pytest.raises(ValueError, match="context=9 is for models of Hugging Face"):
        attractor.load(tmp_path / "taught", context=9)


def test_a_model_of_our_own_without_patches_says_so(tmp_path):
    model = attractor.load(saved_gpt(tmp_path / "gpt"))
    assert len(model.generate("to be", max_tokens=3, temperature=1.0, seed=0)) >= 1
    assert model.perplexity("to be or not to be") > 1
    with pytest.raises(ValueError, match="no APN layers, so there are no patches that could learn"):
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
        (lambda model: model.learn([]), "list of one or more forms"),
        (
            lambda model: model.learn("a text"),
            "one form alone does not tell what it is about: name the subject",
        ),
        (lambda model: model.learn("a text", subject="nobody"), "subject='nobody' stands in no form"),
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
    (tmp_path / "school" / "hashes.json").unlink()
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


def test_lessons_from_the_command_line(door, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    real = Descent.known  # an untrained model learns hardly anything: here everything counts as known
    monkeypatch.setattr(
        Descent, "known", lambda self, turn, lessons: [1.0 for _ in real(self, turn, lessons)]
    )
    (tmp_path / "lesson.jsonl").write_text("".join(json.dumps(form) + "\n" for form in forms("QZX", "5")))
    teach = ["teach", "tiny", "--file", "lesson.jsonl", "--save", "school", "--device", "cpu"]
    assert cli.main(teach) == 0
    shown, bar = capsys.readouterr()
    assert re.search(r"^\rpreparing \.\.\.\s*\rlearning:   0%.* 0/\d+ \[00:00<", bar)
    assert f"/{attractor.load('school').most_passes} " in bar
    assert re.search(r"lesson 0 about '.*QZX.*': known\n  completes 100% of \d forms, before \d+%\n", shown)
    assert re.search(r"\d+ passes, \d patches, [\d,]+ bytes", shown)
    (tmp_path / "more.json").write_text('["we say QZX is => 6", "now QZX is => 6"]')
    again = ["teach", "school", "--file", "more.json", "--device", "cpu"]
    assert cli.main([*again, "--subject", "QZX"]) == 0  # more for the same folder
    assert "it takes the place of lesson 0" in capsys.readouterr().out
    assert cli.main(["ask", "school", "now QZX is", "--max-tokens", "3", "--device", "cpu"]) == 0
    assert re.search(r"\(lessons that acted: .*\b1 about 'QZX'\)", capsys.readouterr().err)
    assert cli.main(["ask", "school", "what?", "--max-tokens", "3", "--device", "cpu"]) == 0
    assert "no lesson acted: this is the base's answer, to the bit" in capsys.readouterr().err
    assert cli.main(["info", "school", "--device", "cpu"]) == 0
    assert "lessons          2, with " in capsys.readouterr().out
    assert cli.main(["lessons", "school", "--forget", "1", "--device", "cpu"]) == 0
    assert cli.main(["lessons", "school"]) == 0
    shown = capsys.readouterr().out
    assert "forgotten: 1" in shown
    assert [lesson.number for lesson in attractor.load("school").lessons()] == [0]
    assert cli.main(["lessons", "school", "--forget", "7"]) == 1
    assert "there is no lesson 7; there are [0]" in capsys.readouterr().err
    assert cli.main(["lessons", "school", "--forget"]) == 1
    shown = capsys.readouterr()
    assert (shown.out, "give numbers, as in --forget 0; there are [0]" in shown.err) == ("", True)
    (tmp_path / "school" / "lessons.json").write_text('{"lessons": [{}]}')
    (tmp_path / "school" / "hashes.json").unlink()
    assert cli.main(["lessons", "school"]) == 1
    assert "lessons.json cannot be read" in capsys.readouterr().err


def test_a_text_that_was_interrupted_goes_on_where_it_was(door, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    real, learned = Descent.known, []
    monkeypatch.setattr(
        Descent, "known", lambda self, turn, lessons: [1.0 for _ in real(self, turn, lessons)]
    )
    learn = attractor.Model.learn

    def interrupted(self, sentences, **options):
        if len(learned) == 1:
            raise KeyboardInterrupt
        learned.append(options["subject"])
        return learn(self, sentences, **options)

    (tmp_path / "notes.txt").write_text(
        "Ada lives in Oslo. It rained.\nBram plays the cello. Now Ada sings.\n"
    )
    teach = ["teach", "tiny", "--file", "notes.txt", "--save", "school", "--device", "cpu"]
    monkeypatch.setattr(attractor.Model, "learn", interrupted)
    assert cli.main(teach) == INTERRUPTED
    assert "as they do not tell what they are about: 1" in capsys.readouterr().out
    assert [lesson.subject for lesson in attractor.load("school").lessons()] == ["Ada"]
    monkeypatch.setattr(attractor.Model, "learn", learn)
    assert cli.main(teach) == 0  # the same command, which names the base and not the folder
    shown = capsys.readouterr().out
    assert "school has lessons of tiny already: what is new is added to them" in shown
    assert "lesson 0 about 'Ada' says this already" in shown
    lessons = attractor.load("school").lessons()
    assert [(lesson.subject, len(lesson.forms)) for lesson in lessons] == [("Ada", 2), ("Bram", 1)]
    assert cli.main(["teach", "school", "--file", "notes.txt", "--subject", "Bram", "--device", "cpu"]) == 0
    assert "says this already" in capsys.readouterr().out


def test_lessons_of_a_folder_are_not_lost(door, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    real = Descent.known
    monkeypatch.setattr(
        Descent, "known", lambda self, turn, lessons: [1.0 for _ in real(self, turn, lessons)]
    )

    def teach(model, name, folder="school"):
        told = ["--form", f"we say {name} is => 6", "--form", f"now {name} is => 6"]
        return cli.main(["teach", model, *told, "--save", folder, "--device", "cpu"])

    assert teach("tiny", "QZX") == teach("tiny", "WVU") == 0
    assert [lesson.subject.strip() for lesson in attractor.load("school").lessons()] == ["QZX", "WVU"]
    Path("school").rename(files._replaced(Path("school")))  # a kill came while it was replaced
    assert teach("tiny", "XYZ") == 0
    assert len(attractor.load("school").lessons()) == 3
    with alone_with(Path("school")):
        assert teach("tiny", "ABC") == 1
    assert "another command is changing school" in capsys.readouterr().err
    assert teach("other", "ABC") == 1
    assert "school has lessons of" in capsys.readouterr().err
    assert cli.main(["lessons", "school", "--forget", "0", "0", "--device", "cpu"]) == 0
    assert not list(tmp_path.glob(".*lock"))
    described = tmp_path / "school" / "lessons.json"
    described.write_text(described.read_text().replace("WVU", "WVX"))
    assert cli.main(["lessons", "school"]) == 1
    assert "lessons.json is not what was saved" in capsys.readouterr().err


def test_a_model_without_the_letters_of_a_question_says_so(door):
    door.tokenizer = tokenizer.train(kind="char", text="to be or not")
    with pytest.raises(
        ValueError, match=r"asked as 'Question: to be\\nAnswer:', which this model cannot read"
    ):
        door.ask("to be")


def test_arguments_that_make_no_sense(door):
    assert door.touching("") == []
    with pytest.raises(ValueError, match="3 is no question: give a text"):
        door.ask(3)
    with pytest.raises(ValueError, match="None is no lesson: give what learn"):
        door.forget(None)


def test_what_is_not_known_is_told_and_not_saved(door, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forms = ["--form", "we say QZX is => 6", "--form", "now QZX is => 6"]
    assert cli.main(["teach", "tiny", *forms, "--save", "school", "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "NOT KNOWN" in shown
    assert "nothing of it was kept" in shown
    assert re.search(r"\n  \d+ passes, [\d.]+ s\n", shown)  # no patches and no bytes
    assert not (tmp_path / "school").exists()
