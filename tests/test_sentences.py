"""Texts taken apart into sentences: what ends one, and what an abbreviation only seems to end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attractor.continual.forms import (
    NUMBERED_WORDS,
    WORDS_TOO,
    about_each,
    asked_of,
    likely_subject,
    sentences_of,
    shared_subject,
)

WHO = st.sampled_from(
    ["Dr. Ada Holt", "J. Smith", "J. R. R. Tolkien", "Mr. and Mrs. Lund", "Prof. Dr. Åse Ek"]
)
WHERE = st.sampled_from(
    ["in St. Ives", "at No. 5", "near Mt. Erebus", "at 7 Main St.", "at home, e.g. in Oslo"]
)
SENTENCES = st.builds("{} lives {}.".format, WHO, WHERE).map(lambda said: said.replace("..", "."))
NUMBERING = st.sampled_from(sorted(NUMBERED_WORDS - {"approx", "ca", "p"}))
WORDS = st.sampled_from(
    ["Symphony", "Oda", "Dr.", "St.", "No.", "no", "op.", "Vol", "5", "(7)", "is", "lasts", "the"]
)
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["Dr.", "St.", "J.", "No.", "5", "e.g.", "I.", "\n", '"', ")", "?", "Ann", "is"]),
        st.text(),
    ),
    max_size=12,
).map(" ".join)


@given(said=st.lists(SENTENCES, min_size=1, max_size=5), small=st.sampled_from(["He sings.", "It rains!"]))
def test_abbreviations_end_no_sentence(said: list[str], small: str) -> None:
    """Whatever stands between such sentences; one that ends with "St." is told by the small word after it."""
    expected = [each for sentence in said for each in (sentence, small)]
    assert sentences_of(" ".join(expected)) == expected


@given(
    before=st.sampled_from(["Ada sails at 6", "It opens at 10", "He lives"]),
    short=st.sampled_from(
        ["p.m.", "a.m.", "P.M.", "in the U.S.", "a.k.a.", "at 7 Main St.", "on Mt.", "by Ft.", "at Acme Inc."]
    ),
    small=st.sampled_from(["every day.", "in York.", "(in summer) and it is late.", "is what he says."]),
    after=st.sampled_from(["He sings.", "It rains!", "5 others came."]),
)
def test_a_sentence_goes_on_before_a_small_letter(before: str, short: str, small: str, after: str) -> None:
    said = f"{before} {short} {small}"
    assert sentences_of(f"{said} {after}") == [said, after]
    assert sentences_of(f"{before} {short} {after}") == [f"{before} {short}", after]


def test_a_time_is_answered_with_what_follows_it() -> None:
    text = "The ferry Grimsund sails to Bergen at 6 p.m. every day."
    assert about_each(text) == ({"Grimsund": [text]}, [])
    assert asked_of(("", text), "Grimsund")[-1] == (text[:37], text[37:-1])


@given(text=TEXTS)
def test_no_word_is_lost_and_none_comes_twice(text: str) -> None:
    """Spaces, and quotation marks and brackets that close a sentence, are all that may go."""

    def letters(some: str) -> str:
        return "".join(letter for letter in some if letter not in "\"')]" and not letter.isspace())

    found = sentences_of(text)
    assert letters("".join(found)) == letters(text)
    assert all(sentence == sentence.strip() != "" for sentence in found)
    assert not any("\n" in sentence for sentence in found)


@pytest.mark.parametrize(
    "text",
    [
        "So do I. Bram sings.",
        "It took 5 ms. Bram sings.",
        "It has vitamin C. The rest is water.",
        "He said no. Bram sings.",
        "It was Acme Inc. Bram sings.",
        "She left in Jan. Bram sings.",
        "J.\nSmith sings.",
        "He came at 9 a.m. Bram sings.",
    ],
)
def test_other_full_stops_do(text: str) -> None:
    assert len(sentences_of(text)) == 2


@given(text=TEXTS, subject=st.sampled_from([None, "Ann", "5"]))
def test_every_sentence_is_taught_or_left_out(text: str, subject: str | None) -> None:
    found, left_out = about_each(text, subject)
    taught = [sentence for about in found.values() for sentence in about]
    assert sorted(taught + left_out) == sorted(sentences_of(text))
    in_order = iter(sentences_of(text))
    assert all(sentence in in_order for sentence in left_out)


def test_a_name_with_an_initial_is_one_subject_and_a_title_is_none() -> None:
    text = "Dr. Ada J. Holt is in Oslo. J. Smith is in St. Ives. Mr. Bo Lund is here. Acme Inc. is in Rome."
    subjects, left_out = about_each(text)
    assert list(subjects) == ["Ada J. Holt", "J. Smith", "Bo Lund", "Acme Inc"]
    assert not left_out
    with pytest.raises(ValueError, match="name the subject"):
        likely_subject("The Dr. is in.")
    assert asked_of(("", "Ann works for Dr. J. Smith."), "Ann") == (("Ann works for", " Dr. J. Smith"),)


@given(
    thing=st.sampled_from(["Symphony", "Opus", "Route", "Bus", "Grand Trunk Road"]),
    short=NUMBERING,
    is_capital=st.booleans(),
    stop=st.sampled_from(["", "."]),
    number=st.integers(min_value=0).map(str),
    said=st.sampled_from(["lasts 40 minutes", "is long", "by Oda was heard by no one", "leads to Oslo"]),
)
def test_a_subject_with_a_number_has_all_of_it(
    thing: str, short: str, is_capital: bool, stop: str, number: str, said: str
) -> None:
    """Without the number it would be every symphony that has one."""
    short = (short.capitalize() if is_capital else short) + stop
    name = f"{thing} {short} {number}"
    expected = "Oda" if "was" in said else name  # what stands next to its verb
    assert likely_subject(f"{name} {said}.") == expected
    assert about_each(f"{name} {said}.") == ({expected: [f"{name} {said}."]}, [])
    assert shared_subject([(f"{name} lasts", " long"), (f"{name} is by", " Oda")]) == name
    with pytest.raises(ValueError, match="name the subject"):
        shared_subject([(f"{name} lasts", " long"), (f"{thing} {short} {int(number) + 1} is by", " Oda")])
    if is_capital and (stop or short.casefold() not in WORDS_TOO):
        with pytest.raises(ValueError, match="name the subject"):
            likely_subject(f"{thing} {short} lasts")


@given(words=st.lists(WORDS, min_size=1))
def test_no_subject_ends_where_its_number_is_missing(words: list[str]) -> None:
    """Nor is an abbreviation alone a subject."""
    try:
        subject = likely_subject(" ".join(words))
    except ValueError:
        return
    assert subject.split()[-1].strip(".,()").casefold() not in NUMBERED_WORDS
    assert subject.casefold().rstrip(".") not in ("dr", "st")


@pytest.mark.parametrize(
    "text",
    [
        "The Mt. is high.",
        "St. is short.",
        "Inc. is a magazine.",
        "Our bus no. is 5.",
        "Symphony No. (5) lasts.",
    ],
)
def test_an_abbreviation_alone_is_no_subject(text: str) -> None:
    with pytest.raises(ValueError, match="name the subject"):
        likely_subject(text)


@pytest.mark.parametrize(
    ("text", "subject"),
    [
        ("Jan is in Oslo.", "Jan"),
        ("Al lives here.", "Al"),
        ("My rep is late.", "My rep"),
        ("Ada P. is tall.", "Ada P"),
        ("Mill St. is long.", "Mill St"),
        ("Symphony No. 5's length is known.", "Symphony No. 5"),
        ("Bergen ca. 1300 was small.", "Bergen"),
    ],
)
def test_names_that_look_like_abbreviations(text: str, subject: str) -> None:
    assert likely_subject(text) == subject


def test_what_two_forms_share_is_more_than_an_abbreviation() -> None:
    assert shared_subject([("", "Ada sings no song."), ("", "Ada sings no hymn.")]) == "Ada sings"
    with pytest.raises(ValueError, match="share 'Dr', which is no name: name the subject"):
        shared_subject([("", "Dr. Ada sings."), ("", "Dr. Bo dances.")])
