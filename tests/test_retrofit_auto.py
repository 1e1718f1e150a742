"""Saved retrofits and the Auto classes of transformers, also in a process of their own."""

import json
import subprocess
import sys

import pytest
import torch
from families import FAMILIES, SMALL, logits, some_tokens, teach, tiny, transformers
from safetensors.torch import load_file, save_file

import attractor
from attractor.hf import files
from attractor.hf.auto import load_with_base
from attractor.hf.known import RetrofitConfig

READ_ALL = """
import sys
import attractor
attractor.retrofit  # as is all of the core
assert "transformers" not in sys.modules
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
tokens, found = load_file("tokens")["tokens"], {}
for family in sys.argv[1:]:
    net = AutoModelForCausalLM.from_pretrained(f"{family}/saved")
    with torch.no_grad():
        found[family] = net(input_ids=tokens).logits
save_file(found, "found")
"""


def make(folder, family="llama", dtype=torch.float32):
    tiny(family, dtype).save_pretrained(folder / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
    net = teach(attractor.retrofit(base, SMALL))
    net.save_pretrained(folder / "saved")
    return net


def test_every_family_is_equal_to_the_last_bit_in_a_fresh_process(tmp_path):
    expected = {family: logits(make(tmp_path / family, family)) for family in FAMILIES}
    save_file({"tokens": some_tokens()}, tmp_path / "tokens")
    subprocess.run([sys.executable, "-c", READ_ALL, *FAMILIES], cwd=tmp_path, check=True)
    found = load_file(tmp_path / "found")
    assert [family for family in FAMILIES if not torch.equal(found[family], expected[family])] == []


def test_the_base_has_the_dtype_that_it_had(tmp_path):
    net = make(tmp_path, dtype=torch.bfloat16)
    for dtype in (None, "auto", "bfloat16", torch.bfloat16):
        again = load_with_base(tmp_path / "saved", dtype=dtype, device_map="cpu")
        assert again.dtype == torch.bfloat16
        assert torch.equal(logits(again), logits(net))
    with pytest.raises(ValueError, match=r"dtype=torch.float32 is not torch.bfloat16, that of the base"):
        load_with_base(tmp_path / "saved", dtype=torch.float32)


def test_a_folder_without_its_config_says_what_it_is(tmp_path):
    make(tmp_path)
    (tmp_path / "saved" / "config.json").unlink()
    with pytest.raises(OSError, match=r"this is a retrofit, which attractor\.load_retrofit"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


def test_a_base_of_another_shape_is_not_loaded(tmp_path):
    make(tmp_path)
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match="another base: num_hidden_layers is 2 there and 1000000000 here"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


def test_a_base_without_data_is_a_clear_error(tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match=r"of the base has no data: load the base before its retrofit"):
        attractor.load_retrofit(tiny("llama").to("meta"), tmp_path / "saved")


def test_the_hash_of_a_base_on_a_disk_is_read_from_the_disk(tmp_path):
    make(tmp_path)
    options = {"device_map": {"": "disk"}, "offload_folder": str(tmp_path / "kept")}
    net = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    assert files.base_hash(net.model) == files.base_hash(tiny("llama"))
    weights = next(path for path in (tmp_path / "base").glob("*.safetensors"))
    state = load_file(weights)
    state["model.norm.weight"] = state["model.norm.weight"] * 2
    save_file(state, weights, {"format": "pt"})
    with pytest.raises(ValueError, match="another base, with weights"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)


def test_a_base_that_cannot_be_had_is_a_clear_error(tmp_path):
    make(tmp_path)
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"there is no '.*base' here"):
        attractor.hf.Retrofit.from_pretrained(tmp_path / "saved")
    tiny("llama", seed=1).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="another base, with weights"):
        attractor.hf.Retrofit.from_pretrained(tmp_path / "saved")
    attractor.retrofit(tiny("llama"), SMALL).save_pretrained(tmp_path / "unnamed")
    with pytest.raises(ValueError, match=r"does not say where its base is: .* attractor\.load_retrofit"):
        load_with_base(tmp_path / "unnamed")
    with pytest.raises(ValueError, match="there is no folder 'org/name': fetch a retrofit"):
        load_with_base("org/name")


def test_the_configuration_is_registered(tmp_path):
    make(tmp_path)
    assert type(transformers.AutoConfig.from_pretrained(tmp_path / "saved")) is RetrofitConfig


def test_a_pipeline_writes_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    net = make(tmp_path)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({chr(48 + i): i for i in range(64)}, unk_token="0")
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    options = {"max_new_tokens": 4, "do_sample": False, "return_tensors": True}
    (written,) = transformers.pipeline("text-generation", str(tmp_path / "saved"), tokenizer=tokenizer)(
        "5", **options
    )
    expected = net.generate(torch.tensor([[5]]), max_new_tokens=4, do_sample=False)[0]
    assert written["generated_token_ids"] == expected.tolist()
