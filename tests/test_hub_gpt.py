"""A GPT of ours as a model of transformers: the same logits, and nothing that is lost or ignored."""

import subprocess
import sys
import types

import pytest
import torch
from families import SMALL, some_tokens, transformers
from safetensors.torch import load_file, save_file

import attractor
from attractor import GPT, GPTConfig, announce, tokenizer
from attractor.hf.gpt import GPTForCausalLM

READ = """
import sys
import attractor
assert "transformers" not in sys.modules and "torch" not in sys.modules
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, pipeline
tokens, found = load_file("tokens")["tokens"], {}
for name in ("float32", "bfloat16", "plain"):
    found[name] = AutoModelForCausalLM.from_pretrained(name)(tokens).logits.detach()
save_file(found, "found")
((written,),) = pipeline("text-generation", "plain")(["ab"], max_new_tokens=3, do_sample=False)
open("written", "w").write(written["generated_text"])
"""
WITHOUT_US = """
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained("plain")
except ValueError as error:
    print(error)
"""


def gpt(dtype=torch.float32):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, context=16, num_layers=2, num_heads=2, dim=32, ffn="apn", apn=SMALL))
    model.apn_layers()[1].resize(11)  # layers may have grown apart
    return model.to(dtype).eval()


def test_the_same_logits_in_a_fresh_process(tmp_path):
    models = {"float32": gpt(torch.float32), "bfloat16": gpt(torch.bfloat16), "plain": gpt()}
    models["plain"].save_pretrained(tmp_path / "plain")
    words = tokenizer.CharTokenizer(map(chr, range(64, 128)))
    words.save(tmp_path / "plain" / "tokenizer.json")
    for name in ("float32", "bfloat16"):
        model = models[name]
        GPTForCausalLM.of(model).save_pretrained(tmp_path / name)
        names = {path.name for path in (tmp_path / name).iterdir()}
        assert names == {
            "README.md",
            "config.json",
            "generation_config.json",
            "hashes.json",
            "model.safetensors",
        }
        assert "| ffn | apn |" in (tmp_path / name / "README.md").read_text()
    save_file({"tokens": some_tokens()}, tmp_path / "tokens")
    subprocess.run([sys.executable, "-c", READ], cwd=tmp_path, check=True)
    found = load_file(tmp_path / "found")
    for name, model in models.items():
        assert torch.equal(found[name], model(some_tokens())), name
    expected = attractor.load(tmp_path / "plain", device="cpu").generate("ab", max_tokens=3)
    assert (tmp_path / "written").read_text() == f"ab{expected}"


def test_without_this_package_the_remedy_is_told(tmp_path):
    gpt().save_pretrained(tmp_path / "plain")
    run = [sys.executable, "-c", WITHOUT_US]
    said = subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "attractor_gpt, which attractor.hf.register() of attractor-patch-networks makes known" in said


FIRST = ["modeling_utils", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "generation.utils", "modelcard", "modeling_layers", "models.auto.tokenization_auto",
    "models.llama.modeling_llama", "pipelines", "processing_utils", "trainer",
))]  # fmt: skip


