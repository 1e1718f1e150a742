"""Text to numbers and back: characters, bytes or byte-level BPE, each kept as one JSON file.

tokenizer = train("char", text)
tokenizer.save("tokenizer.json")
load("tokenizer.json").decode(tokenizer.encode("To be"))  # "To be"
"""

import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attractor.config import check_choice
from attractor.files import digest_of, parse_json

SCHEMA_VERSION = 1
DEFAULT_BPE_VOCAB_SIZE = 4096
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders write for a character that is cut
MOST_HELD = 16  # tokens at most that wait for the rest of a character
SLICE = 1 << 18  # characters per call into the BPE library, which keeps some hundred bytes for each

logger = logging.getLogger("attractor")


class Tokenizer(ABC):
    """What char, byte and BPE have in common."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.int64]: ...

    @abstractmethod
    def decode(self, ids: ArrayLike) -> str: ...

    @abstractmethod
    def _fields(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self: ...

    def encode_known(self, text: str) -> tuple[NDArray[np.int64], Counter[str]]:
        """The ids of what the vocabulary can say, and how often each other character was left out."""
        return self.encode(text), Counter()

    def pieces(self, chunks: Iterable[str]) -> Iterator[str]:
        """Cut a stream of text so that the pieces' encodings, joined, are the encoding of the whole."""
        yield from chunks

    def to_json(self) -> str:
        return json.dumps({"schema_version": SCHEMA_VERSION, "kind": self.kind, **self._fields()}, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, with a digest by which damage is known."""
        fields = json.loads(self.to_json())
        text = json.dumps({**fields, "digest": digest_of(fields)}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size})"

    def _check_ids(self, ids: ArrayLike) -> NDArray[np.int64]:
        array = np.asarray(ids)
        if array.size == 0:
            array = array.astype(np.int64)  # an empty list arrives as float64
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"ids must be one row of integers, got shape {array.shape} of {array.dtype}")
        if array.size and (array.min() < 0 or array.max() >= self.vocab_size):
            bad = array[(array < 0) | (array >= self.vocab_size)]
            raise ValueError(f"id {int(bad[0])} is outside the vocabulary: 0 <= id < {self.vocab_size}")
        return array.astype(np.int64)


class CharTokenizer(Tokenizer):
    """One id per distinct character, in code point order."""

    kind = "char"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = tuple(characters)
        if not self.characters:
            raise ValueError("a char vocabulary needs at least one character; the text is empty")
        codes = np.array([ord(character) for character in self.characters], dtype="<u4")
        self._codes = codes
        # One table from code point to id; the extra last entry catches everything beyond the vocabulary.
        self._ids = np.full(int(codes.max()) + 2, -1, dtype=np.int64)
        self._ids[codes] = np.arange(len(codes))

    @classmethod
    def train(cls, text: str | Iterable[str]) -> Self:
        distinct: set[str] = set()
        for chunk in [text] if isinstance(text, str) else text:
            distinct.update(chunk)
        return cls(sorted(distinct))

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def _look_up(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        return self._ids[np.minimum(codes, len(self._ids) - 1)], codes

    def encode(self, text: str) -> NDArray[np.int64]:
        ids, dropped = self.encode_known(text)
        if dropped:
            raise ValueError(
                f"characters not in the vocabulary of {self.vocab_size}: {describe(dropped)}; "
                "leave them out (in Python, encode_known does that)"
            )
        return ids

    def encode_known(self, text: str) -> tuple[NDArray[np.int64], Counter[str]]:
        ids, codes = self._look_up(text)
        known = ids >= 0
        if known.all():
            return ids, Counter()
        values, counts = np.unique(codes[~known], return_counts=True)
        return ids[known], Counter(dict(zip(map(chr, values.tolist()), counts.tolist(), strict=True)))

    def decode(self, ids: ArrayLike) -> str:
        return self._codes[self._check_ids(ids)].tobytes().decode("utf-32-le", "surrogatepass")

    def _fields(self) -> dict[str, Any]:
        return {"characters": list(self.characters)}

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        characters = fields.get("characters")
        if not isinstance(characters, list) or not all(
            isinstance(character, str) and len(character) == 1 for character in characters
        ):
            raise ValueError('"characters" must be a list of single characters')
        if characters != sorted(set(characters)):
            raise ValueError('"characters" must be distinct and in code point order')
        return cls(characters)


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8: any text in, no training."""

    kind = "byte"

    @property
    def vocab_size(self) -> int:
        return 256

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: ArrayLike) -> str:
        """Bytes that are not UTF-8, as a model may well write them, become replacement characters."""
        return self._check_ids(ids).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def _fields(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        return cls()


class LibraryTokenizer(Tokenizer):
    """One of Hugging Face tokenizers, kept as the library writes it."""

    def __init__(self, library_json: str) -> None:
        try:
            self._tokenizer = _library().Tokenizer.from_str(library_json)
        except BaseException as error:  # the library raises nothing narrower, and its panics are no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"the embedded {self.kind} tokenizer is damaged: {error}") from error

    def decode(self, ids: ArrayLike) -> str:
        """Tokens that cut a character in half become replacement characters."""
        return self._tokenizer.decode(self._check_ids(ids).tolist(), skip_special_tokens=False)

    def library_json(self) -> str:
        return self._tokenizer.to_str()

    def _fields(self) -> dict[str, Any]:
        return {"tokenizers": json.loads(self.library_json())}

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        return cls(json.dumps(fields.get("tokenizers")))


class BPETokenizer(LibraryTokenizer):
    """Byte-level BPE; all 256 bytes are tokens, so nothing is unknown."""

    kind = "bpe"

    def __init__(self, library_json: str) -> None:
        super().__init__(library_json)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if missing := set(_library().pre_tokenizers.ByteLevel.alphabet()) - set(vocabulary):
            raise ValueError(f"the embedded BPE model lacks {len(missing)} of the 256 bytes")
        if sorted(vocabulary.values()) != list(range(len(vocabulary))):
            raise ValueError("the embedded BPE model does not number its tokens 0, 1, 2, ...")
        self._vocab_size = len(vocabulary)

    @classmethod
    def train(cls, text: str | Iterable[str], vocab_size: int = DEFAULT_BPE_VOCAB_SIZE) -> Self:
        check_request("bpe", vocab_size)
        library = _library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=[],
            show_progress=False,
        )
        pieces = _whole_lines(_slices(text) if isinstance(text, str) else text)
        tokenizer.train_from_iterator(map(_check_text, pieces), trainer)
        trained = cls(tokenizer.to_str())
        if trained.vocab_size < vocab_size:
            logger.warning("the text has only %d BPE tokens, not %d", trained.vocab_size, vocab_size)
        return trained

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def pieces(self, chunks: Iterable[str]) -> Iterator[str]:
        return _whole_lines(chunks)

    def encode(self, text: str) -> NDArray[np.int64]:
        parts = [self._tokenizer.encode(_check_text(piece)).ids for piece in self.pieces(_slices(text))]
        return np.array([token for ids in parts for token in ids], dtype=np.int64)


