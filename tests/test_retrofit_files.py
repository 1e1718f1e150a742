"""Retrofits on disk: equal to the last bit, strict about everything, and readable for ever."""

import json
from pathlib import Path

import pytest
import torch
from families import FAMILIES, SMALL, logits, some_tokens, teach, tiny, transformers
from safetensors.torch import load_file, save_file

import attractor
from attractor import APNConfig
from attractor.checkpoint import tensors_hash
from attractor.files import digest_of
from attractor.hf import files
from attractor.hf.card import MODEL_TYPE

RETROFITS = Path(__file__).parent / "retrofits"


def state(net):
    return {f"{n}.{name}": p for n, layer in net.apn_layers().items() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_are_equal_to_the_last_bit(family, tmp_path):
    net = teach(attractor.retrofit(tiny(family), SMALL))
    net.apn_layers()[1].resize(11)  # layers may have grown apart
    expected = logits(net)
    net.save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == files.OURS
    loaded = attractor.load_retrofit(tiny(family), tmp_path / "saved")
    assert torch.equal(logits(loaded), expected)
    assert {name: p.tolist() for name, p in state(loaded).items()} == {
        name: p.tolist() for name, p in state(net).items()
    }
    assert {id(p) for p in loaded.trainable_parameters()} == {id(p) for p in state(loaded).values()}
    assert torch.equal(logits(loaded.unload()), logits(tiny(family)))


def test_a_retrofit_says_where_its_base_was_loaded_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny("llama").save_pretrained("base")
    base = transformers.AutoModelForCausalLM.from_pretrained("base")
    net = attractor.retrofit(base, SMALL)
    net.save_pretrained("saved")
    assert files.loaded_from("saved") == str(tmp_path / "base")  # from every folder
    net.model.name_or_path = "org/name"
    net.save_pretrained("named")
    assert files.loaded_from("named") == "org/name"
    attractor.retrofit(tiny("llama"), SMALL).save_pretrained("unnamed")
    for folder in ("unnamed", RETROFITS / "qwen3_format2" / "retrofit"):
        assert files.loaded_from(folder) is None
        with pytest.raises(ValueError, match=r"does not say where its base is: .* attractor\.load_retrofit"):
            attractor.load(folder)
    with pytest.raises(ValueError, match="holds no retrofit that can be read"):
        files.loaded_from("base")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_variant_comes_back(dtype, tmp_path):
    variants = [
        {"decoder": "shared"},
        {"gate": "scalar", "layer_norm": True},
        {"prototypes": "contextual"},
        {"routing": "dot", "init": "paper"},
    ]
    for number, variant in enumerate(variants):
        config = APNConfig(num_patches=4, top_k=2, rank=4, **variant)
        net = attractor.retrofit(tiny("gpt2", torch.bfloat16), config, dtype=dtype)
        for parameter in net.trainable_parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        net.save_pretrained(tmp_path / str(number))
        loaded = attractor.load_retrofit(tiny("gpt2", torch.bfloat16), tmp_path / str(number))
        assert torch.equal(logits(loaded), logits(net))
        assert loaded.apn_layers()[0].config == config


def test_replaced_layers_come_back_in_place_of_the_ffn(tmp_path):
    net = attractor.retrofit(tiny("opt"), SMALL, mode="replace", sample=some_tokens(4, 16), steps=3)
    net.save_pretrained(tmp_path / "saved")
    loaded = attractor.load_retrofit(tiny("opt"), tmp_path / "saved")
    assert loaded.modes == {"default": "replace"}
    assert torch.equal(logits(loaded), logits(net))


def test_a_retrofit_can_hold_several_loaded_ones(tmp_path):
    net = teach(attractor.retrofit(tiny("llama"), SMALL))
    net.save_pretrained(tmp_path / "first")
    net.add("second", SMALL)
    teach(net, seed=7).save_pretrained(tmp_path / "second")
    net.save_pretrained(tmp_path / "again", name="default")
    assert (
        load_file(tmp_path / "again" / files.WEIGHTS).keys()
        == load_file(tmp_path / "first" / files.WEIGHTS).keys()
    )
    held = attractor.load_retrofit(tiny("llama"), tmp_path / "again", name="a")
    assert attractor.load_retrofit(held, tmp_path / "second", name="b") is held
    for mine, theirs in {"a": "default", "b": "second", None: None}.items():
        held.use(mine)
        net.use(theirs)
        assert torch.equal(logits(held), logits(net))
    with pytest.raises(ValueError, match="no retrofit is in use"):
        net.save_pretrained(tmp_path / "none")


def test_bookkeeping_is_not_another_base(tmp_path):
    net = teach(attractor.retrofit(tiny("llama"), SMALL))
    net.save_pretrained(tmp_path / "saved")
    model = tiny("llama")
    model.config.use_cache, model.config.pad_token_id = False, 5
    model.config.of_a_later_release = True
    attractor.load_retrofit(model, tmp_path / "saved")


def test_through_the_models_own_files(tmp_path):
    """The base is saved and loaded by transformers, also while it is retrofitted: those files are whole."""
    net = teach(attractor.retrofit(tiny("opt"), SMALL))
    net.save_pretrained(tmp_path / "retrofit")
    net.model.save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map="cpu").eval()
    assert torch.equal(logits(base), logits(tiny("opt")))
    assert torch.equal(logits(attractor.load_retrofit(base, tmp_path / "retrofit")), logits(net))


