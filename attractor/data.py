"""Text comes in and becomes tokens: a folder of train.bin, val.bin, tokenizer.json and meta.json.

    data = prepare("shakespeare", "data/shakespeare")  # or a file, a folder, a glob
    batches = Batches(data.train, batch_size=64, context=256, seed=0)
    inputs, targets = next(batches)  # (64, 256) int64 each

Text is read, checked and encoded in chunks, so that files may be larger than memory.
"""

import difflib
import glob
import hashlib
import itertools
import json
import logging
import operator
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attractor import corpora
from attractor import tokenizer as tokenizers
from attractor.config import check_number, check_seed, check_size
from attractor.files import parse_json, replace_folder
from attractor.tokenizer import Tokenizer, describe
from attractor.version import __version__

SCHEMA_VERSION = 1
FILES = ("train.bin", "val.bin", "tokenizer.json", "meta.json")
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
IGNORED = -100  # the target that cross_entropy skips

PathLike = str | os.PathLike[str]
Tokens = NDArray[Any]
Meta = dict[str, Any]
Progress = Callable[[int, int], None]
Batch = tuple[Tensor, Tensor]
Sweep = Iterator[tuple[Tensor, Tensor, int]]

logger = logging.getLogger("attractor")


@dataclass(frozen=True)
class TextSource:
    """A source of text; `chunks()` reads it, from the start each time."""

    name: str
    origin: str
    files: tuple[Path, ...] = ()
    text: str = field(default="", repr=False)
    options: dict[str, int] = field(default_factory=dict)

    def chunks(self) -> Iterator[str]:
        for start in range(0, len(self.text), corpora.CHUNK):
            yield self.text[start : start + corpora.CHUNK]
        for path in self.files:
            last = "\n"
            for chunk in filter(None, corpora.read_file(path)):
                yield chunk
                last = chunk[-1]
            if last != "\n" and path is not self.files[-1]:
                yield "\n"  # a file's last line does not run into the next file


def open_text(source: PathLike, *, cache_dir: PathLike | None = None, **options: int) -> TextSource:
    """Find a corpus by its name, else a file, a folder of text files or a glob; "./python" is no corpus."""
    name = os.fspath(source)
    if isinstance(source, str) and name in corpora.CORPORA:
        fetched = corpora.fetch_with_source(name, cache_dir, **options)
        return TextSource(name, fetched.source, text=fetched.text, options=fetched.options)
    matches = [name] if os.path.isfile(name) else glob.glob(name, recursive=True)
    files = sorted(Path(match) for match in matches if os.path.isfile(match))
    if not (files := corpora.text_files(Path(name)) if os.path.isdir(name) else files):
        raise ValueError(_not_found(name))
    if options:
        raise ValueError(f"options {sorted(options)} belong to a corpus, but {name!r} names files")
    return TextSource(name, f"{len(files)} file(s)", files=tuple(files))


def read_text(source: PathLike, *, cache_dir: PathLike | None = None, **options: int) -> str:
    """The whole text of a corpus, a file, a folder or a glob.

    `options` are those of the corpus: `read_text("paper-shift", size=2_000)`. A name that is neither a corpus
    nor a file, and a text that is empty, are ValueErrors.
    """
    text = "".join(open_text(source, cache_dir=cache_dir, **options).chunks())
    if not text:
        raise ValueError(f"{os.fspath(source)!r} is empty")
    return text


def _not_found(name: str) -> str:
    if (path := Path(name)).is_dir():
        return f"the folder {name!r} holds no text files ({' '.join(corpora.TEXT_SUFFIXES)})"
    beside = os.listdir(path.parent) if path.parent.is_dir() else []
    close = difflib.get_close_matches(name, corpora.CORPORA, cutoff=0.5)
    close += [str(path.parent / match) for match in difflib.get_close_matches(path.name, beside)]
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"no corpus, file, folder or glob is named {name!r}; corpora: {', '.join(corpora.CORPORA)}{hint}"


