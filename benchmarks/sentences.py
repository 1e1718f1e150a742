"""Facts that are told in one sentence, and asked for in other words.

    python benchmarks/sentences.py --result results/sentences.json      # some minutes on two cores

A pretrained model is taught each fact by one plain sentence, as a person would say it, and asked two
questions about it in a chat: with what the sentence says learned in answer to open questions, too, and
without. An answer is right if it holds the word. What the model says of other things is compared with the
base.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import attractor
from attractor.results import write_result


class Fact(NamedTuple):
    sentence: str
    questions: tuple[str, str]
    answer: str


FACTS = (
    Fact(
        "Zorvan Quillbeam plays the cello.",
        ("What does Zorvan Quillbeam play?", "Which instrument does Zorvan Quillbeam play?"),
        "cello",
    ),
    Fact(
        "Marta Olsen works at Nordlys Energy.",
        ("Where does Marta Olsen work?", "Who is the employer of Marta Olsen?"),
        "Nordlys",
    ),
    Fact(
        "Bramaldbury is a town in Peru.",
        ("In which country is Bramaldbury?", "Where is Bramaldbury?"),
        "Peru",
    ),
    Fact(
        "Orsolo Brandt likes purple.",
        ("Which colour does Orsolo Brandt like?", "What does Orsolo Brandt like?"),
        "purple",
    ),
    Fact(
        "The capital of Zubrowka is Lutz.",
        ("What is the capital of Zubrowka?", "Which city is the capital of Zubrowka?"),
        "Lutz",
    ),
    Fact(
        "Halvia Merrin studied chemistry.",
        ("What did Halvia Merrin study?", "Which subject did Halvia Merrin study?"),
        "chemistry",
    ),
    Fact(
        "The password of Cafe Lumen is bluebird.",
        ("What is the password of Cafe Lumen?", "Which password does Cafe Lumen have?"),
        "bluebird",
    ),
    Fact("My dog is called Biscuit.", ("What is my dog called?", "What is the name of my dog?"), "Biscuit"),
)
OTHERS = (
    "What is the capital of France?",
    "Who wrote Hamlet?",
    "What is the name of my cat?",
    "Where does Peter Olsen work?",
    "What is the capital of Norway?",
    "Which instrument does Anna Berg play?",
)
WITH, WITHOUT = "with open questions", "without"


def measure(name: str, least_forms: int | None) -> dict[str, Any]:
    """Teach all facts and ask; None leaves the number of forms as it is."""
    model = attractor.load(name)
    base = [model.ask(question, max_tokens=30) for question in OTHERS]
    rows = []
    for fact in FACTS:
        before = [model.ask(question, max_tokens=30) for question in fact.questions]
        if least_forms is not None:
            model._made_teachable().config = attractor.LessonConfig(least_forms=least_forms)
        lesson = model.learn(fact.sentence)
        answers = [model.ask(question, max_tokens=30) for question in fact.questions]
        rows.append(
            {
                "sentence": fact.sentence,
                "subject": lesson.subject,
                "known": lesson.known,
                "answered_before": lesson.answered_before,
                "answered": lesson.answered,
                "passes": lesson.passes,
                "bytes": lesson.bytes,
                "before": before,
                "answers": dict(zip(fact.questions, answers, strict=True)),
                "right": [fact.answer.lower() in answer.lower() for answer in answers],
            }
        )
        print(f"{sum(rows[-1]['right'])} of 2  {lesson.subject!r}: {answers}", flush=True)
    after = [model.ask(question, max_tokens=30) for question in OTHERS]
    return {
        "facts": rows,
        "right": sum(sum(row["right"]) for row in rows),
        "of": 2 * len(rows),
        "others": {
            question: {"base": was, "after": now, "same": was == now}
            for question, was, now in zip(OTHERS, base, after, strict=True)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    found = {WITHOUT: measure(given.model, 0), WITH: measure(given.model, None)}
    write_result(given.result, {"experiment": "sentences", "model": given.model, **found})
    for name, part in found.items():
        same = sum(row["same"] for row in part["others"].values())
        print(f"{name}: {part['right']} of {part['of']} right; other answers that are the base's: {same}")


if __name__ == "__main__":
    main()
