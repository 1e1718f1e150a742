"""A retrofitted model in other hands: generate, Trainer, checkpointing, torch.compile, and our own tools."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import FAMILIES, SMALL, logits, some_tokens, teach, tiny, transformers
from safetensors.torch import save_file
from torch.nn import functional as F

import attractor
from attractor import APNConfig
from attractor.continual.config import AllocationConfig, GuardConfig, LearnConfig, UpdateConfig
from attractor.continual.guard import Guard
from attractor.continual.guarded import GuardedLearner
from attractor.continual.learner import OnlineLearner
from attractor.continual.overlay import Branch, Overlay
from attractor.evaluate import evaluate, routing, token_losses
from attractor.front import adapter_folder
from attractor.generate import generate
from attractor.hf import CausalLM
from attractor.hf.callback import APNCallback
from attractor.hf.files import loaded_from

MOMENTS = ("exp_avg", "exp_avg_sq")
families = pytest.mark.parametrize("family", FAMILIES)
TEXT = np.tile(some_tokens(1, 10, seed=6)[0].numpy(), 20)  # there is something to learn in it


@families
def test_generating_with_a_cache_equals_generating_without(family):
    net = teach(attractor.retrofit(tiny(family), SMALL))
    prompt = some_tokens(2, 5)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    cached, plain = (net.generate(prompt, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)
    expected = prompt
    for _ in range(8):
        following = logits(net, expected)[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, following], 1)
    for row, alone in zip(cached[:, 5:].tolist(), expected[:, 5:].tolist(), strict=True):
        end = alone.index(2) + 1 if 2 in alone else len(alone)  # 2 ends a text, and then there is padding
        assert row[:end] == alone[: len(row)][:end]
        assert not any(row[end:])


@families
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(family, reentrant):
    gradients = []
    for checkpointing in (False, True):
        net = teach(attractor.retrofit(tiny(family), SMALL)).train()
        torch.manual_seed(0)  # dropout
        if checkpointing:
            net.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                net.enable_input_require_grads()
        net(input_ids=some_tokens(), labels=some_tokens(), use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in net.trainable_parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert plain.any()
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("family", ["llama", "bloom", "opt"])
def test_autocast(family):
    net = attractor.retrofit(tiny(family), SMALL)
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(net.unload())
    net.add("again", SMALL)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(net), expected)
        teach(net)
        net(input_ids=some_tokens(), labels=some_tokens()).loss.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in net.trainable_parameters())


@pytest.mark.parametrize(("family", "backend"), [("llama", "aot_eager"), ("opt", "eager")])
def test_compiled(family, backend):
    net = teach(attractor.retrofit(tiny(family, num_hidden_layers=1), SMALL))
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    torch.testing.assert_close(logits(compiled), logits(net))
    net.use(None)
    torch.testing.assert_close(logits(compiled), logits(net))


# --- Trainer


class Rows(torch.utils.data.Dataset):
    def __init__(self, count=8):
        self.rows = some_tokens(count, 16)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trainer(net, folder, *, steps=4, callbacks=(), **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_steps=2,
        **options,
    )
    return transformers.Trainer(
        model=net, args=arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=list(callbacks)
    )


def test_trainer(tmp_path):
    net = attractor.retrofit(tiny("gpt2"), SMALL)
    base = {name: value.clone() for name, value in net.model.state_dict().items()}
    factors = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            factors.append(float(net.apn_layers()[1].scale_factor))

        def on_log(self, args, state, control, logs=None, **_):
            assert "loss" not in logs or "apn/0/usage_entropy" in logs

    own = trainer(net, tmp_path / "run", callbacks=[APNCallback(warmup_steps=4), Watch()])
    before = own.evaluate()["eval_loss"]
    own.train()
    assert own.evaluate()["eval_loss"] < before
    assert factors == pytest.approx([0.1, 0.325, 0.55, 0.775])
    assert float(net.apn_layers()[1].scale_factor) == 1
    record = own.state.log_history[0]
    assert 0 < record["apn/1/usage_entropy"] <= np.log(8) + 1e-6
    assert 0 <= record["apn/1/dead_patches"] <= 8
    assert all(torch.equal(value, base[name]) for name, value in net.model.state_dict().items())
    assert not any(layer._forward_pre_hooks for layer in net.apn_layers().values())
    net.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(attractor.load_retrofit(tiny("gpt2"), tmp_path / "saved")), logits(net.eval()))


def test_trainer_checkpoints_are_small_and_resume(tmp_path):
    whole = attractor.retrofit(tiny("gpt2"), SMALL)
    trainer(whole, tmp_path / "run").train()
    saved = tmp_path / "run" / "checkpoint-2" / "model.safetensors"
    assert saved.stat().st_size < 2 * sum(p.nbytes for p in whole.trainable_parameters())
    resumed = attractor.retrofit(tiny("gpt2"), SMALL)
    trainer(resumed, tmp_path / "run").train(resume_from_checkpoint=str(saved.parent))
    for mine, theirs in zip(resumed.trainable_parameters(), whole.trainable_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_a_trainer_writes_loads_again(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    net = attractor.retrofit(base, APNConfig(num_patches=8, top_k=3, rank=4, scale=2.0), layers=[1])
    own = trainer(net, tmp_path / "run", steps=2)
    own.train()
    own.save_model(tmp_path / "saved")
    for folder in (tmp_path / "saved", tmp_path / "run" / "checkpoint-2"):
        assert adapter_folder(folder) == folder  # what attractor.load asks first
        assert loaded_from(folder) == str(tmp_path / "base")
        again = attractor.load_retrofit(tiny("gpt2"), folder, name="again")
        assert torch.equal(logits(again), logits(net.eval()))
        with pytest.raises(ValueError, match="another base, with weights"):
            attractor.load_retrofit(tiny("gpt2", seed=1), folder)
    assert adapter_folder(tmp_path / "base") is None
    with pytest.raises(ValueError, match="describes no retrofit: it is of another model"):
        attractor.load_retrofit(tiny("gpt2"), tmp_path / "base")


def test_a_trainer_writes_every_retrofit_of_a_net(tmp_path, caplog):
    net = teach(attractor.retrofit(tiny("llama"), SMALL, name="verse"))
    net.add("prose", SMALL, layers=[1], read_from=0)
    teach(net, seed=7)
    trainer(net, tmp_path / "run").save_model(tmp_path / "saved")
    for name in ("verse", "prose"):
        net.use(name)
        caplog.clear()
        again = attractor.load_retrofit(tiny("llama"), tmp_path / "saved", name=name)
        assert f"holds the retrofits prose, verse: only {name!r} is read" in caplog.text
        assert torch.equal(logits(again), logits(net))
    with pytest.raises(ValueError, match=r"holds the retrofits \['prose', 'verse'\]: choose one of them"):
        attractor.load_retrofit(tiny("llama"), tmp_path / "saved")


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("retrofits.default.1.decoder"),
        lambda state: state.update({"retrofits.default.7.decoder": torch.zeros(1)}),
        lambda state: state.update({"lm_head.weight": torch.zeros(1)}),
        lambda state: state["retrofits.default.1.decoder"].view(-1)[3:4].add_(1e-3),
        lambda state: state["retrofits.default.1.decoder"].view(-1)[3:4].fill_(torch.nan),
        lambda state: state["retrofits.default.description"][-40:].fill_(32),
        lambda state: state.update({"retrofits.default.description": torch.zeros(0)}),
        lambda state: state.update({"retrofits.default.description": torch.ones(3, 3)}),
        lambda state: state.pop("retrofits.default.description"),
    ],
    ids=range(9),
)
def test_a_damaged_checkpoint_is_refused(damage, tmp_path):
    net = attractor.retrofit(tiny("llama"), SMALL)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    attractor.load_retrofit(tiny("llama"), tmp_path)
    damage(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds no retrofit that can be read"):
        attractor.load_retrofit(tiny("llama"), tmp_path)


def test_a_run_does_not_resume_with_other_settings_or_another_base(tmp_path):
    trainer(attractor.retrofit(tiny("gpt2"), SMALL), tmp_path / "run", steps=2).train()
    louder = replace(SMALL, scale=3.0)
    for net, message in (
        (attractor.retrofit(tiny("gpt2"), louder), "of a retrofit with another layers"),
        (attractor.retrofit(tiny("gpt2", seed=1), SMALL), "of another base: its weights differ"),
    ):
        before = {name: value.clone() for name, value in net.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            trainer(net, tmp_path / "run").train(resume_from_checkpoint=True)
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_trainer_with_bfloat16_and_checkpointing(tmp_path):
    net = attractor.retrofit(tiny("llama"), SMALL)
    trainer(net, tmp_path, steps=1, bf16=True, gradient_checkpointing=True).train()
    assert any(layer.decoder.any() for layer in net.apn_layers().values())


def test_the_callback_gives_patches_to_what_is_new(tmp_path):
    net = attractor.retrofit(tiny("gpt2"), SMALL)
    before = {number: layer.prototypes.clone() for number, layer in net.apn_layers().items()}
    callback = APNCallback(allocation=AllocationConfig(mode="replace", novelty=1e9, window=1, cooldown=129))
    moments = []

    class Watch(transformers.TrainerCallback):
        """A step has 64 tokens: there is time for a patch at the first and at the fourth."""

        def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
            for event in callback.allocations[len(moments) :]:
                layer = model.apn_layers()[event.layer]
                moments.append((state.global_step, event.patch))
                assert not layer.decoder[event.patch].any()
                assert not any(optimizer.state[layer.decoder][part][event.patch].any() for part in MOMENTS)
                assert any(optimizer.state[layer.decoder][part].any() for part in MOMENTS)
                assert not torch.equal(layer.prototypes[event.patch], before[event.layer][event.patch])

    own = trainer(net, tmp_path, steps=6, callbacks=[callback, Watch()])
    own.train()
    told = [(event.layer, event.mode, event.reason, event.token) for event in callback.allocations]
    assert told == [(layer, "replace", "novelty", token) for token in (64, 256) for layer in (0, 1)]
    assert [record["apn/1/allocations"] for record in own.state.log_history[:6]] == [1, 1, 1, 2, 2, 2]
    assert len({event.patch for event in callback.allocations if event.layer == 0}) == 2
    assert [step for step, _ in moments] == [1, 1, 4, 4]


def test_a_run_that_broke_off_leaves_nothing_to_the_next(tmp_path, caplog):
    class Boom(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            raise KeyboardInterrupt

    net = attractor.retrofit(tiny("gpt2"), SMALL)
    callback = APNCallback(warmup_steps=10)
    with pytest.raises(KeyboardInterrupt):
        trainer(net, tmp_path / "broken", callbacks=[callback, Boom()]).train()
    assert pickle.loads(pickle.dumps(net)).apn_layers().keys() == {0, 1}
    net.save_pretrained(tmp_path / "saved")
    assert "what is saved has it whole" in caplog.text
    trainer(net, tmp_path / "whole", callbacks=[callback]).train()
    for layer in net.apn_layers().values():
        assert not layer._forward_pre_hooks
        assert float(layer.scale_factor) == 1


def test_the_callback_cannot_grow_a_layer(tmp_path):
    with pytest.raises(ValueError, match="the optimizer of a Trainer does not know"):
        APNCallback(allocation=AllocationConfig(mode="grow"))


def test_the_callback_needs_a_retrofit(tmp_path):
    with pytest.raises(ValueError, match="APNCallback needs a retrofit in use, not a GPT2LMHeadModel"):
        trainer(tiny("gpt2"), tmp_path, steps=1, callbacks=[APNCallback()]).train()
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        APNCallback(warmup_steps=-1)


def test_the_state_dict_is_that_of_the_layers():
    net = teach(attractor.retrofit(tiny("gpt2"), SMALL))
    assert all(key.startswith("retrofits.default.") for key in net.state_dict())
    other = attractor.retrofit(tiny("gpt2"), SMALL)
    assert other.load_state_dict(net.state_dict()) == ([], [])
    assert torch.equal(logits(other), logits(net))
    short = dict(list(net.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match=r"Missing key.*retrofits.default.0.prototypes"):
        other.load_state_dict(short)


# --- our own tools


def causal(family="llama", **options):
    net = teach(attractor.retrofit(tiny(family), SMALL))
    return CausalLM(net, context=32, **options)


@families
def test_causal_predicts_what_the_model_predicts(family):
    model = causal(family)
    tokens = some_tokens(2, 20)
    expected = logits(model.net, tokens)
    with torch.no_grad():
        assert torch.equal(model(tokens), expected)
        found, stats = model(tokens, return_stats=True)
        cache = model.new_cache(2)
        pieces = [model(piece, cache=cache) for piece in tokens.split([7, 1, 1, 11], dim=1)]
    assert torch.equal(found, expected)
    assert {number: own.indices.shape for number, own in stats.items()} == {0: (2, 20, 2), 1: (2, 20, 2)}
    assert cache.length == 20
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="33 tokens do not fit"):
        model(some_tokens(1, 33))


def test_causal_takes_the_models_context():
    assert CausalLM(attractor.retrofit(tiny("llama"), SMALL)).config.context == 64
    model = tiny("bloom")
    del model.config.max_position_embeddings
    net = attractor.retrofit(model, SMALL)
    with pytest.raises(ValueError, match="give context="):
        CausalLM(net)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_evaluate_and_routing(family):
    model = causal(family)
    losses = token_losses(model, TEXT)
    assert evaluate(model, TEXT) == pytest.approx(float(losses.mean()))
    first = F.cross_entropy(
        logits(model.net, torch.from_numpy(TEXT[None, :32]))[0], torch.from_numpy(TEXT[1:33])
    )
    assert float(losses[:32].mean()) == pytest.approx(float(first), rel=1e-5)
    assert routing(model, TEXT)[1].indices.shape == (199, 2)


def test_our_generate_is_theirs():
    model = causal()
    model.net.generation_config.eos_token_id = None
    prompt = some_tokens(2, 5)
    ours = torch.stack(list(generate(model, prompt, max_tokens=8, temperature=0)), 1)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(ours, model.net.generate(prompt, **options)[:, 5:])
    assert len(list(generate(model, prompt, max_tokens=40))) == 40  # longer than the context


LEARN = LearnConfig(budget=32, update=UpdateConfig(learning_rate=0.05))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_learning_from_a_stream(family):
    model = causal(family)
    base = {name: value.clone() for name, value in model.base.state_dict().items()}
    growth = AllocationConfig(mode="grow", novelty=100.0, window=32, cooldown=32)
    learner = OnlineLearner(model, config=replace(LEARN, allocation=growth, prototype_rate=0.1))
    before = learner.perplexity(TEXT)
    for _ in range(3):
        seen = learner.observe(TEXT)
    assert seen.updates == 6
    assert model.apn_layers()[0].num_patches == 16
    assert learner.perplexity(TEXT) < before
    assert learner.monitor(TEXT)["apn/1/usage_entropy"] > 0
    assert all(torch.equal(value, base[name]) for name, value in model.base.state_dict().items())
    assert learner.predict(TEXT[:10]).shape == (64,)


def test_guard_over_one_copy_of_the_weights():
    model = causal()
    base = CausalLM(model.net, None, context=32)
    guard = Guard({"base": base, "new": model})
    total = len(TEXT) - 1
    losses = {
        name: evaluate(path, TEXT) * total for name, path in {"b": base, "n": model, "g": guard}.items()
    }
    assert losses["b"] != losses["n"]
    assert losses["g"] <= losses["b"] + guard.bound(total) + 1e-4
    assert len(list(generate(guard, some_tokens(1, 4), max_tokens=6))) == 6
    assert base.apn_layers() == {}
    assert model.net.active == "default"


def test_a_branch_learns_beside_its_base(tmp_path):
    model = causal()
    tokens = some_tokens(2, 20)
    expected = logits(model.net, tokens)
    branch = Branch(model)
    shared = {p.data_ptr() for p in model.base.parameters()} & {
        p.data_ptr() for p in branch.model.parameters()
    }
    assert len(shared) == len(list(model.base.parameters()))
    learner = OnlineLearner(branch.model, config=LEARN)
    learner.observe(TEXT)
    learned = branch.model(tokens)
    assert not torch.equal(learned, expected)
    assert torch.equal(logits(model.net, tokens), expected)
    branch.overlay().save(tmp_path / "overlay")
    again = Branch(model)
    again.apply(Overlay.load(tmp_path / "overlay"))
    assert torch.equal(again.model(tokens), learned)
    again.apply(None)
    assert torch.equal(again.model(tokens), expected)
    with pytest.raises(ValueError, match="another base"):
        Branch(causal("qwen3")).apply(Overlay.load(tmp_path / "overlay"))


def test_guarded_learning():
    learner = GuardedLearner(causal(), config=GuardConfig(learn=LEARN))
    before = learner.perplexity(TEXT)
    for _ in range(3):
        learner.observe(TEXT, source="new")
    assert learner.perplexity(TEXT) < before
    learner.drop("new")
    assert learner.perplexity(TEXT) == pytest.approx(before)


def test_learners_come_back(tmp_path):
    """What they save holds the retrofit: they go on with the model that is made of it."""
    learner = GuardedLearner(causal(), config=GuardConfig(learn=LEARN))
    learner.observe(TEXT, source="new")
    learner.save(tmp_path / "guarded")
    model = CausalLM(attractor.load_retrofit(tiny("llama"), tmp_path / "guarded"), context=32)
    again = GuardedLearner.load(tmp_path / "guarded", model=model)
    assert again.perplexity(TEXT) == learner.perplexity(TEXT)
    assert again.overlays() == learner.overlays()
    with pytest.raises(ValueError, match="not the one these overlays were made over"):
        GuardedLearner.load(tmp_path / "guarded", model=causal("qwen3"))
    plain = OnlineLearner(causal(), config=LEARN)
    plain.observe(TEXT)
    plain.save(tmp_path / "plain")
    model = CausalLM(attractor.load_retrofit(tiny("llama"), tmp_path / "plain"), context=32)
    again = OnlineLearner.load(tmp_path / "plain", model=model)
    assert again.observe(TEXT).loss == plain.observe(TEXT).loss
    assert again.totals == plain.totals


def test_causal_saves_the_retrofit(tmp_path):
    model = causal()
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(attractor.load_retrofit(tiny("llama"), tmp_path / "saved")), logits(model.net))
    with pytest.raises(ValueError, match="nothing of ours to save"):
        CausalLM(model.net, None).save_pretrained(tmp_path / "base")
    assert model.num_parameters() == sum(p.numel() for p in model.net.parameters())


def test_apn_config_is_the_default():
    assert attractor.retrofit(tiny("llama"), layers=[0]).apn_layers()[0].config == APNConfig()
