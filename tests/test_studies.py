"""The command of the studies, in process: what a person types, sees and gets back."""

import dataclasses
import json
import random

import pytest

from attractor import presets
from attractor.data import prepare
from studies import __main__ as studies
from studies import edits, facts, table1, trivia


def run(*arguments) -> int:
    return studies.main([str(argument) for argument in arguments])


def test_every_study_has_a_line_and_a_help(capsys):
    assert run("list") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == [*studies.STUDIES, *studies.FACTS]
    assert all(len(line.split()) > 5 for line in shown)
    with pytest.raises(SystemExit) as stop:
        run("shifts", "--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for option in (
        "--size",
        "--domain",
        "--out",
        "--result",
        "--device",
        "--jobs",
        "--minutes",
        "--seeds",
        "--methods",
        "--mixture",
    ):
        assert option in shown


@pytest.mark.parametrize("study", [facts, trivia, edits])
def test_studies_of_facts_have_their_own_options(study, monkeypatch):
    told = []
    monkeypatch.setattr(study, "main", told.append)
    assert run(study.__name__.removeprefix("studies."), "--seed", 3) == 0
    assert told == [["--seed", "3"]]


def test_table1(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "words.txt"
    text.write_text(" ".join(random.Random(0).choices(["to", "be", "or", "not"], k=500)))

    def small(model, size):
        config = presets.NAMES[f"tiny_{model}"]()
        shape = dataclasses.replace(config.model, context=8, num_layers=1, dim=16)
        train = dataclasses.replace(config.train, max_steps=4, batch_size=2, eval_interval=2)
        return dataclasses.replace(config, model=shape, train=train)

    monkeypatch.setattr(table1, "run_config", small)
    monkeypatch.setattr(studies, "dataset_of", lambda config: prepare(text, "data/words"))
    assert run("table1", "--device", "cpu", "--result", "out.json") == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert set(result["rows"]) == {"dense", "apn"}
    assert f"{result['rows']['apn']['val_ppl']:.3f}" in shown
    assert result["rows"]["apn"]["usage_entropy"] > 0
    assert result["rows"]["dense"]["usage_entropy"] is None
    assert {"commit", "versions", "machine"} <= set(result["provenance"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table1", "--device", "cuda:99"], "GPUs here"),
        (["table1", "--models"], "names no model"),
        (["table2", "--seed", "-1"], "seed=-1 must be an integer"),
        (["shifts", "--minutes", "nan"], "minutes=nan must be a number, 0 or more"),
        (["shifts", "--mixture"], "the mixture is empty"),
        (["match", "--domain", "a=x.txt", "a=y.txt"], "names 'a' twice: x.txt and y.txt"),
        (["report"], "no results given"),
        (["report", "nowhere.json"], "nowhere.json"),
    ],
)
def test_mistakes_are_messages(arguments, message, capsys):
    assert run(*arguments) == 1
    assert message in capsys.readouterr().err


def test_a_stopped_study_says_that_nothing_is_lost(monkeypatch, capsys):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(studies.Table1, "run", interrupted)
    assert run("table1") == studies.INTERRUPTED
    assert "what was saved is kept" in capsys.readouterr().err
