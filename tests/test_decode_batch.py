"""Texts that are generated together are what they would be alone, whatever joins and leaves beside them."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attractor.config import APNConfig, GPTConfig
from attractor.generate import generate
from attractor.model import GPT, RaggedCache
from attractor.serve.decode import sequences
from attractor.serve.decode.batch import Batch
from attractor.serve.decode.sequences import Publication, Sampling, Sequence, read_prompt

VOCABULARY, CONTEXT = 13, 24
CPU = torch.device("cpu")


def model_of(seed, scale=1.0, context=CONTEXT):
    """In float64, so that the size of a batch does not round a token into another."""
    torch.manual_seed(seed)
    config = GPTConfig(
        vocab_size=VOCABULARY,
        context=context,
        num_layers=2,
        num_heads=2,
        dim=8,
        ffn="apn",
        apn=APNConfig(num_patches=4, top_k=2, rank=2),
    )
    model = GPT(config).double().eval()
    with torch.no_grad():
        model.embedding.weight.mul_(scale)
    return model


def random_text(length, seed, vocabulary=VOCABULARY):
    return torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def added(batch, row):
    for _ in read_prompt(row):
        pass
    batch.add(row)
    return row


def turn(batch):
    """A step as the engine takes it: rows whose context is full read again."""
    written, failed = batch.step()
    assert not failed
    for row, _ in written:
        if row.is_full:
            batch.take_out(row)
            added(batch, row)
    return written


# --- the cache

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(1, 20)),
        st.tuples(st.sampled_from(["leave", "aside"]), st.integers(0, 5)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    min_size=4,
    max_size=12,
)


def check_ragged(model, actions, context, vocabulary):
    """`aside`: a row goes on alone for a token and comes back."""
    joint, texts, seed = None, [], 0
    for action, number in actions:
        seed += 1
        if action == "join":
            one, text = model.new_row(), random_text(min(number, context - 2), seed, vocabulary)
            for piece in (text[:2], text[2:]):
                if piece:
                    model(torch.tensor([piece]), cache=one)
            joint = one if joint is None else (joint.add(one), joint)[1]
            texts.append(text)
        elif not texts:
            continue
        elif action == "step":
            for _ in range(number):
                if max(map(len, texts)) >= context:
                    break
                seed += 1
                tokens = random_text(len(texts), seed, vocabulary)
                got = model(torch.tensor(tokens)[:, None], cache=joint)[:, -1]
                for row, token in enumerate(tokens):
                    texts[row] = [*texts[row], token]
                    wanted = model(torch.tensor([texts[row]]))[0, -1]
                    torch.testing.assert_close(got[row], wanted, rtol=1e-4, atol=1e-5)
        else:
            row = number % len(texts)
            one, text = joint.copy_of(row), texts[row]
            joint.remove(row)
            texts[row] = texts[-1]
            texts.pop()
            if action == "aside" and len(text) < context:
                token = random_text(1, seed, vocabulary)
                model(torch.tensor([token]), cache=one)
                joint.add(one)
                texts.append([*text, *token])
        assert joint.length == max(map(len, texts), default=0)
        assert [joint.end - start for start in joint.starts] == list(map(len, texts))


@given(ACTIONS)
@settings(max_examples=40)
@torch.no_grad()
def test_a_ragged_cache_is_many_caches(actions):
    check_ragged(model_of(0), actions, CONTEXT, VOCABULARY)


ALL = [
    ("join", 3),
    ("join", 11),
    ("step", 2),
    ("join", 20),
    ("step", 2),
    ("aside", 1),
    ("step", 1),
    ("leave", 0),
    ("step", 3),
    ("leave", 1),
    ("join", 2),
    ("step", 4),
]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma2", "mpt", "opt"])
@torch.no_grad()
def test_so_it_is_for_retrofitted_models(family):
    from families import SMALL, teach, tiny

    from attractor.hf.causal import CausalLM
    from attractor.hf.net import retrofit

    net = teach(retrofit(tiny(family), SMALL))
    check_ragged(CausalLM(net, context=32), ALL, 32, 64)
    check_ragged(CausalLM(net, None, context=32), ALL, 32, 64)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_retrofitted_models_write_together():
    """Two paths over one copy of the weights, and a context that overflows."""
    from families import SMALL, teach, tiny

    from attractor.hf.causal import CausalLM
    from attractor.hf.net import retrofit

    net = teach(retrofit(tiny("llama", torch.float64), SMALL))
    paths = {"base": CausalLM(net, None, context=24), "new": CausalLM(net, context=24)}
    publication = Publication(1, paths, window=16, pause=1.0)
    batch, rows = Batch(CPU), {}
    for number in range(4):
        row = Sequence(publication, random_text(1 + 6 * number, number, 64), Sampling(0.9, seed=number))
        rows[added(batch, row)] = []
        for one, written in turn(batch):
            rows[one].append(written.token)
    for _ in range(20):
        for one, written in turn(batch):
            rows[one].append(written.token)
    for number, tokens in enumerate(rows.values()):
        prompt = torch.tensor([random_text(1 + 6 * number, number, 64)])
        wanted = generate(publication.guard, prompt, max_tokens=24 - number, temperature=0.9, seed=number)
        assert tokens == [int(token) for token in wanted]


@torch.no_grad()
def test_what_a_row_leaves_behind_harms_no_other():
    """A diverged row's NaN, in memory that another row gets and does not fill."""
    model, joint = model_of(0), RaggedCache()
    model(torch.tensor([random_text(10, 0)]), cache=joint)
    joint.add(joint.copy_of(0))
    for pair in joint.layers:
        for stored in pair:
            stored[1] = torch.nan
    joint.remove(1)
    one = model.new_row()
    model(torch.tensor([[1, 2]]), cache=one)
    joint.add(one)
    got = model(torch.tensor([[3], [3]]), cache=joint)[1, -1]
    torch.testing.assert_close(got, model(torch.tensor([[1, 2, 3]]))[0, -1])