@pytest.mark.parametrize("first", FIRST)
def test_whatever_of_transformers_is_imported_first_both_are_known(first):
    script = f"""import attractor, transformers.{first}
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
names = [config.__name__ for config in AutoModelForCausalLM._model_mapping._extra_content]
assert names == ["RetrofitConfig", "HubGPTConfig"], names
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_transformers_works_on_where_it_cannot_be_told(monkeypatch):
    module = types.ModuleType("modeling_auto")  # of a release that has no such classes
    with pytest.warns(UserWarning, match=r"AutoModelForCausalLM.*: pip install .attractor-patch-networks.hf"):
        announce._register("modeling_auto", module)


def test_the_same_whichever_class_has_saved_it(tmp_path):
    model = gpt()
    GPTForCausalLM.of(model).save_pretrained(tmp_path / "hub")
    assert torch.equal(GPT.from_pretrained(tmp_path / "hub")(some_tokens()), model(some_tokens()))
    (tmp_path / "hub" / "tokenizer.json").write_text(tokenizer.ByteTokenizer().to_json())
    assert attractor.load(tmp_path / "hub", device="cpu").model.config == model.config_now()


TEXT = "Gr\u00fc\u00dfe an die Welt!\n\x00 \u4e16\u754c  ok"


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_a_tokenizer_of_ours_is_one_of_transformers(kind, tmp_path):
    own = tokenizer.train(kind, TEXT * 20, 260 if kind == "bpe" else None)
    gpt().save_pretrained(tmp_path)
    own.save(tmp_path / "tokenizer.json")
    for _ in range(2):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert theirs(TEXT)["input_ids"] == own.encode(TEXT).tolist()
        assert theirs.decode(own.encode(TEXT)) == TEXT
        theirs.save_pretrained(tmp_path)  # as transformers writes it
    if kind == "char":
        with pytest.raises(Exception, match="Missing"):
            theirs("Q")


def test_what_grows_later_is_saved_too_and_a_card_stays(tmp_path):
    model = GPTForCausalLM.of(gpt())
    model.gpt.apn_layers()[0].resize(9)
    tmp_path.joinpath("README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {n: layer.num_patches for n, layer in again.gpt.apn_layers().items()} == {0: 9, 1: 11}
    assert torch.equal(again(some_tokens()).logits, model(some_tokens()).logits)
    assert again.generate(some_tokens(1, 4), max_new_tokens=2).shape == (1, 6)
    assert tmp_path.joinpath("README.md").read_text() == "mine"


def test_a_tensor_that_is_missing_or_too_many_is_refused(tmp_path):
    GPTForCausalLM.of(gpt()).save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    key, shape = "gpt.blocks.1.ffn.decoder", r"\(11, 4, 32\)"
    for state, message in (
        ({name: value for name, value in whole.items() if name != key}, f"{shape}, the file nothing"),
        ({**whole, "gpt.colour": torch.zeros(1)}, r"nothing, the file \(1,\)"),
        ({**whole, key: whole[key][1:].clone()}, rf"{shape}, the file \(10, 4, 32\)"),
    ):
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"model\.safetensors is not what was saved"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        (tmp_path / "hashes.json").unlink()
        with pytest.raises(ValueError, match=rf"does not fit its config.json: .*the model has {message}"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        GPTForCausalLM.of(gpt()).save_pretrained(tmp_path)


def test_it_generates_and_learns_and_refuses_what_it_cannot_read():
    model, tokens = GPTForCausalLM.of(gpt()), some_tokens(2, 8)
    written = model.generate(tokens, max_new_tokens=3, do_sample=False)
    expected = tokens
    for _ in range(3):
        expected = torch.cat([expected, model.gpt(expected)[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, expected)
    logits = model.gpt(tokens)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(model(tokens, labels=tokens).loss, loss)
    halved = model(tokens, labels=tokens, num_items_in_batch=2 * tokens[:, 1:].numel()).loss
    torch.testing.assert_close(halved, loss / 2)  # as Trainer accumulates gradients
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="reads no padding"):
        model(tokens, attention_mask=mask)
    for options in ({"use_cache": False}, {"num_beams": 1, "cache_implementation": "dynamic"}):
        assert torch.equal(model.generate(tokens, max_new_tokens=3, do_sample=False, **options), expected)
    with pytest.raises(ValueError, match="a StaticCache: leave cache_implementation= out"):
        model.generate(tokens, max_new_tokens=3, cache_implementation="static")


def test_what_a_trainer_writes_loads_again(tmp_path):
    model = GPTForCausalLM.of(gpt())
    before = model.gpt.apn_layers()[0].decoder.clone()
    rows = [{"input_ids": row, "labels": row} for row in some_tokens(4, 8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=2,
        save_steps=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert not torch.equal(model.gpt.apn_layers()[0].decoder, before)
    for folder in (tmp_path / "saved", tmp_path / "run" / "checkpoint-2"):
        again = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(again(some_tokens()).logits, model.eval()(some_tokens()).logits)
