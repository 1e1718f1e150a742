import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attractor import analysis, monitor, presets
from attractor.config import APNConfig, GPTConfig, MoEConfig, TrainConfig
from attractor.generate import generate, sample
from attractor.layer import APN
from attractor.model import GPT, MLP, KVCache
from attractor.moe import MoE, Switch
from attractor.trainer import make_optimizer

SMALL = GPTConfig(
    vocab_size=11,
    context=16,
    num_layers=2,
    num_heads=2,
    dim=16,
    ffn="apn",
    apn=APNConfig(num_patches=8, rank=4),
)


def build(config: GPTConfig = SMALL, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


@pytest.mark.parametrize(
    ("preset", "millions"),
    [("paper_dense", 10.65), ("paper_apn", 23.21), ("best_apn", 80.34), ("gpt2_small_dense", 110.12)],
)
def test_parameters_of_the_presets(preset, millions):
    with torch.device("meta"):
        model = GPT(presets.NAMES[preset]().model)
    assert round(model.num_parameters() / 1e6, 2) == millions


def test_every_preset_has_a_docstring_and_survives_json():
    for preset in presets.NAMES.values():
        config = preset()
        assert preset.__doc__
        assert type(config).from_json(config.to_json()) == config


@pytest.mark.parametrize("bias", [False, True])
def test_dense_model_equals_torch(bias):
    """The dense model against PyTorch's own Transformer layers with the same weights."""
    config = dataclasses.replace(SMALL, ffn="mlp", bias=bias)
    model = build(config).double().eval()
    layers = []
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(
            16,
            2,
            64,
            0.0,
            nn.functional.gelu,
            batch_first=True,
            norm_first=True,
            bias=bias,
            dtype=torch.float64,
        ).eval()
        pairs = {
            "self_attn.in_proj_": block.attention.qkv,
            "self_attn.out_proj.": block.attention.out,
            "linear1.": block.ffn.up,
            "linear2.": block.ffn.out,
            "norm1.": block.norm_1,
            "norm2.": block.norm_2,
        }
        state = {prefix + name: p for prefix, part in pairs.items() for name, p in part.named_parameters()}
        layer.load_state_dict(state)
        layers.append(layer)
    tokens = torch.randint(11, (3, 16))
    h = model.embedding(tokens) + model.positions.weight
    mask = nn.Transformer.generate_square_subsequent_mask(16, dtype=torch.float64)
    for layer in layers:
        h = layer(h, src_mask=mask, is_causal=True)
    torch.testing.assert_close(model(tokens), model.norm(h) @ model.embedding.weight.T)


def test_causality():
    model = build().eval()
    tokens = torch.randint(11, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 11
    assert torch.equal(model(tokens)[:, :9], model(changed)[:, :9])
    assert not torch.equal(model(tokens)[:, 9:], model(changed)[:, 9:])


def test_layers_may_differ():
    config = dataclasses.replace(
        SMALL, num_layers=3, per_layer={"0": {"ffn": "mlp"}, "2": {"num_patches": 5, "gate": "scalar"}}
    )
    model = build(config)
    assert isinstance(model.blocks[0].ffn, MLP)
    assert {layer: apn.num_patches for layer, apn in model.apn_layers().items()} == {1: 8, 2: 5}
    assert model.blocks[2].ffn.gate_slope is None
    assert model.blocks[1].ffn.config.num_layers == 3
    _, stats = model(torch.randint(11, (1, 4)), return_stats=True)
    assert set(stats) == {1, 2}
    assert GPTConfig.from_json(config.to_json()) == config


def test_statistics_refer_to_the_residual_stream():
    model = build().eval()
    tokens = torch.randint(11, (1, 5))
    logits, stats = model(tokens, return_stats=True)
    assert torch.equal(logits, model(tokens))
    h = model.embedding(tokens) + model.positions.weight[:5]
    h = h + model.blocks[0].attention(model.blocks[0].norm_1(h), None)
    torch.testing.assert_close(stats[0].input_norm, h.norm(dim=-1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 15}, "dim=15 must be a multiple of num_heads=2"),
        ({"ffn": "kan"}, "ffn='kan' is unknown; allowed: 'mlp', 'apn'"),
        ({"context": 0}, "context=0 must be a positive integer"),
        ({"per_layer": {"2": {"ffn": "mlp"}}}, "per_layer names layer '2'; allowed: '0' to '1'"),
        ({"per_layer": {"0": {"ffn": "kan"}}}, r"per_layer\[0\].ffn='kan' is unknown"),
        ({"per_layer": {"0": {"patches": 3}}}, r"unknown fields \['patches'\]"),
        ({"apn": APNConfig(dropout=0.5)}, "apn.dropout=0.5 contradicts dropout=0.0"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_save_and_load(tmp_path):
    model = build().eval()
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "hashes.json", "model.safetensors"}
    again = GPT.from_pretrained(tmp_path).eval()
    tokens = torch.randint(11, (2, 9))
    assert torch.equal(again(tokens), model(tokens))
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors is not what was saved"):
        GPT.from_pretrained(tmp_path)
    (tmp_path / "hashes.json").unlink()  # as if it were of an earlier release
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        GPT.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        GPT.from_pretrained(tmp_path)


def test_loading_is_strict(tmp_path):
    build().save_pretrained(tmp_path)
    for changes, message in (
        ({"num_layers": 1}, "there are 2 blocks, and num_layers=1"),
        ({"num_layers": 10**12}, "there are 2 blocks"),
        ({"vocab_size": 12}, r"embedding.weight: the model has \(12, 16\), the file \(11, 16\)"),
        ({"vocab_size": 2**62}, "no model can be so large"),
    ):
        (tmp_path / "config.json").write_text(dataclasses.replace(SMALL, **changes).to_json())
        with pytest.raises(ValueError, match=r"config\.json is not what was saved.* delete .*hashes\.json"):
            GPT.from_pretrained(tmp_path)
        (tmp_path / "hashes.json").rename(tmp_path / "kept")
        with pytest.raises(ValueError, match=f"does not fit config.json: {message}"):
            GPT.from_pretrained(tmp_path)
        (tmp_path / "kept").rename(tmp_path / "hashes.json")


def test_multiply_adds_of_the_model():
    config = dataclasses.replace(SMALL, per_layer={"0": {"ffn": "mlp"}})
    d, t = 16, 16
    apn = 8 * d + d * 4 + 4 * 4 * d
    expected = 2 * (4 * d * d + t * d) + 8 * d * d + apn + 11 * d
    assert analysis.model_multiply_adds(build(config)) == expected


@pytest.mark.parametrize(("ffn", "experts"), [("moe", 3), ("switch", 1)])
def test_multiply_adds_of_a_model_with_mixtures(ffn, experts):
    moe = MoEConfig(num_experts=5, top_k=3 if ffn == "moe" else 1, hidden=24)
    config = dataclasses.replace(SMALL, ffn=ffn, moe=moe, per_layer={"0": {"ffn": "mlp"}})
    d, t = 16, 16
    mixture = 5 * d + experts * 2 * 24 * d
    expected = 2 * (4 * d * d + t * d) + 8 * d * d + mixture + 11 * d
    assert analysis.model_multiply_adds(build(config)) == expected


@pytest.mark.parametrize("pieces", [[16], [1] * 16, [5, 1, 7, 3]])
def test_cache_equals_cache_free(pieces):
    model = build().eval()
    tokens = torch.randint(11, (2, 16))
    cache = KVCache(model, 2)
    with torch.no_grad():
        parts = [model(piece, cache=cache) for piece in tokens.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens))
        with pytest.raises(ValueError, match="17 tokens do not fit into the model's context of 16"):
            model(tokens[:, :1], cache=cache)


def test_greedy_generation_equals_the_plain_loop():
    model = build().eval()
    text = torch.randint(11, (3, 4))
    out = torch.stack(list(generate(model, text, max_tokens=12, temperature=0)), 1)
    for _ in range(12):
        text = torch.cat([text, model(text)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(out, text[:, 4:])


def test_generation_goes_past_the_context_and_is_seeded():
    model = build().train()
    text = torch.randint(11, (2, 30))  # longer than the context
    first, second, other = (
        torch.stack(list(generate(model, text, max_tokens=40, seed=seed)), 1) for seed in (1, 1, 2)
    )
    assert first.shape == (2, 40)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert model.training


def test_sampling_follows_the_distribution():
    random = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20000, 4)

    def frequencies(*options) -> list[float]:
        return (torch.bincount(sample(logits, *options, random), minlength=4) / 20000).tolist()

    assert frequencies(1.0, None, None) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.02)
    assert frequencies(1.0, 2, None) == pytest.approx([0.625, 0.375, 0, 0], abs=0.02)
    assert frequencies(1.0, None, 0.8) == pytest.approx([0.625, 0.375, 0, 0], abs=0.02)
    assert frequencies(1.0, None, 0.81)[2] > 0
    assert frequencies(1.0, 3, 0.5) == [1, 0, 0, 0]
    assert frequencies(0.5, None, None)[0] == pytest.approx(0.25 / 0.365, abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 1.5}, "top_p=1.5 must be a number, 0 < top_p <= 1"),
    ],
)
def test_bad_generation_options(options, message):
    with pytest.raises(ValueError, match=message):
        generate(build(), torch.zeros(1, 1, dtype=torch.long), **options)
    with pytest.raises(ValueError, match="at least one token"):
        generate(build(), torch.zeros(1, 0, dtype=torch.long))


