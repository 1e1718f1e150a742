"""The command line, in process: what a person types, sees and gets back."""

import json
import random
import shlex

import pytest

from attractor import cli
from attractor.version import __version__

FAST = shlex.split(
    "--model.context 8 --model.num-layers 1 --model.num-heads 2 --model.dim 16 --model.apn.num-patches 4 "
    "--model.apn.rank 4 --train.max-steps 6 --train.batch-size 2 --train.eval-interval 3 "
    "--train.checkpoint-interval 3 --train.warmup-steps 1 --device cpu"
)


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "words.txt"
    file.write_text(" ".join(random.Random(0).choices(["to", "be", "or", "not"], k=500)))
    return file


def run(*arguments) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_from_text_to_sample(text, capsys):
    assert run("data", "prepare", text) == 0
    assert "training and" in capsys.readouterr().out
    assert run("train", "tiny_apn", "--data.source", "data/words", "--out", "runs/a", *FAST) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 6
    assert run("sample", "runs/a", "--prompt", "to be", "--max-tokens", 20, "--seed", 1) == 0
    first = capsys.readouterr().out
    assert first.startswith("to be")
    assert len(first) == len("to be") + 20 + 1
    assert run("sample", "runs/a", "--prompt", "to be", "--max-tokens", 20, "--seed", 1) == 0
    assert capsys.readouterr().out == first
    assert run("info", "runs/a") == 0
    card = capsys.readouterr().out
    assert "best validation" in card
    assert "APN(16, num_patches=4" in card
    assert "char tokens" in card


def test_a_run_is_neither_overwritten_nor_lost(text, capsys):
    train = ["train", "tiny_dense", "--data.source", text, "--out", "runs/b", *FAST]
    assert run(*train) == 0
    assert run(*train) == 1
    assert "holds a run already; --resume auto goes on with it" in capsys.readouterr().err
    assert run(*train, "--resume", "auto", "--train.max-steps", "9") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "tiny_apn", "--train.max-stepz", "3"], "--train.max-steps"),
        (["train", "tiny_apn", "--train.max-steps", "-3"], "max_steps=-3 must be a positive integer"),
        (["train", "tiny_apn", "--model.apn.top-k", "31"], "top_k=31 must not exceed num_patches=30"),
        (["train", "huge"], "tiny_apn"),
        (["sample"], "Missing from attractor sample"),
    ],
)
def test_wrong_options_stop_before_any_work(text, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err + shown.out
    assert not (text.parent / "runs").exists()


def test_wrong_files_are_explained(text, capsys):
    assert run("sample", "nowhere") == 1
    assert "neither a saved model" in capsys.readouterr().err
    assert run("data", "prepare", "shakespear") == 1
    assert "shakespeare" in capsys.readouterr().err
    text.write_bytes(b"\x00\x01\x02" * 100)
    assert run("data", "prepare", text) == 1
    assert "attractor:" in capsys.readouterr().err


def test_small_verbs(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"attractor {__version__}\n"
    assert run("data", "list") == 0
    assert "paper-shift" in capsys.readouterr().out
    assert run("info", "--backends") == 0
    shown = capsys.readouterr().out
    assert "grouped    yes" in shown
    assert "triton     " in shown
    assert run("experiment", "shifts", "--size", "full") == 1
    assert "python -m studies list" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        run("--help")
    assert stop.value.code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "decode", "--device", "banana"], "device='banana' is unknown"),
        (["bench", "layer", "--device", "cuda:99"], "GPUs here"),
        (["bench", "layer", "--rounds", "0"], "rounds=0 must be a positive integer"),
        (["bench", "train", "--presets", "foo", "bar"], "preset='foo' is unknown; allowed: "),
        (["bench", "train", "--steps", "0"], "steps=0 must be a positive integer"),
        (["bench", "decode", "--streams", "0", "--device", "cpu"], "streams=0 must be a positive integer"),
        (["demo", "--steps", "0"], "steps=0 must be a positive integer"),
        (["bench", "layer", "--device", "meta"], "device='meta' holds no numbers"),
    ],
)
def test_mistakes_are_messages(arguments, message, capsys):
    assert run(*arguments) == 1
    assert message in capsys.readouterr().err
