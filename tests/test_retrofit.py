"""APN layers in Hugging Face models: what they change, and that it can be undone."""

import copy
import pickle

import pytest
import torch
from families import FAMILIES, SMALL, assert_same, logits, snapshot, some_tokens, teach, tiny
from torch import nn

import attractor
from attractor import APNConfig

families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_beside_changes_no_logit_and_unload_gives_the_model_back(family):
    model = tiny(family)
    next(model.parameters()).requires_grad_(False)
    before, expected = snapshot(model), logits(model)
    net = attractor.retrofit(model, SMALL)
    assert list(net.apn_layers()) == [0, 1]
    assert torch.equal(logits(net), expected)
    teach(net)
    assert not torch.allclose(logits(net), expected, atol=1e-3)
    assert net.unload() is model
    assert_same(before, snapshot(model))
    assert torch.equal(logits(model), expected)


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_beside_is_exact_in_half_precision(family, dtype):
    model = tiny(family, dtype)
    expected = logits(model)
    for own in (None, torch.float32):
        net = attractor.retrofit(model, SMALL, dtype=own)
        assert {p.dtype for p in net.trainable_parameters()} == {own or dtype}
        assert torch.equal(logits(net), expected)
        assert logits(teach(net)).dtype == dtype
        net.unload()


@families
def test_the_update_is_added_to_what_the_ffn_gives(family):
    """Against an independent way: a hook on the FFN's last module adds what the layer gives its input."""
    model = tiny(family)
    net = teach(attractor.retrofit(model, SMALL))
    found, layers = logits(net), net.apn_layers()
    places = [site.place for site in net.sites.values()]
    net.unload()
    seen, hooks = {}, []
    for place in places:
        hooks.append(
            place.modules[0].register_forward_pre_hook(lambda m, x, n=place.number: seen.update({n: x[0]}))
        )
        hooks.append(
            place.modules[-1].register_forward_hook(lambda m, x, y, n=place.number: y + layers[n](seen[n]))
        )
    assert torch.equal(logits(model), found)


@families
def test_replace_leaves_out_the_ffn(family):
    """With decoders at zero a replaced FFN gives zero, and one that adds a residual gives the residual."""
    model = tiny(family)
    net = attractor.retrofit(model, SMALL, mode="replace", sample=some_tokens(4, 16), steps=2)
    for layer in net.apn_layers().values():
        nn.init.zeros_(layer.decoder)
    found = logits(net)
    places = [site.place for site in net.sites.values()]
    net.unload()

    def silence(module, arguments, output):
        return arguments[1] if len(arguments) > 1 else torch.zeros_like(output)

    hooks = [place.modules[-1].register_forward_hook(silence) for place in places]
    assert torch.equal(logits(model), found)
    for hook in hooks:
        hook.remove()
    assert not torch.allclose(logits(model), found, atol=1e-5)


@families
def test_replaced_layers_learn(family):
    net = attractor.retrofit(tiny(family), SMALL, mode="replace", sample=some_tokens(4, 16), steps=2)
    net.train()
    net(input_ids=some_tokens(), labels=some_tokens()).loss.backward()
    assert all(parameter.grad is not None for parameter in net.trainable_parameters())
    assert all(parameter.grad is None for parameter in net.model.parameters())


def test_misspelt_options_are_named():
    with pytest.raises(TypeError, match=r"unknown options \['Mode', 'layer'\]; there are: layers, mode"):
        attractor.retrofit(tiny("llama"), SMALL, layer=[0], Mode="replace")
    for config in ({}, 0, {"num_patches": 4}):
        with pytest.raises(TypeError, match="give an APNConfig"):
            attractor.retrofit(tiny("llama"), config)


@pytest.mark.parametrize("family", ["opt", "llama", "bloom"])
def test_a_pickled_retrofit_works(family):
    net = teach(attractor.retrofit(tiny(family), SMALL))
    again = pickle.loads(pickle.dumps(net))
    assert torch.equal(logits(again), logits(net))
    assert torch.equal(logits(again.unload()), logits(tiny(family)))


def test_an_unloaded_retrofit_leaves_the_model_alone():
    model = tiny("llama")
    old = attractor.retrofit(model, SMALL)
    old.unload()
    new = teach(attractor.retrofit(model, SMALL))
    expected = logits(new)
    assert old.unload() is model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="a retrofit of another owner"):
        old.add("again", SMALL)
    assert torch.equal(logits(new), expected)
    new.unload()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_was_dropped_and_resized_is_trainable_again():
    net = attractor.retrofit(tiny("llama"), SMALL)
    net.model.resize_token_embeddings(70)
    with net.using(None):
        net.drop("default")
    assert all(parameter.requires_grad for parameter in net.unload().parameters())


