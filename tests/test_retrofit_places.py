"""Where APN layers go: FFNs that are found by structure or named by a pattern, and what is no FFN."""

import pytest
import torch
from families import (
    COMMON,
    GATED,
    SMALL,
    assert_same,
    logits,
    snapshot,
    some_tokens,
    teach,
    tiny,
    transformers,
)
from torch import nn

import attractor
from attractor.hf.find import find_places

PLACES = {
    "gpt2": "transformer.h.{}.mlp",
    "llama": "model.layers.{}.mlp",
    "gpt_neox": "gpt_neox.layers.{}.mlp",
    "opt": "model.decoder.layers.{}.fc1",
    "mpt": "transformer.blocks.{}.ffn",
}


@pytest.mark.parametrize("family", PLACES)
def test_places(family):
    model = tiny(family)
    names = [PLACES[family].format(number) for number in (0, 1)]
    assert [place.name for place in find_places(model, "all")] == names
    assert [place.name for place in find_places(model, [1])] == names[1:]
    assert [place.name for place in find_places(model, PLACES[family].format("*"))] == names
    assert [place.name for place in find_places(model, PLACES[family].format("[0-0]"))] == names[:1]
    assert len(find_places(model, "all")[0].modules) == (3 if family == "opt" else 1)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([2], r"no FFNs in layers \[2\]; there are in \[0, 1\]"),
        ([0, 0], "list of different layer numbers"),
        ([], "list of different layer numbers"),
        ([True], "list of different layer numbers"),
        (["mlp"], "list of different layer numbers"),
        (
            "model.layers.*.ffn",
            r"names no module of LlamaForCausalLM. Candidates: .*'model.layers.\*.mlp' \(2\)",
        ),
        ("model.layers.*.mlp.*_proj", "two places in one block"),
    ],
)
def test_layers_that_are_not_there(layers, message):
    model = tiny("llama")
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        attractor.retrofit(model, SMALL, layers=layers)
    assert_same(before, snapshot(model))


def test_unknown_architecture_lists_candidates_and_takes_a_pattern():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        is_decoder=True,
    )
    model = transformers.BertLMHeadModel(config).eval()
    with pytest.raises(ValueError, match=r"no FFNs that are known.*'bert.encoder.layer.\*.attention' \(2\)"):
        attractor.retrofit(model, SMALL)
    expected = logits(model)
    net = attractor.retrofit(model, SMALL, layers="bert.encoder.layer.*.attention.output.dense")
    assert torch.equal(logits(net), expected)
    assert not torch.equal(logits(teach(net)), expected)


def from_config(family, **options):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **COMMON | GATED | options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])  # one returns a tensor, one also its routing
def test_beside_a_mixture_of_experts(family):
    model = from_config(family, num_local_experts=4, num_experts_per_tok=2)
    expected = logits(model)
    net = attractor.retrofit(model, SMALL)
    assert torch.equal(logits(net), expected)
    assert not torch.equal(logits(teach(net)), expected)
    assert torch.equal(logits(net.unload()), expected)
    net = attractor.retrofit(model, SMALL, prototypes="kmeans", sample=some_tokens(4, 16))
    assert torch.equal(logits(net), expected)


def test_a_split_ffn_with_dropout_inside_is_refused():
    options = {"ffn_dim": 64, "num_layers": 2, "attention_heads": 4}
    assert list(attractor.retrofit(from_config("xglm", **options), SMALL).apn_layers()) == [0, 1]
    with pytest.raises(
        ValueError, match=r"model.layers.0 drops activations .* set its activation_dropout to 0"
    ):
        attractor.retrofit(from_config("xglm", activation_dropout=0.1, **options), SMALL)


def test_two_lists_of_blocks_are_not_guessed_between():
    model = tiny("llama")
    model.vision = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": nn.Linear(32, 32)})])})
    model.vision.layers[0].mlp = model.vision.layers[0]["mlp"]
    net = attractor.retrofit(model, SMALL)  # what reads the text is known
    assert [site.place.name for site in net.sites.values()] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    net.unload()
    model.model.vision = model.vision
    with pytest.raises(ValueError, match=r"FFNs in 2 lists, model.layers, model.vision.layers"):
        attractor.retrofit(model, SMALL)
    assert list(attractor.retrofit(model, SMALL, layers="model.layers.*.mlp").apn_layers()) == [0, 1]


def test_of_a_model_that_sees_what_reads_is_found():
    text = COMMON | GATED | {"query_pre_attn_scalar": 8}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=63,
        boi_token_index=61,
        eoi_token_index=62,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = some_tokens() % 60
    expected = logits(model, tokens)
    net = attractor.retrofit(model, SMALL)
    assert [site.place.name for site in net.sites.values()] == [
        "model.language_model.layers.0.mlp",
        "model.language_model.layers.1.mlp",
    ]
    assert torch.equal(logits(net, tokens), expected)
    assert not torch.equal(logits(teach(net), tokens), expected)
    assert torch.equal(logits(net.unload(), tokens), expected)


def test_a_place_deep_in_a_block():
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp = nn.Sequential(layer.mlp, nn.Identity(), nn.Identity())
    net = attractor.retrofit(model, SMALL, layers="model.layers.*.mlp.0")
    assert [site.place.name for site in net.sites.values()] == [
        "model.layers.0.mlp.0",
        "model.layers.1.mlp.0",
    ]
    with pytest.raises(ValueError, match="two places in one block"):
        net.add("more", SMALL, layers="model.layers.*.mlp.*")


def test_a_module_of_two_blocks_is_refused():
    model = tiny("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(ValueError, match=r"model.layers.0.mlp and model.layers.1.mlp share a module"):
        attractor.retrofit(model, SMALL)
    with pytest.raises(ValueError, match="share a module"):
        attractor.retrofit(model, SMALL, layers="model.layers.*.mlp")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("model.layers.*.mlp.down_proj", r"down_proj is given .* and hidden states have width 32"),
        ("model.layers.*.mlp.gate_proj", r"gate_proj is given .* and returns"),
        ("lm_head", "lm_head is given .* and returns"),
        ("model.embed_tokens", r"embed_tokens is given .*int64"),
    ],
)
def test_a_module_that_is_no_ffn_is_named(layers, message):
    net = attractor.retrofit(tiny("llama"), SMALL, layers=layers)
    with pytest.raises(ValueError, match=message):
        logits(net)
    assert torch.equal(logits(net.unload()), logits(tiny("llama")))