@dataclass(frozen=True)
class Dataset:
    """A prepared folder: memory-mapped tokens, the tokenizer that made them, and the record of both."""

    folder: Path
    meta: Meta
    tokenizer: Tokenizer
    train: Tokens
    val: Tokens

    @property
    def unknown_characters(self) -> Counter[str]:
        """What the tokenizer had no token for and so was left out, with counts; `open` logs it."""
        return Counter(self.meta["unknown_characters"])

    @classmethod
    def open(cls, folder: PathLike) -> Self:
        """Check a prepared folder and map it; anything that is wrong with it is a ValueError."""
        folder = Path(folder)
        if missing := [name for name in FILES if not (folder / name).is_file()]:
            raise ValueError(f"{folder} is not a prepared dataset: no {', '.join(missing)}; prepare it first")
        meta = _read_meta(folder / "meta.json")
        tokenizer = tokenizers.load(folder / "tokenizer.json")
        if (tokenizer.kind, tokenizer.vocab_size) != (meta.get("tokenizer"), meta["vocab_size"]):
            said = f"{meta.get('tokenizer')!r} of {meta['vocab_size']}"
            raise ValueError(f"{folder}: meta.json says {said}, but tokenizer.json is {tokenizer!r}")
        train, val = (_map_tokens(folder / f"{part}.bin", part, meta) for part in ("train", "val"))
        dataset = cls(folder, meta, tokenizer, train, val)
        if unknown := dataset.unknown_characters:
            logger.warning(
                "%s was made without characters its vocabulary lacks: %s", folder, describe(unknown)
            )
        return dataset