# --- what others make of it


def test_the_model_card_says_what_is_known(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\ntags:\n- x\nlicense: apache-2.0\n---\n# A model\n")
    net = attractor.retrofit(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), SMALL)
    net.save_pretrained(tmp_path / "saved", about={"data": "law | news", "perplexity": "9.47"})
    card = (tmp_path / "saved" / files.CARD).read_text()
    header, text = card.removeprefix("---\n").split("---\n", 1)
    assert "license: apache-2.0\n" in header
    assert "base_model" not in header  # a folder on this machine means nothing elsewhere
    assert str(tmp_path) not in card
    for row in (
        "| base | a LlamaForCausalLM |",
        f"| weights of the base | SHA-256 {tensors_hash(net.model.state_dict())} |",
        "| licence of the base | apache-2.0 |",
        "| layers | 2, beside the FFNs |",
        "| patches | 2 of 8, rank 4 |",
        "| data | law \\| news |",
        "| perplexity | 9.47 |",
    ):
        assert row in text
    net.model.name_or_path = "org/name"
    net.save_pretrained(tmp_path / "saved")  # in place of the other, whose card nobody edited
    card = (tmp_path / "saved" / files.CARD).read_text()
    assert "base_model: org/name\n" in card
    assert "license:" not in card
    assert "| licence of the base | not known" in card
    (tmp_path / "saved" / files.CARD).write_text(card + "Mine.")
    with pytest.raises(ValueError, match="is not as we wrote it: move it"):
        net.save_pretrained(tmp_path / "saved")


