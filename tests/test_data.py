import hashlib
import json
import os
import shutil
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attractor import corpora, shift_grammar
from attractor.data import Dataset, prepare, read_text
from attractor.tokenizer import ByteTokenizer, CharTokenizer

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 20


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "input.txt"
    path.write_bytes(TEXT.encode())
    return path


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(corpora, "CHUNK", 7)


def digest(folder):
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sorted(os.listdir(folder))
    }


def test_a_file_a_folder_and_a_glob(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    files = {
        "b/two.md": "two\n",
        "a.txt": "one",
        "c.PY": "three",
        "x.bin": "\0",
        ".git/y.txt": "no",
        ".z.txt": "no",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode())
    assert read_text(tmp_path / "a.txt") == "one"
    assert read_text(tmp_path) == "one\ntwo\nthree"  # sorted, and no line runs into the next file
    assert read_text(str(tmp_path / "*.txt")) == "one"
    assert read_text(f"{tmp_path}/**/*.[mt]*") == "one\ntwo\n"
    odd = tmp_path / "[a].txt"
    odd.write_text("brackets")
    assert read_text(odd) == "brackets"


def test_a_corpus_by_name(monkeypatch, tmp_path):
    assert read_text("paper-shift", size=2_000) == corpora.fetch("paper-shift", size=2_000)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").write_text("mine")
    assert read_text("./python") == "mine"
    assert read_text("python", max_bytes=5_000) == corpora.fetch("python", max_bytes=5_000)
    with pytest.raises(ValueError, match=r"options \['max_bytes'\] belong to a corpus"):
        read_text("./python", max_bytes=5_000)


def test_newlines_and_the_byte_order_mark(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\xef\xbb\xbf")
    assert read_text(path) == "a\r\nb\ufeff"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"abc\0def", r"input\.txt is binary: a NUL at byte 3; convert it to UTF-8"),
        ("text".encode("utf-16"), r"not UTF-8 at byte 0|NUL at byte 3"),
        (b"caf\xe9 au lait", r"input\.txt is not UTF-8 at byte 3 \(invalid continuation byte\); convert"),
        (b"0123456789\xe2\x82", r"not UTF-8 at byte 10 \(unexpected end of data\)"),
    ],
)
@pytest.mark.parametrize("chunk", [1 << 20, 7])
def test_what_is_not_text_is_refused(tmp_path, source, content, message, chunk, monkeypatch):
    monkeypatch.setattr(corpora, "CHUNK", chunk)
    source.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_text(source)
    with pytest.raises(ValueError, match=message):
        prepare(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["input.txt"]


@given(raw=st.binary(max_size=40).filter(lambda raw: 0 not in raw), chunk=st.integers(1, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_decoding_in_chunks_is_decoding_at_once(tmp_path, raw, chunk):
    """The same text, or the same offset of the first bad byte, as bytes.decode gives for the whole."""
    path = tmp_path / "raw"
    path.write_bytes(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "CHUNK", chunk)
        try:
            expected = raw.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            with pytest.raises(ValueError, match=f"not UTF-8 at byte {error.start} "):
                list(corpora.read_file(path))
        else:
            assert "".join(corpora.read_file(path)) == expected


def test_not_found_suggests(tmp_path, source):
    with pytest.raises(
        ValueError, match=r"'shakespear'; corpora: shakespeare, kjv.*did you mean 'shakespeare'\?"
    ):
        read_text("shakespear")
    with pytest.raises(ValueError, match=r"did you mean '.*/input\.txt'\?"):
        read_text(tmp_path / "imput.txt")
    with pytest.raises(ValueError, match="no corpus, file, folder or glob is named"):
        read_text(tmp_path / "none" / "*.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty' holds no text files \(\.txt"):
        read_text(tmp_path / "empty")


def test_a_file_that_cannot_be_read(source, monkeypatch):
    def fail(*rest):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(ValueError, match=r"cannot read .*input\.txt: .*Permission denied"):
        read_text(source)


def test_char_is_what_nanogpt_makes(tmp_path, source):
    """prepare.py of nanoGPT's shakespeare_char, line by line."""
    characters = sorted(set(TEXT))
    stoi = {character: index for index, character in enumerate(characters)}
    n = len(TEXT)
    train = np.array([stoi[c] for c in TEXT[: int(n * 0.9)]], dtype=np.uint16)
    val = np.array([stoi[c] for c in TEXT[int(n * 0.9) :]], dtype=np.uint16)

    dataset = prepare(source, tmp_path / "out")
    assert (tmp_path / "out" / "train.bin").read_bytes() == train.tobytes()
    assert (tmp_path / "out" / "val.bin").read_bytes() == val.tobytes()
    assert isinstance(dataset.train, np.memmap)
    assert not dataset.train.flags.writeable
    assert dataset.tokenizer.decode(dataset.val) == TEXT[int(n * 0.9) :]
    assert sorted(os.listdir(tmp_path)) == ["input.txt", "out"]


def test_the_split_of_tiny_shakespeare(tmp_path, source):
    source.write_bytes(b"ab" * (1_115_394 // 2))
    dataset = prepare(source, tmp_path / "out")
    assert (len(dataset.train), len(dataset.val)) == (1_003_854, 111_540)


def test_meta(tmp_path, source):
    dataset = prepare(source, tmp_path / "out", val_fraction=0.25)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta == dataset.meta
    assert meta["schema_version"] == 1
    assert meta["source"] == str(source)
    assert meta["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert (meta["characters"], meta["train_characters"]) == (len(TEXT), int(len(TEXT) * 0.75))
    assert (meta["train_tokens"], meta["val_tokens"]) == (len(dataset.train), len(dataset.val))
    assert (meta["tokenizer"], meta["vocab_size"], meta["dtype"]) == ("char", len(set(TEXT)), "uint16")
    assert (meta["val_fraction"], meta["unknown_characters"]) == (0.25, {})
    assert meta["created_by"].startswith("attractor ")
    shift = prepare("paper-shift", tmp_path / "shift", size=3_000, seed=2)
    assert shift.meta["options"] == {"size": 3_000, "seed": 2}
    assert "Python" in shift.meta["origin"]


@pytest.mark.parametrize(("kind", "vocab_size"), [("char", None), ("byte", None), ("bpe", 300)])
def test_chunks_change_nothing(tmp_path, source, kind, vocab_size, monkeypatch):
    pytest.importorskip("tokenizers")
    source.write_bytes(("caf\u00e9 \u20ac \U0001f600\n" + TEXT).encode())
    whole = prepare(source, tmp_path / "whole", tokenizer=kind, vocab_size=vocab_size)
    monkeypatch.setattr(corpora, "CHUNK", 7)
    calls = []
    cut = prepare(
        source,
        tmp_path / "cut",
        tokenizer=kind,
        vocab_size=vocab_size,
        progress=lambda *call: calls.append(call),
    )
    assert digest(whole.folder) == digest(cut.folder)
    total = whole.meta["characters"]
    assert len(calls) > 50
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (total, total)
    assert {total for _, total in calls} == {total}
    assert whole.tokenizer.decode(whole.train) + whole.tokenizer.decode(whole.val) == read_text(source)


def test_memory_stays_bounded(tmp_path, source):
    import tracemalloc

    source.write_bytes(b"to be or not to be\n" * 1_000_000)  # 19 MB of text, 38 MB of tokens
    tracemalloc.start()
    prepare(source, tmp_path / "out", tokenizer="byte")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30_000_000


def test_bpe_learns_from_the_training_part_only(tmp_path, source):
    pytest.importorskip("tokenizers")
    source.write_text("abcd" * 900 + "wxyz" * 100)
    dataset = prepare(source, tmp_path / "out", tokenizer="bpe", vocab_size=260)
    assert len(dataset.train) < 1000
    assert len(dataset.val) == 400
    assert dataset.meta["requested_tokenizer"] == {"kind": "bpe", "vocab_size": 260}


def test_a_large_vocabulary_takes_four_bytes(tmp_path, source):
    text = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    source.write_bytes(text.encode())
    dataset = prepare(source, tmp_path / "out")
    assert (dataset.train.dtype.str, dataset.meta["dtype"]) == ("<u4", "uint32")
    assert dataset.train[-1] == 62_999
    assert dataset.val[-1] == 69_999


def test_another_vocabulary(tmp_path, source, caplog):
    """Domain B in A's characters: what A lacks is left out, counted, recorded and logged."""
    prepare(source, tmp_path / "a")
    other = tmp_path / "b.txt"
    other.write_text("Speak! \u20ac hear\u20ac 7\n" * 10, encoding="utf-8")
    assert not caplog.text
    for tokenizer in (tmp_path / "a" / "tokenizer.json", CharTokenizer.train(TEXT)):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        caplog.clear()
        dataset = prepare(other, tmp_path / "b", tokenizer=tokenizer)
        assert dataset.unknown_characters == Counter({"\u20ac": 20, "!": 10, "7": 10})
        assert dataset.meta["unknown_characters"] == {"\u20ac": 20, "!": 10, "7": 10}
        assert dataset.tokenizer.decode(dataset.train) == "Speak  hear \n" * 9
        assert r"vocabulary lacks: 40 ('\u20ac' x 20, '!' x 10, '7' x 10)" in caplog.text
        assert (dataset.folder / "tokenizer.json").read_bytes() == (
            tmp_path / "a" / "tokenizer.json"
        ).read_bytes()
    caplog.clear()
    prepare(other, tmp_path / "b", tokenizer=tmp_path / "a" / "tokenizer.json")
    assert "40 (" in caplog.text  # also when the folder is used as it is
    assert prepare(other, tmp_path / "c", tokenizer=ByteTokenizer()).unknown_characters == Counter()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "word"}, "tokenizer='word' is unknown; allowed: 'char', 'byte', 'bpe'"),
        ({"tokenizer": "byte", "vocab_size": 300}, 'needs tokenizer="bpe"'),
        ({"tokenizer": "bpe", "vocab_size": 12}, "vocab_size=12 must be an integer of at least 256"),
        ({"tokenizer": ByteTokenizer(), "vocab_size": 300}, "no meaning for an existing tokenizer"),
        ({"val_fraction": 0}, "val_fraction=0 must be between 0 and 1"),
        ({"val_fraction": 1.0}, "val_fraction=1.0 must be"),
        ({"val_fraction": "a"}, "val_fraction='a' must be"),
        ({"val_fraction": 1e-9}, "too short: .*'val_tokens': 1"),
        ({"tokenizer": CharTokenizer("F")}, "too short: .*'val_tokens': 0"),
        ({"size": 3}, r"options \['size'\] belong to a corpus"),
    ],
)
def test_wrong_requests_leave_nothing(tmp_path, source, changes, message):
    source.write_text("First Citizen" * 2)
    with pytest.raises(ValueError, match=message):
        prepare(source, tmp_path / "out", **changes)
    assert os.listdir(tmp_path) == ["input.txt"]


@pytest.mark.network
@pytest.mark.skipif(not os.environ.get("ATTRACTOR_NETWORK"), reason="set ATTRACTOR_NETWORK=1 to ask pip")
def test_tiny_shakespeare_itself(tmp_path):
    dataset = prepare("shakespeare", tmp_path / "out", cache_dir=tmp_path)
    assert (len(dataset.train), len(dataset.val), dataset.tokenizer.vocab_size) == (1_003_854, 111_540, 65)
    assert set(dataset.tokenizer.characters) == shift_grammar.CHARACTERS
    shift = prepare("paper-shift", tmp_path / "shift", tokenizer=dataset.tokenizer, size=10_000)
    assert not shift.unknown_characters


@pytest.mark.parametrize("length", range(1, 22))
def test_too_short_for_the_split(tmp_path, source, length):
    source.write_text("a" * length)
    if length - int(length * 0.9) >= 2:
        assert len(prepare(source, tmp_path / "out").val) >= 2
    else:
        with pytest.raises(ValueError, match="too short"):
            prepare(source, tmp_path / "out")


def test_the_same_is_reused_and_another_is_refused(tmp_path, source):
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is as good as none
    prepare(source, out)
    before = {name: (out / name).stat().st_mtime_ns for name in os.listdir(out)}
    prepare(source, out, progress=lambda *call: pytest.fail("encoded again"))
    assert {name: (out / name).stat().st_mtime_ns for name in os.listdir(out)} == before
    for changes, what in (
        ({"val_fraction": 0.2}, "val_fraction"),
        ({"tokenizer": "byte"}, "requested_tokenizer"),
        ({"tokenizer": CharTokenizer.train(TEXT)}, "requested_tokenizer"),
    ):
        with pytest.raises(ValueError, match=f"out differs in {what} from"):
            prepare(source, out, **changes)
    source.write_text(TEXT + "more")
    with pytest.raises(ValueError, match="differs in sha256"):
        prepare(source, out)
    assert {name: (out / name).stat().st_mtime_ns for name in os.listdir(out)} == before
    dataset = prepare(source, out, overwrite=True, tokenizer="byte")
    assert dataset.tokenizer == ByteTokenizer()
    assert sorted(os.listdir(tmp_path)) == ["input.txt", "out"]


def test_a_folder_that_is_not_ours_is_never_replaced(tmp_path, source):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"holds other files \(thesis\.tex\); choose another folder"):
            prepare(source, out, overwrite=overwrite)
        with pytest.raises(ValueError, match="is not a folder; choose another"):
            prepare(source, source, overwrite=overwrite)
    assert (out / "thesis.tex").read_text() == "precious"


def test_a_damaged_folder_is_replaced_only_when_asked(tmp_path, source):
    out = tmp_path / "out"
    expected = digest(prepare(source, out).folder)
    (out / "val.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"val\.bin has 0 bytes, not .*; remove the folder, or overwrite it"):
        prepare(source, out)
    assert digest(prepare(source, out, overwrite=True).folder) == expected


def failing(error):
    def fail(*rest, **named):
        raise error

    return fail


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("moment", ["progress", "tokenizer", "fsync", "rename"])
def test_an_interrupted_prepare_leaves_what_was_there(tmp_path, source, monkeypatch, existing, moment):
    out = tmp_path / "out"
    before = digest(prepare(source, out).folder) if existing else None
    interrupt = KeyboardInterrupt()
    rename, renamed = os.rename, []

    def rename_fails_at_the_last(old, new):
        if new == out and not renamed:
            renamed.append(new)
            raise interrupt
        rename(old, new)

    options = {"progress": failing(interrupt)} if moment == "progress" else {}
    if moment == "tokenizer":
        monkeypatch.setattr(CharTokenizer, "save", failing(interrupt))
    if moment == "fsync":
        monkeypatch.setattr(os, "fsync", failing(interrupt))
    if moment == "rename":
        monkeypatch.setattr(os, "rename", rename_fails_at_the_last)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, out, overwrite=existing, val_fraction=0.3, **options)
    assert sorted(os.listdir(tmp_path)) == (["input.txt", "out"] if existing else ["input.txt"])
    assert not existing or digest(out) == before
    monkeypatch.undo()
    assert len(prepare(source, out, overwrite=existing, val_fraction=0.3).val) > 400


def test_another_process_was_quicker(tmp_path, source):
    out = tmp_path / "out"
    first = []

    def meanwhile(done, total):
        if not first:
            first.append(digest(prepare(source, out).folder))

    assert digest(prepare(source, out, progress=meanwhile).folder) == first[0]
    assert sorted(os.listdir(tmp_path)) == ["input.txt", "out"]


def test_a_full_disk_and_a_read_only_place(tmp_path, source, monkeypatch):
    with pytest.raises(ValueError, match=r"cannot write beside .*input\.txt/out.*choose another folder"):
        prepare(source, source / "out")
    monkeypatch.setattr(os, "fsync", failing(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        prepare(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["input.txt"]


def test_a_text_that_changes_while_it_is_read(tmp_path, source):
    def change(done, total):
        source.write_text(TEXT.replace("speak", "SPEAK"))

    source.write_text("x" * (corpora.CHUNK + 1) + TEXT)
    with pytest.raises(ValueError, match="changed while it was read"):
        prepare(source, tmp_path / "out", progress=change)
    assert os.listdir(tmp_path) == ["input.txt"]


def change_meta(folder, **fields):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, **fields}))


def truncate(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])


