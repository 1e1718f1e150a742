import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attractor.serve.decode.sequences import GeneratedToken
from attractor.serve.decode.stream import StopStrings, TextDecoder
from attractor.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Detokenizer, PretrainedTokenizer

BYTES = ByteTokenizer()
# Bytes that begin, go on with and end characters of every length, more often than chance would have them.
BEGINS_AND_ENDS = bytes.fromhex("41 20 80 9f a9 c3 e2 82 ac f0 98 ef bf bd ff")
some_bytes = st.lists(st.sampled_from(BEGINS_AND_ENDS), max_size=24)


def spelled(tokenizer, tokens):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]
    assert sum(count for _, count in pieces) == len(tokens)
    return [text for text, _ in pieces]


@given(some_bytes)
def test_bytes_joined_are_the_whole(tokens):
    assert "".join(spelled(BYTES, tokens)) == BYTES.decode(tokens)


@given(st.text(max_size=20))
def test_no_character_is_cut_and_none_waits_longer_than_it_must(text):
    tokens = BYTES.encode(text).tolist()
    pieces = spelled(BYTES, tokens)
    assert "".join(pieces) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        ends = np.cumsum([len(character.encode()) for character in text]).tolist()
        assert [number + 1 for number, piece in enumerate(pieces) if piece] == ends


@pytest.fixture(scope="module")
def bpe():
    return BPETokenizer.train("the cafés of \u20ac and \U0001f600 \U0001f603 " * 40, 300)


@given(st.data())
def test_bpe_joined_is_the_whole(bpe, data):
    tokens = data.draw(st.lists(st.integers(0, bpe.vocab_size - 1), max_size=30))
    assert "".join(spelled(bpe, tokens)) == bpe.decode(tokens)


def test_a_tokenizer_that_writes_the_first_token_differently():
    library = pytest.importorskip("tokenizers")
    words = {"\u2581hello": 0, "\u2581world": 1, "!": 2, "<0xC3>": 3, "<0xA9>": 4}
    tokenizer = library.Tokenizer(library.models.BPE(words, [], byte_fallback=True))
    tokenizer.decoder = library.decoders.Sequence(
        [library.decoders.ByteFallback(), library.decoders.Metaspace(prepend_scheme="always")]
    )
    pretrained = PretrainedTokenizer(tokenizer.to_str())
    tokens = [0, 1, 3, 4, 2, 1, 1]
    assert pretrained.decode(tokens) == "hello world\u00e9! world world"
    assert spelled(pretrained, tokens) == ["hello", " world", "", "\u00e9", "!", " world", " world", ""]


def cut(text, stops):
    """Up to the stop string that is whole first."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if stop and text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    st.lists(st.text("ab ", max_size=5), max_size=8),
    st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_do_not_depend_on_the_pieces(pieces, stops):
    held = StopStrings(stops)
    sent = "".join(held.push(piece) for piece in pieces)
    assert (sent + held.finish(), held.stopped) == cut("".join(pieces), stops)


@given(some_bytes, st.lists(st.sampled_from(["A", " A", "\u20ac", "A\u00e9", "  "]), max_size=2))
def test_tokens_come_with_their_text(tokens, stops):
    decoder = TextDecoder(BYTES, stops)
    pieces = [decoder.push(GeneratedToken(token, -1.0, {})) for token in tokens] + [decoder.finish()]
    text = "".join(piece.text for piece in pieces)
    assert (text, decoder.stopped) == cut(BYTES.decode(tokens), stops)
    pieces = [each for piece in pieces for each in piece.tokens]
    assert "".join(each.text for each in pieces) == text
    given_out = [each.generated.token for each in pieces]
    assert given_out == tokens[: len(given_out)]
    assert decoder.stopped or given_out == tokens


def test_nothing_is_sent_that_may_still_be_a_stop_string():
    decoder = TextDecoder(CharTokenizer("abSTOP"), ["STOP"])
    letters = "abSTOP"
    ids = CharTokenizer("abSTOP").encode(letters).tolist()
    sent = [decoder.push(GeneratedToken(token, 0.0, {})).text for token in ids]
    assert sent == ["a", "b", "", "", "", ""]
    assert decoder.stopped
    assert decoder.finish().text == ""