def test_a_wrapped_retrofit_has_a_state_dict():
    net, other = (attractor.retrofit(tiny("llama"), SMALL) for _ in range(2))
    teach(net)
    holder = nn.ModuleDict({"inner": other})
    holder.load_state_dict({f"inner.{key}": value for key, value in net.state_dict().items()})
    assert torch.equal(logits(other), logits(net))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "instead"}, "mode='instead' is unknown; allowed: 'beside', 'replace'"),
        ({"prototypes": "means"}, "prototypes='means' is unknown"),
        ({"prototypes": "kmeans"}, "needs a sample="),
        ({"mode": "replace"}, "needs a sample="),
        ({"mode": "replace", "sample": ["text"]}, "give the model's tokenizer="),
        ({"mode": "replace", "sample": "text"}, "expected token ids or a list of texts"),
        ({"mode": "replace", "sample": torch.zeros(3)}, "expected token ids"),
        ({"mode": "replace", "sample": torch.full((2, 20), 64)}, "outside the model's vocabulary, 0 to 63"),
        (
            {"mode": "replace", "sample": torch.ones(1, 65).long()},
            "rows of 65 tokens; the model's context is 64",
        ),
        ({"mode": "replace", "sample": torch.ones(1, 9, dtype=torch.int64)}, "9 tokens; distilling needs"),
        (
            {"prototypes": "kmeans", "sample": torch.ones(1, 5, dtype=torch.int64)},
            "5 tokens for 8 prototypes",
        ),
        ({"dtype": torch.int8}, "dtype=torch.int8 must be one of torch.float32"),
        ({"name": 3}, "cannot name a retrofit"),
        ({"name": "a.b"}, "cannot name a retrofit"),
        ({"name": "items"}, "cannot name a retrofit"),
        ({"backend": "fast"}, "backend='fast' is unknown"),
        ({"steps": 0}, "steps=0 must be a positive integer"),
    ],
)
def test_mistakes_change_nothing(options, message):
    model = tiny("llama")
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        attractor.retrofit(model, SMALL, **options)
    assert_same(before, snapshot(model))


def test_what_cannot_be_retrofitted():
    with pytest.raises(ValueError, match="a Linear cannot be retrofitted"):
        attractor.retrofit(nn.Linear(2, 2), SMALL)
    model = tiny("gpt2")
    net = attractor.retrofit(model, SMALL)
    for given in (model, net):
        with pytest.raises(ValueError, match="retrofitted already"):
            attractor.retrofit(given, SMALL)
    net.unload()
    model.transformer.h[0].forward = lambda hidden, *_, **__: {"hidden": hidden}
    net = attractor.retrofit(model, SMALL, layers="transformer.h.*")
    with pytest.raises(ValueError, match=r"transformer.h.0 returns a dict, and an APN layer a tensor"):
        logits(net)
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn is not given hidden states"):
        logits(attractor.retrofit(tiny("llama"), SMALL, layers="model.layers.*.self_attn"))


def test_only_the_layers_learn_and_it_says_so(capsys):
    net = attractor.retrofit(tiny("qwen3"), SMALL, layers=[1])
    own = sum(parameter.numel() for parameter in net.apn_layers()[1].parameters())
    assert sum(parameter.numel() for parameter in net.trainable_parameters()) == own
    assert not any(parameter.requires_grad for parameter in net.model.parameters())
    net.print_trainable_parameters()
    assert f"trainable: {own:,} of " in capsys.readouterr().out
    net.unload()
    assert all(parameter.requires_grad for parameter in net.model.parameters())


def test_a_shared_decoder_starts_at_zero_too():
    model = tiny("gpt2")
    expected = logits(model)
    net = attractor.retrofit(model, APNConfig(num_patches=8, top_k=2, rank=4, decoder="shared"))
    assert torch.equal(logits(net), expected)
    net(input_ids=some_tokens(), labels=some_tokens()).loss.backward()
    assert net.apn_layers()[0].decoder_base.grad.any()


