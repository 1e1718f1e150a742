"""Who is taken for the subject of a lesson? With silent patches and without.

    python benchmarks/namesakes.py --result results/namesakes.json

SmolLM2-135M is taught invented people and companies of a grammar of the study of facts, and wrong capitals of
15 countries. Then forms that were never taught name them, others of the same last name, and 15 other
countries: on which of these texts does a lesson act? All others are the base's, to the bit. Where basins lie
does not depend on what is learned in them, so that one pass is enough. Four minutes on two cores.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attractor import LessonConfig
from attractor.continual.lessons import Lessons
from attractor.hf.pretrained import load_pretrained
from attractor.hf.teachable import teachable
from attractor.results import write_result
from studies.facts_world import World

REAL = ("Peter", "Maria", "David", "Elena")
FORMS = (("sentence", 0), ("sentence", 1), ("question", 0), ("question", 1))
ASKED = (("taught", 0), *FORMS)


def acted_on(lessons: Lessons, texts: Sequence[str]) -> float:
    """The share of these texts on which a lesson acts."""
    return sum(any(number is not None for number in lessons.touching(text)) for text in texts) / len(texts)


def recognised(lessons: Lessons, texts: Sequence[tuple[str, int]]) -> float:
    """The share of these texts on which the lesson of this number acts."""
    return sum(number in lessons.touching(text) for text, number in texts) / len(texts)


def measure(world: World, things: Sequence[tuple[str, str, Any]], strangers: int) -> dict[str, Any]:
    model, tokenizer = load_pretrained("smollm2-135m")
    config = LessonConfig(strangers=strangers, passes=1, after=0, mention=1)
    _, lessons = teachable(model, tokenizer.encode, config=config)
    words, draw = world.words, random.Random(0)

    def said(name: str, kind: str, forms: Sequence[tuple[str, int]]) -> list[str]:
        relations = list(words[kind].values())[:2]
        return [row[form][number].format(n=name) for row in relations for form, number in forms]

    for name, kind, facts in things:
        lessons.learn(
            [
                (form.format(n=name), f" {facts[relation]}")
                for relation in list(words[kind])[:2]
                for form in words[kind][relation]["taught"]
            ],
            subject=name,
        )
    taken = {name for chunk in world.chunks for name, _, _ in chunk}
    own, namesakes, real = [], [], []
    for number, (name, kind, _) in enumerate(things):
        last = name.split(" ", 1)[1]
        own += [(text, number) for text in said(name, kind, FORMS)]
        for _ in range(2):
            while (other := f"{world._name(kind, draw).split(' ')[0]} {last}") in taken:
                pass
            namesakes += said(other, kind, ASKED)
        real += said(f"{draw.choice(REAL)} {last}", kind, ASKED)
    people = {
        "subjects, in forms never taught": recognised(lessons, own),
        "namesakes with invented first names": acted_on(lessons, namesakes),
        "namesakes with real first names": acted_on(lessons, real),
    }
    patches = sum(lesson.patches for lesson in lessons.lessons.values()) / len(things)
    size = sum(lesson.bytes for lesson in lessons.lessons.values()) / len(things)
    lessons.learn_many(world.moves())
    first = len(things)
    countries = {
        f"{which} countries, {form}": value
        for form in ("taught", "sentence", "question")
        for which, value in (
            (
                "moved",
                recognised(
                    lessons,
                    [
                        (world.known[form][0].format(n=country), first + number)
                        for number, country in enumerate(world.moved)
                    ],
                ),
            ),
            ("other", acted_on(lessons, [world.known[form][0].format(n=country) for country in world.kept])),
        )
    }
    background = vars(lessons.calibration.touched(lessons.layer))
    return {
        "strangers": strangers,
        "acted on": people | countries,
        "patches": patches,
        "bytes": size,
        "background": background,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--grammar", default="facts_third")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--things", type=int, default=12, help="people and companies that are taught")
    given = parser.parse_args()
    world = World(given.seed, 2, given.grammar)
    things = [thing for thing in world.chunks[0] if thing[1] != "town"]
    random.Random(given.seed).shuffle(things)
    rows = []
    for strangers in (0, LessonConfig().strangers):
        rows.append(measure(world, things[: given.things], strangers))
        print(rows[-1], flush=True)
        settings = {name: getattr(given, name) for name in ("grammar", "seed", "things")}
        write_result(given.result, {"experiment": "namesakes", **settings, "rows": rows})


if __name__ == "__main__":
    main()