def test_apn_layers_by_role():
    assert all(isinstance(layer, APN) for layer in build().apn_layers().values())


MIXTURE = dataclasses.replace(SMALL, ffn="mlp", moe=MoEConfig(num_experts=4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ffn": "switch", "moe": MoEConfig(top_k=3)}, 'top_k=3 contradicts ffn="switch"'),
        ({"ffn": "moe", "moe": MoEConfig(capacity_factor=2.0)}, 'capacity_factor=2.0 needs ffn="switch"'),
        ({"per_layer": {"0": {"ffn": "switch", "top_k": 2}}}, r"per_layer\[0\]: a switch layer has top_k=1"),
        ({"per_layer": {"0": {"ffn": "switch", "noise": True}}}, r"per_layer\[0\]: a switch layer has"),
        ({"per_layer": {"1": {"ffn": "moe", "capacity_factor": 2.0}}}, "capacity_factor=2.0 needs"),
        ({"per_layer": {"1": {"ffn": "moe", "rank": 2}}}, r"unknown fields \['rank'\]; MoEConfig has"),
    ],
)
def test_contradictions_in_a_model(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MIXTURE, **changes)


def test_settings_reach_the_kind_that_reads_them():
    config = dataclasses.replace(
        MIXTURE,
        ffn="moe",
        moe=MoEConfig(num_experts=4, top_k=3, capacity_factor=2.0),
        num_layers=3,
        per_layer={"1": {"ffn": "switch", "num_experts": 6}, "2": {"hidden": 48, "noise": False}},
    )
    first, second, third = (config.ffn_of(layer) for layer in range(3))
    assert first == ("moe", MoEConfig(num_experts=4, top_k=3))
    assert second == ("switch", MoEConfig(num_experts=6, top_k=1, noise=False, capacity_factor=2.0))
    assert third == ("moe", MoEConfig(num_experts=4, top_k=3, hidden=48, noise=False))
    assert GPTConfig.from_json(config.to_json()) == config
    with torch.device("meta"):
        blocks = GPT(config).blocks
    assert [block.ffn.hidden for block in blocks] == [16, 64, 48]  # 64 / 3 is nearest to 16


