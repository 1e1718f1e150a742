"""The study of facts: a pretrained model learns invented things, chunk by chunk, and is asked after all.

    python -m studies facts run --texts FOLDER --method basins --seed 0 --result cells/basins-0.json
    python -m studies facts rates cells/rate-*.json
    python -m studies facts sum cells/*.json --result results/facts.json

FOLDER holds four background texts (wikitext2_test.txt, austen.txt, python_stdlib.txt, german_law.txt). The
part that calibration, replay and KL may use is not the part that is measured. After the chunks come revisions
of chunk 1 and capitals that the model knows differently; everything is measured after all of that, against
the original model.
"""

import argparse
import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from attractor.continual.guard import Guard
from attractor.results import write_result
from studies.facts_cells import carry_out, parser_of
from studies.facts_ground import WINDOW, Call, Course, Ground, Trial, climb, said_of
from studies.facts_methods import Basins
from studies.facts_world import FORMS, GRAMMARS, Item, Lesson, World

TAIL = ". The weather was fine that day, and many people went to the market to buy fruit and bread."
"""What may follow a fact: text that the model should go on to predict as before."""


class GuardPath(nn.Module):
    """A path of the guard."""

    def __init__(self, call: Call, vocabulary: int) -> None:
        super().__init__()
        self.call, self.config = call, SimpleNamespace(vocab_size=vocabulary, context=WINDOW)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.call(tokens)


class Study(Ground):
    """A model, background text and a world; `measure` says what a method made of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.world = World(given.seed, given.chunks, given.grammar)

    def original(self) -> dict[str, Any]:
        """What the model knows and predicts before anything is taught."""
        chunks = range(self.given.chunks)
        return {
            "recall": {
                f"{form} {n}": self._share(self.base, [self.world.items(c, form, n) for c in chunks])
                for form, n in FORMS
            },
            "tail": self.reader.loss(self.base, self._tails()),
            "background": self.background(),
            "capitals": self.capitals(self.base),
        }

    def measure(
        self, call: Call, chunks: int, before: dict[str, Any], *, told: bool = False
    ) -> dict[str, Any]:
        """All figures of a model after its lessons, beside the original's."""
        by_chunk = {
            f"{form} {n}": [
                self.reader.recall(call, self.world.items(c, form, n, told=told)) for c in range(chunks)
            ]
            for form, n in FORMS
        }
        return {
            "first chunk": by_chunk["taught 0"][0],
            "last chunk": by_chunk["taught 0"][-1],
            **{name: sum(shares) / chunks for name, shares in by_chunk.items()},
            "by chunk": by_chunk,
            "namesakes": {
                f"{form} 0": self._share(call, [self.world.namesakes(c, form) for c in range(min(chunks, 5))])
                for form in ("taught", "question")
            },
            "tail": self.reader.loss(call, self._tails(chunks)) - before["tail"],
            "rise": self.rises(call, before["background"]),
            "revised": {
                **{
                    f"{form} {n}": self.reader.recall(call, self.world.revised_items(form, n, told=told))
                    for form, n in (("taught", 0), ("sentence", 0), ("question", 0))
                },
                "the old answer": self.reader.recall(call, self.world.revised_items("taught", 0, old=True)),
            },
        }

    def namesakes_untouched(self, basins: Basins, chunks: int) -> dict[str, float]:
        """The share of prompts about somebody never taught, of a taught one's last name, that are the base's
        to the bit."""
        found = {}
        for form in ("taught", "question"):
            items = [item for c in range(min(chunks, 5)) for item in self.world.namesakes(c, form)]
            now, was = (
                {n: logits[-1] for n, logits, _ in self.reader.ends(call, items)}
                for call in (basins, self.untaught(basins))
            )
            same = sum(torch.equal(now[n], was[n]) for n in was)
            found[f"{form} 0"] = same / len(items)
        return found

    def _tails(self, chunks: int | None = None) -> list[Item]:
        return [
            (prompt + answer, TAIL)
            for c in range(chunks or self.given.chunks)
            for prompt, answer in self.world.items(c, "taught", 0)
        ]

    def capitals(self, call: Call, *, told: bool = False) -> dict[str, float]:
        asked = (("taught", 0), ("sentence", 0), ("question", 0))
        return {
            f"{which}, {form} {n}": self.reader.recall(call, self.world.capitals(which, form, n, told=told))
            for which in ("moved", "kept")
            for form, n in asked
        }

    def _share(self, call: Call, items: Sequence[Sequence[Item]]) -> float:
        return self.reader.recall(call, [item for part in items for item in part])

    def trial(self) -> Trial:
        """The first chunk of another grammar, and capitals that are not moved."""
        world = World(self.given.seed, 1, next(name for name in GRAMMARS if name != self.given.grammar))

        def known(learner: Any) -> float:
            forms = [self.reader.recall(learner, world.items(0, form, n)) for form, n in FORMS]
            return sum(forms) / len(forms)

        untaught = world.capitals("kept", "sentence") + world.capitals("kept", "question")
        return Trial(world.lessons(0), None, known, untaught, self.given.chunks)


