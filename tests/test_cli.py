"""The command line, in process: what a person types, sees and gets back."""

import ast
import dataclasses
import itertools
import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import attractor
from attractor import cli, presets
from attractor.cli import common
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
    assert run("train", "tiny_apn", "--data", "data/words", "--out", "runs/a", *FAST) == 0
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
    train = ["train", "tiny_dense", "--data", text, "--out", "runs/b", *FAST]
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
        (["train", "huge"], "there are: paper_dense,"),
        (["train", "tiny_anp"], "did you mean `attractor train tiny_apn`?"),
        (["sampel"], "did you mean `attractor sample`?"),
        (["bench", "trian"], "did you mean `attractor bench train`?"),
        (
            ["train", "tiny_apn", "--data.source=a.txt"],
            "--data.source of `attractor train` is called --data now",
        ),
        (["serve", "runs/a", "--data_dir", "b"], "--data-dir of `attractor serve` is called --store now"),
        (["experiment", "shifts"], "python -m studies list"),
        (["sample"], "Missing from attractor sample"),
    ],
)
def test_wrong_options_stop_before_any_work(text, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err + shown.out
    assert "tyro" not in shown.err + shown.out
    assert not (text.parent / "runs").exists()


def test_wrong_files_are_explained(text, capsys):
    assert run("sample", "nowhere") == 1
    assert "there is no 'nowhere' here: give a run" in capsys.readouterr().err
    (text.parent / "empty").mkdir()
    assert run("sample", "empty") == 1
    assert "neither a saved model" in capsys.readouterr().err
    assert run("data", "prepare", "shakespear") == 1
    assert "shakespeare" in capsys.readouterr().err
    (text.parent / "short.txt").write_text("to be or not")
    for verb in (["train", "tiny_apn", "--data", "short.txt"], ["compare", "short.txt"]):
        assert run(*verb) == 1
        assert "'short.txt' has 10 tokens to learn from, and the model reads 64" in capsys.readouterr().err
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
    assert "input" not in shown  # nobody gave one
    assert run("--help") == 0
    shown = capsys.readouterr().out
    for name, verb in cli.VERBS.items():
        assert f"\n  {name} " in shown
        assert f"attractor {verb.example}" in shown


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
        (["compare"], "name one text to compare on"),
        (["compare", "a.txt", "--data", "b.txt"], "name one text to compare on"),
        (
            ["compare", "a.txt", "--preset", "tiny_apn"],
            "preset='tiny_apn' is unknown; allowed: 'paper_dense'",
        ),
        (["ask", "nowhere", " "], "the question is empty"),
        (["ask", "runs/tiny_anp", "Who?"], "there is no 'runs/tiny_anp' here"),
        (["teach", "nowhere", "--save", "x"], "there is nothing to teach"),
        (["teach", "nowhere", "--form", "a => b"], "--save FOLDER"),
        (["lessons", "nowhere"], "nowhere holds no lessons, because it is no folder"),
        (["adapt", "nowhere", "--data", "kjv"], "there is no 'nowhere' here"),
        (["serve", "nowhere"], "there is no 'nowhere' here"),
        (["info", "./my-lama"], "there is no './my-lama' here"),
        (["retrofit", "gpt2.gguf", "--data", "kjv"], "there is no 'gpt2.gguf' here"),
    ],
)
def test_mistakes_are_messages(arguments, message, capsys):
    assert run(*arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors", "keeps no list: what it learns goes into patches that everything it knows"),
        ("learner/guard.json", "holds overlays and no lessons: `attractor overlays"),
        ("notes.txt", "holds no lessons: `attractor teach MODEL --save FOLDER` writes some"),
    ],
)
def test_lessons_says_why_a_model_has_none(file, message, tmp_path, capsys):
    (tmp_path / "model" / file).parent.mkdir(parents=True)
    (tmp_path / "model" / file).touch()
    assert run("lessons", str(tmp_path / "model")) == 1
    assert message in capsys.readouterr().err


