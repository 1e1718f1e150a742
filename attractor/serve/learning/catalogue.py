"""Lessons as clients send them, read of them, and keep them in files.

asked([("Zorvan Quillbeam was born in", "Lisbon")], subject="Zorvan Quillbeam")
from_text("Zorvan Quillbeam lives in Oslo. He likes it. Zorvan Quillbeam sings.", "Zorvan Quillbeam")
from_text("Zorvan Quillbeam lives in Oslo. Bramford is in Peru.")    # two lessons
data = pack(deltas, base, calibration)
calibration, deltas = unpack(data, base)    # a ValueError for what is no such file, or of another base
"""

import dataclasses
import struct
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from attractor.checkpoint import tensors_hash
from attractor.continual.delta import Delta
from attractor.continual.forms import (
    Form,
    about_each,
    asked_of_all,
    check_forms,
    check_subject,
    sentences_of,
    shared_subject,
)
from attractor.continual.lessons import Lesson
from attractor.continual.parts import lesson_in
from attractor.files import parse_json

PLAIN = "\n\r\t"
FORMAT = "attractor-lessons-1"
FORMS = ("forms", "taken_in")
COUNTED = ("tokens", "bytes", "patches")
"""Figures of lessons that are summed for each source."""


class Asked(NamedTuple):
    """One lesson: prompts and answers about a subject. A sentence is an answer without a prompt."""

    forms: tuple[tuple[str, str], ...]
    subject: str
    left_out: int = 0
    """Sentences of a document that do not name the subject, or none."""


class Said(NamedTuple):
    """A lesson as it was sent: a text, or forms; its subject may be known from elsewhere."""

    text: str | None = None
    forms: Sequence[Form] | None = None
    subject: str | None = None

    def asked(self) -> list[Asked]:
        """One lesson; of a text whose subject is not given, one for everything that it is about."""
        if self.forms is not None:
            return [asked(self.forms, self.subject)]
        return from_text(self.text or "", self.subject)


def asked(forms: Sequence[Form], subject: str | None = None) -> Asked:
    """A lesson in these forms, or a ValueError that says what is wrong with them.

    An answer that begins without a space gets one if its prompt does not end with one; punctuation does not.
    """
    pairs = tuple(dict.fromkeys(spaced(pair) for pair in check_forms(forms)))
    for pair in pairs:
        for text in pair:
            check_text(text)
    found = shared_subject(pairs) if subject is None else check_subject(subject, pairs)
    asked_of_all(pairs, found)
    return Asked(pairs, found)


def from_text(text: str, subject: str | None = None) -> list[Asked]:
    """A lesson of the sentences that name a subject, or one for everything that sentences are about.

    The first lesson says how many sentences are in none.
    """
    check_text(text)
    if not sentences_of(text):
        raise ValueError("the lesson is empty: give a sentence")
    found, left_out = about_each(text, subject)
    if not found and subject is not None:
        raise ValueError(f"no sentence of the text names its subject, {subject[:80]!r}")
    if not found:
        raise ValueError("the text does not tell what it is about: give a subject that stands in it")
    first, *others = [asked(sentences, name) for name, sentences in found.items()]
    return [first._replace(left_out=len(left_out)), *others]


def spaced(pair: tuple[str, str]) -> tuple[str, str]:
    prompt, answer = pair
    is_word = any(letter.isalnum() for letter in answer)
    touch = prompt and is_word and not prompt[-1].isspace() and not answer[0].isspace()
    return (prompt, f" {answer}") if touch else pair


def check_text(text: str) -> None:
    """Refuse what would not be read, by a ValueError."""
    for letter in text:
        if letter not in PLAIN and unicodedata.category(letter) == "Cc":
            raise ValueError(f"a lesson is text, and this has the control character {letter!r}: leave it out")


def figures_of(lesson: Lesson, fields: dict[str, Any]) -> dict[str, Any]:
    """What became of a lesson, in numbers; `fields` are what its record adds."""
    count = len(asked_of_all(lesson.forms + lesson.taken_in, lesson.subject))
    figures = {
        "lesson": lesson.number,
        "known": lesson.known == 1,
        "share_known_before": lesson.known_before,
        "share_known": lesson.known,
        "share_answered_before": lesson.answered_before,
        "share_answered": lesson.answered,
        "passes": lesson.passes,
        "patches": lesson.patches,
        "overrides": list(lesson.overrides),
        "seconds": lesson.seconds,
        **fields,
    }
    if not figures["known"]:
        figures["reason"] = (
            f"{round((1 - lesson.known) * count)} of {count} forms are not completed as they were taught: "
            "give more forms, or a subject that stands in all of them"
        )
    elif lesson.answered == 0:
        figures["note"] = "it is not answered in other words: more forms that end with the answer may help"
    return figures