# --- rows

MODELS = {"base": model_of(0, 25.0), "x": model_of(1, 25.0), "y": model_of(2, 40.0)}
PUBLICATIONS = [
    Publication(1, {"base": MODELS["base"]}),
    Publication(2, {"base": MODELS["base"], "x": MODELS["x"]}, window=10),
    Publication(3, dict(MODELS), prior=0.7, window=40, pause=2.0),
]
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "publication": st.integers(0, 2),
            "path": st.sampled_from([None, None, "base"]),
            "prompt": st.integers(1, CONTEXT + 4),
            "joins": st.integers(0, 12),
            "tokens": st.integers(1, 30),
            "temperature": st.sampled_from([0.0, 0.7, 1.5]),
            "top_k": st.sampled_from([None, 4]),
            "top_p": st.sampled_from([None, 0.9]),
        }
    ),
    min_size=1,
    max_size=5,
)


@given(ROWS)
@settings(max_examples=10)
def test_rows_are_what_they_would_be_alone(plans):
    """The same seed gives what `generate` writes, in whatever company, with contexts that overflow."""
    batch, rows = Batch(CPU), {}
    for time in range(45):
        for number, plan in enumerate(plans):
            if plan["joins"] == time:
                sampling = Sampling(plan["temperature"], plan["top_k"], plan["top_p"], seed=number)
                prompt = random_text(plan["prompt"], number)
                row = Sequence(PUBLICATIONS[plan["publication"]], prompt, sampling, plan["path"])
                rows[added(batch, row)] = (plan, prompt, [])
        for row, written in turn(batch):
            assert sum(written.shares.values()) == pytest.approx(1)
            assert list(written.shares) == row.names
            rows[row][2].append(written.token)
        batch.remove([row for row, (plan, _, tokens) in rows.items() if len(tokens) >= plan["tokens"]])
    assert not batch.sequences
    assert not batch.models
    for row, (plan, prompt, tokens) in rows.items():
        publication = row.publication
        alone = publication.guard if plan["path"] is None else publication.paths[plan["path"]]
        options = {name: plan[name] for name in ("temperature", "top_k", "top_p")}
        wanted = generate(
            alone, torch.tensor([prompt]), max_tokens=plan["tokens"], seed=row.sampling.seed, **options
        )
        assert tokens == [int(token) for token in wanted]