def _read_meta(path: Path) -> Meta:
    try:
        meta = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    version = meta.get("schema_version") if isinstance(meta, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{path}: schema_version={version!r}; this release reads {SCHEMA_VERSION}")
    types = {"train_tokens": int, "val_tokens": int, "vocab_size": int, "unknown_characters": dict}
    if wrong := [name for name, kind in types.items() if not isinstance(meta.get(name), kind)]:
        raise ValueError(f"{path} is damaged: {', '.join(wrong)} missing or of the wrong type")
    if any(type(count) is not int for count in meta["unknown_characters"].values()):
        raise ValueError(f"{path} is damaged: unknown_characters says how often each was left out")
    return meta


def _map_tokens(path: Path, part: str, meta: Meta) -> Tokens:
    count, size = meta[f"{part}_tokens"], path.stat().st_size
    name = str(meta.get("dtype"))
    dtype = np.dtype(DTYPES.get(name, "V1"))
    if dtype.kind != "u" or count < 2 or size != count * dtype.itemsize:
        raise ValueError(f"{path} has {size} bytes, not {count} tokens of {name}: prepare it again")
    tokens = np.memmap(path, dtype=dtype, mode="r")
    # All of them where that is quick; else an even sample, which still finds a wrong tokenizer or dtype.
    if (largest := int(tokens[:: -(-count // (1 << 25))].max())) >= meta["vocab_size"]:
        raise ValueError(f"{path} holds token {largest}, but the vocabulary has {meta['vocab_size']}")
    return tokens


def prepare(
    source: PathLike,
    out_dir: PathLike,
    *,
    tokenizer: PathLike | Tokenizer = "char",
    vocab_size: int | None = None,
    val_fraction: float = 0.1,
    progress: Progress | None = None,
    overwrite: bool = False,
    cache_dir: PathLike | None = None,
    **options: int,
) -> Dataset:
    """Encode a text into `out_dir`: the last `val_fraction` of its characters to validate, the rest to train.

    `tokenizer` is a kind to train, or an existing tokenizer (or its file) to say this text in another's
    vocabulary; characters it lacks are left out, counted in meta.json and logged. `progress` is called with
    the characters encoded and in all. The folder appears whole or not at all; the same one is not made twice.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from attractor import prepare
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "my.txt").write_text("Once upon a time. " * 200)
    >>> dataset = prepare(folder / "my.txt", folder / "data")
    >>> len(dataset.train), len(dataset.val), dataset.tokenizer.vocab_size
    (3240, 360, 13)

    A `source` that is neither a known corpus nor a text, and a folder that holds something else, are a
    ValueError; `overwrite` replaces what is there.
    """
    check_number("val_fraction", val_fraction, "between 0 and 1", lambda share: 0 < share < 1)
    given, requested = tokenizers.resolve(tokenizer, vocab_size)
    text = open_text(source, cache_dir=cache_dir, **options)
    sha256, characters, distinct = _survey(text)
    split = int(characters * (1 - val_fraction))
    wanted = {"sha256": sha256, "val_fraction": float(val_fraction), "requested_tokenizer": requested}
    folder = Path(out_dir).resolve()
    if (existing := _existing(folder, wanted, overwrite)) is not None:
        return existing
    if given is None:  # characters are those of the whole text; BPE learns nothing from the held-out part
        seen = (chunk for part, chunk in _parts(text, split) if part == "train")
        given = tokenizers.train(text=seen if requested["kind"] == "bpe" else distinct, **requested)
    meta = {
        "schema_version": SCHEMA_VERSION,
        "created_by": f"attractor {__version__}",
        "source": text.name,
        "origin": text.origin,
        "options": text.options,
        "characters": characters,
        "train_characters": split,
        **wanted,
        "tokenizer": given.kind,
        "vocab_size": given.vocab_size,
        "dtype": "uint16" if given.vocab_size <= 1 << 16 else "uint32",
    }
    temporary = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"cannot write beside {folder}: {error}; choose another folder") from error
    try:
        _write(temporary, text, given, meta, progress or (lambda done, total: None))
        if _existing(folder, wanted, overwrite) is None:  # else another process was quicker
            replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # when all went well it has been renamed
    return Dataset.open(folder)


def _survey(text: TextSource) -> tuple[str, int, set[str]]:
    """The hash, the length and the distinct characters; every complaint about the text comes from here."""
    digest, characters, distinct = hashlib.sha256(), 0, set[str]()
    for chunk in text.chunks():
        digest.update(chunk.encode("utf-8"))
        characters += len(chunk)
        distinct.update(chunk)
    if not characters:
        raise ValueError(f"{text.name!r} is empty")
    return digest.hexdigest(), characters, distinct


def _parts(text: TextSource, split: int) -> Iterator[tuple[str, str]]:
    """Chunks marked "train" up to the character `split`, "val" from there on."""
    position = 0
    for chunk in text.chunks():
        cut = min(max(split - position, 0), len(chunk))
        position += len(chunk)
        if cut:
            yield "train", chunk[:cut]
        if cut < len(chunk):
            yield "val", chunk[cut:]


def _existing(folder: Path, wanted: Meta, overwrite: bool) -> Dataset | None:
    """What `folder` already holds if it is what is wanted; None if it may be (over)written."""
    if not folder.exists():
        return None
    if not folder.is_dir() or (foreign := sorted(set(os.listdir(folder)) - set(FILES))):
        other = f"holds other files ({', '.join(foreign[:3])})" if folder.is_dir() else "is not a folder"
        raise ValueError(f"{folder} {other}; choose another folder")
    if overwrite or not os.listdir(folder):
        return None
    try:
        dataset = Dataset.open(folder)
    except ValueError as error:
        raise ValueError(f"{error}; remove the folder, or overwrite it") from error
    if differing := [name for name, value in wanted.items() if dataset.meta.get(name) != value]:
        raise ValueError(
            f"{folder} differs in {', '.join(differing)} from what is wanted; remove it, or overwrite it"
        )
    return dataset


def _write(folder: Path, text: TextSource, tokenizer: Tokenizer, meta: Meta, progress: Progress) -> None:
    digest, done, unknown = hashlib.sha256(), 0, Counter[str]()
    counts = {"train_tokens": 0, "val_tokens": 0}
    for part, group in itertools.groupby(_parts(text, meta["train_characters"]), key=operator.itemgetter(0)):
        with open(folder / f"{part}.bin", "wb") as file:
            for piece in tokenizer.pieces(chunk for _, chunk in group):
                ids, dropped = tokenizer.encode_known(piece)
                file.write(ids.astype(DTYPES[meta["dtype"]]).tobytes())
                digest.update(piece.encode("utf-8"))
                unknown.update(dropped)
                counts[f"{part}_tokens"] += len(ids)
                done += len(piece)
                progress(done, meta["characters"])
    if digest.hexdigest() != meta["sha256"]:
        raise ValueError(f"{text.name!r} changed while it was read; prepare it again")
    if min(counts.values()) < 2:
        raise ValueError(f"{text.name!r} is too short: {counts}, and each part needs 2; give more text")
    tokenizer.save(folder / "tokenizer.json")
    record = {**meta, **counts, "unknown_characters": dict(unknown.most_common())}
    (folder / "meta.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


class Batches:
    """Endless random windows of the tokens, of which batch number i is always the same.

    `batch_size` is that of one step over all processes: rank r takes the r-th share of the rows that a single
    process would take, so that any number of processes walks through the same data.
    """

    def __init__(
        self,
        tokens: Tokens,
        batch_size: int,
        context: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("context", context), ("world_size", world_size)):
            check_size(name, value)
        check_seed(seed)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be 0 <= rank < world_size={world_size}")
        if batch_size % world_size:
            raise ValueError(f"batch_size={batch_size} must be a multiple of world_size={world_size}")
        if len(tokens) <= context:
            raise ValueError(f"{len(tokens)} tokens are too few: context={context} needs one more than that")
        self.tokens, self.device, self.pin_memory = tokens, device, pin_memory
        self.batch_size, self.context, self.seed = batch_size, context, seed
        share = batch_size // world_size
        self._rows = slice(rank * share, (rank + 1) * share)
        self.step = 0

    def batch(self, step: int) -> Batch:
        """Inputs and targets of one step, (rows, context) each, without moving on."""
        # Philox is a function of its key; its raw bits, unlike numpy's distributions, are fixed for good.
        bits = np.random.Philox(key=np.array([self.seed, step], dtype=np.uint64)).random_raw(self.batch_size)
        starts = bits[self._rows] % np.uint64(len(self.tokens) - self.context)  # the bias is below 2**-30
        inputs, targets = _windows_at(self.tokens, starts.astype(np.int64), self.context)
        if self.pin_memory:
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        if self.device is None:
            return inputs, targets
        inputs = inputs.to(self.device, non_blocking=self.pin_memory)
        return inputs, targets.to(self.device, non_blocking=self.pin_memory)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """The step, and the settings that give it its meaning; the number of ranks may change."""
        settings = {"seed": self.seed, "batch_size": self.batch_size, "context": self.context}
        return {"step": self.step, **settings, "num_tokens": len(self.tokens)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name, value in self.state_dict().items():
            if name != "step" and state.get(name) != value:
                raise ValueError(f"the saved batches had {name}={state.get(name)}, these have {value}")
        if not isinstance(step := state.get("step"), int) or step < 0:
            raise ValueError(f"step={step!r} must be an integer, 0 or more")
        self.step = step


def _windows_at(tokens: Tokens, starts: Tokens, length: int) -> Batch:
    """Inputs and targets, (rows, length) int64 each: copies, and the targets one token on."""
    inputs = np.stack([tokens[start : start + length] for start in starts.tolist()])
    targets = np.stack([tokens[start : start + length] for start in (starts + 1).tolist()])
    return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets.astype(np.int64))


def windows(tokens: Tokens, context: int, batch_size: int) -> Sweep:
    """The evaluation sweep: inputs, targets, how many targets there are; every token but the first is one."""
    for name, value in {"context": context, "batch_size": batch_size}.items():
        check_size(name, value)
    if len(tokens) < 2:
        raise ValueError(f"{len(tokens)} tokens hold no target: give at least 2")
    last = len(tokens) - 1  # the number of targets
    starts = np.arange(0, max(last - context + 1, 0), context)  # windows that are full
    batches = [(starts[first : first + batch_size], context) for first in range(0, len(starts), batch_size)]
    if (rest := len(starts) * context) < last:
        batches.append((np.array([rest]), last - rest))
    for chosen, length in batches:
        inputs, targets = _windows_at(tokens, chosen, length)
        yield inputs, targets, targets.numel()
