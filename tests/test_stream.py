"""attractor adapt and monitor: the loop, its log, stopping and going on, and what a person may get wrong."""

import json
import math
import shutil

import pytest
import torch
from test_learner import assert_same, learner_of, state_of, stream

import attractor
from attractor import cli
from attractor.checkpoint import find_model
from attractor.continual.learner import OnlineLearner
from attractor.continual.stream import adapt
from attractor.continual.update import NotFiniteUpdate
from attractor.model import GPT
from attractor.tokenizer import ByteTokenizer


def run(*arguments):
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:  # the parser's own way to refuse
        return stop.code


def train(options):
    """Train a tiny model on a.txt, by the command line."""
    size = "--model.context 8 --model.dim 16 --model.num-layers 2 --train.batch-size 4 --device cpu"
    return run("train", "tiny_apn", "--data", "a.txt", *size.split(), *options.split())


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_adapt(tmp_path):
    learner, records = learner_of(budget=16), []
    texts = {"first": stream(100), "second": stream(70, seed=1)}
    summary = adapt(learner, texts, tmp_path, canary=stream(50, seed=2), every=40, report=records.append)
    assert log_of(tmp_path) == records
    assert [record["tokens"] for record in records] == [48, 96, 100, 148, 170]  # in multiples of the budget
    assert sum(record["updates"] for record in records) == learner.totals.updates
    assert [record["source"] for record in records] == ["first"] * 3 + ["second"] * 2
    assert records[-1]["canary"] != summary["canary_before"]
    losses = [record["loss"] for record in records]
    assert summary["losses"] == {
        "first": {"first": losses[0], "last": losses[1]},  # four tokens at the end are no piece
        "second": {"first": losses[3], "last": losses[3]},
    }
    assert not summary["interrupted"]
    assert_same(state_of(OnlineLearner.load(tmp_path / "learner")), state_of(learner))


def test_stopped_and_resumed_is_the_same(tmp_path):
    texts = {"first": stream(100), "second": stream(70, seed=1)}
    whole = learner_of(budget=20)
    done = adapt(whole, texts, tmp_path / "whole", canary=stream(50, seed=2), every=40)
    calls = []
    part = learner_of(budget=20)

    def stop():
        calls.append(1)
        return len(calls) == 2

    first = adapt(part, texts, tmp_path / "part", canary=stream(50, seed=2), every=40, stop=stop)
    assert first["interrupted"]
    loaded = OnlineLearner.load(tmp_path / "part" / "learner")
    with (tmp_path / "part" / "log.jsonl").open("a") as file:
        file.write('{"tokens": 999999}\n{"torn')  # of a future that did not happen
    second = adapt(loaded, texts, tmp_path / "part", canary=stream(50, seed=2), every=40)
    assert second == done
    assert log_of(tmp_path / "part") == log_of(tmp_path / "whole")
    assert_same(state_of(loaded), state_of(whole))
    again = OnlineLearner.load(tmp_path / "part" / "learner")
    for wrong in (
        {"third": stream(9)},
        {"second": texts["second"], "first": texts["first"]},
        {**texts, "first": stream(100, seed=5)},
    ):
        with pytest.raises(ValueError, match="resume with the same texts"):
            adapt(again, wrong, tmp_path / "part", canary=stream(50, seed=2))
    with pytest.raises(ValueError, match="another canary"):
        adapt(again, texts, tmp_path / "part")