def test_layers_are_in_the_models_mode():
    net = attractor.retrofit(tiny("gpt2").eval(), APNConfig(num_patches=8, top_k=2, rank=4, dropout=0.5))
    assert torch.equal(logits(teach(net)), logits(net))
    assert not net.training
    net.train()
    assert not torch.equal(logits(net), logits(net))
    net.add("second", SMALL)
    assert net.apn_layers()[0].training


def test_the_seed_decides():
    first, same, other = (
        attractor.retrofit(tiny("gpt2"), SMALL, seed=seed).apn_layers()[0].prototypes for seed in (0, 0, 1)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    model, sample = tiny("gpt2"), some_tokens(4, 16)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    attractor.retrofit(model, SMALL, mode="replace", sample=sample, steps=2)
    assert torch.equal(state, torch.get_rng_state())


def test_switching():
    model = tiny("opt")
    base = logits(model)
    net = teach(attractor.retrofit(model, SMALL, name="first"), seed=3)
    first = logits(net)
    net.add("second", APNConfig(num_patches=4, top_k=1, rank=2), layers=[1])
    assert torch.equal(logits(net), base)
    second = logits(teach(net, seed=4))
    net.add("third", SMALL, mode="replace", sample=some_tokens(4, 16), steps=2)
    third = logits(net)
    assert len({tuple(x.flatten().tolist()) for x in (base, first, second, third)}) == 4
    for name, expected in {"second": second, None: base, "third": third, "first": first}.items():
        net.use(name)
        assert torch.equal(logits(net), expected)
        trained = {id(p) for p in net.trainable_parameters()}
        assert trained == {id(p) for layer in net.apn_layers().values() for p in layer.parameters()}
    with net.using("second"):
        assert torch.equal(logits(net), second)
    assert torch.equal(logits(net), first)
    with pytest.raises(ValueError, match=r"no retrofit 'fourth'; there are \['first', 'second', 'third'\]"):
        net.use("fourth")
    with pytest.raises(ValueError, match="a retrofit 'first' already"):
        net.add("first", SMALL)
    with pytest.raises(ValueError, match=r"block 0 has retrofits at model.decoder.layers.0.fc1"):
        net.add("elsewhere", SMALL, layers="model.decoder.layers.*.self_attn.out_proj")
    net.drop("first")
    assert net.active is None
    assert torch.equal(logits(net), base)
    assert torch.equal(logits(net.unload()), base)


def test_a_second_retrofit_is_measured_on_the_base():
    alone = attractor.retrofit(tiny("llama"), SMALL, prototypes="kmeans", sample=some_tokens(4, 16))
    net = teach(attractor.retrofit(tiny("llama"), SMALL))
    net.add("second", SMALL, prototypes="kmeans", sample=some_tokens(4, 16))
    for number, layer in net.apn_layers().items():
        assert torch.equal(layer.prototypes, alone.apn_layers()[number].prototypes)


def test_merge_is_refused_unless_there_is_nothing_to_merge():
    model = tiny("gpt2")
    net = attractor.retrofit(model, SMALL)
    assert net.merge() is model
    net = teach(attractor.retrofit(model, SMALL))
    net.add("nothing", SMALL)  # in use, but not alone
    with pytest.raises(ValueError, match="cannot be merged: what a token gets depends on which patches"):
        net.merge()
    assert list(net.apn_layers()) == [0, 1]


def test_a_copy_is_on_its_own():
    net = teach(attractor.retrofit(tiny("bloom"), SMALL))
    expected = logits(net)
    other = copy.deepcopy(net)
    teach(other, seed=5)
    assert torch.equal(logits(net), expected)
    assert not torch.equal(logits(other), expected)
    other.unload()
    assert torch.equal(logits(net), expected)


def test_another_librarys_forward_comes_back():
    model = tiny("gpt2")
    block = model.transformer.h[0]
    theirs = block.mlp.forward
    block.mlp.forward = lambda hidden: 2 * theirs(hidden)
    found, expected = block.mlp.forward, logits(model)
    net = attractor.retrofit(model, SMALL)
    assert torch.equal(logits(net), expected)
    assert net.unload() is model
    assert block.mlp.forward is found
    net = attractor.retrofit(model, SMALL)
    ours, block.mlp.forward = block.mlp.forward, found
    with pytest.raises(ValueError, match=r"another library changed what calling transformer.h.0.mlp does"):
        net.unload()
    assert list(net.apn_layers()) == [0, 1]
    block.mlp.forward = ours
    net.unload()


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'refit'"):
        _ = attractor.refit