class Replay:
    """A guard that reads a text that was generated, in the order of `generate`."""

    def __init__(self, guard, prompt):
        self.guard, self.context = guard, guard.config.context
        self.text = torch.tensor([prompt[-self.context :]])
        self.unread, self.after, self.wakes = self.text, None, 0
        self._start()

    def _start(self):
        self.cache = self.guard.new_cache(1, after=self.after)
        self.at_rest, let_rest = set(), self.cache._let_rest

        def watched():  # called when a prediction has been made
            self.at_rest = set(self.cache.at_rest)
            let_rest()

        self.cache._let_rest = watched

    @torch.no_grad()
    def predict(self, token):
        """The token's log-probability; `at_rest` says who was when it was predicted."""
        if self.cache.length + self.unread.shape[1] > self.context:
            self.unread, self.after = self.text[:, -max(1, self.context // 2) :], self.cache
            self._start()
        slept = set(self.cache.at_rest)
        predictions = self.guard(self.unread, cache=self.cache)[0, -1]
        self.wakes += bool(slept - self.at_rest)
        self.unread = torch.tensor([[token]])
        self.text = torch.cat([self.text, self.unread], 1)
        return float(predictions[token])


@pytest.mark.parametrize(("window", "temperature"), [(7, 4.0), (60, 1.0), (200, 4.0)])
def test_the_guard_of_each_row_is_the_guard(window, temperature):
    """Step by step: the mixture, who rests, who wakes because a window starts, odds turn, or all is full."""
    publication = Publication(1, dict(MODELS), window=window, pause=2.0)
    batch, replays, rests = Batch(CPU), {}, 0
    for length in (1, 5, CONTEXT):
        prompt = random_text(length, length)
        row = added(batch, Sequence(publication, prompt, Sampling(temperature, seed=length)))
        replays[row] = Replay(publication.guard, prompt)
    for _ in range(90):
        written, failed = batch.step()
        assert not failed
        for row, one in written:
            assert one.logprob == pytest.approx(replays[row].predict(one.token), abs=2e-4)
            at_rest = {path for path, cache in enumerate(row.caches) if cache.row < 0}
            assert at_rest == replays[row].at_rest
            assert all(one.shares[row.names[path]] == 0 for path in at_rest)
            rests += bool(at_rest)
            if row.is_full:
                batch.take_out(row)
                added(batch, row)
    if window > 7:
        assert rests > 20
        assert sum(replay.wakes for replay in replays.values()) > 0


def test_the_odds_wake_a_path():
    """No window starts and no context ends: unlikely tokens alone bring a path back."""
    paths = {"base": model_of(0, 25.0, 128), "x": model_of(1, 25.0, 128)}
    publication = Publication(1, paths, pause=10.0)
    batch, prompt = Batch(CPU), random_text(3, 0)
    row = added(batch, Sequence(publication, prompt, Sampling(6.0, seed=0)))
    replay = Replay(publication.guard, prompt)
    for _ in range(120):
        one = batch.step()[0][0][1]
        assert one.logprob == pytest.approx(replay.predict(one.token), abs=2e-4)
        assert {path for path, cache in enumerate(row.caches) if cache.row < 0} == replay.at_rest
    assert replay.wakes > 0


def test_long_prompts_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr(sequences, "PIECE", 5)
    for length, pauses in ((2, 0), (3, 0), (5, 1), (17, 6), (24, 8)):
        publication, prompt = PUBLICATIONS[1], random_text(length, 7)
        batch, row = Batch(CPU), Sequence(PUBLICATIONS[1], prompt, Sampling(seed=3))
        assert sum(1 for _ in read_prompt(row)) == pauses
        batch.add(row)
        tokens = [turn(batch)[0][1].token for _ in range(9)]
        wanted = generate(publication.guard, torch.tensor([prompt]), max_tokens=9, seed=3)
        assert tokens == [int(token) for token in wanted]


def test_versions_share_the_lane_of_a_path_that_did_not_change():
    batch = Batch(CPU)
    rows = [added(batch, Sequence(p, [1, 2, 3], Sampling(seed=0))) for p in PUBLICATIONS]
    batch.step()
    assert sorted(len(model.rows) for model in batch.models.values()) == [1, 2, 3]
    batch.remove(rows[1:])
    assert [len(model.rows) for model in batch.models.values()] == [1]


class Failing(GPT):
    """Cannot read the token 5."""

    def forward(self, tokens, *, cache=None, return_stats=False):
        if bool((tokens == 5).any()):
            raise RuntimeError("no fives")
        return super().forward(tokens, cache=cache)


def test_a_lane_that_fails_takes_only_its_rows():
    broken = Failing(model_of(0).config).double()
    batch = Batch(CPU)
    good = added(batch, Sequence(PUBLICATIONS[1], [1, 2], Sampling(seed=1)))
    bad = added(
        batch, Sequence(Publication(9, {"base": MODELS["base"], "bad": broken}), [1], Sampling(seed=0))
    )
    failures, tokens = {}, []
    for _ in range(20):
        bad.text[-1] = 5 if len(tokens) == 3 else bad.text[-1]
        written, failed = batch.step()
        failures |= failed
        tokens += [one.token for row, one in written if row is good]
    assert list(failures) == [bad]
    assert failures[bad] == "RuntimeError: no fives"
    assert batch.sequences == [good]
    wanted = generate(PUBLICATIONS[1].guard, torch.tensor([[1, 2]]), max_tokens=20, seed=1)
    assert tokens == [int(token) for token in wanted]


def test_publications_are_checked():
    with pytest.raises(ValueError, match='must be called "base"'):
        Publication(1, {"x": MODELS["x"]})
    with pytest.raises(ValueError, match="do not mix"):
        Publication(1, {"base": MODELS["base"], "x": model_of(0, context=7)})
    training = model_of(0).train()
    assert not Publication(1, {"base": training}).paths["base"].training
