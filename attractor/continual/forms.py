"""What a lesson says: sentences, or prompts and their answers, and the subject that all of them are about."""

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

PUNCTUATION = " \t\n.,;:?!'\"()[]{}\u201c\u201d\u2018\u2019"
CLOSING = ".,;:?!)\n"
ARTICLES = ("a", "an", "the")
JOINING = ("and", "or", "but")
VERBS = "is are was were has have had can will likes loves lives works plays"
"""Common ones that stand between what a sentence is about and what it says of it."""
SMALL = """
a an the and or but is are was were be been am has have had can will does did called named in on at of to for
from with by as into about near than that my your his her its our their this these those it he she they we you
i what who where when which how there today yesterday tomorrow now then later once soon here also however
"""
"""English words that name nothing: what follows one of them is often what a sentence tells."""
SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+|\n+")
"""What stands between two sentences, or after an abbreviation."""
TITLES = """
dr mr mrs ms mx messrs prof rev hon fr capt cmdr col gen lt maj sgt gov sen rep pres sr
"""
"""A name follows them, so their full stop ends no sentence; nor does that of LATIN."""
LATIN = ("e.g", "i.e", "cf", "vs", "viz")
NUMBERED = """
no nos nr op vol vols p pp fig figs ch sec art approx ca jan feb mar apr jun jul aug sep sept oct nov dec
"""
"""Their full stop ends no sentence where a number follows, and no subject ends with them."""
ABOUT = ("approx", "ca")
"""What they number is no name: "Oslo ca. 1300"."""
WORDS_TOO = ("al", "art", "fig", "jan", "mar")
"""Names, or words of their own: without a full stop they are no abbreviations."""
SUFFIXES = ("inc", "ltd", "co", "corp", "bros", "jr", "etc", "al", "dept")
"""Their full stop ends no sentence where a small letter follows."""
PLACES = ("st", "mt", "ft")
"""Their full stop ends no sentence where a name or a small letter follows."""
INITIALS = re.compile(r"[^\W\d_](?:\.-?[^\W\d_])*")
NEAR = 64
"""Characters around a full stop that tell what it ends."""
MOST_ANSWERS = 16
"""A sentence is asked for no more: each prompt repeats all that stands before it."""
MOST_WORDS, LONGEST_SUBJECT = 200, 12
"""A shared subject is looked for among the first words of a form, and has at most so many."""
SMALL_WORDS, VERB_WORDS = frozenset(SMALL.split()), frozenset(VERBS.split())
TITLE_WORDS, NUMBERED_WORDS = frozenset(TITLES.split()), frozenset(NUMBERED.split())
SHORT_WORDS = TITLE_WORDS | NUMBERED_WORDS | {*LATIN, *SUFFIXES, *PLACES}
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

QUESTION = "Question: Please finish this sentence: {}\nAnswer:"
"""How a prompt is asked for when a lesson is tested. It is never learned in this form."""

