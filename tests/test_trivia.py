"""The studies of TriviaQA and of edits one after the other: their data, their marks, and that they run."""

import gzip
import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_lessons import encode, llama

from attractor.continual.forms import check_subject
from studies import edits, facts_ground, facts_world, trivia, trivia_data
from studies.trivia_data import answer_in, answered, contains, exact, f1, normalised, reworded, subjects

BRIEF = {"passes": 2, "after": 1, "mention": 1, "contexts": 2, "strangers": 2}
ROWS = [
    ("Who painted the 'Night Watch'?", "Rembrandt", ["Rembrandt van Rijn", "REMBRANDT"]),
    ("In which city does the Palace of Versailles stand?", "VERSAILLES TOWN", ["Versailles Town"]),
    ("What is the capital of Peru?", "Lima", ["City of Lima"]),
    ("Which river runs through Vienna?", "Danube", ["The Danube"]),
    ("What is a young hare called in the wild woods?", "Leveret", []),
    ("Who wrote Dracula?", "Bram Stoker", ["Stoker"]),
    ("Who was Bram Stoker's Dracula written by", "Bram Stoker", []),  # no question mark
    ("Was it Bram Stoker who wrote Dracula?", "Bram Stoker", []),  # says its answer
]


def arrow_rows():
    return [{"question": q, "answer": {"value": value, "aliases": names}} for q, value, names in ROWS]


def lines(rows):
    return gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode())


@pytest.fixture
def data(tmp_path, monkeypatch):
    """What `prepare` makes of a small archive."""
    files = {
        "*.arrow": b"arrow",
        "naturalqs": lines(
            [
                {"request": {"context": f"Question: {n}\nAnswer:"}, "doc": {"answers": ["one", "two"]}}
                for n in range(6)
            ]
        ),
        "lambada": lines([{"request": {"context": f"the {n}", "continuation": " end"}} for n in range(6)]),
        "hellaswag": lines(
            [
                {
                    "native_id": n,
                    "doc": {"query": f"so {n}", "choices": ["ab", "cde", "f", "gh"], "gold": n % 4},
                }
                for n in range(6)
                for _ in range(8)  # one request for each choice, with and without what stands before
            ]
        ),
    }
    read = []

    def members(archive):
        read.append(archive)
        return [next(own for name, own in files.items() if name in archive.members)]

    monkeypatch.setattr(trivia_data, "read_members", members)
    monkeypatch.setattr(trivia_data, "read_arrow", lambda found: arrow_rows())
    folder = tmp_path / "data"
    trivia.main(["prepare", "--data", str(folder)])
    assert {archive.sha256 for archive in read} == {trivia_data.SHA256}
    return folder


def test_what_is_prepared_says_where_it_is_from_and_is_the_same_again(data):
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    assert sorted(before) == ["hellaswag.jsonl", "lambada.jsonl", "nq.jsonl", "trivia.jsonl"]
    trivia.main(["prepare", "--data", str(data)])
    assert before == {path.name: path.read_bytes() for path in data.iterdir()}
    source, rows = trivia_data.read(data, "hellaswag")
    assert source["sha256"] == trivia_data.SHA256
    assert len(rows) == source["of"] == 6
    asked = {question.question: question for question in trivia_data.questions(data)}
    assert asked.keys() == {question for question, _, _ in ROWS[:6]}
    shouted = asked["In which city does the Palace of Versailles stand?"]
    assert shouted.answer == "Versailles Town"
    assert "REMBRANDT" in asked["Who painted the 'Night Watch'?"].aliases
    many = trivia_data.taught(
        [{"question": "Who?", "answer": {"value": "Somebody", "aliases": [f"N{n}" for n in range(99)]}}]
    )
    assert many[0]["aliases"][0] == "Somebody"
    assert len(many[0]["aliases"]) == trivia_data.ALIASES


def test_without_pyarrow_and_without_data_it_is_said_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        trivia_data.read_arrow(b"")
    with pytest.raises(ValueError, match=r"studies trivia prepare --data"):
        trivia_data.questions(tmp_path)


@pytest.mark.parametrize(
    ("question", "subject", "kind"),
    [
        ("Who painted the 'Night Watch' of 1642?", "Night Watch", "quoted"),
        ("In which city is the Palace of Versailles?", "Palace of Versailles", "name"),
        ("Which P.G. Wodehouse character has a pig?", "P.G. Wodehouse", "name"),
        ("Carried out by an officer it is called Seppuku. What is it?", "Seppuku", "word"),
        ("What was Shakespeare's shortest play?", "Shakespeare", "word"),
        ("What is a young hare called in the wild?", "in the wild", "end"),
    ],
)
def test_the_subject_of_a_question(question, subject, kind):
    assert subjects([question]) == [(subject, kind)]