class PretrainedTokenizer(LibraryTokenizer):
    """The tokenizer that a pretrained model came with, without its special tokens."""

    kind = "pretrained"
    chat: Callable[[list[dict[str, str]]], str] | None = None
    """Turns messages into the text that the model was trained to answer, if it was trained to chat."""
    ends: tuple[int, ...] = ()
    """Tokens that end what the model writes."""

    def __init__(self, library_json: str) -> None:
        super().__init__(library_json)
        self._vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array(self._tokenizer.encode(_check_text(text), add_special_tokens=False).ids, np.int64)


class Detokenizer:
    """Turns tokens into pieces of text, each with the number of its tokens.

    The pieces joined are the text of all tokens together. A token may end within a character; then the last
    tokens, three at most, are held until it is whole. The tokens of the last piece stay as context, because
    some tokenizers write the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> tuple[str, int]:
        self._held.append(token)
        text = self._decode(self._context + self._held)
        if not text.endswith(UNFINISHED) or len(self._held) > MOST_HELD:
            return self.finish()
        for count in range(min(3, len(self._held)), 0, -1):
            head, tail = self._held[:-count], self._held[-count:]
            if self._decode(self._context + head) + self._decode(tail) == text:
                return self._release(len(head))
        return "", 0

    def finish(self) -> tuple[str, int]:
        return self._release(len(self._held))

    def _release(self, count: int) -> tuple[str, int]:
        now, self._held = self._held[:count], self._held[count:]
        text = self._decode(self._context + now)[len(self._decode(self._context)) :] if now else ""
        self._context = now if text else self._context
        return text, count


TOKENIZERS: dict[str, type[CharTokenizer] | type[ByteTokenizer] | type[BPETokenizer]] = {
    tokenizer.kind: tokenizer for tokenizer in (CharTokenizer, ByteTokenizer, BPETokenizer)
}
KINDS = tuple(TOKENIZERS)
"""The kinds that can be trained here."""
READABLE: dict[str, type[Tokenizer]] = {**TOKENIZERS, PretrainedTokenizer.kind: PretrainedTokenizer}


def check_request(kind: str, vocab_size: int | None) -> int | None:
    """The `vocab_size` to train with, or a ValueError before any work; only BPE has one to choose."""
    check_choice("tokenizer", kind, KINDS)
    if kind != "bpe":
        if vocab_size is not None:
            raise ValueError(f'vocab_size={vocab_size} needs tokenizer="bpe"; that of {kind!r} is given')
        return None
    size = DEFAULT_BPE_VOCAB_SIZE if vocab_size is None else vocab_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 256:
        raise ValueError(f"vocab_size={size!r} must be an integer of at least 256, one per byte")
    return size


def train(kind: str, text: str | Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """A tokenizer of this kind for this text."""
    size = check_request(kind, vocab_size)
    if size is not None:
        return BPETokenizer.train(text, size)
    return ByteTokenizer() if kind == "byte" else CharTokenizer.train(text)


def resolve(
    tokenizer: str | os.PathLike[str] | Tokenizer, vocab_size: int | None = None
) -> tuple[Tokenizer | None, dict[str, Any]]:
    """An existing tokenizer, itself or by its file, or None for a kind to train; and a record of the request.

    The record of a kind is what `train` takes beside the text.
    """
    if isinstance(tokenizer, str) and (tokenizer in KINDS or not os.path.exists(tokenizer)):
        return None, {"kind": tokenizer, "vocab_size": check_request(tokenizer, vocab_size)}
    if vocab_size is not None:
        raise ValueError(f"vocab_size={vocab_size} has no meaning for an existing tokenizer")
    given = tokenizer if isinstance(tokenizer, Tokenizer) else load(tokenizer)
    return given, {"kind": given.kind, "sha256": hashlib.sha256(given.to_json().encode()).hexdigest()}


def from_json(text: str) -> Tokenizer:
    """Read what `to_json` or `save` wrote."""
    try:
        fields: Any = parse_json(text)
    except ValueError as error:
        raise ValueError(f"not a tokenizer: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"not a tokenizer: expected a JSON object, got {type(fields).__name__}")
    digest = fields.pop("digest", None)
    if digest is not None and digest != digest_of(fields):
        raise ValueError("it is not what was saved: its digest differs")
    version, kind = fields.pop("schema_version", None), fields.pop("kind", None)
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version={version!r}: this release of attractor reads {SCHEMA_VERSION}")
    check_choice("kind", kind, tuple(READABLE))
    tokenizer = READABLE[kind]._from_fields(fields)
    if unknown := sorted(set(fields) - set(tokenizer._fields())):
        raise ValueError(f"unknown fields {unknown} in a {kind} tokenizer")
    return tokenizer


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a file written by `save`; anything else is a ValueError that names the file."""
    try:
        return from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load a tokenizer from {os.fspath(path)}: {error}") from error


