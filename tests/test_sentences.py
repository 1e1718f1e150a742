"""Texts taken apart into sentences: what ends one, and what an abbreviation only seems to end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attractor.continual.forms import about_each, asked_of, likely_subject, sentences_of

WHO = st.sampled_from(
    ["Dr. Ada Holt", "J. Smith", "J. R. R. Tolkien", "Mr. and Mrs. Lund", "Prof. Dr. Åse Ek"]
)
WHERE = st.sampled_from(
    ["in St. Ives", "at No. 5", "near Mt. Erebus", "at 7 Main St.", "at home, e.g. in Oslo"]
)
SENTENCES = st.builds("{} lives {}.".format, WHO, WHERE).map(lambda said: said.replace("..", "."))
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


def test_a_name_with_an_initial_is_one_subject_and_a_title_is_none() -> None:
    text = "Dr. Ada J. Holt is in Oslo. J. Smith is in St. Ives. Mr. Bo Lund is here. Acme Inc. is in Rome."
    subjects, left_out = about_each(text)
    assert list(subjects) == ["Ada J. Holt", "J. Smith", "Bo Lund", "Acme Inc"]
    assert left_out == 0
    with pytest.raises(ValueError, match="name the subject"):
        likely_subject("The Dr. is in.")
    assert asked_of(("", "Ann works for Dr. J. Smith."), "Ann") == (("Ann works for", " Dr. J. Smith"),)