def too_large(folder):
    tokens = np.memmap(folder / "val.bin", dtype="<u2", mode="r+")
    tokens[3] = 999
    tokens.flush()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "val.bin").unlink(),
            r"not a prepared dataset: no val\.bin; prepare it first",
        ),
        (lambda folder: shutil.rmtree(folder), r"no train\.bin, val\.bin, tokenizer\.json, meta\.json"),
        (lambda folder: truncate(folder, "train.bin"), r"train\.bin has \d+ bytes, not \d+ tokens of uint16"),
        (lambda folder: truncate(folder, "tokenizer.json"), None),  # only the last newline: harmless
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot load a tokenizer"),
        (lambda folder: (folder / "meta.json").write_text("{"), r"meta\.json is damaged"),
        (lambda folder: (folder / "meta.json").write_bytes(b"\xff"), r"meta\.json is damaged"),
        (lambda folder: (folder / "meta.json").write_text("[]"), "schema_version=None; this release reads 1"),
        (lambda folder: change_meta(folder, schema_version=2), "schema_version=2; this release reads 1"),
        (lambda folder: change_meta(folder, dtype=None), "tokens of None"),
        (lambda folder: change_meta(folder, dtype="float32"), "tokens of float32"),
        (lambda folder: change_meta(folder, train_tokens="3"), "train_tokens missing or of the wrong type"),
        (lambda folder: change_meta(folder, val_tokens=0), "not 0 tokens"),
        (
            lambda folder: change_meta(folder, vocab_size=7),
            r"says 'char' of 7, but .* CharTokenizer\(vocab_size=\d",
        ),
        (
            lambda folder: ByteTokenizer().save(folder / "tokenizer.json"),
            r"but .* ByteTokenizer\(vocab_size=256\)",
        ),
        (too_large, r"val\.bin holds token 999, but the vocabulary has"),
    ],
)
def test_a_damaged_dataset_is_refused(tmp_path, source, damage, message):
    folder = prepare(source, tmp_path / "out").folder
    damage(folder)
    if message is None:
        Dataset.open(folder)
    else:
        with pytest.raises(ValueError, match=message):
            Dataset.open(folder)
