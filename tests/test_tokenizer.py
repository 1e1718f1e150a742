import builtins
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attractor import tokenizer as tokenizers
from attractor.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, from_json, load, train

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 3

any_text = st.text()  # every code point but surrogates, as UTF-8 has it


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers")
    return BPETokenizer.train(TEXT, 300)


@given(any_text.filter(bool))
def test_char_round_trip(text):
    tokenizer = CharTokenizer.train(text)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.shape == (len(text),)
    assert tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode(ids) == text
    assert from_json(tokenizer.to_json()) == tokenizer


@given(any_text)
def test_byte_round_trip(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=any_text)
def test_bpe_round_trip_of_text_it_never_saw(bpe, text):
    ids = bpe.encode(text)
    assert ids.dtype == np.int64
    assert bpe.decode(ids) == text


white = st.text(st.sampled_from("ab\n \t.1'"), max_size=60)


@given(text=white, size=st.integers(1, 9))
def test_bpe_in_pieces_is_bpe_of_the_whole(bpe, text, size):
    """Against the library's own encoding of the whole text; white space is where a cut could show."""
    pieces = list(bpe.pieces(text[start : start + size] for start in range(0, len(text), size)))
    assert "".join(pieces) == text
    in_pieces = [token for piece in pieces for token in bpe._tokenizer.encode(piece).ids]
    assert in_pieces == bpe._tokenizer.encode(text).ids == bpe.encode(text).tolist()


def test_bpe_cuts_long_text(bpe, monkeypatch):
    whole = bpe.encode(TEXT)
    monkeypatch.setattr(tokenizers, "SLICE", 16)
    assert len(list(bpe.pieces(tokenizers._slices(TEXT)))) > 5
    assert np.array_equal(bpe.encode(TEXT), whole)


def test_bpe_training_is_deterministic_and_stops_where_the_text_does(bpe, caplog):
    assert BPETokenizer.train(TEXT, 300).to_json() == bpe.to_json()
    assert BPETokenizer.train(iter([TEXT]), 300) == bpe
    assert bpe.vocab_size == 300
    assert len(bpe.encode(TEXT)) < len(TEXT)
    assert BPETokenizer.train("ab", 300).vocab_size == 257
    assert "only 257 BPE tokens" in caplog.text


def test_char_ids_are_ranks_of_sorted_characters():
    tokenizer = CharTokenizer.train("hello")
    assert tokenizer.characters == ("e", "h", "l", "o")
    assert tokenizer.encode("hello").tolist() == [1, 0, 2, 2, 3]
    assert CharTokenizer.train(["he", "llo"]) == tokenizer


def test_unknown_characters_are_counted_never_dropped_in_silence():
    tokenizer = CharTokenizer.train("abc")
    with pytest.raises(ValueError, match=r"not in the vocabulary of 3: 3 \('x' x 2, '\\u20ac' x 1\)"):
        tokenizer.encode("axb\u20acx")
    ids, dropped = tokenizer.encode_known("axb\u20acx")
    assert tokenizer.decode(ids) == "ab"
    assert dropped == Counter({"x": 2, "\u20ac": 1})
    with pytest.raises(ValueError, match="and 18 more kinds"):
        tokenizer.encode("defghijklmnopqrstuvwxyzABC")
    assert ByteTokenizer().encode_known("\u20ac")[1] == Counter()


@given(known=st.text(min_size=1), text=st.text())
def test_known_and_dropped_make_the_whole(known, text):
    tokenizer = CharTokenizer.train(known)
    ids, dropped = tokenizer.encode_known(text)
    assert tokenizer.decode(ids) == "".join(character for character in text if character in set(known))
    assert dropped == Counter(character for character in text if character not in set(known))


def test_lone_surrogates(bpe):
    text = "a\ud83d\ude00\udfff"
    tokenizer = CharTokenizer.train(text)
    assert from_json(tokenizer.to_json()).decode(tokenizer.encode(text)) == text
    for strict in (ByteTokenizer(), bpe):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            strict.encode(text)