def test_a_failure_keeps_what_was_learned(tmp_path, monkeypatch):
    learner = learner_of(budget=8)
    original, calls = learner._score, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 8:
            raise NotFiniteUpdate("injected")
        return original(*arguments)

    monkeypatch.setattr(learner, "_score", failing)
    with pytest.raises(NotFiniteUpdate):
        adapt(learner, {"first": stream(100)}, tmp_path, every=16)
    loaded = OnlineLearner.load(tmp_path)
    assert loaded.totals.tokens == 56
    adapt(loaded, {"first": stream(100)}, tmp_path, every=16)
    assert loaded.totals.tokens == 100
    assert loaded.totals.scored == 99


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two texts, and a model that was trained on the first."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "a.txt").write_text("to be or not to be, that is the question\n" * 30)
    (folder / "b.txt").write_text("that is the question: to be or not to be?\n" * 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train("--train.max-steps 10 --train.eval-interval 5 --out run") == 0
    return folder


@pytest.fixture
def run_folder(trained, tmp_path, monkeypatch):
    """A copy of its own for every test."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_commands(run_folder, capsys):
    options = ("--data", "b.txt", "--every", 200, "--budget", 64, "--device", "cpu")
    assert run("adapt", "run", *options, "--gates.max-surprise", 3) == 0
    shown = capsys.readouterr()
    assert "canary perplexity" in shown.out
    assert "left out" in shown.err  # the ? and the : are new to the model
    summary = json.loads((run_folder / "run-adapted" / "summary.json").read_text())
    assert summary["updates"] > 10
    assert summary["config"]["gates"]["max_surprise"] == 3
    assert run("adapt", "run", *options) == 1
    assert "--resume goes on" in capsys.readouterr().err
    assert run("adapt", "run", *options, "--resume", "--budget", 5) == 1
    assert "settings of its own" in capsys.readouterr().err
    assert run("sample", "run-adapted/learner", "--max-tokens", 5) == 0
    # on from an adaptation, with its own settings
    assert run("adapt", "run-adapted/learner", "--data", "a.txt", "--out", "more", "--canary", "b.txt") == 0
    capsys.readouterr()
    assert run("adapt", "run-adapted/learner", "--data", "a.txt", "--out", "x", "--budget", 5) == 1
    assert "settings of its own" in capsys.readouterr().err
    assert run("monitor", "run", "--data", "b.txt", "--device", "cpu", "--json", "m.json") == 0
    assert "Omega(A,B)" in capsys.readouterr().out
    assert (run_folder / "run" / "monitor.png").exists()
    assert "shared" in json.loads((run_folder / "m.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["adapt", "nowhere", "--data", "b.txt"], "there is no 'nowhere' here"),
        (["adapt", "run", "--data", "nothing.txt"], "nothing.txt"),
        (["adapt", "run", "--data", "b.txt", "--update.max-change", "0"], "max_change=0.0 must be"),
        (["adapt", "run", "--data", "b.txt", "--budget", "0"], "budget=0 must be a positive integer"),
        (["adapt", "run", "--data", "b.txt", "--update.train", "attention"], "unknown roles"),
        (["adapt", "run", "--data", "b.txt", "--resume"], "run-adapted holds no adaptation to go on with"),
        (["adapt", "run", "--data", "b.txt", "--max-tokens", "0"], "max_tokens=0 must be"),
        (["adapt", "run", "--data", "b.txt", "b.txt"], "each once"),
        (["monitor", "run", "--data", "b.txt", "a.txt", "b.txt"], "3 texts"),
    ],
)
def test_mistakes_are_messages(run_folder, arguments, message, capsys):
    assert run(*arguments, "--device", "cpu") in (1, 2)
    assert message in capsys.readouterr().err
    assert not (run_folder / "run-adapted").exists()


def test_dense_models_are_refused(run_folder, capsys):
    from attractor.config import GPTConfig

    GPT(GPTConfig(vocab_size=5, context=8, num_layers=1, num_heads=1, dim=8)).save_pretrained("dense")
    ByteTokenizer().save("dense/tokenizer.json")
    assert run("adapt", "dense", "--data", "b.txt", "--device", "cpu") == 1
    assert "no APN layers, so there are no patches that could learn: train one" in capsys.readouterr().err
    assert run("serve", "dense", "--device", "cpu") == 1
    assert "serve one that has some" in capsys.readouterr().err


def test_short_texts_and_the_folder_itself(run_folder, capsys):
    assert run("adapt", "run", "--data", "b.txt", "--max-tokens", 1, "--device", "cpu") == 0
    assert run("sample", "run-adapted", "--max-tokens", 3) == 0


def test_a_text_that_changed_is_no_measure(run_folder, capsys):
    """New characters give others new numbers; what the run learned is not what its text says now."""
    (run_folder / "a.txt").write_text((run_folder / "a.txt").read_text().replace("q", "Q"))
    shutil.rmtree(run_folder / "data")
    for verb in (["adapt", "run", "--data", "b.txt"], ["monitor", "run"]):
        assert run(*verb, "--device", "cpu") == 1
        assert "has changed since" in capsys.readouterr().err
    assert run("adapt", "run", "--data", "b.txt", "--canary", "b.txt", "--device", "cpu") == 0
    (run_folder / "a.txt").unlink()
    shutil.rmtree(run_folder / "data")
    assert run("monitor", "run", "--device", "cpu") == 1
    assert "Without the validation text of run/checkpoints" in capsys.readouterr().err


def test_samples_of_what_was_learned(run_folder, capsys):
    """Overlays lie beside the base; a sample is of both."""
    learn = ("--guard", "--update.learning-rate", "0.1", "--budget", 64, "--attention", "whole")
    assert run("adapt", "run", "--data", "b.txt", "--device", "cpu", *learn) == 0
    written = []
    for folder in ("run", "run-adapted"):
        capsys.readouterr()
        assert run("sample", folder, "--prompt", "to be", "--temperature", 0, "--max-tokens", 60) == 0
        written.append(capsys.readouterr().out)
    assert written[0] != written[1]
    assert run("info", "run-adapted") == 0
    shown = capsys.readouterr().out
    assert "overlays         b;" in shown
    model = attractor.load("run-adapted", device="cpu")
    rise = 100 * math.expm1(model.model.bound(8) / 8)  # the context is 8
    assert f"nats more in 8 tokens: its perplexity rises by at most {rise:.2f} %" in shown
    with pytest.raises(ValueError, match="`attractor adapt --guard`"):
        model.learn([("to be", " or")])


def test_guarded(run_folder, capsys):
    """Learn in overlays, look after them, and always come back to the base."""
    options = ("--device", "cpu", "--guard", "--update.learning-rate", "1e-2", "--budget", 64)
    options = (*options, "--every", 200, "--attention", "low_rank")
    assert run("adapt", "run", "--data", "b.txt", "a.txt", *options) == 0
    assert "canary perplexity" in capsys.readouterr().out
    summary = json.loads((run_folder / "run-adapted" / "summary.json").read_text())
    rise = math.log(summary["canary_after"] / summary["canary_before"])
    assert rise <= math.log(2) / 8  # the context is 8
    assert summary["overlay/b/bytes"] > 0

    def overlays(*arguments):
        code = run("overlays", "run-adapted", *arguments)
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    code, shown = overlays("list")
    assert code == 0
    assert shown.count("version") >= 2
    assert overlays("export", "b", "exported")[0] == 0
    assert overlays("export", "b", "exported") == (1, "attractor: exported exists; choose a new folder\n")
    assert overlays("rollback", "b", "--version", 2)[0] == 0
    assert "b                    version 2" in overlays("list")[1]
    assert "tokens of 'a'" in overlays("drop", "a")[1]
    assert overlays("import", "exported", "again")[0] == 0
    assert overlays("drop", "nobody")[0] == 1
    assert "'b'" in overlays("drop", "nobody")[1]
    for name in ("b", "again"):
        overlays("drop", name)
    assert "this is the base" in overlays("list")[1]
    model, base = (GPT.from_pretrained(find_model(run_folder / name)) for name in ("run-adapted", "run"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), base.parameters(), strict=True))
    assert run("overlays", "run", "list") == 1
    assert "adapt --guard" in capsys.readouterr().err


def test_texts_get_names_of_their_own(run_folder, capsys):
    for folder in ("x", "y"):
        (run_folder / folder).mkdir()
        (run_folder / folder / "t.txt").write_text("to be or not to be\n" * 20)
    (run_folder / "base.txt").write_text("to be or not to be\n" * 20)
    guard = ("--guard", "--device", "cpu")
    assert run("adapt", "run", "--data", "x/t.txt", "y/t.txt", *guard) == 1
    assert "a name of its own" in capsys.readouterr().err
    assert not (run_folder / "run-adapted").exists()
    assert run("adapt", "run", "--data", "base.txt", *guard) == 0
    assert run("overlays", "run-adapted", "list") == 0
    assert "base-text" in capsys.readouterr().out


def test_guard_settings_need_the_guard(run_folder, capsys):
    assert run("adapt", "run", "--data", "b.txt", "--device", "cpu", "--prior", "0.9") == 1
    assert "without --guard" in capsys.readouterr().err
    assert run("adapt", "run", "--data", "b.txt", "--device", "cpu", "--guard") == 0
    assert run("adapt", "run", "--data", "b.txt", "--device", "cpu", "--resume") == 1
    assert "was adapted with --guard" in capsys.readouterr().err
    assert run("adapt", "run", "--data", "b.txt", "--device", "cpu", "--resume", "--guard") == 0


def test_unlabelled(run_folder, capsys):
    options = ("--guard", "--unlabelled", "--device", "cpu")
    assert train("--train.max-steps 150 --train.learning-rate 1e-2 --out taught") == 0
    (run_folder / "c.txt").write_text("q,qq,,qnq,uq,n" * 600)
    rate = ("--update.learning-rate", "1e-2", "--max-overlays", 1)  # two texts, one of which is the base's
    assert run("adapt", "taught", "--data", "c.txt", "a.txt", "--guard", "--device", "cpu", *rate) == 1
    assert "--max-overlays allows more" in capsys.readouterr().err
    assert run("adapt", "taught", "--data", "c.txt", "a.txt", *options, *rate) == 0
    assert run("adapt", "taught-adapted", "--data", "b.txt", "--guard", "--device", "cpu", "--out", "y") == 1
    assert "--max-overlays allows more" in capsys.readouterr().err  # and so it does
    more = ("--guard", "--device", "cpu", "--out", "y", "--max-overlays", 2)
    assert run("adapt", "taught-adapted", "--data", "b.txt", *more) == 0
    assert run("overlays", "taught-adapted", "list") == 0
    assert "domain-1" in capsys.readouterr().out
    assert run("adapt", "run", "--data", "c.txt", "--unlabelled", "--device", "cpu", "--out", "x") == 1
    assert "without --guard" in capsys.readouterr().err


def test_consolidating(run_folder, capsys):
    options = ("--guard", "--device", "cpu", "--update.learning-rate", "1e-2", "--budget", 64)
    assert run("adapt", "run", "--data", "b.txt", *options) == 0
    base = GPT.from_pretrained(find_model(run_folder / "run-adapted"))

    def consolidate(*arguments):
        capsys.readouterr()
        code = run("overlays", "run-adapted", "consolidate", "b", "--canary", "b.txt", *arguments)
        return code, "".join(capsys.readouterr())

    assert "nothing was changed" in consolidate("--tolerance", 10)[1]
    same = GPT.from_pretrained(find_model(run_folder / "run-adapted"))
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), same.parameters(), strict=True))
    assert consolidate("--tolerance", 10, "--confirm")[0] == 0
    after = GPT.from_pretrained(find_model(run_folder / "run-adapted"))
    assert not all(torch.equal(a, b) for a, b in zip(base.parameters(), after.parameters(), strict=True))
    assert consolidate()[0] == 1  # it is no overlay any more