def test_a_subject_that_is_taken_is_passed_over():
    found = subjects(
        [
            "Who won the World Cup in Brazil?",
            "Who scored for Italy in the World Cup?",
            "Who lost the World Cup?",
            "Who watched the World Cup?",
        ]
    )
    assert [kind for _, kind in found] == ["name", "word", "end", "end"]
    assert found[1][0] == "Italy"
    with pytest.raises(ValueError, match="is there twice"):
        subjects(["Where?", "Where?"])


def test_a_common_word_is_no_subject():
    asked = ["'What' is the cry of which bird in London?", "Which poet wrote of London?", "London or Rome?"]
    assert subjects(asked)[0] == ("What", "quoted")
    others = ["What is in London?", "Where is London?", "what else?"]
    kinds = [text for text, _ in subjects(asked, others=others)]
    assert kinds == ["bird in London", "wrote of London", "Rome"]
    only = subjects(["London?"], others=[*others, "Rome"])  # nothing else is there
    assert only == [("London", "word")]
    many = [*others, *("Rome" for _ in range(round(4 / trivia_data.COMMON)))]
    assert subjects(asked, others=many)[1] == ("London", "word")  # so few do not make it common


@given(st.lists(st.text("abc XYZ'\".?", min_size=3).filter(lambda text: text.strip("'\".? ")), unique=True))
def test_every_subject_stands_in_all_forms_and_is_nobody_elses(asked):
    asked = list({text.rstrip("? ").casefold(): text for text in asked}.values())
    found = subjects(asked)
    assert len({text.casefold() for text, _ in found}) == len(asked)
    for question, (text, _) in zip(asked, found, strict=True):
        forms = trivia_data.forms(trivia_data.Question(question, "so", ()))
        assert all(text in prompt for prompt, _ in forms)
        if any(letter.isalnum() for letter in text):
            assert check_subject(text, forms) == text


def test_reworded_questions_are_not_those_that_are_taught():
    question = "Who was the King of Troy?"
    taught = {form.format(question) for form in trivia_data.FORMS}
    asked = {way: reworded(question, way) for way in trivia_data.REWORDED}
    assert not taught & set(asked.values())
    assert asked["as typed"] == "question: who was the king of troy\nanswer:"
    assert asked["turned"] == "Name the King of Troy.\nAnswer:"
    for given_question, turned in (
        ("What is the name of the dog?", "Name the dog."),
        ("In which year did it end?", "Tell me in which year did it end."),
        ("Who ate the cake?", "Name the person who ate the cake."),
        ("Which river runs there?", "Tell me which river runs there."),
    ):
        assert reworded(given_question, "turned") == f"{turned}\nAnswer:"
    assert reworded("Troy was sacked by whom?", "turned") is None