def test_a_configuration_from_before_the_mixtures_still_loads():
    old = '{"schema_version": 1, "ffn": "apn", "apn": {"rank": 8}, "per_layer": {"0": {"ffn": "mlp"}}}'
    config = GPTConfig.from_json(old)
    assert config == GPTConfig(ffn="apn", apn=APNConfig(rank=8), per_layer={"0": {"ffn": "mlp"}})
    assert config.ffn_of(0) == ("mlp", None)


MIXED = dataclasses.replace(
    MIXTURE,
    num_layers=4,
    dropout=0.1,
    per_layer={"1": {"ffn": "apn"}, "2": {"ffn": "moe", "top_k": 1}, "3": {"ffn": "switch"}},
)


def test_every_kind_in_one_model(tmp_path):
    torch.manual_seed(0)
    model = GPT(MIXED).eval()
    assert [type(block.ffn) for block in model.blocks] == [MLP, APN, MoE, Switch]
    assert set(model.apn_layers()) == {1}
    assert {block.ffn.dropout for block in model.blocks if not isinstance(block.ffn, APN)} == {0.1}
    tokens = torch.randint(11, (2, 9))
    logits, stats = model(tokens, return_stats=True)
    assert torch.equal(logits, model(tokens))
    assert {layer: stat.num_patches for layer, stat in stats.items()} == {1: 8, 2: 4, 3: 4}
    assert {tuple(stat.indices.shape) for stat in stats.values()} == {(2, 9, 4), (2, 9, 1)}
    sum(stat.balance for stat in stats.values()).backward()
    model.save_pretrained(tmp_path)
    again = GPT.from_pretrained(tmp_path).eval()
    assert again.config == MIXED
    assert torch.equal(again(tokens), logits)
    shapes = {name: tuple(p.shape) for name, p in model.blocks[2].ffn.state_dict().items()}
    assert shapes == {"router": (4, 16), "noise": (4, 16), "up": (4, 16, 64), "out": (4, 64, 16)}


