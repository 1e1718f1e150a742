"""The three kinds of language models are what the package asks for: mypy reads this file too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import SMALL, tiny

import attractor
from attractor.config import APNConfig, GPTConfig
from attractor.continual.guard import Guard
from attractor.evaluate import evaluate, routing
from attractor.generate import generate
from attractor.hf import CausalLM
from attractor.lm import LanguageModel, TrainableModel, mode
from attractor.model import GPT

CONTEXT, VOCABULARY = 16, 64
TEXT = torch.arange(3 * CONTEXT).numpy() % 7


def gpt() -> GPT:
    torch.manual_seed(0)
    apn = APNConfig(num_patches=4, top_k=2, rank=2)
    size: dict[str, Any] = {"num_layers": 2, "num_heads": 1, "dim": 8}
    return GPT(GPTConfig(vocab_size=VOCABULARY, context=CONTEXT, ffn="apn", apn=apn, **size))


def causal() -> CausalLM:
    return CausalLM(attractor.retrofit(tiny("llama"), SMALL), context=CONTEXT)


def guard() -> Guard:
    model = causal()
    return Guard({"base": CausalLM(model.net, None, context=CONTEXT), "retrofit": model})


READ: list[Callable[[], LanguageModel]] = [gpt, causal, guard]
TAUGHT: list[Callable[[], TrainableModel]] = [gpt, causal]


@pytest.mark.parametrize("make", READ)
def test_language_models(make: Callable[[], LanguageModel]) -> None:
    model = make()
    assert isinstance(model, LanguageModel)
    assert isinstance(model, TrainableModel) == (make in TAUGHT)
    assert (model.config.vocab_size, model.config.context) == (VOCABULARY, CONTEXT)
    assert model.device == torch.device("cpu")
    model.train()
    with mode(model, training=False), torch.no_grad():
        tokens = torch.from_numpy(TEXT[None, :CONTEXT])
        whole, cache = model(tokens).log_softmax(-1), model.new_cache(1)
        pieces = [model(piece, cache=cache).log_softmax(-1) for piece in tokens.split([5, 1, 10], 1)]
    assert all(module.training for module in model.modules())
    assert cache.length == CONTEXT
    assert whole.shape == (1, CONTEXT, VOCABULARY)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)
    assert 0 < evaluate(model, TEXT) < 10
    assert len(list(generate(model, tokens[:, :3], max_tokens=20, seed=0))) == 20  # past the context


@pytest.mark.parametrize("make", TAUGHT)
def test_trainable_models_name_their_layers_alike(make: Callable[[], TrainableModel]) -> None:
    model = make()
    layers, names = model.apn_layers(), dict(model.named_parameters())
    assert routing(model, TEXT).keys() == layers.keys() == {0, 1}
    for number, layer in layers.items():
        for name, parameter in layer.named_parameters():
            full = f"blocks.{number}.ffn.{name}"
            assert names[full] is model.get_parameter(full) is parameter
            assert torch.equal(model.state_dict()[full], parameter)
    assert model.config_now().to_json()