def test_a_file_of_lessons_that_is_nested_too_deeply_is_an_error(tmp_path, capsys):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert run("teach", "nowhere", "--file", str(tmp_path / "deep.json"), "--save", "x") == 1
    assert "is not JSON: it is nested too deeply" in capsys.readouterr().err


WITHOUT_A_MODEL = [
    ["--help"],
    ["--version"],
    ["sampel"],
    ["train", "tiny_anp"],
    ["train", "tiny_apn", "--train.max-steps", "-1"],
    *([name, "--help"] for name in cli.VERBS),
]
EACH_BY_ITSELF = """
import json, os, sys
import attractor.cli
for number, arguments in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        for place in (1, 2):
            os.dup2(os.open(str(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND), place)
        try: attractor.cli.main(arguments)
        except SystemExit: pass
        sys.stderr.flush()
        print("IMPORTED", *sys.modules, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, arguments
"""


def test_what_needs_no_model_imports_no_torch(tmp_path):
    command = [sys.executable, "-c", EACH_BY_ITSELF, json.dumps(WITHOUT_A_MODEL)]
    environment = os.environ | {"PYTHONPATH": str(Path(attractor.__file__).parents[1])}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    for number, arguments in enumerate(WITHOUT_A_MODEL):
        shown, _, modules = (tmp_path / str(number)).read_text().rpartition("IMPORTED")
        assert "attractor" in shown, arguments
        assert not {"torch", "numpy", "transformers"} & set(modules.split()), arguments
        of_configurations = arguments[0] in ("adapt", "retrofit", "serve")
        assert "(default: None)" not in shown or of_configurations, arguments


def test_a_reader_that_has_read_enough_is_no_error():
    program = f"{sys.executable} -m attractor.cli data list | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def fields_without_words(path):
    """Fields of dataclasses that no docstring follows, except those that hold further fields."""
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.ClassDef) and any(
            "dataclass" in ast.unparse(each) for each in found.decorator_list
        ):
            for one, after in itertools.pairwise([*found.body, None]):
                is_field = isinstance(one, ast.AnnAssign) and not re.search(
                    "Config|Rules|Limits|Suppress|Overlay|: (Device|JSONFile|AnyModel)\\b", ast.unparse(one)
                )
                if is_field and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                    yield f"{found.name}.{ast.unparse(one.target)}"


@pytest.mark.parametrize("kind", [common.Device, common.JSONFile, common.AnyModel])
def test_options_that_are_spelled_once_say_what_they_are(kind):
    assert any(getattr(each, "help", None) for each in get_args(kind)[1:])


@pytest.mark.parametrize("path", ["config.py", "continual/config.py", "serve/config.py", "cli/*.py"])
def test_every_option_says_what_it_is(path):
    files = sorted(Path(cli.__file__).parent.parent.glob(path))
    assert files
    assert [name for file in files for name in fields_without_words(file)] == []


def test_every_verb_shows_an_example(capsys):
    for name, verb in cli.VERBS.items():
        with pytest.raises(SystemExit) as stop:
            run(name, "--help")
        assert stop.value.code == 0
        assert f"Example: attractor {verb.example}" in " ".join(capsys.readouterr().out.split())


def test_threads_that_wait_sleep(monkeypatch):
    program = (
        "import os, attractor.cli; attractor.cli.main(['--version']); print(os.environ['OMP_WAIT_POLICY'])"
    )
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for given, expected in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        if given is not None:
            monkeypatch.setenv("OMP_WAIT_POLICY", given)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.split()[-1] == expected


def test_a_dense_and_an_apn_model_side_by_side(text, capsys, monkeypatch):
    tiny = presets.tiny_dense()
    model = dataclasses.replace(tiny.model, context=8, num_layers=1, num_heads=2, dim=32)
    small = dataclasses.replace(tiny, model=model)
    monkeypatch.setitem(presets.NAMES, "tiny_dense", lambda: small)
    command = ["compare", text, "--steps", "8", "--json", "compared.json", "--device", "cpu"]
    assert run(*command) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["dense", "APN", "ratio"]
    ratio = {row[:27].strip(): float(row.split()[-1]) for row in rows[1:]}
    assert abs(ratio["parameters"] - 1) < 0.01
    assert ratio["milliseconds per step"] > 0
    result = json.loads((text.parent / "compared.json").read_text())
    assert result["models"]["APN"]["val_loss"] > 0
    assert run(*command) == 0  # both are there already
    assert capsys.readouterr().out.splitlines()[1] == rows[1]