def describe(dropped: Counter[str], limit: int = 8) -> str:
    """Say how many characters were left out, and the most frequent of them, for messages."""
    shown = ", ".join(f"{character!a} x {count}" for character, count in dropped.most_common(limit))
    more = f" and {len(dropped) - limit} more kinds" if len(dropped) > limit else ""
    return f"{dropped.total()} ({shown}{more})"


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            'BPE needs Hugging Face tokenizers: pip install "attractor-patch-networks[train]"'
        ) from error
    return tokenizers


def _check_text(text: str) -> str:
    text.encode("utf-8")  # the library reports a lone surrogate as "must be str"; this says what is wrong
    return text


def _slices(text: str) -> Iterator[str]:
    return (text[start : start + SLICE] for start in range(0, len(text), SLICE))


def _whole_lines(chunks: Iterable[str]) -> Iterator[str]:
    """Cut only between a line's end and a line that starts at once.

    Byte-level BPE looks at runs of white space together, so a cut inside one would change the tokens.
    """
    kept = ""
    for chunk in chunks:
        kept += chunk
        if cut := _last_cut(kept):
            yield kept[:cut]
            kept = kept[cut:]
    if kept:
        yield kept


def _last_cut(text: str) -> int:
    end = len(text) - 1
    while (newline := text.rfind("\n", 1, end)) > 0:
        if not text[newline - 1].isspace() and not text[newline + 1].isspace():
            return newline + 1
        end = newline
    return 0