@pytest.mark.parametrize("kind", tokenizers.KINDS)
def test_save_and_load(tmp_path, kind, bpe):
    tokenizer = train(kind, TEXT, 300 if kind == "bpe" else None)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load(tmp_path / "tokenizer.json")
    assert again == tokenizer
    assert hash(again) == hash(tokenizer)
    assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    assert (tmp_path / "tokenizer.json").read_bytes().isascii()
    assert again.decode([]) == ""
    assert len(again.encode("")) == 0
    assert f"vocab_size={tokenizer.vocab_size}" in repr(tokenizer)


@pytest.mark.parametrize("kind", tokenizers.KINDS)
def test_ids_outside_the_vocabulary(kind, bpe):
    tokenizer = bpe if kind == "bpe" else train(kind, TEXT)
    for ids in ([0, tokenizer.vocab_size], [-1]):
        with pytest.raises(ValueError, match=f"id {ids[-1]} is outside .* < {tokenizer.vocab_size}"):
            tokenizer.decode(ids)
    for ids in ([[0]], [0.5], 3):
        with pytest.raises(ValueError, match="one row of integers"):
            tokenizer.decode(ids)


def test_bytes_that_are_not_utf8_become_replacement_characters(bpe):
    assert ByteTokenizer().decode([0x41, 0xE2, 0x82]) == "A\ufffd"
    assert bpe.decode(bpe.encode("\u20ac")[:2]) == "\ufffd"


CHAR = {"schema_version": 1, "kind": "char", "characters": ["a", "b"]}
WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a tokenizer"),
        ("[]", "expected a JSON object, got list"),
        (json.dumps(CHAR)[:-9], "not a tokenizer"),
        (json.dumps(CHAR | {"schema_version": 2}), "schema_version=2: this release of attractor reads 1"),
        (json.dumps({"kind": "char"}), "schema_version=None"),
        (json.dumps(CHAR | {"kind": "word"}), "kind='word' is unknown; allowed: 'char', 'byte', 'bpe'"),
        (json.dumps(CHAR | {"kind": []}), r"kind=\[\] is unknown"),
        (json.dumps(CHAR | {"characters": "ab"}), "list of single characters"),
        (json.dumps(CHAR | {"characters": ["a", "bc"]}), "list of single characters"),
        (json.dumps(CHAR | {"characters": ["b", "a"]}), "code point order"),
        (json.dumps(CHAR | {"characters": []}), "at least one character"),
        (json.dumps(CHAR | {"colour": 1}), r"unknown fields \['colour'\]"),
        (json.dumps({"schema_version": 1, "kind": "bpe"}), "embedded bpe tokenizer is damaged"),
        (
            json.dumps(
                {"schema_version": 1, "kind": "bpe", "tokenizers": {"version": "1.0", "model": WORDS}}
            ),
            "lacks 25. of the 256 bytes",
        ),
        (b"\xff\xfe", "cannot load a tokenizer"),
    ],
)
def test_a_damaged_file_says_what_came_and_what_is_allowed(tmp_path, content, message, bpe):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"cannot load a tokenizer from .*nothing\.json"):
        load(tmp_path / "nothing.json")


def test_gaps_in_a_bpe_vocabulary_are_refused(bpe):
    fields = json.loads(bpe.to_json())
    vocabulary = fields["tokenizers"]["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 999
    with pytest.raises(ValueError, match="0, 1, 2"):
        from_json(json.dumps(fields))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("word", TEXT), "tokenizer='word' is unknown; allowed: 'char', 'byte', 'bpe'"),
        (("char", ""), "the text is empty"),
        (("char", TEXT, 100), "needs tokenizer=\"bpe\"; that of 'char' is given"),
        (("bpe", TEXT, 255), "vocab_size=255 must be an integer of at least 256"),
        (("bpe", TEXT, True), "vocab_size=True must be"),
    ],
)
def test_wrong_requests(arguments, message, bpe):
    with pytest.raises(ValueError, match=message):
        train(*arguments)


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "tokenizers":
            raise ImportError("No module named 'tokenizers'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'pip install "attractor-patch-networks\[train\]"'):
        BPETokenizer.train(TEXT, 300)
    assert train("char", TEXT).vocab_size == len(set(TEXT))