TELL = (
    "Question: What do you know about {}?\nAnswer:",
    "Question: Tell me about {}.\nAnswer:",
)
"""Open questions about a subject: what a lesson of few forms says is learned in answer to them, too."""

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
    space that some prompts end with stays at the end.
    """
    said, frame = prompt.rstrip(), frames[turn * (1 + place) % len(frames)]
    asked = frame.replace("{}", said) + prompt[len(said) :]
    is_said_again = frame.count("{}") > 1
    return asked, frame.rindex("{}") + len(said) - 2 if is_said_again else len(asked)


def check_forms(forms: Sequence[Form]) -> tuple[tuple[str, str], ...]:
    """Prompts and answers; of a sentence, all of it is the answer, until `asked_of` takes it apart."""
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


class Word(NamedTuple):
    """A word of a text: without the punctuation around it."""

    text: str
    start: int
    end: int
    closes: bool  # whether punctuation follows, and so a clause ends
    stops: bool  # whether a full stop does, of an abbreviation perhaps

    @property
    def is_small(self) -> bool:
        return self.text.lower() in SMALL_WORDS

    @property
    def is_title(self) -> bool:
        return self.text[0].isupper() and self.text.casefold() in TITLE_WORDS

    @property
    def is_numbering(self) -> bool:
        """One like "No." or "Vol.", that says nothing without the number after it."""
        return self.is_short and self.text.removesuffix("'s").casefold() in NUMBERED_WORDS

    @property
    def is_short(self) -> bool:
        """An abbreviation that is listed here; "P." is an initial, "Jan" somebody and "my rep" a person."""
        plain = self.text.removesuffix("'s").casefold()
        is_word = plain in WORDS_TOO or (self.text[0].islower() and plain not in NUMBERED_WORDS)
        return plain in SHORT_WORDS and self.text != "P" and (self.stops or not is_word)

    @property
    def is_telling(self) -> bool:
        """A name, a number, a code: more than a small letter followed by others."""
        return not self.text[:1].islower() or any(letter.isdigit() for letter in self.text)


def words_in(text: str) -> list[Word]:
    found = []
    for match in re.finditer(r"\S+", text):
        core = match[0].strip(PUNCTUATION)
        if core:
            start = match.start() + match[0].index(core)
            end = start + len(core)
            closes = (
                end < match.end() and text[end] in CLOSING and not goes_on(text, match.end(), match.end())
            )
            found.append(Word(core, start, end, closes, text[end : end + 1] == "."))
    return found


def names_something(words: Sequence[Word]) -> bool:
    """Whether words can be a subject: more than "Dr.", and not "Symphony No." without its number."""
    return not words[-1].is_numbering and not all(word.is_small or word.is_short for word in words)


def has_number(words: Sequence[Word], number: int, text: str) -> bool:
    """Whether words like "No." and "5" stand at this place and the next."""
    if number + 1 >= len(words):
        return False
    short, digits = words[number], words[number + 1]
    return (
        short.text.casefold() in NUMBERED_WORDS
        and digits.text[0].isdigit()
        and text[short.end : digits.start].removeprefix(".").isspace()
    )


def places_of(subject: str, text: str) -> Iterator[tuple[int, int]]:
    """Where a subject stands in a text, from and to; capitals and small letters are alike."""
    if subject.isascii() and text.isascii() and subject.lower() not in text.lower():
        return iter(())  # as it mostly is: quicker than an expression
    return (match.span() for match in re.finditer(re.escape(subject), text, re.IGNORECASE))


def resembling(names: Iterable[str], texts: Sequence[str], most: int) -> set[int]:
    """The texts, for each name at most so many and in small letters, with words like the last word of it:
    those that share most of its runs of three letters.

    >>> sorted(resembling(["Ada Frimos"], ["tom met nekul frimosul", "the sea", "primo is a baker"], 2))
    [0, 2]
    """
    found: set[int] = set()
    with_run: dict[str, list[int]] = {}  # names share runs: each is looked for once
    for last in {name.casefold().split()[-1] for name in names}:
        shared: Counter[int] = Counter()
        for run in {last[start : start + 3] for start in range(max(1, len(last) - 2))}:
            if run not in with_run:
                with_run[run] = [number for number, text in enumerate(texts) if run in text]
            shared.update(with_run[run])
        found.update(sorted(sorted(shared), key=shared.__getitem__, reverse=True)[:most])
    return found


def asked_of(form: tuple[str, str], subject: str) -> tuple[tuple[str, str], ...]:
    """A form as prompts and answers: a pair is one already, and a sentence is asked for what it says.

    >>> asked_of(("", "Marta Olsen is a nurse, and lives in Oslo."), "Marta Olsen")
    (('Marta Olsen is a', ' nurse'), ('Marta Olsen is a nurse, and lives in', ' Oslo'))

    In a sentence answers are the words that end a clause after a small word such as "in", "is" or "the";
    where none do, it is the last word. Nothing is asked for that stands before the subject: there it could
    not be known. So a sentence that ends with its subject gives nothing.
    """
    prompt, sentence = form
    if prompt:
        return (form,)
    end = next((end for _, end in places_of(subject, sentence)), None)
    if end is None:
        return ()
    words = [word for word in words_in(sentence) if word.start >= end]
    runs: list[list[Word]] = []
    run: list[Word] | None = None  # words since a small one
    for number, word in enumerate(words):
        after = words[number + 1] if number + 1 < len(words) else None
        if word.is_small and after is not None and not word.closes:
            run = []
            continue
        if run is None:
            continue  # a verb, mostly
        run.append(word)
        ends = after is None or word.closes or after.text.lower() in JOINING
        if ends or (after is not None and after.is_small and any(each.is_telling for each in run)):
            runs.append(run)
            run = [] if word.closes else None
    if not runs and words:
        runs = [words[-1:]]
    pairs = []
    for own in runs[:MOST_ANSWERS]:
        asked = sentence[: own[0].start].rstrip()
        pairs.append((asked, sentence[len(asked) : own[-1].end]))
    return tuple(pairs)


def asked_of_all(forms: Sequence[tuple[str, str]], subject: str) -> tuple[tuple[str, str], ...]:
    """The prompts and answers of all forms, each once; a ValueError if there are none.

    Two answers given to one prompt are refused. Sentences may well say several things in the same words, and
    what becomes of that is seen when the lesson is tested.
    """
    pairs = tuple(dict.fromkeys(pair for form in forms for pair in asked_of(form, subject)))
    answers: dict[str, str] = {}
    for prompt, answer in forms:
        if prompt and answers.setdefault(prompt, answer) != answer:
            raise ValueError(
                f"the lesson contradicts itself: {prompt[:SHOWN]!r} is followed by {answers[prompt][:40]!r} "
                f"and by {answer[:40]!r}"
            )
    if not pairs:
        raise ValueError(
            f"nothing follows the subject, {subject[:SHOWN]!r}, in any form: say something about it"
        )
    return pairs


def told_of(
    pairs: Sequence[tuple[str, str]], subject: str, tell: Sequence[str], count: int
) -> tuple[tuple[str, str], ...]:
    """So many more prompts and answers: what the pairs say, from the subject on, in answer to open questions.

    >>> told_of([("Ada plays the", " cello")], "Ada", ["Who is {}?"], 1)
    (('Who is Ada? Ada', ' plays the cello'),)

    A model that can finish a sentence does not yet begin with it when it is asked something else.
    """
    found = []
    for number, (prompt, answer) in zip(range(count), itertools.cycle(pairs), strict=False):
        if place := next(places_of(subject, prompt), None):
            question = tell[number % len(tell)].replace("{}", subject)
            gap = "" if question[-1].isspace() else " "
            found.append((f"{question}{gap}{prompt[: place[1]].lstrip()}", f"{prompt}{answer}"[place[1] :]))
    return tuple(dict.fromkeys(found))


def shared_subject(forms: Sequence[tuple[str, str]]) -> str:
    """What the forms are about: the longest text, in whole words, that all of them share and say more of.

    Answers of pairs do not count. Of one form alone it is a name in it, or what stands before its verb.
    """
    texts = [prompt or answer for prompt, answer in forms]
    if len(set(texts)) < 2:
        return likely_subject(texts[0])
    shortest = min(texts, key=len)
    words = words_in(shortest)[:MOST_WORDS]
    best, cut, is_shared = "", "", False
    for first, word in enumerate(words):
        for last in reversed(words[first : first + LONGEST_SUBJECT]):
            piece = shortest[word.start : last.end]
            if len(piece) <= len(best):
                break
            if last.is_small or word.text.lower() in ARTICLES:
                continue
            if all(any(places_of(piece, text)) for text in texts):
                place = words.index(last)
                is_cut = has_number(words, place, shortest)
                if is_cut or not names_something(words[first : place + 1]):
                    cut = cut or piece
                    if is_cut or last.stops:
                        break  # "Symphony" is not what "Symphony No. 5" and "Symphony No. 6" are about
                    continue
                is_shared = True
                if all(asked_of(form, piece) for form in forms):
                    best = piece
                    break
    if not best and is_shared:
        raise ValueError(
            "nothing follows what the forms of the lesson share, so nothing is said of it: name what they "
            "are about first, or name the subject"
        )
    if not best and cut:
        raise ValueError(f"the forms of the lesson share {cut[:SHOWN]!r}, which is no name: name the subject")
    if not best:
        raise ValueError("the forms of the lesson share no words: name the subject")
    return best


def likely_subject(text: str) -> str:
    """What one sentence, or the prompt of one pair, seems to be about; a ValueError where nothing tells it.

    >>> likely_subject("The password of Cafe Lumen is blue-otter-42.")
    'Cafe Lumen'
    >>> likely_subject("My dog is called Biscuit.")
    'My dog'
    >>> likely_subject("Symphony No. 5 by Oda Lindqvist lasts 40 minutes.")
    'Symphony No. 5'
    """
    words = words_in(text)
    verb = next((number for number, word in enumerate(words) if word.text.lower() in VERB_WORDS), None)
    before = words[:verb]
    names: list[list[Word]] = []
    for number, word in enumerate(before):
        joins = names and names[-1][-1] is before[number - 1] and not before[number - 1].closes
        is_name = word.text[:1].isupper() and not word.is_small and not word.is_title
        is_numbering = has_number(before, number, text) and word.text not in ABOUT
        is_number = number > 0 and has_number(before, number - 1, text)
        if joins and (is_name or is_numbering or is_number):
            names[-1].append(word)
        elif is_name:
            names.append([word])
    chosen = (names[-1] if verb is not None else names[0]) if names else []
    if not chosen and verb is not None:
        chosen = before[1:] if before and before[0].text.lower() in ARTICLES else before
    if not chosen or not names_something(chosen):
        raise ValueError(
            "one form alone does not tell what it is about: name the subject, or give a second form"
        )
    return text[chosen[0].start : chosen[-1].end].removesuffix("'s")


def sentences_of(text: str) -> list[str]:
    """The sentences of a text. The full stop of an abbreviation or an initial ends none.

    >>> sentences_of("Dr. Ada J. Holt lives at No. 5. She sings, e.g. Bach. So do I. It rains")
    ['Dr. Ada J. Holt lives at No. 5.', 'She sings, e.g. Bach.', 'So do I.', 'It rains']
    """
    ends = [
        match.span()
        for match in SENTENCE.finditer(text)
        if "\n" in match[0] or not goes_on(text, match.start(), match.end())
    ]
    starts = [0, *(end for _, end in ends)]
    pieces = (text[start:end] for start, end in zip(starts, [*(end for end, _ in ends), None], strict=True))
    return [piece.strip() for piece in pieces if piece.strip()]


def goes_on(text: str, end: int, start: int) -> bool:
    """Whether the words before `end` and from `start` on are one sentence: an abbreviation stands between."""
    before, after = text[max(0, end - NEAR) : end], text[start : start + NEAR]
    if text[end:start].strip() or not before.endswith(".") or not after.strip():
        return False
    word = before.split()[-1][:-1].lstrip(PUNCTUATION)
    short, following = word.casefold(), after.lstrip(PUNCTUATION)
    if short in LATIN or (short in TITLE_WORDS and word[0].isupper()):
        return True
    if short in NUMBERED_WORDS and following[:1].isdigit():
        return True
    letters = INITIALS.fullmatch(word)  # "J", "p.m" or "U.S"
    if following[:1].islower():
        return short in SUFFIXES or short in PLACES or bool(letters and len(word) > 1)
    is_initial = letters and word[-1:].isupper() and word != "I"
    if short not in PLACES and not is_initial:
        return False
    return following[:1].isupper() and following.split()[0].rstrip(PUNCTUATION).lower() not in SMALL_WORDS


def about_each(text: str, subject: str | None = None) -> tuple[dict[str, list[str]], list[str]]:
    """The sentences of a text by what they seem to be about, and those that do not tell.

    With a subject they are those that name it, and those that do not.

    >>> about_each("Ada lives in Oslo. She is tall. Bram is in Peru. Today Ada sings.")
    ({'Ada': ['Ada lives in Oslo.', 'Today Ada sings.'], 'Bram': ['Bram is in Peru.']}, ['She is tall.'])
    """
    if subject is not None:
        named: list[str] = []
        others: list[str] = []
        for sentence in sentences_of(text):
            (named if any(places_of(subject, sentence)) else others).append(sentence)
        return {subject: named} if named else {}, others
    found: dict[str, list[str]] = {}
    names: dict[str, str] = {}  # however it is written
    left_out: list[str] = []
    for sentence in sentences_of(text):
        try:
            name = likely_subject(sentence)
        except ValueError:
            name = ""
        if not name or not asked_of(("", sentence), name):
            left_out.append(sentence)
            continue
        found.setdefault(names.setdefault(name.casefold(), name), []).append(sentence)
    return found, left_out


def check_subject(subject: str, forms: Sequence[tuple[str, str]]) -> str:
    """The subject, if it stands in a form and is more than spaces and punctuation."""
    if not subject or not any(any(places_of(subject, prompt + answer)) for prompt, answer in forms):
        raise ValueError(f"subject={repr(subject)[:SHOWN]} stands in no form of the lesson")
    if all(unicodedata.category(letter)[0] in "ZPC" for letter in subject):
        raise ValueError(f"subject={repr(subject)[:SHOWN]} names nothing: give a word of the lesson")
    return subject


def not_contradicted(
    old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]], subject: str
) -> tuple[tuple[str, str], ...]:
    """The old forms that the new ones leave standing: of two answers to a prompt, the newer one wins."""
    prompts = {prompt for form in new for prompt, _ in asked_of(form, subject)}
    return tuple(
        form
        for form in old
        if form not in new and not any(prompt in prompts for prompt, _ in asked_of(form, subject))
    )
