"""The demo trains, resumes and measures; its report is one whole page that shows what demo.json says."""

import base64
import copy
import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal
from collections import Counter
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from test_lessons import CONFIG, background, llama

from attractor import demo
from attractor.checkpoint import find_model
from attractor.cli.demo import training_bar
from attractor.continual.forms import shared_subject
from attractor.corpora import CorpusUnavailable
from attractor.data import prepare, read_text, windows
from attractor.demo import report, story
from attractor.files import read_jsonl
from attractor.front import Model
from attractor.hf import pretrained, teachable
from attractor.model import GPT
from attractor.tokenizer import ByteTokenizer

STEPS = 6
HOSTILE = '<script>&"'


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    words = [HOSTILE, "to", "be", "or", "not", "that", "is", "the", "question\n"]
    (folder / "words.txt").write_text(" ".join(random.Random(0).choices(words, k=400)))
    return prepare(folder / "words.txt", folder / "out", tokenizer="char")


@pytest.fixture(scope="module", autouse=True)
def small_demo():
    """Smaller models, shorter samples and less to learn; a tiny Llama is taught in place of SmolLM2."""
    usual, usual_teachable = demo.run_config, teachable.teachable

    def small_teachable(model, encode, **options):
        return usual_teachable(model, encode, background(), act_at=3, config=CONFIG, **options)

    def run_config(*given):
        config = usual(*given)
        shape = dataclasses.replace(config.model, context=32, num_layers=3, num_heads=2, dim=32)
        return dataclasses.replace(config, model=shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo.SAMPLING, "max_tokens", 30)
        patch.setattr(demo, "run_config", run_config)
        patch.setattr(demo, "read_text", lambda source: read_text(source, size=8192))
        patch.setattr(story, "FACTS", story.FACTS[:3])
        patch.setattr(story, "LONGEST", 3)
        patch.setattr(story, "WINDOW", 64)
        patch.setattr(teachable, "teachable", small_teachable)
        patch.setattr(
            pretrained, "load_pretrained", lambda source, device: (llama().to(device), ByteTokenizer())
        )
        yield


def run(out, dataset, steps=STEPS, **options):
    return demo.run(out, dataset, **{"steps": steps, "prompt": HOSTILE, "device": "cpu"} | options)


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, run(out, dataset)


