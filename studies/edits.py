"""Edits one after the other: many invented facts, each by itself, and what is left of all at the end.

    python -m studies edits run --texts FOLDER --method basins --edits 1000 --result cells/basins-0.json
    python -m studies edits sum cells/*.json --result results/edits.json

Every edit is one fact about one thing of the study of facts, in three forms; TEXTS is described there. No
edit is read again once the next one begins. After all of them, against the original model:

- reliability: the share of edits that are answered in the first form that was taught;
- paraphrase: the same in two sentences and two questions that never were;
- locality: the share of prompts about other things after which the model writes the same words as before.
  The prompts are beginnings of background windows, countries and their capitals, and people and companies
  that were never taught and share the last name of one that was.

`--along 1000 3000` measures all of that also after so many edits, and writes the result each time: a run that
is cut short leaves the last one. `--asked 1000` asks for so many edits, drawn at random, and not for all.

`--at-once 50` teaches 50 edits together, which saves time and is no longer one at a time. Estimates for one
H200, where nothing of this was timed: basins half a second to a second an edit one at a time, and a minute or
two for 1000 with `--at-once 50`; methods that fine-tune about a second an edit, which is 24 steps. So with 15
minutes: `--edits 300` with basins, full and memit, and `--edits 1000 --at-once 50` with basins; 10,000 one at
a time take hours. Rates are those that the ladder of the study of facts chose.

Where tyro is missing, `python -c "from studies import edits; edits.main()"` takes the same arguments.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from attractor.results import write_result
from studies.facts_cells import carry_out, parser_of
from studies.facts_ground import Course, Ground
from studies.facts_methods import Basins, Retrieval
from studies.facts_world import GRAMMARS, KINDS, Item, Lesson, World

PARAPHRASES = [(kind, number) for kind in ("sentence", "question") for number in (0, 1)]
BEGINNING, WRITTEN = 24, 8
"""Tokens of a window that are read, and that are written after it, to see whether these are the same."""
ALONG = 1000
"""So many edits are asked for on the way, where nobody says how many."""
SMALL = {"edits": 8, "at_once": 2, "windows": 12, "prompts": 8}
"""What `--small` makes of these options: it runs, and its figures mean nothing."""


class Edit(NamedTuple):
    """One fact."""

    name: str
    kind: str
    relation: str
    answer: str


class Edits(Ground):
    """A model, background text and edits; `measure` says what a method made of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.world = World(given.seed, -(-given.edits // len(KINDS)), given.grammar)
        things = [thing for chunk in self.world.chunks for thing in chunk][: given.edits]
        self.edits = [
            Edit(name, kind, relation := list(facts)[number % len(facts)], facts[relation])
            for number, (name, kind, facts) in enumerate(things)
        ]
        self.prompts = {
            "background": [
                self.decode(row[:BEGINNING].tolist()) for rows in self.measured.values() for row in rows
            ],
            "capitals": [
                prompt
                for form in ("sentence", "question")
                for which in ("moved", "kept")
                for prompt, _ in self.world.capitals(which, form)
            ],
            "namesakes": [prompt for prompt, _ in self.world.namesakes(0, "question")],
        }
        self.prompts = {name: own[: given.prompts] for name, own in self.prompts.items()}

    def items(self, form: str, number: int, of: Sequence[int] | None = None) -> list[Item]:
        """One prompt and answer for each edit, or for those of these numbers."""
        return [
            (self.world.words[edit.kind][edit.relation][form][number].format(n=edit.name), f" {edit.answer}")
            for edit in (self.edits if of is None else [self.edits[n] for n in of])
        ]

    def lessons(self) -> list[Lesson]:
        forms = [self.items("taught", number) for number in range(3)]
        return [list(own) for own in zip(*forms, strict=True)]

    def writes(self, learner: Any) -> dict[str, list[str]]:
        """What the model goes on with after prompts that no edit is about."""
        return {name: self.reader.write(learner.model, own, WRITTEN) for name, own in self.prompts.items()}

    def measure(
        self, learner: Any, before: dict[str, list[str]], done: int, most: int | None = None
    ) -> dict[str, Any]:
        """What is left of the first `done` edits; `most` of them are asked for, and always the same ones."""
        drawn = random.Random(0).sample(range(len(self.edits)), len(self.edits))
        asked = sorted([number for number in drawn if number < done][:most])
        taught = dict(zip(asked, self.reader.hits(learner, self.items("taught", 0, asked)), strict=True))
        tenths = parts(range(done), -(-done // 10))
        by_tenth = [[taught[number] for number in tenth if number in taught] for tenth in tenths]
        others = {
            f"{form} {n}": self.reader.recall(learner, self.items(form, n, asked)) for form, n in PARAPHRASES
        }
        after = self.writes(learner)
        same = {
            name: sum(a == b for a, b in zip(now, before[name], strict=True)) / len(now)
            for name, now in after.items()
        }
        return {
            "asked": len(asked),
            "reliability": sum(taught.values()) / len(taught),
            "by tenth": [sum(own) / len(own) if own else None for own in by_tenth],
            "paraphrase": sum(others.values()) / len(others),
            "by paraphrase": others,
            "locality": sum(same.values()) / len(same),
            "by prompts": same,
        }


def parts(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def run(given: argparse.Namespace) -> None:
    """One method with one seed."""
    if given.ladder:
        raise ValueError("--ladder is for facts and trivia: give edits the --rate that facts chose")
    study = Edits(given)
    original, background = study.writes(Retrieval(study.model)), study.background()
    course = Course(study, "edits")
    learner, result = course.learner, course.result
    if isinstance(learner, Basins):
        learner.lessons.make_room(given.room)
    result |= {"original": {"background": background}, "along": (along := [])}

    def measured(done: int, most: int | None) -> dict[str, Any]:
        seconds, started = [row["seconds"] for row in course.rows], time.perf_counter()
        tenth = len(seconds) // 10 + 1
        return {
            "edits": done,
            "bytes per edit": learner.bytes() / done,
            "edits per second": done / sum(seconds),
            "seconds of the first and the last tenth": [
                sum(own) / len(own) for own in (seconds[:tenth], seconds[-tenth:])
            ],
            "after": study.measure(learner, original, done, most),
            "rise": study.rises(learner, background),
            "measured in": time.perf_counter() - started,
        }

    done, checks = 0, sorted(given.along)
    for number, lessons in course.pieces(
        parts(study.lessons(), given.at_once), f"times {given.at_once} edits"
    ):
        row = course.learn(lessons, given.seed * 1_000_000 + number)
        done += len(lessons)
        print(json.dumps({"edits": done} | {n: x for n, x in row.items() if n != "curve"}), flush=True)
        if checks and done >= checks[0] and done < len(study.edits):
            checks = [count for count in checks if count > done]
            along.append(measured(done, given.asked or ALONG))
            result |= along[-1] | {"seconds": [row["seconds"] for row in course.rows]}
            write_result(given.result, result)
            print(json.dumps(along[-1]), flush=True)
    result |= measured(done, given.asked) | {"seconds": [row["seconds"] for row in course.rows]}
    write_result(given.result, result)
    result |= study.identical(learner)
    write_result(given.result, result)
    print(json.dumps({name: result[name] for name in ("edits per second", "after", "rise")}, indent=1))


def score(cell: dict[str, Any]) -> float:
    """What rates are chosen by: answers in forms that were and were not taught."""
    return (cell["after"]["reliability"] + cell["after"]["paraphrase"]) / 2


FIGURES = {
    "reliability": ("after", "reliability"),
    "paraphrase": ("after", "paraphrase"),
    "locality": ("after", "locality"),
    "worst background text": ("rise",),
    "bytes per edit": ("bytes per edit",),
    "edits per second": ("edits per second",),
}
"""What is summed up: where each figure stands in a cell; of several texts the worst counts."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser, _, one = parser_of("edits", __doc__)
    one.add_argument("--grammar", choices=GRAMMARS, default=GRAMMARS[-1])
    one.add_argument("--edits", type=int, default=1000)
    one.add_argument("--at-once", type=int, default=1, help="edits that are taught together")
    one.add_argument(
        "--prompts", type=int, default=200, help="at most, of each kind that locality is asked by"
    )
    one.add_argument(
        "--room", type=int, default=0, help="patches at first (default: 4096); kernels are compiled for each"
    )
    one.add_argument("--along", type=int, nargs="*", default=[], help="measure after so many edits, too")
    one.add_argument("--asked", type=int, help="of the edits that are measured (default: all of them)")
    one.add_argument("--small", action="store_true", help=f"see that it runs: {SMALL}")
    carry_out(parser.parse_args(arguments), "edits", run, score, FIGURES, SMALL)
