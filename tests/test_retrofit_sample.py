"""What a sample of text gives a retrofit: prototypes among the model's activations, and FFNs distilled."""

import pytest
import torch
from families import SMALL, logits, some_tokens, tiny

import attractor
from attractor import APNConfig
from attractor.hf.build import relative_error
from attractor.hf.find import find_places
from attractor.hf.sample import activations, set_prototypes


@pytest.mark.parametrize("family", ["llama", "bloom", "opt"])
def test_activations_are_the_ffns_own(family):
    model = tiny(family)
    place = find_places(model, [1])[0]
    ((_, inputs, outputs),) = activations(model, [place], list(some_tokens(4, 16).split(2)))
    assert inputs.shape == outputs.shape == (64, 32)
    own = inputs
    with torch.no_grad():
        for module in place.modules:
            own = module(own, torch.zeros_like(own)) if family == "bloom" else module(own)
    torch.testing.assert_close(outputs, own)


@pytest.mark.parametrize("groups", [1, 2])
def test_kmeans_puts_prototypes_among_the_tokens(groups):
    torch.manual_seed(0)
    more = {"prototypes": "contextual", "routing_dim": 8, "routing_groups": 2} if groups == 2 else {}
    config = APNConfig(num_patches=4, top_k=1, rank=2, **more)
    layer = attractor.APN.from_config(16, config)
    centres = torch.randn(4, 16)
    truth = torch.arange(400) % 4
    tokens = 3 * centres[truth] + 0.1 * torch.randn(400, 16)
    lengths = layer.prototypes.norm(dim=1)
    set_prototypes(layer, tokens, seed=0)
    torch.testing.assert_close(layer.prototypes.norm(dim=1), lengths)
    _, stats = layer(tokens, return_stats=True)
    chosen = stats.indices[:, 0]
    assert len({(int(a), int(b)) for a, b in zip(truth, chosen, strict=True)}) == 4
    assert stats.confidence.min() > 0.9
    again = attractor.APN.from_config(16, config)
    again.load_state_dict(layer.state_dict())
    set_prototypes(again, tokens, seed=0)
    torch.testing.assert_close(again.prototypes, layer.prototypes)


def test_kmeans_is_nearer_to_tokens_than_chance():
    model, sample = tiny("llama"), some_tokens(16, 32)
    confidence = {}
    for prototypes in ("random", "kmeans"):
        config = APNConfig(num_patches=16, top_k=1, rank=2)
        net = attractor.retrofit(model, config, prototypes=prototypes, sample=sample)
        with net.recording(sample.shape) as stats:
            logits(net, sample)
        confidence[prototypes] = attractor.monitor.summary(stats[0])["confidence_mean"]
        net.unload()
    assert confidence["kmeans"] > confidence["random"] + 0.1


class Letters:
    """A tokenizer, as far as a sample needs one."""

    def __call__(self, text):
        return {"input_ids": [ord(letter) % 64 for letter in text]}


def test_a_sample_of_texts():
    texts = ["To be, or not to be", "", "that is the question"]
    net = attractor.retrofit(tiny("llama"), SMALL, prototypes="kmeans", sample=texts, tokenizer=Letters())
    ids = Letters()(texts[2])["input_ids"]
    same = attractor.retrofit(
        tiny("llama"), SMALL, prototypes="kmeans", sample=texts[2:], tokenizer=Letters()
    )
    rows = attractor.retrofit(tiny("llama"), SMALL, prototypes="kmeans", sample=torch.tensor([ids]))
    assert torch.equal(same.apn_layers()[1].prototypes, rows.apn_layers()[1].prototypes)
    assert not torch.equal(same.apn_layers()[1].prototypes, net.apn_layers()[1].prototypes)
    long = ["To be, or not to be, that is the question. " * 3]  # longer than the context
    attractor.retrofit(tiny("gpt2"), SMALL, prototypes="kmeans", sample=long, tokenizer=Letters())


@pytest.mark.parametrize(
    ("family", "dtype"), [("gpt2", torch.float32), ("olmo2", torch.float32), ("bloom", torch.bfloat16)]
)
def test_distilling_reduces_the_error(family, dtype):
    config = APNConfig(num_patches=8, top_k=4, rank=32)
    sample = some_tokens(32, 32)
    errors = {}
    for steps in (1, 150):
        model = tiny(family, dtype)
        net = attractor.retrofit(model, config, layers=[0], mode="replace", sample=sample, steps=steps)
        errors[steps] = net.errors["default"][0]
        layer, place = net.apn_layers()[0].float(), net.sites[0].place
        net.unload()
        ((_, inputs, outputs),) = activations(model, [place], list(some_tokens(8, 32, seed=9).split(8)))
        assert relative_error(layer, inputs, outputs) == pytest.approx(errors[steps], rel=0.2, abs=0.02)
    assert errors[150] < 0.75 * errors[1]


@pytest.mark.parametrize("family", ["llama", "bloom", "opt"])
def test_a_float32_layer_in_place_of_a_bfloat16_ffn(family):
    sample = some_tokens(4, 16)
    for prototypes in ("random", "kmeans"):
        net = attractor.retrofit(
            tiny(family, torch.bfloat16),
            SMALL,
            mode="replace",
            prototypes=prototypes,
            sample=sample,
            steps=2,
            dtype=torch.float32,
        )
        assert {parameter.dtype for parameter in net.trainable_parameters()} == {torch.float32}
        seen = []
        place = net.sites[0].place
        place.modules[-1].register_forward_hook(lambda module, given, output, seen=seen: seen.append(output))
        assert logits(net).dtype == torch.bfloat16
        assert seen[0].dtype == torch.bfloat16