def test_first_values_of_a_mixture():
    torch.manual_seed(0)
    config = dataclasses.replace(MIXTURE, dim=128, num_layers=8, ffn="moe")
    layer = GPT(config).blocks[0].ffn
    deviations = {name: float(p.detach().std()) for name, p in layer.named_parameters()}
    expected = {"router": 0.02, "noise": 0.02, "up": 0.02, "out": 0.005}
    assert deviations == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("ffn", ["mlp", "moe", "switch"])
def test_a_start_of_unit_variance(ffn):
    """As the codes of an APN have it. Nothing else differs from GPT-2's start."""
    config = dataclasses.replace(MIXTURE, dim=128, num_layers=8, ffn=ffn)
    torch.manual_seed(0)
    usual = GPT(config)
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(config, ffn_start="unit"))
    layer = model.blocks[0].ffn
    first = layer.up.weight.T if ffn == "mlp" else layer.up[0]
    assert float((torch.randn(1000, 128) @ first.detach()).std()) == pytest.approx(1.0, rel=0.1)
    for (name, ours), theirs in zip(model.named_parameters(), usual.parameters(), strict=True):
        factor = 128**-0.5 / 0.02 if name.endswith(("ffn.up", "ffn.up.weight")) else 1.0
        assert float(ours.detach().std()) == pytest.approx(factor * float(theirs.detach().std()), rel=0.2), (
            name
        )
    with pytest.raises(ValueError, match="ffn_start='large' is unknown"):
        dataclasses.replace(config, ffn_start="large")


def test_a_dense_ffn_of_another_width():
    config = GPTConfig(vocab_size=16, context=8, num_layers=2, num_heads=2, dim=8, hidden=48)
    model, usual = GPT(config), GPT(dataclasses.replace(config, hidden=None))
    assert model.blocks[0].ffn.up.weight.shape == (48, 8)
    assert usual.blocks[0].ffn.up.weight.shape == (32, 8)
    more = analysis.model_multiply_adds(model) - analysis.model_multiply_adds(usual)
    assert more == model.num_parameters() - usual.num_parameters() == 2 * 2 * 8 * 16
    assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 16)
    with pytest.raises(ValueError, match="hidden=0 must be a positive integer"):
        dataclasses.replace(config, hidden=0)


def test_experts_decay():
    model = GPT(dataclasses.replace(MIXTURE, ffn="moe"))
    decayed, _ = (set(group["params"]) for group in make_optimizer(model, TrainConfig()).param_groups)
    layer = model.blocks[0].ffn
    assert {layer.up, layer.out, layer.router, layer.noise} <= decayed


@pytest.mark.parametrize("ffn", ["moe", "switch"])
def test_a_model_learns_and_keeps_its_experts_alive(ffn):
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(MIXTURE, ffn=ffn))
    text = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]).repeat(40)  # fourteen contexts to learn
    optimizer = make_optimizer(model, TrainConfig(learning_rate=1e-2))
    losses = []
    for _ in range(30):
        starts = torch.randint(len(text) - 17, (16,)).tolist()
        batch = torch.stack([text[start : start + 17] for start in starts])
        logits, stats = model(batch[:, :-1], return_stats=True)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        (loss + 0.01 * sum(layer.balance for layer in stats.values())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert losses[0] > 2.3
    assert losses[-1] < 0.8 * losses[0]
    _, stats = model.eval()(batch[:, :-1], return_stats=True)
    for layer in stats.values():
        assert monitor.summary(layer)["dead_patches"] == 0


@pytest.mark.parametrize("name", ["tiny_moe", "tiny_switch"])
def test_mixture_presets(name):
    config, dense = presets.NAMES[name]().model, presets.tiny_dense().model
    with torch.device("meta"):
        ours, theirs = (GPT(c).blocks[0].ffn for c in (config, dense))
    ratio = (ours.up.numel() + ours.out.numel()) / sum(p.numel() for p in theirs.parameters())
    assert ratio == 4
    assert ours.config.top_k * ours.hidden == 4 * dense.dim