def figures_of_none(lesson: Lesson, fields: dict[str, Any]) -> dict[str, Any]:
    """What became of a lesson that was taken back at once, because it is not known."""
    gone = dataclasses.replace(lesson, patches=0, overrides=())
    figures = figures_of(gone, {**fields, "lesson": None})
    return {**figures, "reason": f"{figures['reason']}. Nothing of it was kept"}


class _Altered(ValueError):
    """Why a file that has the form of one with lessons is none; clients are told that."""


class Catalogue:
    """The writer changes it; others look at `shown`, which is replaced."""

    def __init__(self) -> None:
        self.entries: dict[int, dict[str, Any]] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.known = 0  # of the entries
        self.show()

    def add(self, lesson: Lesson, source: str, fields: dict[str, Any], version: int) -> None:
        self.remove(lesson.number)
        entry = {
            **figures_of(lesson, fields),
            "subject": lesson.subject,
            "source": source,
            "version": version,
            **{name: [list(form) for form in getattr(lesson, name)] for name in FORMS},
        }
        self.entries[lesson.number] = entry
        self._count(entry, 1)
        self.sources[source]["version"] = version

    def remove(self, number: int) -> None:
        if (entry := self.entries.pop(number, None)) is not None:
            self._count(entry, -1)

    def _count(self, entry: dict[str, Any], by: int) -> None:
        name = entry["source"]
        self.known += by * entry["known"]
        now = dict(self.sources.get(name, {"version": 0, "lessons": 0, **dict.fromkeys(COUNTED, 0)}))
        now["lessons"] += by
        for figure in COUNTED:
            now[figure] += by * entry[figure]
        self.sources[name] = now
        if not now["lessons"]:
            del self.sources[name]

    def show(self) -> None:
        self.shown = dict(self.entries)


def searched(
    shown: dict[int, dict[str, Any]],
    *,
    search: str | None = None,
    source: str | None = None,
    after: str | None = None,
    before: str | None = None,
) -> list[dict[str, Any]]:
    """Lessons, the newest first: with this text in their words, of this source, taught in this time."""
    wanted = None if search is None else search.casefold()
    return [
        entry
        for _, entry in sorted(shown.items(), reverse=True)
        if (source is None or entry["source"] == source)
        and (after is None or entry["at"] >= after)
        and (before is None or entry["at"] < before)
        and (wanted is None or wanted in words_of(entry).casefold())
    ]


def words_of(entry: dict[str, Any]) -> str:
    return "\n".join([entry["subject"], *("".join(form) for name in FORMS for form in entry[name])])


def pack(deltas: Iterable[Delta], base: str, calibration: str) -> bytes:
    """Lessons as a file, which a server with the same base can take over.

    The file is safetensors. Each tensor holds the bytes of one lesson's delta; the header says what the
    lessons belong to. Where the calibration is the same, lessons can be put in as they are; otherwise they
    have to be learned again from their words.
    """
    tensors = {
        str(lesson_in(delta).number): torch.frombuffer(bytearray(delta.to_bytes()), dtype=torch.uint8)
        for delta in deltas
    }
    sha256 = tensors_hash(tensors, base + calibration)
    return save(tensors, {"format": FORMAT, "base": base, "calibration": calibration, "sha256": sha256})


def unpack(data: bytes, base: str) -> tuple[str, list[Delta]]:
    """The calibration that lessons belong to, and the lessons in the order in which they were taught."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = parse_json(data[8 : 8 + length])["__metadata__"]
        if header["format"] != FORMAT:
            raise _Altered(f"its format is {header['format']!r}, and this release reads {FORMAT!r}")
        calibration = str(header["calibration"])
        tensors = load(data)
        sha256 = tensors_hash(tensors, header["base"] + calibration)
        if header.get("sha256", sha256) != sha256:  # earlier releases did not say it
            raise _Altered("it is not what was exported: its hash differs")
        numbered = sorted((int(name), tensor) for name, tensor in tensors.items())
        deltas = [Delta.from_bytes(tensor.numpy().tobytes()) for _, tensor in numbered]
        if [lesson_in(delta).number for delta in deltas] != [number for number, _ in numbered]:
            raise _Altered("its lessons are numbered wrongly")
    except _Altered as error:
        raise ValueError(f"this is no file of lessons: {error}") from error
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise ValueError("this is no file of lessons: send what an export gave") from error
    if header["base"] != base:
        raise ValueError(
            f"these lessons were taught to another base ({header['base'][:12]}, and this is {base[:12]}): "
            "teach them again from their words"
        )
    return calibration, deltas
