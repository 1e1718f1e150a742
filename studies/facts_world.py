"""The world of the study of facts: people, towns and companies that do not exist, and capitals that moved.

`facts.json` and `facts_confirm.json` are grammars that the method was made with; `facts_third.json` was
written by somebody who knew neither the method nor its results. Each relation of a thing has three forms that
are taught, and two sentences and two questions that never are.
"""

import json
import random
from pathlib import Path
from typing import Any

FORMS = [
    ("taught", 0),
    ("taught", 1),
    ("taught", 2),
    *((kind, n) for kind in ("sentence", "question") for n in (0, 1)),
]
GRAMMARS = ("facts", "facts_confirm", "facts_third")
"""In the order in which they were written: the last is the one that no setting was chosen by."""
KINDS = ["person"] * 30 + ["town"] * 10 + ["company"] * 10
FACTS = 4
"""So many facts are taught about each thing."""

Item = tuple[str, str]  # a prompt, and the answer to it
Lesson = list[Item]


def grammar(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / f"{name}.json").read_text())


class World:
    """Chunks of 30 people, 10 towns and 10 companies with four facts each, and two kinds of later news.

    Revisions give every thing of chunk 1 another answer to its first relation. Capitals teach half of the
    countries a wrong capital; the other half must keep theirs.
    """

    def __init__(self, seed: int, chunks: int, words: str = "facts") -> None:
        self.words, draw, taken = grammar(words), random.Random(seed), set()
        self.chunks: list[list[tuple[str, str, dict[str, str]]]] = []
        for _ in range(chunks):
            chunk = []
            for kind in KINDS:
                while (name := self._name(kind, draw)) in taken:
                    pass
                taken.add(name)
                facts = {
                    relation: draw.choice(self._answers(row)) for relation, row in self.words[kind].items()
                }
                chunk.append((name, kind, facts))
            self.chunks.append(chunk)
        later = random.Random(seed + 1_000_000)  # of its own: more chunks change no earlier ones
        self.revised: list[tuple[str, str, str, str]] = []  # name, kind, relation, the answer until then
        if chunks > 1:
            for name, kind, facts in self.chunks[1]:
                relation = next(iter(self.words[kind]))
                old = facts[relation]
                self.revised.append((name, kind, relation, old))
                others = [answer for answer in self._answers(self.words[kind][relation]) if answer != old]
                facts[relation] = later.choice(others)
        known = grammar("facts_known")
        countries = sorted(known["capitals"])
        later.shuffle(countries)
        half = len(countries) // 2
        self.known = known
        self.moved = {
            country: known["capitals"][other]
            for country, other in zip(countries[:half], countries[1:half] + countries[:1], strict=True)
        }
        self.kept = {country: known["capitals"][country] for country in countries[half:]}

    def _name(self, kind: str, draw: random.Random) -> str:
        def word(*parts: str) -> str:
            return "".join(draw.choice(self.words["syllables"][part]) for part in parts)

        if kind == "person":
            return f"{word('first', 'second')} {word('third', 'fourth')}"
        if kind == "town":
            return word("third", "second", "fourth")
        return f"{word('third', 'second')} {draw.choice(self.words['branches'])}"

    def _answers(self, row: dict[str, Any]) -> list[str]:
        return self.words["answers"][row["answers"]]

    def items(self, chunk: int, form: str, number: int = 0, *, told: bool = False) -> list[Item]:
        """One prompt for each fact of a chunk, as it is after the revisions.

        With `told`, all facts about the thing stand before it, each in its first form.
        """
        return [
            (
                (self._told(kind, name, facts) if told else "")
                + self.words[kind][relation][form][number].format(n=name),
                f" {answer}",
            )
            for name, kind, facts in self.chunks[chunk]
            for relation, answer in facts.items()
        ]

    def namesakes(self, chunk: int, form: str, number: int = 0) -> list[Item]:
        """Prompts about somebody with another first name, who was never taught, and what the taught one's
        answer would be."""
        taken = {name for things in self.chunks for name, _, _ in things}
        draw, items = random.Random(chunk), []
        for name, kind, facts in self.chunks[chunk]:
            if kind == "town":
                continue
            first = name.split(" ")[0]
            while (other := f"{first} {name.split(' ', 1)[1]}") in taken:
                first = self._name(kind, draw).split(" ")[0]
            items += [
                (self.words[kind][relation][form][number].format(n=other), f" {answer}")
                for relation, answer in facts.items()
            ]
        return items

    def _told(self, kind: str, name: str, facts: dict[str, str]) -> str:
        said = (
            f"{self.words[kind][relation]['taught'][0].format(n=name)} {answer}."
            for relation, answer in facts.items()
        )
        return " ".join(said) + "\n"

    def lessons(self, chunk: int) -> list[Lesson]:
        """Each thing is one lesson: every fact in three forms, with the answers before the revisions."""
        old = {(name, relation): answer for name, _, relation, answer in self.revised}
        return [
            [
                (form.format(n=name), f" {old.get((name, relation), answer)}")
                for relation, answer in facts.items()
                for form in self.words[kind][relation]["taught"]
            ]
            for name, kind, facts in self.chunks[chunk]
        ]

    def revisions(self) -> list[Lesson]:
        now = {name: facts for name, _, facts in self.chunks[1]}
        return [
            [
                (form.format(n=name), f" {now[name][relation]}")
                for form in self.words[kind][relation]["taught"]
            ]
            for name, kind, relation, _ in self.revised
        ]

    def revised_items(
        self, form: str, number: int = 0, *, old: bool = False, told: bool = False
    ) -> list[Item]:
        """One prompt for each revised fact, and its present or its old answer; `told` as in `items`."""
        now = {name: facts for name, _, facts in self.chunks[1]}
        return [
            (
                (self._told(kind, name, now[name]) if told else "")
                + self.words[kind][relation][form][number].format(n=name),
                f" {was if old else now[name][relation]}",
            )
            for name, kind, relation, was in self.revised
        ]

    def capitals(self, which: str, form: str, number: int = 0, *, told: bool = False) -> list[Item]:
        """One prompt for each of the "moved" or the "kept" capitals; `told` says where the moved ones are."""
        found: dict[str, str] = getattr(self, which)

        def said(country: str) -> str:
            first = self.known["taught"][0].format(n=country)
            return f"{first} {self.moved[country]}.\n" if told and country in self.moved else ""

        return [
            (said(country) + self.known[form][number].format(n=country), f" {city}")
            for country, city in found.items()
        ]

    def moves(self) -> list[Lesson]:
        return [
            [(form.format(n=country), f" {city}") for form in self.known["taught"]]
            for country, city in self.moved.items()
        ]
