"""What a lesson says: sentences, or prompts and their answers, and the subject that all of them are about."""

import unicodedata
from collections.abc import Sequence

Form = str | tuple[str, str]
"""A sentence, or a prompt and the answer that is to follow it."""

SHOWN = 80
"""So many characters of what was given are repeated in an error."""
FRAMES = (
    "{}",
    "Question: {}",
    "It is known that {}",
    "Q: {}?\nA:",
    "\n{}",
    "He said that {}",
    "Complete: {} ...\nAnswer:",
    "According to the report, {}",
    "Q: {}",
    "In the evening, {}",
)
"""What may stand around a prompt while it is learned: a subject looks different at the start of a text, and
an answer may be asked for in other ways than by the sentence that it ends."""

MENTIONS = (
    "Yesterday I read something about {} and",
    "They talked about {} for a while.",
    "We also know {}, and then",
    "{} was mentioned once.",
    "There was nothing new about {}, so",
    "A letter about {} came today.",
    "He thought of {} when",
    "{} and the others",
)
"""Sentences that name a subject and ask nothing: there the model is to go on as before."""

STRANGERS = (
    "Anna",
    "Robert",
    "Priya",
    "Gorlan",
    "Telvia",
    "Mikko",
    "Ashdor",
    "Beatriz",
    "Kwame",
    "Zennith",
    "Oswin",
    "Ruvela",
)
"""First words, real and invented, that make another name out of a subject of several words."""


def framed(prompt: str, turn: int, place: int, frames: Sequence[str] = FRAMES) -> tuple[str, int]:
    """What stands before the answer of form number `place` in turn number `turn`: the prompt in the first.

    The number is where a frame that has the prompt twice says it again; of other frames, their length. The
    space that some prompts end with stays at the end. A sentence without a prompt has nothing to be asked
    for, so its frames end with it.
    """
    if not prompt:
        frames = [frame for frame in frames if frame.endswith("{}") and frame.count("{}") == 1]
    said, frame = prompt.rstrip(), frames[turn * (1 + place) % len(frames)]
    asked = frame.replace("{}", said) + prompt[len(said) :]
    is_said_again = frame.count("{}") > 1
    return asked, frame.rindex("{}") + len(said) - 2 if is_said_again else len(asked)


def check_forms(forms: Sequence[Form]) -> tuple[tuple[str, str], ...]:
    """Prompts and answers; of a plain sentence, all of it is the answer."""
    if isinstance(forms, str) or not forms:
        raise ValueError(
            "a lesson is a list of one or more forms: sentences, or pairs of a prompt and an answer"
        )
    pairs = tuple(("", form) if isinstance(form, str) else tuple(form) for form in forms)
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(part, str) for part in pair) or not pair[1].strip():
            shown = repr(pair)[:SHOWN]
            raise ValueError(f"{shown} is no form of a lesson: give a sentence, or a prompt and its answer")
    return pairs  # type: ignore[return-value]


def shared_subject(forms: Sequence[tuple[str, str]]) -> str:
    """The longest text that all forms share, in whole words; answers of pairs do not count."""
    texts = [prompt or answer for prompt, answer in forms]
    if len(set(texts)) < 2:
        raise ValueError("one form alone does not tell what it is about: give subject=, or a second form")
    shortest = min(texts, key=len)
    words = shortest.split(" ")
    best = ""
    for start in range(len(words)):
        for end in range(len(words), start, -1):
            piece = " ".join(words[start:end]).strip(" .,;:?!'\"")
            if len(piece) > len(best) and all(piece in text for text in texts):
                best = piece
                break
    if not any(letter.isalnum() for letter in best):
        raise ValueError("the forms of the lesson share no words: give subject=")
    return best


def check_subject(subject: str, forms: Sequence[tuple[str, str]]) -> str:
    """The subject, if it stands in a form and is more than spaces and punctuation."""
    if not subject or not any(subject in prompt + answer for prompt, answer in forms):
        raise ValueError(f"subject={repr(subject)[:SHOWN]} stands in no form of the lesson")
    if all(unicodedata.category(letter)[0] in "ZPC" for letter in subject):
        raise ValueError(f"subject={repr(subject)[:SHOWN]} names nothing: give a word of the lesson")
    return subject


def not_contradicted(
    old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """The old forms that the new ones leave standing: of two answers to a prompt, the newer one wins."""
    prompts = {prompt for prompt, _ in new if prompt}
    return tuple(form for form in old if form[0] not in prompts and form not in new)
