"""A write that fails leaves what was there; JSON is read and written without what it cannot hold."""

import json
import math
import os

import pytest

from attractor import files
from attractor.files import (
    finite,
    read_jsonl,
    recover_folder,
    replace_folder,
    write_file,
    write_folder,
    write_text,
)


def fail(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("moment", ["fill", "flush", "replace"])
def test_a_file_that_cannot_be_written_stays_what_it_was(tmp_path, monkeypatch, moment):
    path = tmp_path / "new" / "a.txt"
    write_text(path, "old: \N{SNOWMAN}")
    monkeypatch.setattr(*((os, "replace") if moment == "replace" else (files, "flush")), fail)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, fail if moment == "fill" else lambda partial: partial.write_text("new"))
    assert [(found.name, found.read_text("utf-8")) for found in path.parent.iterdir()] == [
        ("a.txt", "old: \N{SNOWMAN}")
    ]


@pytest.mark.parametrize("survivor", ["old", "new"])
def test_a_replacement_that_was_killed_is_undone(tmp_path, survivor):
    """Between two renames only the old folder is there, under another name; after them both are."""
    target, replaced = tmp_path / "x", tmp_path / ".replaced-x"
    write_folder(target, lambda folder: (folder / "a").write_text("old"))
    os.rename(target, replaced)
    if survivor == "new":
        write_folder(tmp_path / "y", lambda folder: (folder / "a").write_text("new"))
        os.rename(tmp_path / "y", target)
    recover_folder(target)
    assert (target / "a").read_text() == survivor
    assert os.listdir(tmp_path) == ["x"]


def test_a_replacement_that_fails_is_undone_at_once(tmp_path, monkeypatch):
    target, new = tmp_path / "x", tmp_path / "new"
    for folder, text in ((target, "old"), (new, "new")):
        folder.mkdir()
        (folder / "a").write_text(text)
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda old, to: fail() if old == new else rename(old, to))
    with pytest.raises(OSError, match="No space left"):
        replace_folder(new, target)
    assert (target / "a").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["new", "x"]


def test_numbers_that_json_does_not_know():
    values = {"a": math.nan, "b": [1, -math.inf, (2.5, "x")], "c": {"d": None, "e": True}}
    assert finite(values) == {"a": None, "b": [1, None, [2.5, "x"]], "c": {"d": None, "e": True}}
    assert finite(math.inf) is None
    assert finite(3.5) == 3.5


def test_a_log_is_read_without_what_does_not_belong_to_it(tmp_path):
    path, good = tmp_path / "log.jsonl", [{"step": 1}, {"step": 2, "loss": None}, {"step": 5}]
    lines = [json.dumps(record) for record in good]
    path.write_text(
        "\n".join([lines[0], "hello", '"step"', '{"step": "3"}', lines[1], lines[2], lines[2][:-3]])
    )
    assert read_jsonl(path, "step") == good
    assert read_jsonl(path, "step", 4) == good[:2]
    assert read_jsonl(path, "tokens") == []
    assert read_jsonl(tmp_path / "nothing", "step") == []
