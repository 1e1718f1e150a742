"""A GPT of ours as a model of transformers: the same logits, and nothing that is lost or ignored."""

import subprocess
import sys

import pytest
import torch
from families import SMALL, some_tokens, transformers
from safetensors.torch import load_file, save_file

from attractor import GPT, GPTConfig
from attractor.hf.gpt import GPTForCausalLM

READ = """
import attractor.hf
attractor.hf.register()
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
tokens, found = load_file("tokens")["tokens"], {}
for name in ("float32", "bfloat16"):
    found[name] = AutoModelForCausalLM.from_pretrained(name)(tokens).logits.detach()
save_file(found, "found")
"""


def gpt(dtype=torch.float32):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, context=16, num_layers=2, num_heads=2, dim=32, ffn="apn", apn=SMALL))
    model.apn_layers()[1].resize(11)  # layers may have grown apart
    return model.to(dtype).eval()


def test_the_same_logits_in_a_fresh_process(tmp_path):
    models = {"float32": gpt(torch.float32), "bfloat16": gpt(torch.bfloat16)}
    for name, model in models.items():
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
    with pytest.raises(ValueError, match="give use_cache=False"):
        model.generate(tokens, max_new_tokens=3, use_cache=True)


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
