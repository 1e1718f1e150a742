"""The loop: it learns, resumes to the bit, survives kills and full disks, and stops with a clear message."""

import dataclasses
import json
import math
import multiprocessing
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from attractor import checkpoint, files
from attractor.config import APNConfig, GPTConfig, RunConfig, TrainConfig
from attractor.data import Dataset, prepare, windows
from attractor.evaluate import evaluate
from attractor.layer import APN
from attractor.model import GPT
from attractor.trainer import NotFiniteLoss, learning_rate, make_optimizer
from attractor.trainer import Trainer as AnyTrainer

Trainer = partial(AnyTrainer, device="cpu")  # bits are promised there, and these tests run everywhere

FORKS = multiprocessing.get_context("forkserver")  # importing torch takes seconds: once is enough
FORKS.set_forkserver_preload(["attractor.trainer", "torch._inductor.compile_fx", "torch.utils.tensorboard"])

CONFIG = RunConfig(
    model=GPTConfig(
        vocab_size=27,
        context=8,
        num_layers=2,
        num_heads=2,
        dim=16,
        dropout=0.1,
        ffn="apn",
        apn=APNConfig(num_patches=6, top_k=2, rank=4, patch_dropout=0.1),
    ),
    train=TrainConfig(
        max_steps=12, batch_size=4, warmup_steps=2, eval_interval=4, checkpoint_interval=3, log_interval=1
    ),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "my", "vex", "zip", "was"]
    source = folder / "text.txt"
    source.write_text(" ".join(random.Random(0).choices(words, k=400)))
    return prepare(source, folder / "out", tokenizer="char")


def config_for(dataset, **changes) -> RunConfig:
    model = dataclasses.replace(CONFIG.model, vocab_size=dataset.tokenizer.vocab_size)
    return dataclasses.replace(CONFIG, model=model, train=dataclasses.replace(CONFIG.train, **changes))


def weights(run: Path) -> dict[str, torch.Tensor]:
    folder = checkpoint.Checkpoints(run).newest("last")
    return load_file(folder / "model.safetensors") | load_file(folder / "training.safetensors")


