"""What a client wants to be known: forms of one lesson, from sentences, from questions or from a document.

asked([("Zorvan Quillbeam was born in", "Lisbon")], subject="Zorvan Quillbeam")
from_text("Zorvan Quillbeam lives in Oslo. He likes it. Zorvan Quillbeam sings.", "Zorvan Quillbeam")
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from attractor.continual.forms import Form, check_forms, check_subject, shared_subject

SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+|\n+")
PLAIN = "\n\r\t"


class Asked(NamedTuple):
    """One lesson: prompts and answers about a subject. A sentence is an answer without a prompt."""

    forms: tuple[tuple[str, str], ...]
    subject: str
    left_out: int = 0
    """Sentences of a document that do not name the subject."""


class Said(NamedTuple):
    """A lesson as it was sent: a text, or forms; its subject may be known from elsewhere."""

    text: str | None = None
    forms: Sequence[Form] | None = None
    subject: str | None = None

    def asked(self) -> Asked:
        return (
            from_text(self.text or "", self.subject)
            if self.forms is None
            else asked(self.forms, self.subject)
        )


def asked(forms: Sequence[Form], subject: str | None = None) -> Asked:
    """A lesson in these forms, or a ValueError that says what is wrong with them.

    An answer that begins without a space gets one if its prompt does not end with one.
    """
    pairs = tuple(dict.fromkeys(spaced(pair) for pair in check_forms(forms)))
    answers: dict[str, str] = {}
    for prompt, answer in pairs:
        for text in (prompt, answer):
            check_text(text)
        if prompt and answers.setdefault(prompt, answer) != answer:
            raise ValueError(
                f"the lesson contradicts itself: {prompt[:80]!r} is followed by {answers[prompt][:40]!r} and "
                f"by {answer[:40]!r}"
            )
    found = shared_subject(pairs) if subject is None else check_subject(subject, pairs)
    if not any("".join(pair).partition(found)[2].strip() for pair in pairs):
        raise ValueError(f"nothing follows the subject, {found[:80]!r}, in any form: say something about it")
    return Asked(pairs, found)


def from_text(text: str, subject: str | None) -> Asked:
    """The sentences of a text that name its subject, each as a form."""
    check_text(text)
    sentences = [sentence.strip() for sentence in SENTENCE.split(text) if sentence.strip()]
    if not sentences:
        raise ValueError("the lesson is empty: give a sentence")
    if subject is None:
        raise ValueError(
            "a text alone does not tell what it is about: give a subject that stands in it, or several forms"
        )
    about = [sentence for sentence in sentences if subject in sentence]
    if not about:
        raise ValueError(f"no sentence of the text names its subject, {subject[:80]!r}")
    return asked(about, subject)._replace(left_out=len(sentences) - len(about))


def spaced(pair: tuple[str, str]) -> tuple[str, str]:
    prompt, answer = pair
    touch = prompt and not prompt[-1].isspace() and not answer[0].isspace()
    return (prompt, f" {answer}") if touch else pair


def check_text(text: str) -> None:
    """Refuse what would not be read, by a ValueError."""
    for letter in text:
        if letter not in PLAIN and unicodedata.category(letter) == "Cc":
            raise ValueError(f"a lesson is text, and this has the control character {letter!r}: leave it out")