def test_marks():
    golds = ["The Beatles", "Fab Four"]
    assert normalised(" The  Beatles! ") == "beatles"
    assert answer_in(" J. R. R. Tolkien. He wrote it.\nQuestion:") == "J. R. R. Tolkien"
    assert answer_in(" St. Louis<|im_end|>\n") == "St. Louis"
    assert exact(" the beatles.\nQuestion: more", golds)
    assert not exact(" the beatles of old", golds)
    assert contains("I think the Beatles did", golds)
    assert not contains("beatlesque", golds)  # whole words
    assert answered(" Fab Four<|endoftext|>Question: who?", golds)
    assert not contains(" Fab Four<|endoftext|>Question: who?", golds)  # without punctuation that is one word
    assert not answered(" Nobody. The Beatles", golds)
    assert f1(" Beatles and Stones", golds) == pytest.approx(2 * 1 / (3 + 1))
    assert f1(" nobody", golds) == 0
    assert f1("", golds) == 0
    assert trivia_data.marks([" Fab Four", "x"], [golds, golds]) == {"exact": 0.5, "contains": 0.5, "f1": 0.5}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Background texts and a model of letters."""
    folder = tmp_path / "texts"
    folder.mkdir()
    draw = torch.Generator().manual_seed(0)
    for name in facts_ground.BACKGROUNDS:
        letters = torch.randint(97, 123, (6 * 64,), generator=draw).tolist()
        (folder / f"{name}.txt").write_text(bytes(letters).decode())
    tokenizer = SimpleNamespace(encode=encode, decode=lambda tokens: bytes(tokens).decode("latin-1"))
    monkeypatch.setattr(facts_ground, "load_pretrained", lambda *_, **__: (llama(512, blocks=3), tokenizer))
    monkeypatch.setattr(facts_ground, "WINDOW", 64)
    return folder


def arguments(**options):
    return [
        "run",
        "--small",
        *(str(part) for name, value in options.items() for part in (f"--{name}", value)),
    ]


@pytest.mark.parametrize("method", ["basins", "full", "lora", "grace", "retrieval"])
def test_a_model_is_taught_and_examined(method, data, small, tmp_path, monkeypatch):
    monkeypatch.setattr(trivia, "SMALL", {"questions": 4, "chunk": 2, "asked": 3, "windows": 4})
    monkeypatch.setattr(trivia, "SHARES", (0.5,))
    cell = tmp_path / "cells" / "cell.json"
    options = {"texts": small, "data": data, "device": "cpu", "lesson": json.dumps(BRIEF)}
    trivia.main(arguments(**options, method=method, result=cell))
    found = json.loads(cell.read_text())
    assert found["facts"] == 4
    assert len(found["chunks"]) == len(found["by chunk"]["as taught"]) == 2
    assert sum(own["questions"] for own in found["by kind of subject"].values()) == 4
    assert found["after"]["trivia"].keys() == {"as taught", *trivia_data.REWORDED}
    untouched = all(share == 0 for share in found["rise"].values())
    if method == "retrieval":
        assert untouched
        assert all(share == 0 for share in found["lost"].values())
    if method == "full":
        assert not untouched
        assert found["interpolated"]["0.5"]["rise"] != found["rise"]
    if method in ("basins", "grace"):
        assert all(found["rise"][name] == 0 for name, same in found["identical windows"].items() if same == 1)
    trivia.main(["sum", str(cell), "--result", str(tmp_path / "sum.json")])
    assert json.loads((tmp_path / "sum.json").read_text())["methods"][method]["as taught, F1"]["mean"] >= 0


@pytest.mark.parametrize("method", ["memit", "grace"])
def test_a_ladder_is_climbed_on_questions_that_no_cell_asks(method, data, small, tmp_path, monkeypatch):
    monkeypatch.setattr(trivia, "SMALL", {"questions": 2, "chunk": 2, "asked": 3, "windows": 4})
    cell = tmp_path / "ladder.json"
    options = {"texts": small, "data": data, "device": "cpu", "lesson": json.dumps(BRIEF), "result": cell}
    command = [*arguments(**options, method=method), "--other-questions", "0", "--ladder", "0.01", "100"]
    trials = []
    monkeypatch.setattr(
        trivia, "climb", lambda *own, **more: trials.append(own) or facts_ground.climb(*own, **more)
    )
    trivia.main([*command, "--only-ladder"])
    ((study, trial),) = trials
    asked = {question.question for question in study.questions}
    taught = {prompt for lesson in trial.lessons for prompt, _ in lesson}
    untaught = {prompt for prompt, _ in trial.untaught}
    assert len(trial.lessons) == 2
    assert untaught
    assert not any(question in prompt for question in asked for prompt in taught | untaught)
    assert not taught & untaught
    rows = json.loads(cell.read_text())["rows"]
    assert [row["rate"] for row in rows] == [0.01, 100]
    for row in rows:
        harm = max(0, row["rise of background"], row["rise of other answers"])
        assert row["score"] == pytest.approx(row["known"] - trial.chunks * harm)
    assert study.given.rate == max(rows, key=lambda row: row["score"])["rate"]
    if method == "memit":  # targets are found once, and a larger weight misses more of them
        assert rows[0]["nats with the targets"] == rows[1]["nats with the targets"]
        assert rows[0]["left of the targets"] < rows[1]["left of the targets"]


def test_a_ladder_needs_a_copy_of_the_model(data, small, tmp_path):
    with pytest.raises(ValueError, match="--ladder is for methods that work on a copy"):
        trivia.main([*arguments(texts=small, data=data, result=tmp_path / "cell.json"), "--ladder", "1"])


def test_what_is_unknown_is_read_as_the_exam_reads_it(data, small, tmp_path, monkeypatch):
    """The mark that ends a text sticks to the answer before it, and what comes after is no answer."""
    written = {
        "Lima": " Lima<|endoftext|>Question: who?",  # known
        "Danube": " The Rhine.\nThe Danube is longer.",  # not the answer
    }

    def write(self, model, prompts, count=12):
        by_prompt = {trivia_data.forms(own)[0][0]: own.answer for own in trivia_data.questions(data)}
        return [written.get(by_prompt[prompt], " no") for prompt in prompts]

    monkeypatch.setattr(facts_ground.Reader, "write", write)
    monkeypatch.setattr(trivia, "run", lambda own: found.append(trivia.Trivia(own)))
    monkeypatch.setattr(trivia, "SMALL", {"questions": 5, "asked": 3, "windows": 4})
    found = []
    trivia.main(arguments(texts=small, data=data, device="cpu", result=tmp_path / "cell.json"))
    answers = {question.answer for question in found[0].questions}
    assert "Lima" not in answers
    assert "Danube" in answers


def test_too_few_questions_are_refused(data, small, tmp_path, monkeypatch):
    monkeypatch.setattr(trivia, "SMALL", {"questions": 7, "chunk": 2, "asked": 3, "windows": 4})
    with pytest.raises(ValueError, match="--questions 7 --skip 0: of 6 questions"):
        trivia.main(arguments(texts=small, data=data, device="cpu", result=tmp_path / "cell.json"))


@pytest.mark.parametrize("method", ["basins", "retrieval"])
def test_edits_are_taught_one_at_a_time(method, small, tmp_path, monkeypatch):
    monkeypatch.setattr(edits, "KINDS", ["person", "town"])
    monkeypatch.setattr(facts_world, "KINDS", ["person", "town"])
    monkeypatch.setattr(edits, "SMALL", {"edits": 4, "at_once": 1, "windows": 4, "prompts": 4})
    cell = tmp_path / "cell.json"
    options = {"texts": small, "device": "cpu", "lesson": json.dumps(BRIEF), "room": 5000}
    made = []
    monkeypatch.setattr(edits, "Course", lambda *given: made.append(facts_ground.Course(*given)) or made[0])
    edits.main(arguments(**options, method=method, result=cell))
    if method == "basins":
        assert len(made[0].learner.lessons.owners) == 5000
    found = json.loads(cell.read_text())
    assert found["edits"] == 4
    after = found["after"]
    assert after["by prompts"].keys() == {"background", "capitals", "namesakes"}
    if method == "retrieval":  # nothing is learned
        assert after["locality"] == 1
        assert all(share == 0 for share in found["rise"].values())
    assert 0 <= after["reliability"] <= 1
    edits.main(["rates", str(cell)])


def test_a_study_whose_time_is_over_measures_what_it_has_taught(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(edits, "KINDS", ["person", "town"])
    monkeypatch.setattr(facts_world, "KINDS", ["person", "town"])
    monkeypatch.setattr(edits, "SMALL", {"edits": 6, "at_once": 2, "windows": 4, "prompts": 4})
    cell = tmp_path / "cell.json"
    edits.main(arguments(texts=small, device="cpu", method="retrieval", minutes=0, result=cell))
    assert json.loads(cell.read_text())["edits"] == 4  # the first two pieces are taught in any case
    assert "the time is over after 2 times 2 edits" in capsys.readouterr().out


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_run_that_is_cut_short_leaves_what_was_measured_on_the_way(is_cut, small, tmp_path, monkeypatch):
    monkeypatch.setattr(edits, "KINDS", ["person", "town"])
    monkeypatch.setattr(facts_world, "KINDS", ["person", "town"])
    monkeypatch.setattr(edits, "SMALL", {"edits": 6, "at_once": 2, "windows": 4, "prompts": 4})
    learn = edits.Course.learn

    def cut(self, lessons, seed, *rest):
        if is_cut and seed % 1_000_000 == 2:
            raise KeyboardInterrupt
        return learn(self, lessons, seed, *rest)

    monkeypatch.setattr(edits.Course, "learn", cut)
    options = {"texts": small, "device": "cpu", "method": "retrieval", "result": tmp_path / "cell.json"}
    given = [*arguments(**options), "--along", "1", "3", "6", "--asked", "3"]
    with pytest.raises(KeyboardInterrupt) if is_cut else nullcontext():
        edits.main(given)
    found = json.loads((tmp_path / "cell.json").read_text())
    assert [row["edits"] for row in found["along"]] == [2, 4]
    assert [row["after"]["asked"] for row in found["along"]] == [2, 3]
    assert (found["edits"], found["after"]["asked"]) == ((4, 3) if is_cut else (6, 3))
    assert len(found["seconds"]) == found["edits"] // 2
    assert all(share is None or 0 <= share <= 1 for share in found["after"]["by tenth"])


def test_ten_thousand_edits_are_about_different_things():
    world = facts_world.World(0, 200, facts_world.GRAMMARS[-1])
    names = [name for chunk in world.chunks for name, _, _ in chunk]
    assert len(names) == len(set(names)) == 10_000