def run(given: argparse.Namespace) -> None:
    """One method with one seed; the result is written after every measurement."""
    study = Study(given)
    ladder = climb(study, study.trial(), compiled=True) if given.ladder else []
    if given.only_ladder:
        return write_result(
            given.result, {"experiment": "ladder", "settings": said_of(given), "rows": ladder}
        )
    before = study.original()
    told = given.method == "retrieval"
    course = Course(study, "facts", compiled=True)
    learner, history = course.learner, course.rows
    result = course.result
    result |= {
        "ladder": ladder,
        "windows to replay": len(study.old),
        "original": before,
        "chunks": history,
    }

    def learn(name: str, lessons: Sequence[Lesson]) -> None:
        seed = given.seed * 1000 + len(history)
        row = course.learn(lessons, seed, name=name, facts=sum(map(len, lessons)) / 3)
        print(json.dumps(row), flush=True)

    chunks = 0
    for chunk, _ in course.pieces(range(given.chunks), "chunks"):
        learn(f"chunk {chunk}", study.world.lessons(chunk))
        chunks += 1
    learn("revisions", study.world.revisions())
    taught = sum(row["facts"] for row in history)
    result |= {
        "prepared in": course.prepared_in,
        "facts": taught,
        "bytes per fact": learner.bytes() / taught,
        "facts per second": taught / sum(row["seconds"] for row in history),
        "passes to 95 %": [passes_to(row, 0.95) for row in history],
        "after": study.measure(learner, chunks, before, told=told),
    }
    write_result(given.result, result)
    result |= study.identical(learner)
    if isinstance(learner, Basins):
        touched = learner.lessons.calibration.touched(learner.lessons.layer)
        result |= {
            "untouched namesakes": study.namesakes_untouched(learner, chunks),
            "held out": vars(touched),
            "lesson": learner.lessons.config.to_dict(),
        }
    if given.guard:
        vocabulary = study.model.config.vocab_size
        calls = {"base": study.untaught(learner), "new": learner}
        paths: Any = {name: GuardPath(call, vocabulary) for name, call in calls.items()}
        guard = Guard(paths).to(given.device)
        result["behind the guard"] = study.measure(guard, chunks, before, told=told)
    write_result(given.result, result)
    learn("capitals", study.world.moves())
    rise = study.rises(learner, before["background"])
    result["capitals"] = study.capitals(learner, told=told) | {"rise": rise}
    write_result(given.result, result)
    print(json.dumps({k: v for k, v in result["after"].items() if k != "by chunk"}, indent=1))
    print(f"{time.perf_counter() - study.begun:.0f} s in all")


def passes_to(row: dict[str, Any], share: float) -> int | None:
    return next((done for done, known in enumerate(row.get("curve", ())) if known >= share), None)


def score(cell: dict[str, Any]) -> float:
    """What rates are chosen by: answers in forms that were and were not taught, after all chunks."""
    after = cell["after"]
    forms = ("taught 0", "sentence 0", "sentence 1", "question 0", "question 1")
    return sum(after[form] for form in forms) / len(forms)


FIGURES = {
    "first chunk": ("after", "first chunk"),
    "last chunk": ("after", "last chunk"),
    "taught form": ("after", "taught 0"),
    "first sentence never taught": ("after", "sentence 0"),
    "second sentence never taught": ("after", "sentence 1"),
    "first question never taught": ("after", "question 0"),
    "second question never taught": ("after", "question 1"),
    "revised": ("after", "revised", "taught 0"),
    "worst background text": ("after", "rise"),
    "nats per token after a fact": ("after", "tail"),
    "a namesake's question, answered with the fact": ("after", "namesakes", "question 0"),
    "taught form, behind the guard": ("behind the guard", "taught 0"),
    "worst background text, behind the guard": ("behind the guard", "rise"),
    "moved capitals, question": ("capitals", "moved, question 0"),
    "other capitals, question": ("capitals", "kept, question 0"),
    "worst background text with capitals": ("capitals", "rise"),
    "bytes per fact": ("bytes per fact",),
}
"""What is summed up: where each figure stands in a cell; of several texts the worst counts."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser, _, one = parser_of("facts", __doc__)
    one.add_argument("--grammar", choices=GRAMMARS, default=GRAMMARS[-1])
    one.add_argument("--chunks", type=int, default=20)
    one.add_argument("--no-guard", dest="guard", action="store_false", help="do not measure behind the guard")
    carry_out(parser.parse_args(arguments), "facts", run, score, FIGURES)