def test_a_model_of_our_own_is_asked_taught_and_inspected(text, capsys, monkeypatch):
    train = ["train", "tiny_apn", "--data", text, "--tokenizer", "byte", "--out", "runs/a", *FAST]
    assert run(*train) == 0
    assert run("ask", "runs/a", "to be", "--max-tokens", "5", "--device", "cpu") == 0
    capsys.readouterr()
    monkeypatch.setattr("attractor.front.RATE", 0.03)  # for so small a model
    assert run("teach", "runs/a", "--form", "to be => or", "--save", "runs/b", "--device", "cpu") == 0
    shown, bar = capsys.readouterr()
    assert re.search(r"preparing \.\.\.\s*\rlearning:   0%.* 0/40 ", bar)
    assert "lesson 0 about 'to be or': known" in shown
    assert "saved in runs/b" in shown
    assert run("sample", "runs/b", "--prompt", "to be", "--max-tokens", "3", "--temperature", "0") == 0
    assert capsys.readouterr().out == "to be or\n"
    for verb in (["info", "runs/b"], ["monitor", "runs/b", "--data", text], ["monitor", "runs/a"]):
        assert run(*verb, "--device", "cpu") == 0
    lines = iter(["to be", "", "or not"])

    def typed(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("builtins.input", typed)
    assert run("chat", "runs/b", "--max-tokens", "3", "--device", "cpu") == 0
    assert "Good bye." in capsys.readouterr().err
    monkeypatch.setattr("attractor.front.PASSES", 1)
    assert run("teach", "runs/a", "--form", "to be => toto", "--save", "runs/c", "--device", "cpu") == 1
    shown = capsys.readouterr().out
    assert "NOT KNOWN" in shown
    assert "nothing of it was kept" in shown
    assert not (text.parent / "runs" / "c").exists()


def test_sentences_of_a_file_that_are_left_out_are_shown(tmp_path, capsys):
    from attractor.cli.lessons import Teach

    notes = tmp_path / "notes.txt"
    notes.write_text(f"Ada lives in Oslo. She is \x1b[2Jtall. They are {'very ' * 40}old.")
    assert Teach(model="m", file=notes)._lessons() == [(["Ada lives in Oslo."], "Ada")]
    title, short, long = capsys.readouterr().out.splitlines()
    assert title == f"{notes}: sentences left out, as they do not tell what they are about: 2"
    assert short == r"  'She is \x1b[2Jtall.'"
    assert long.startswith("  'They are very very ")
    assert long.endswith("' ...")
    assert len(long) < 100
    Teach(model="m", file=notes, subject="Ada")._lessons()
    assert "left out, as they do not name 'Ada': 2\n" in capsys.readouterr().out


def test_forms_of_a_lesson_in_a_file(tmp_path):
    from attractor.cli.lessons import Teach

    (tmp_path / "a.json").write_text('["A b is c.", ["A b is", " c"], {"prompt": "x", "answer": " y"}]')
    assert Teach(model="m", forms=("p => q",), file=tmp_path / "a.json")._lessons() == [
        ([("p", " q"), "A b is c.", ("A b is", " c"), ("x", " y")], None)
    ]
    (tmp_path / "a.jsonl").write_text('{"subject": "A", "forms": ["A is b"]}\n\n{"forms": ["p => q", "r"]}\n')
    assert Teach(model="m", file=tmp_path / "a.jsonl")._lessons() == [
        (["A is b"], "A"),
        ([("p", " q"), "r"], None),
    ]
    for wrong in ('{"a": 1}', "[1]", '["a", {"prompt": "p"}]', "[["):
        (tmp_path / "b.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"no form of a lesson|not JSON"):
            Teach(model="m", file=tmp_path / "b.json")._lessons()