def assert_same(run: Path, other: Path) -> None:
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_it_learns_and_leaves_a_whole_run(dataset, tmp_path):
    records = []
    trainer = Trainer(
        config_for(dataset, max_steps=60, learning_rate=1e-2), dataset, tmp_path, report=records.append
    )
    before = evaluate(trainer.model, dataset.val)
    summary = trainer.run()
    assert summary["step"] == 60
    assert summary["best_val_loss"] < before - 0.5
    model = GPT.from_pretrained(checkpoint.find_model(tmp_path))
    assert evaluate(model, dataset.val) == pytest.approx(summary["best_val_loss"], abs=1e-6)
    assert records == [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("apn/1/usage_entropy" in record for record in records)
    assert RunConfig.from_json((tmp_path / "config.json").read_text()) == trainer.config
    assert any((tmp_path / "tensorboard").iterdir())


def test_evaluation_predicts_every_token_once(dataset):
    torch.manual_seed(0)
    model = GPT(config_for(dataset).model).double().eval()
    tokens = dataset.val[:37]
    losses = []
    for start in range(0, 36, 8):  # one window at a time, the last one short
        window = torch.from_numpy(tokens[start : start + 9].astype(np.int64))
        log_p = model(window[None, :-1]).detach().log_softmax(-1)[0]
        losses += [-float(log_p[i, window[i + 1]]) for i in range(len(window) - 1)]
    assert len(losses) == 36 == sum(number for _, _, number in windows(tokens, 8, 3))
    assert evaluate(model, tokens, batch_size=3) == pytest.approx(sum(losses) / 36, abs=1e-6)


@pytest.mark.parametrize("stop_at", [1, 3, 5, 11])
def test_resuming_is_exact(dataset, tmp_path, stop_at):
    config = config_for(dataset)
    Trainer(config, dataset, tmp_path / "whole").run()

    def interrupt(record):
        if record["step"] == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    summary = Trainer(config, dataset, tmp_path / "parts", report=interrupt).run()
    assert summary["interrupted"]
    assert summary["step"] == stop_at
    torch.manual_seed(99)  # nothing may depend on the state of the process
    again = Trainer(config, dataset, tmp_path / "parts")
    assert again.resume()
    assert again.run()["step"] == 12
    assert_same(tmp_path / "whole", tmp_path / "parts")
    whole, parts = (
        [
            {name: value for name, value in json.loads(line).items() if name != "train/tokens_per_second"}
            for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in ("whole", "parts")
    )
    assert whole == parts


def stop_now(*_):
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_does_not_replace_the_checkpoint_of_this_step(dataset, tmp_path, monkeypatch):
    trainer = Trainer(config_for(dataset), dataset, tmp_path)
    save = trainer.save

    def save_and_stop(kind):
        stop_now()
        return save(kind)

    monkeypatch.setattr(trainer, "save", save_and_stop)
    for module in (checkpoint, files):  # a kill within it would lose the only checkpoint
        monkeypatch.setattr(module, "remove_folder", None)
    assert trainer.run()["step"] == 3


def test_a_signal_does_not_save_a_poisoned_state(dataset, tmp_path, monkeypatch):
    trainer = Trainer(config_for(dataset, log_interval=100), dataset, tmp_path)
    train_step = trainer._train_step

    def poisoned_step():
        loss = train_step()
        if trainer.step == 4:  # the fifth step, which nothing logs, evaluates or saves
            stop_now()
            return loss * torch.nan
        return loss

    monkeypatch.setattr(trainer, "_train_step", poisoned_step)
    with pytest.raises(
        NotFiniteLoss, match=r"the loss is nan at step 5; the last good state is .*last-00000003"
    ):
        trainer.run()


def victim(config, folder, run, errors, line):
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)  # what it has to say
    torch.set_num_threads(1)
    trainer = Trainer(config, Dataset.open(folder), run)
    trainer.resume()
    line.send("ready")
    trainer.run()


def test_killed_at_any_moment_it_resumes(dataset, tmp_path):
    """kill -9 again and again; what is on the disk must always load, and the end must be the same bytes."""
    config = config_for(dataset, max_steps=40, checkpoint_interval=1, eval_interval=5)
    Trainer(config, dataset, tmp_path / "whole").run()
    errors = tmp_path / "errors"

    def start():
        ours, theirs = FORKS.Pipe(duplex=False)
        process = FORKS.Process(
            target=victim, args=(config, dataset.folder, tmp_path / "killed", errors, theirs)
        )
        process.start()
        theirs.close()
        assert ours.recv() == "ready", errors.read_text()
        return process

    delays, kills = random.Random(0), 0
    for _ in range(60):
        process = start()
        time.sleep(delays.uniform(0, 0.15))
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        assert process.exitcode in (0, -signal.SIGKILL), errors.read_text()
        assert "Error" not in errors.read_text(), errors.read_text()
        if process.exitcode == 0 or kills == 8:
            break
    assert kills >= 3
    process = start()
    process.join()
    assert process.exitcode == 0, errors.read_text()
    assert_same(tmp_path / "whole", tmp_path / "killed")


def test_a_crash_while_saving_keeps_the_old_checkpoint(dataset, tmp_path, monkeypatch):
    trainer = Trainer(config_for(dataset, max_steps=3), dataset, tmp_path)
    trainer.run()
    before = weights(tmp_path)
    trainer.step = 4
    for module, broken in ((checkpoint, "save_tensors"), (files, "flush"), (os, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(module, broken, _disk_full)
            with pytest.raises(OSError, match="No space left"):
                trainer.save("last")
        assert checkpoint.Checkpoints(tmp_path).newest("last").name == "last-00000003"
        after = weights(tmp_path)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not list((tmp_path / "checkpoints").glob(".partial*"))


def _disk_full(*_, **__):
    raise OSError(28, "No space left on device")


def test_leftovers_of_a_killed_save_are_ignored_and_removed(dataset, tmp_path):
    trainer = Trainer(config_for(dataset, max_steps=3), dataset, tmp_path)
    trainer.run()
    folder = tmp_path / "checkpoints"
    (folder / ".partial-last-00000009-1").mkdir()
    (folder / "last-notes").mkdir()
    assert checkpoint.Checkpoints(tmp_path).newest("last").name == "last-00000003"
    trainer.step = 4
    trainer.save("last")
    assert sorted(path.name for path in folder.iterdir()) == ["best-00000003", "last-00000004", "last-notes"]


def test_loss_that_is_not_finite_stops_with_a_loadable_state(dataset, tmp_path):
    def poison(record):
        if record["step"] == 5:
            with torch.no_grad():
                trainer.model.norm.weight.fill_(torch.nan)

    trainer = Trainer(config_for(dataset), dataset, tmp_path, report=poison)
    with pytest.raises(
        NotFiniteLoss, match=r"the loss is nan at step 6; the last good state is .*last-00000003"
    ):
        trainer.run()
    again = Trainer(config_for(dataset), dataset, tmp_path)
    assert again.resume()
    assert again.step == 3
    assert again.run()["step"] == 12


def test_patience(dataset, tmp_path):
    config = config_for(
        dataset, eval_interval=1, patience=2, learning_rate=1e-12, min_learning_rate=0.0, warmup_steps=0
    )
    trainer = Trainer(config, dataset, tmp_path)
    trainer.best_loss = 0.0  # nothing will be better
    assert trainer.run()["step"] == 2


def test_accumulation_and_regularisers(dataset, tmp_path):
    config = config_for(dataset, max_steps=1)
    still = dataclasses.replace(
        config.model, dropout=0.0, apn=dataclasses.replace(config.model.apn, patch_dropout=0.0)
    )
    config = dataclasses.replace(config, model=still)
    runs = {
        "plain": config,
        "pieces": dataclasses.replace(config, train=dataclasses.replace(config.train, accumulation=4)),
        "balanced": dataclasses.replace(config, train=dataclasses.replace(config.train, balance_weight=10.0)),
        "soft": dataclasses.replace(config, train=dataclasses.replace(config.train, entropy_weight=10.0)),
    }
    results = {}
    for name, run in runs.items():
        trainer = Trainer(run, dataset, tmp_path / name)
        trainer.run()
        results[name] = trainer.model.blocks[0].ffn.prototypes.detach()
    torch.testing.assert_close(results["plain"], results["pieces"], rtol=1e-3, atol=1e-6)
    assert not torch.allclose(results["plain"], results["balanced"], atol=1e-6)
    assert not torch.allclose(results["plain"], results["soft"], atol=1e-6)


def test_without_its_weight_the_balance_is_not_computed(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("attractor.ops.balance_loss", None)
    config = config_for(dataset)
    assert config.train.balance_weight == config.train.entropy_weight == 0
    Trainer(config, dataset, tmp_path)._train_step()


def test_scale_warm_up_is_scheduled(dataset, tmp_path):
    trainer = Trainer(config_for(dataset, max_steps=3, scale_warmup_steps=2), dataset, tmp_path)
    seen = []
    trainer.report = lambda record: seen.append(float(trainer.model.blocks[0].ffn.scale_factor))
    trainer.run()
    assert sorted(set(seen)) == pytest.approx([0.1, 0.55, 1.0])


def test_a_model_saved_in_its_warm_up_is_the_one_that_was_measured(dataset, tmp_path):
    config = config_for(dataset, max_steps=8, scale_warmup_steps=100)
    model = dataclasses.replace(config.model, per_layer={"1": {"scale": 2.0}})
    trainer = Trainer(dataclasses.replace(config, model=model), dataset, tmp_path)
    summary = trainer.run()
    best = GPT.from_pretrained(checkpoint.find_model(tmp_path)).eval()
    assert math.exp(evaluate(best, dataset.val)) == pytest.approx(summary["best_val_ppl"], rel=1e-6)
    first, second = (block.ffn.config.scale for block in best.blocks)
    assert 0 < first < 1
    assert second == pytest.approx(2 * first)
    last = GPT.from_pretrained(checkpoint.Checkpoints(tmp_path).newest("last")).eval()  # for want of a best
    assert evaluate(last, dataset.val) == pytest.approx(evaluate(trainer.model, dataset.val), rel=1e-6)
    again = Trainer(trainer.config, dataset, tmp_path)
    assert again.resume()  # and it goes on with its own settings
    assert [block.ffn.config.scale for block in again.model.blocks] == [1.0, 2.0]


def test_learning_rate():
    train = TrainConfig(max_steps=100, warmup_steps=10, learning_rate=1.0, min_learning_rate=0.1)
    rates = [learning_rate(train, step) for step in range(101)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_what_decays(dataset):
    model = GPT(config_for(dataset).model)
    decayed, free = (set(group["params"]) for group in make_optimizer(model, CONFIG.train).param_groups)
    layer = model.blocks[0].ffn
    assert isinstance(layer, APN)
    assert {layer.decoder, layer.encoder, model.embedding.weight} <= decayed
    assert {layer.prototypes, layer.gate_slope, layer.gate_bias, model.norm.weight} <= free
    assert decayed | free == set(model.parameters())


def test_mistakes_are_caught_before_work_starts(dataset, tmp_path):
    wrong = config_for(dataset)
    wrong = dataclasses.replace(wrong, model=dataclasses.replace(wrong.model, vocab_size=99))
    with pytest.raises(ValueError, match=r"set model\.vocab_size"):
        Trainer(wrong, dataset, tmp_path)
    Trainer(config_for(dataset, max_steps=3), dataset, tmp_path).run()
    other = config_for(dataset)
    other = dataclasses.replace(other, model=dataclasses.replace(other.model, dim=32))
    with pytest.raises(ValueError, match="holds another model"):
        Trainer(other, dataset, tmp_path).resume()
    with pytest.raises(ValueError, match="neither a saved model nor the checkpoints of a run"):
        checkpoint.find_model(tmp_path / "nothing")
    (tmp_path / "other.txt").write_text((dataset.folder.parent / "text.txt").read_text().replace("q", "Q"))
    changed = prepare(tmp_path / "other.txt", tmp_path / "changed", tokenizer="char")
    with pytest.raises(ValueError, match="other characters or words than the one"):
        Trainer(config_for(changed), changed, tmp_path).resume()
    (checkpoint.Checkpoints(tmp_path).newest("last") / "hashes.json").unlink()
    for damage in ("null", "[]", "{}", '{"batches": 3}'):
        (checkpoint.Checkpoints(tmp_path).newest("last") / "training.json").write_text(damage)
        with pytest.raises(ValueError, match=r"cannot go on from .*last-00000003: "):
            Trainer(config_for(dataset), dataset, tmp_path).resume()
    assert not Trainer(config_for(dataset), dataset, tmp_path / "new").resume()
    assert math.isinf(Trainer(config_for(dataset), dataset, tmp_path / "new").best_loss)


def test_a_kill_while_replacing_a_checkpoint_loses_nothing(tmp_path, monkeypatch):
    checkpoints = checkpoint.Checkpoints(tmp_path)
    checkpoints.save("best", 6, lambda folder: (folder / "a").write_text("old"))
    renames = []

    def killed(old, new):
        renames.append(new)
        if len(renames) >= 2:  # the old one has stepped aside, the new one is not there yet
            raise KeyboardInterrupt
        return os_rename(old, new)

    os_rename = os.rename
    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save("best", 6, lambda folder: (folder / "a").write_text("new"))
    monkeypatch.undo()
    newest = checkpoint.Checkpoints(tmp_path).newest("best")
    assert (newest / "a").read_text() == "old"


def test_strange_metrics_do_not_stop_a_run(dataset, tmp_path):
    config = config_for(dataset, max_steps=3)
    Trainer(config, dataset, tmp_path).run()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"no": "step"}\n[1]\n{"step": 2, "cut')
    longer = Trainer(config_for(dataset, max_steps=6), dataset, tmp_path)
    assert longer.resume()
    longer.run()
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == 6


def test_many_models_after_another_are_all_compiled(dataset, tmp_path, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode: real(model, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for layers in (1, 2):
            config = config_for(dataset, max_steps=1, compile=True)
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=layers))
            Trainer(config, dataset, tmp_path / str(layers)).run()