def test_other_loaders_say_what_to_do(saved, monkeypatch):
    """Nobody gets the base without its layers, nor an error that explains nothing."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    registered = transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content
    monkeypatch.delitem(registered, MODEL_TYPE, raising=False)  # another test may have registered it
    with pytest.raises(ValueError, match="which the package attractor-patch-networks loads: see README"):
        transformers.AutoModelForCausalLM.from_pretrained(saved)
    with pytest.raises(ValueError, match="which the package attractor-patch-networks loads: see README"):
        transformers.pipeline("text-generation", model=str(saved))
    with pytest.raises(KeyError, match=r"this is a retrofit, which attractor\.load_retrofit"):
        peft.PeftModel.from_pretrained(tiny("llama"), saved)
    with pytest.raises(KeyError, match=r"this is a retrofit, which attractor\.load_retrofit"):
        tiny("llama").load_adapter(str(saved))
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.LlamaForCausalLM.from_pretrained(saved)


# --- what is refused


def edit(change):
    def tamper(folder):
        tensors = load_file(folder / files.WEIGHTS)
        described = json.loads((folder / files.CONFIG).read_text())
        change(tensors)
        told = {"base": described["base"]["weights"], "digest": described["digest"]}
        save_file(tensors, folder / files.WEIGHTS, metadata=told)

    return tamper


def describe(change, signed=True):
    """Change the configuration; somebody who knows how has written digests that fit."""

    def tamper(folder):
        described = json.loads((folder / files.CONFIG).read_text())
        change(described)
        if signed:
            told = {key: value for key, value in described.items() if key != "digest"}
            described["digest"] = digest_of(told)
        (folder / files.CONFIG).write_text(json.dumps(described))
        if signed and isinstance(described.get("base"), dict):
            edit(lambda tensors: None)(folder)

    return tamper


def changed(change):
    return describe(change, signed=False)


def cut(name, keep):
    def tamper(folder):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: int(len(whole) * keep)])

    return tamper


KEY = "model.layers.1.mlp.decoder"
TAMPERED = {
    "a tensor is missing": edit(lambda t: t.pop(KEY)),
    "a tensor too many": edit(lambda t: t.update(extra=torch.zeros(1))),
    "a tensor renamed": edit(lambda t: t.update({KEY + "s": t.pop(KEY)})),
    "a tensor reshaped": edit(lambda t: t.update({KEY: t[KEY].transpose(0, 1).contiguous()})),
    "a patch less": edit(lambda t: t.update({KEY: t[KEY][1:].clone()})),
    "another type": edit(lambda t: t.update({KEY: t[KEY].double()})),
    "not floating point": edit(lambda t: t.update({KEY: t[KEY].int()})),
    "NaN": edit(lambda t: t[KEY].view(-1)[3:4].fill_(torch.nan)),
    "infinity": edit(lambda t: t[KEY].view(-1)[3:4].fill_(-torch.inf)),
    "a number changed a little": edit(lambda t: t[KEY].view(-1)[3:4].add_(1e-3)),
    "no tensors": edit(lambda t: t.clear()),
    "another format": describe(lambda d: d.update(format=5)),
    "an earlier format": describe(lambda d: d.update(format=1)),
    "an earlier format without a digest": changed(lambda d: (d.update(format=1), d.pop("digest"))),
    "a format that is no number": describe(lambda d: d.update(format=True)),
    "no digest": changed(lambda d: d.pop("digest")),
    "more at once": changed(lambda d: d["layers"][KEY[:-8]].update(top_k=3)),
    "louder": changed(lambda d: d["layers"][KEY[:-8]].update(scale=7.0)),
    "other routing": changed(lambda d: d["layers"][KEY[:-8]].update(routing="dot")),
    "a field less": changed(lambda d: d["layers"][KEY[:-8]].pop("top_k")),
    "in place of the FFN": changed(lambda d: d.update(mode="replace")),
    "of any base": changed(lambda d: d["base"].update(config={})),
    "something more": changed(lambda d: d.update(colour="red")),
    "no format": describe(lambda d: d.pop("format")),
    "another mode": describe(lambda d: d.update(mode="over")),
    "other weights": changed(lambda d: d["base"].update(weights="0" * 64)),
    "no base": describe(lambda d: d.pop("base")),
    "a base of the wrong type": describe(lambda d: d.update(base=[1])),
    "no layers": describe(lambda d: d.update(layers={}, dtypes={})),
    "a layer without a type": describe(lambda d: d["dtypes"].popitem()),
    "an unknown type": describe(lambda d: d["dtypes"].update({KEY[:-8]: "int8"})),
    "an unknown field": describe(lambda d: d["layers"][KEY[:-8]].update(colour="red")),
    "a value out of range": describe(lambda d: d["layers"][KEY[:-8]].update(top_k=99)),
    "more patches than there are": describe(lambda d: d["layers"][KEY[:-8]].update(num_patches=10**9)),
    "a list": lambda folder: (folder / files.CONFIG).write_text("[]"),
    "no JSON": cut(files.CONFIG, 0.7),
    "nothing": cut(files.CONFIG, 0),
    "a truncated file": cut(files.WEIGHTS, 0.9),
    "a truncated header": cut(files.WEIGHTS, 0.01),
    "an empty file": cut(files.WEIGHTS, 0),
    "no weights": lambda folder: (folder / files.WEIGHTS).unlink(),
    "no configuration": lambda folder: (folder / files.CONFIG).unlink(),
}


@pytest.fixture
def saved(tmp_path):
    teach(attractor.retrofit(tiny("llama"), SMALL)).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def refused(model, folder, message):
    before, flags = logits(model), [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(ValueError, match=message):
        attractor.load_retrofit(model, folder)
    assert torch.equal(logits(model), before)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED.keys())
def test_tampered_files_are_refused(tamper, saved):
    tamper(saved)
    refused(tiny("llama"), saved, "holds no retrofit that can be read")


def test_every_single_tensor_counts(saved):
    whole = load_file(saved / files.WEIGHTS)
    for key in whole:
        for change in (lambda t, k=key: t.pop(k), lambda t, k=key: t.update({k: t[k][..., :-1].clone()})):
            edit(change)(saved)
            refused(tiny("llama"), saved, key)
            edit(lambda t: t.update(whole))(saved)
    attractor.load_retrofit(tiny("llama"), saved)


def test_another_base_is_refused(saved):
    refused(tiny("llama", seed=1), saved, "another base, with weights")
    model = tiny("llama")
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    refused(model, saved, "another base, with weights")
    refused(tiny("llama", torch.bfloat16), saved, "another base, with weights")
    model = tiny("llama")
    model.config.rms_norm_eps = 1e-5
    refused(model, saved, "rms_norm_eps is 1e-06 there and 1e-05 here")
    model = tiny("llama")
    model.config.rope_parameters = {"rope_theta": 5.0, "rope_type": "default"}
    refused(model, saved, "rope_parameters.rope_theta is 10000.0 there and 5.0 here")
    refused(tiny("qwen3"), saved, "model_type is 'llama' there")


def test_the_base_is_hashed_once_and_again_when_it_changes(monkeypatch):
    hashed = []
    monkeypatch.setattr(files, "tensors_hash", lambda tensors: hashed.append(1) or tensors_hash(tensors))
    base = tiny("llama")
    net = attractor.retrofit(base, SMALL)

    def hashes_of_base() -> int:
        hashed.clear()
        state = net.state_dict()
        told = json.loads(bytes(state["retrofits.default.description"].tolist()))
        assert told["base"]["weights"] == tensors_hash(base.state_dict())
        return len(hashed) - 1  # one is of the layers

    weight = base.get_output_embeddings().weight
    assert hashes_of_base() == 1
    assert hashes_of_base() == 0
    changes = [
        lambda: weight.mul_(2),
        lambda: base.load_state_dict({name: value + 1 for name, value in base.state_dict().items()}),
        lambda: base.set_output_embeddings(torch.nn.Linear(*weight.T.shape, bias=False)),
        lambda: base.double(),
    ]
    for change in changes:
        with torch.no_grad():
            change()
        assert hashes_of_base() == 1
        assert hashes_of_base() == 0


def test_a_place_that_the_base_has_not_is_refused(saved):
    tensors = {k.replace("layers.1", "layers.7"): v for k, v in load_file(saved / files.WEIGHTS).items()}
    edit(lambda t: (t.clear(), t.update(tensors)))(saved)
    described = json.loads((saved / files.CONFIG).read_text().replace("layers.1", "layers.7"))
    described["tensors"] = tensors_hash(load_file(saved / files.WEIGHTS))
    describe(lambda d: (d.clear(), d.update(described)))(saved)
    refused(tiny("llama"), saved, r"a layer for model.layers.7.mlp, which the base has not")


def test_two_places_in_one_block_are_refused(saved):
    def both(text):
        return text.replace("layers.1.mlp", "layers.0.self_attn")

    tensors = {both(key): value for key, value in load_file(saved / files.WEIGHTS).items()}
    described = json.loads(both((saved / files.CONFIG).read_text()))
    described["tensors"] = tensors_hash(tensors)
    describe(lambda d: (d.clear(), d.update(described)))(saved)
    edit(lambda t: (t.clear(), t.update(tensors)))(saved)
    refused(tiny("llama"), saved, "are two places in one block")


def test_no_folder_is_a_clear_error():
    refused(tiny("llama"), None, "holds no retrofit that can be read")


def test_a_failed_load_leaves_other_retrofits_alone(saved):
    net = teach(attractor.retrofit(tiny("llama"), SMALL, name="mine"), seed=8)
    expected = logits(net)
    (saved / files.WEIGHTS).write_bytes(b"")
    with pytest.raises(ValueError, match="holds no retrofit"):
        attractor.load_retrofit(net, saved)
    assert net.active == "mine"
    assert torch.equal(logits(net), expected)


def test_saving_replaces_retrofits_and_nothing_else(saved, monkeypatch):
    net = teach(attractor.retrofit(tiny("llama"), SMALL), seed=8)
    before = (saved / files.WEIGHTS).read_bytes()

    def full(*_, **__):
        raise files.SafetensorError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(OSError, match="no space left"):
            net.save_pretrained(saved)
    assert (saved / files.WEIGHTS).read_bytes() == before
    net.save_pretrained(saved)
    assert (saved / files.WEIGHTS).read_bytes() != before
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'notes.txt', and saving replaces"):
        net.save_pretrained(saved)
    with pytest.raises(ValueError, match="is a file"):
        net.save_pretrained(saved / "notes.txt")
    (saved.parent / "peft").mkdir()
    (saved.parent / "peft" / files.CONFIG).write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match="that is no retrofit: choose another folder"):
        net.save_pretrained(saved.parent / "peft")
    with torch.no_grad():
        net.apn_layers()[0].encoder[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.encoder holds numbers that are not finite"):
        net.save_pretrained(saved.parent / "new")
    assert not (saved.parent / "new").exists()


# --- what earlier versions wrote


@pytest.mark.parametrize("folder", sorted(RETROFITS.iterdir()), ids=lambda folder: folder.name)
def test_earlier_retrofits_load_and_predict_the_same(folder):
    """Never rewrite these folders: that they still load is the test."""
    config = transformers.AutoConfig.from_pretrained(folder / "base")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(load_file(folder / "base" / "model.safetensors"))
    expected = load_file(folder / "expected.safetensors")
    net = attractor.load_retrofit(model, folder / "retrofit")
    torch.testing.assert_close(logits(net, expected["tokens"]), expected["logits"], rtol=1e-4, atol=1e-5)
    net.use(None)
    torch.testing.assert_close(logits(net, expected["tokens"]), expected["base_logits"], rtol=1e-4, atol=1e-5)
    assert (expected["logits"] - expected["base_logits"]).abs().max() > 0.01