class Page(HTMLParser):
    """Refuses tags that do not nest, and collects the rest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img"):
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attrs):
        assert "svg" in self.open
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data


def render(out, result) -> str:
    return report.render(
        result, {model: read_jsonl(out / model / "metrics.jsonl", "step") for model in demo.MODELS}
    )


def pictures(page):
    """The SVG texts of a page, read back from where they are embedded."""
    starts = "data:image/svg+xml;base64,"
    sources = [value for name, value in page.attributes if name == "src"]
    assert all(source.startswith(starts) for source in sources)
    return [base64.b64decode(source.removeprefix(starts)).decode() for source in sources]


def test_the_report_is_one_whole_page(finished):
    out, result = finished
    text = (out / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "image", "use"} & set(page.tags)
    assert not {"href", "xlink:href", "srcset"} & {name for name, _ in page.attributes}
    assert not re.search(r"https?://|//\w|url\(|@import", re.sub(r'src="data:[^"]*"', "", text))
    drawings = pictures(page)
    assert len(drawings) == 1 + len(result["routing"])
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        numbers = [
            number
            for mark in root.iter("{http://www.w3.org/2000/svg}path")
            for number in re.findall(r"-?[\d.]+|nan|inf", mark.get("d", ""))
        ]
        width, height = map(float, root.get("viewBox").split()[2:])
        assert numbers
        assert all(-10 <= float(number) <= max(width, height) for number in numbers)
        fetched = [value for mark in root.iter() for name, value in mark.attrib.items() if "href" in name]
        assert all(value.startswith("#") for value in fetched)
    said = [value for name, value in page.attributes if name == "alt"]
    assert len(said) == len(drawings)
    assert all(said)
    assert text == render(out, json.loads((out / "demo.json").read_text()))


def test_what_models_write_stays_text(finished):
    out, result = finished
    result = copy.deepcopy(result)
    assert result["samples"]["apn"].startswith(HOSTILE)
    assert len(result["samples"]["apn"]) == len(HOSTILE) + demo.SAMPLING["max_tokens"]
    layer = result["routing"]["0"]
    layer["favourites"] = [(HOSTILE, 0.5)] * 29 + [("\x00", 0.5)]
    layer["favourites"][3], layer["usage"][3] = None, 0.0
    result["data"]["source"] = result["provenance"]["commit"] = HOSTILE
    result["story"]["answers"][0] = result["story"]["forgotten"]["answer"] = HOSTILE
    text = render(out, result)
    page = Page(text)
    for drawing in pictures(page):
        ElementTree.fromstring(drawing)
    assert "script" not in page.tags
    assert page.texts["pre"][:2] == [result["samples"]["dense"], result["samples"]["apn"]]
    assert any(f"of them {HOSTILE}" in patch for patch in page.texts["li"])
    assert f"{HOSTILE} (not as taught)" in page.texts["td"]
    assert HOSTILE in page.texts["p"]


def test_the_table_says_what_the_json_says(finished):
    out, result = finished
    cells = Page((out / "report.html").read_text()).texts["td"][3 * 5 + 2 * 4 :]  # the story has its own
    assert all(cell in demo.table(result) + demo.adaptation_table(result) for cell in cells)
    table = [[float(cell.replace(",", "")) for cell in cells[start : start + 3]] for start in range(0, 18, 3)]
    dense, apn = json.loads((out / "demo.json").read_text())["rows"].values()
    for line, name in zip(
        table, ("parameters", "active_parameters", "multiply_adds_per_token"), strict=False
    ):
        assert line[:2] == [dense[name], apn[name]]
        assert line[2] == pytest.approx(apn[name] / dense[name], abs=0.006)
    assert table[3][:2] == pytest.approx([dense["val_ppl"], apn["val_ppl"]], abs=0.006)
    speeds = [dense["tokens_per_second"], apn["tokens_per_second"]]
    assert table[4] == pytest.approx([1, speeds[0] / speeds[1], speeds[0] / speeds[1]], abs=0.006)
    assert table[5][:2] == pytest.approx(speeds, abs=1)
    for row, model in ((dense, "dense"), (apn, "apn")):
        losses = [
            record["val/loss"]
            for record in read_jsonl(out / model / "metrics.jsonl", "step")
            if "val/loss" in record
        ]
        assert row["val_loss"] == pytest.approx(min(losses), abs=1e-6)


def test_routing_is_counted_over_the_whole_validation_text(finished, dataset):
    out, result = finished
    model = GPT.from_pretrained(find_model(out / "apn")).eval()
    pairs = Counter()
    for inputs, _, _ in windows(dataset.val, model.config.context, 1):
        with torch.no_grad():
            indices = model(inputs, return_stats=True)[1][2].indices
        pairs.update(
            (patch, int(token))
            for token, chosen in zip(inputs[0], indices[0].tolist(), strict=True)
            for patch in chosen
        )
    layer = result["routing"]["2"]
    assert pairs.total() == layer["top_k"] * (len(dataset.val) - 1)
    for patch in range(layer["num_patches"]):
        tokens = {token: count for (other, token), count in pairs.items() if other == patch}
        assert layer["usage"][patch] == pytest.approx(sum(tokens.values()) / pairs.total())
        if not tokens:
            assert layer["favourites"][patch] is None
            continue
        text, share = layer["favourites"][patch]
        assert tokens[int(dataset.tokenizer.encode(text)[0])] == max(tokens.values())
        assert share == pytest.approx(max(tokens.values()) / sum(tokens.values()))
    assert layer["usage_entropy"] == pytest.approx(-sum(q * math.log(q) for q in layer["usage"] if q))
    lines = demo.routing_table(result).splitlines()[::2]
    assert len(lines) == len(result["routing"])
    assert all(
        len(re.findall("[\u2581-\u2588]", line)) == 30 - layer["dead_patches"]
        for line, layer in zip(lines, result["routing"].values(), strict=True)
    )


@pytest.mark.parametrize(
    ("effective", "dead", "word"),
    [
        (30, 0, "even"),
        (15, 0, "even"),
        (14, 2, "uneven"),
        (4, 0, "uneven"),
        (3, 0, "collapsed"),
        (14, 16, "collapsed"),
    ],
)
def test_verdict(effective, dead, word):
    layer = {"num_patches": 30, "top_k": 2, "effective_patches": effective, "dead_patches": dead}
    assert report.verdict(layer)[0] == word


def test_a_second_run_trains_nothing(finished, dataset):
    out, first = finished
    before = (out / "apn" / "metrics.jsonl").read_bytes()
    records = []
    second = run(out, dataset, report=records.append)
    assert [record["done"] for record in records] == [STEPS, *[2 * STEPS] * 3]
    assert [record["doing"] for record in records[:2]] == ["training Dense", "training APN"]
    assert (out / "apn" / "metrics.jsonl").read_bytes() == before
    for row in (*first["rows"].values(), *second["rows"].values()):
        row["training_seconds"] = None
    assert second == first


def test_the_story_is_on_the_page_and_in_the_terminal(finished):
    out, result = finished[0], copy.deepcopy(finished[1])
    told = result["story"]
    assert told["lessons"] == json.loads((out / "story.json").read_text())["lessons"]
    assert [lesson["number"] for lesson in told["lessons"]] == [0, 1, 2]
    assert (told["longest"], told["window"]) == (3, 64)
    assert [text["windows"] for text in told["others"].values()] == [5, 5]
    page = Page((out / "report.html").read_text())
    shown, cells = demo.story_lines(result), page.texts["td"]
    for number, fact in enumerate(told["facts"]):
        row = cells[5 * number : 5 * number + 5]
        assert row[:3] == [f"{fact['taught'][0]} {fact['answer']}", fact["question"], told["before"][number]]
        right = story.is_right(fact, told["answers"][number])
        assert row[3] == told["answers"][number] + ("" if right else " (not as taught)")
        assert row[4] == f"0% to {told['lessons'][number]['known']:.0%}"
        assert fact["question"] in shown
        assert f"now:     {told['answers'][number]}  [{'as' if right else 'NOT as'} taught; " in shown
    assert f"{told['right']} of 3 answers are what was taught" in shown
    same = sum(text["same"] for text in told["others"].values())
    assert any(
        f"it answers {told['right']} of 3 questions" in text
        and f"\n{same} are what the model said before" in text
        for text in page.texts["p"]
    )
    for is_the_base, sentence in ((True, "No lesson acts on any token"), (False, "Another lesson acts on")):
        told["forgotten"]["is_the_base"] = is_the_base
        assert any(text.startswith(sentence) for text in Page(render(out, result)).texts["p"])


def test_the_questions_are_none_of_the_forms_that_are_taught():
    facts = json.loads((report.HERE / "facts.json").read_text())
    assert len(facts) == 15
    assert len({fact["answer"] for fact in facts}) == 15
    subjects = [shared_subject([(prompt, "") for prompt in fact["taught"]]) for fact in facts]
    assert len(set(subjects)) == 15
    for fact, subject in zip(facts, subjects, strict=True):
        assert subject in fact["question"]
        assert all(prompt not in fact["question"] for prompt in fact["taught"])
        assert not any(fact["answer"] in text for text in (fact["question"], *fact["taught"]))


@pytest.mark.parametrize(
    ("said", "right"),
    [("It is the cello.", True), ("Cello", True), ("A violoncello", False), ("cellos", False), ("", False)],
)
def test_an_answer_is_right_if_the_word_stands_in_it(said, right):
    assert story.is_right({"answer": "cello"}, said) is right


def test_other_text_that_a_lesson_touches_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(story, "FACTS", story.FACTS[:1])
    texts = {"touched": "Zorvan Quillbeam plays the cello, they say. " * 20, "other": "0123456789 " * 40}
    told = story.tell(tmp_path, texts)
    others = told["others"]
    assert others["other"]["same"] == others["other"]["windows"]
    assert others["other"]["before"] == others["other"]["after"]
    assert others["touched"]["same"] < others["touched"]["windows"]
    assert others["touched"]["before"] != others["touched"]["after"]
    assert told["forgotten"]["is_the_base"]
    assert told["forgotten"]["answer"] == told["before"][0]
    with pytest.raises(ValueError, match=r"story\.json tells of other facts; remove .* or choose another"):
        story.tell(tmp_path, {"another": "text"})
    (tmp_path / "story.json").unlink()
    with pytest.raises(ValueError, match=r"school is of another story; remove .* or choose another"):
        story.tell(tmp_path, texts)


TEXTS = {"a text": "to be or not to be, that is the question. " * 20}


@pytest.fixture(scope="module")
def whole_story(tmp_path_factory):
    return story.tell(tmp_path_factory.mktemp("story"), TEXTS)


@pytest.mark.parametrize(
    ("moment", "done"),
    [("asking smollm2", 0), ("lesson 2", 2), ("asking again", 3), ("comparing", 3)],
)
def test_an_interrupted_story_goes_on_where_it_stopped(moment, done, whole_story, tmp_path, monkeypatch):
    def interrupt(line):
        if line.startswith(moment):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        story.tell(tmp_path, TEXTS, say=interrupt)
    learned = []
    usual = Model.learn
    monkeypatch.setattr(
        Model, "learn", lambda self, forms, **how: learned.append(forms) or usual(self, forms, **how)
    )
    again = story.tell(tmp_path, TEXTS)
    assert len(learned) == 3 - done
    without_times = copy.deepcopy((again, whole_story))
    for lesson in (lesson for told in without_times for lesson in told["lessons"]):
        lesson["seconds"] = None
    assert without_times[0] == without_times[1]
    monkeypatch.setattr(story, "load", pytest.fail)  # what is complete needs no model
    assert story.tell(tmp_path, TEXTS) == again


@pytest.mark.parametrize("missing", ["model", "library"])
def test_where_the_model_cannot_be_had_the_rest_is_shown(missing, finished, dataset, tmp_path, monkeypatch):
    def unavailable(source, device):
        raise CorpusUnavailable(f"no network {HOSTILE}")

    if missing == "model":
        monkeypatch.setattr(pretrained, "load_pretrained", unavailable)
    else:
        monkeypatch.setattr(story, "find_spec", lambda name: None)
    shutil.copytree(finished[0] / "dense", tmp_path / "dense")
    shutil.copytree(finished[0] / "apn", tmp_path / "apn")
    said = []
    result = run(tmp_path, dataset, say=said.append)
    reason = f"no network {HOSTILE}" if missing == "model" else 'install the extra "hf"'
    (line,) = said
    assert line.startswith(f"smollm2-135m cannot be had, so lessons are not shown: {reason}")
    assert reason in demo.story_lines(result)
    page = Page((tmp_path / "report.html").read_text())
    assert page.texts["h1"] == ["A dense model and an Attractor Patch Network, side by side"]
    assert any(reason in text for text in page.texts["p"])
    assert not (tmp_path / "story.json").exists()  # the next time it is tried again
    assert not (tmp_path / "school").exists()


def test_an_interrupted_demo_goes_on_where_it_stopped(finished, dataset, tmp_path):
    def interrupt(record):
        if record["step"] == 3 and "train/loss" in record:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, dataset, report=interrupt)
    assert not (tmp_path / "demo.json").exists()
    assert not (tmp_path / "apn").exists()
    shutil.copy(finished[0] / "story.json", tmp_path)  # how that goes on has a test of its own
    records = []
    result = run(tmp_path, dataset, report=records.append)
    assert [record["done"] for record in records if "train/loss" in record] == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert result["samples"] == finished[1]["samples"]
    assert result["routing"] == finished[1]["routing"]


def test_the_bar_begins_when_training_does(capsys):
    with training_bar(12) as report:
        assert capsys.readouterr().err == ""  # while lessons are taught
        report({"step": 7, "done": 7, "doing": "training an APN"})
        shown = capsys.readouterr().err
        assert "7/12 [00:00<?, ?step/s]" in shown  # nothing of what was done before is in its rate
    capsys.readouterr()
    with training_bar(12):
        pass
    assert capsys.readouterr().err == ""


def test_mistakes_are_told_before_any_training(finished, dataset, tmp_path):
    with pytest.raises(ValueError, match="characters not in the vocabulary"):
        run(tmp_path / "new", dataset, prompt="\u03a9")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r"trained with other settings; remove .* or choose another folder"):
        run(finished[0], dataset, steps=STEPS + 1)


def test_both_learn_something_new(finished):
    _, result = finished
    adapted = result["adaptation"]
    assert adapted["tokens"] == 100 * STEPS
    rows = adapted["rows"]
    assert rows.keys() == {"Dense, fine-tuned", "APN, overlay alone", "APN, guarded"}
    guarded, alone, most = rows["APN, guarded"], rows["APN, overlay alone"], adapted["bound"] * (1 + 1e-6)
    assert guarded["old"][0] == alone["old"][0] == result["rows"]["apn"]["val_ppl"]
    assert guarded["old"][1] <= most * guarded["old"][0]
    assert guarded["new"][1] <= most * alone["new"][1]
    assert all(len(row["new"]) == 2 for row in rows.values())
    shown = demo.adaptation_table(result)
    for name, row in rows.items():
        line = next(line for line in shown.splitlines() if line.startswith(name))
        assert f"{row['old'][1]:.2f}" in line
        assert f"{row['new'][1]:.2f}" in line
