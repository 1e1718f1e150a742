"""Tiny random models of the families that a retrofit is tested with: width 32, two layers, 64 tokens."""

import pytest
import torch

from attractor import APNConfig

transformers = pytest.importorskip("transformers", reason="transformers is not installed: the extra hf")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "gpt2": {"n_inner": 64},
    "gptj": {"n_inner": 64, "rotary_dim": 4},
    "bloom": {},
    "falcon": {},
    "llama": GATED,
    "mistral": GATED,
    "qwen2": GATED,
    "qwen3": GATED,
    "gemma2": GATED | {"query_pre_attn_scalar": 8},
    "gemma3_text": GATED | {"query_pre_attn_scalar": 8},
    "phi": {"intermediate_size": 64},
    "phi3": {"intermediate_size": 64, "num_key_value_heads": 2},
    "olmo2": GATED,
    "smollm3": GATED,
    "gpt_neox": {"intermediate_size": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mpt": {"expansion_ratio": 2, "max_seq_len": 64},
}
SMALL = APNConfig(num_patches=8, top_k=2, rank=4)


def tiny(family, dtype=torch.float32, seed=0, **shape):
    """A model of this family, ready to predict."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **COMMON | FAMILIES[family] | shape)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def some_tokens(rows=3, time=12, seed=1):
    return torch.randint(64, (rows, time), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, tokens=None):
    return model(input_ids=some_tokens() if tokens is None else tokens).logits


@torch.no_grad()
def teach(net, seed=2):
    """Decoders that do something, without training."""
    generator = torch.Generator().manual_seed(seed)
    for layer in net.apn_layers().values():
        layer.decoder += 0.5 * torch.randn(layer.decoder.shape, generator=generator).to(layer.decoder)
    return net


def snapshot(model):
    return (
        {name: id(module) for name, module in model.named_modules()},
        {name: (id(p), p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()},
        {name: vars(module).get("forward") for name, module in model.named_modules()},
    )


def assert_same(before, after):
    assert before[0] == after[0]
    assert before[2] == after[2]
    assert before[1].keys() == after[1].keys()
    for name, (identity, flag, values) in before[1].items():
        assert (identity, flag) == after[1][name][:2]
        assert torch.equal(values, after[1][name][2])
