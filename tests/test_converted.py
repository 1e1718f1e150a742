"""A GGUF file is converted once: what is read from the cache is what the file itself gives, to the bit."""

import hashlib
import json
import logging
import re

import numpy as np
import pytest
import torch
from families import transformers  # skips this file where it is missing

from attractor import corpora
from attractor.hf import converted, pretrained
from attractor.hf.files import base_fields
from attractor.hf.pretrained import load_pretrained

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
DIM, LAYERS = 32, 2
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A tiny Llama with a byte tokenizer, quantised to 8 bits."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * DIM)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "to", "be", "<end>"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["t o", "b e"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)
    chance = np.random.default_rng(0)

    def add(name, *shape):
        values = chance.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            return
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), DIM)
    add("output_norm.weight", DIM)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", DIM)
        for name, rows, columns in [
            ("attn_q", DIM, DIM),
            ("attn_k", DIM // 2, DIM),
            ("attn_v", DIM // 2, DIM),
            ("attn_output", DIM, DIM),
            ("ffn_gate", 2 * DIM, DIM),
            ("ffn_up", 2 * DIM, DIM),
            ("ffn_down", DIM, 2 * DIM),
        ]:
            add(f"blk.{layer}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTRACTOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def kept(written, cache):
    """What the direct reading gave, and the folder that it left in the cache."""
    direct = load_pretrained(written)
    (folder,) = (cache / "models").iterdir()
    return direct, folder


def forbid_reading(monkeypatch):
    def read_once():
        raise AssertionError("the GGUF file was read again")

    monkeypatch.setattr(converted, "read_once", read_once)


def assert_same(one, other):
    (model, tokenizer), (again, tokenizer_again) = one, other
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens).logits, again(tokens).logits)
    assert json.dumps(base_fields(model)) == json.dumps(base_fields(again))  # in the same order
    assert model.name_or_path == again.name_or_path
    assert tokenizer == tokenizer_again
    assert tokenizer.ends == tokenizer_again.ends == (258,)
    said = [{"role": "user", "content": "to"}]
    assert tokenizer.chat(said) == tokenizer_again.chat(said) == "<to>"


def test_the_second_reading_gives_the_same_to_the_bit(kept, written, monkeypatch):
    forbid_reading(monkeypatch)
    assert_same(kept[0], load_pretrained(written))
    half = load_pretrained(written, dtype=torch.bfloat16)[0]
    assert torch.equal(half.lm_head.weight, kept[0][0].lm_head.weight.bfloat16())


def test_numbers_of_less_precision_are_not_kept(written, cache):
    half = load_pretrained(written, dtype=torch.bfloat16)[0].lm_head.weight
    assert not cache.exists()
    assert not torch.equal(load_pretrained(written)[0].lm_head.weight, half.float())


def test_reading_once_gives_what_transformers_gives(kept, written):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written.parent, gguf_file=written.name)
    state = theirs.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in kept[0][0].state_dict().items())


def test_the_name_of_the_file_does_not_matter_and_its_content_does(kept, written, tmp_path, monkeypatch):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(written.read_bytes())
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(written.read_bytes().replace(b"<end>", b"<END>"))
    assert load_pretrained(changed)[1] != kept[0][1]
    forbid_reading(monkeypatch)
    model, _ = load_pretrained(copy)
    assert model.name_or_path == str(copy)
    assert base_fields(model)["quantization_config"]["gguf_file"] == "copy.gguf"


def cut_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def flip_a_bit(folder):
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def told_otherwise(folder):
    told = json.loads((folder / "manifest.json").read_text())
    told["versions"]["transformers"] = "4.0"
    (folder / "manifest.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut_weights, "model.safetensors is not what was written: its hash differs"),
        (flip_a_bit, "model.safetensors is not what was written: its hash differs"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing or not part of it"),
        (lambda folder: (folder / "more.json").write_text("{}"), "more.json is missing or not part of it"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "Expecting property name"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "no attribute"),
        (lambda folder: (folder / "manifest.json").unlink(), "No such file"),
        (told_otherwise, r"other versions made it: .*'transformers': '4\.0'"),
    ],
)
def test_what_is_damaged_is_told_and_made_again(damage, reason, kept, written, caplog, monkeypatch):
    direct, folder = kept
    damage(folder)
    assert_same(direct, load_pretrained(written))
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "; converting the model again" in warning
    assert re.search(reason, warning)
    forbid_reading(monkeypatch)
    assert_same(direct, load_pretrained(written))


def test_without_a_cache_the_model_is_still_read(written, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTRACTOR_CACHE", str(tmp_path / "file"))
    assert load_pretrained(written)[0].config.hidden_size == DIM
    assert "could not keep" in caplog.text


def test_what_a_killed_process_left_goes(kept, written, cache):
    _, folder = kept
    left = folder.with_name(f".partial-{folder.name}-1")
    folder.rename(left)
    load_pretrained(written)
    assert [path.name for path in (cache / "models").iterdir()] == [folder.name]


def test_a_large_file_is_not_kept(written, cache, monkeypatch):
    monkeypatch.setattr(converted, "MOST_BYTES", 1000)
    load_pretrained(written)
    assert not cache.exists()


def test_smollm2_needs_its_file_only_once(kept, written, monkeypatch):
    monkeypatch.setattr(pretrained, "SMOLLM2_SHA256", hashlib.sha256(written.read_bytes()).hexdigest())
    monkeypatch.setattr(corpora, "read_members", lambda archive: pytest.fail("it was fetched"))
    model, _ = load_pretrained("smollm2-135m")
    assert torch.equal(model.lm_head.weight, kept[0][0].lm_head.weight)
    assert base_fields(model)["quantization_config"]["gguf_file"] == pretrained.SMOLLM2_FILE


def test_gguf_without_its_library_is_told(written, monkeypatch):
    def version(name):
        raise pretrained.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pretrained.metadata, "version", version)
    with pytest.raises(ValueError, match=r'needs the extra "hf": pip install .* \(.*gguf'):
        load_pretrained(written)
