"""Controls of the studies of facts, each on a toy problem against the equations of its paper."""

from contextlib import nullcontext

import pytest
import torch
from test_facts import given
from test_lessons import encode, llama
from torch.nn import functional as F

from attractor.continual.config import LessonConfig
from attractor.continual.reading import Reading
from attractor.hf.halves import Undivided
from attractor.hf.teachable import cut
from studies import facts_tuning
from studies.facts_editors import ClosedForm, Grace, projected, silent_directions, spread
from studies.facts_methods import method
from studies.facts_tuning import Inputs, Reservoir, low_rank

LESSONS = [
    [("Zorvan Quill plays the", " cello"), ("On stage, Zorvan Quill plays the", " cello")],
    [("Marla Tamsin lives in", " Oslo"), ("The home of Marla Tamsin is", " Oslo")],
]
BRIEF = {"after": 0, "mention": 0, "contexts": 1}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def background():
    return cut(["the quick brown fox jumps over a lazy dog. " * 40], encode, 32)


def learner(name, settings=BRIEF, model=None, **options):
    chosen = given(name, lesson={**settings}, **options)
    free = background()
    return method(chosen, llama(256, blocks=3) if model is None else model, encode, free, free, nullcontext)


def gradient_of(objective, at):
    at = at.clone().requires_grad_(True)
    objective(at).backward()
    return at.grad


class TestClosedForm:
    missing, keys, old = drawn(5, 3), drawn(8, 3, seed=1), drawn(8, 40, seed=2)

    def test_memit_is_the_least_change_of_old_keys_beside_the_residual_of_new_ones(self):
        """Equation 14 of the paper minimises sum |D K0|^2 weighted, plus |D K - R|^2."""
        covariance = self.old @ self.old.T / 40
        change = spread(self.missing, self.keys, 7 * covariance)

        def objective(d):
            return 7 * torch.trace(d @ covariance @ d.T) + (d @ self.keys - self.missing).square().sum()

        assert gradient_of(objective, change).abs().max() < 1e-9
        assert gradient_of(objective, change + 0.01).abs().max() > 1e-3

    def test_alphaedit_leaves_old_keys_alone_and_solves_the_rest(self):
        """D P K0 = 0 for keys that span no silent direction; in the others D is the ridge solution."""
        basis = torch.linalg.qr(drawn(8, 8, seed=3))[0]
        old = basis[:, :5] @ drawn(5, 40, seed=4)  # three directions are silent
        silent = silent_directions(old @ old.T / 40, 1e-9)
        assert torch.allclose(silent, basis[:, 5:] @ basis[:, 5:].T)
        past = drawn(8, 2, seed=5)
        change = projected(self.missing, self.keys, silent, past @ past.T, 0.3)
        assert (change @ old).abs().max() < 1e-9

        def objective(d):
            d = d @ silent
            return (
                (d @ self.keys - self.missing).square().sum()
                + (d @ past).square().sum()
                + 0.3 * d.square().sum()
            )

        assert gradient_of(objective, change).abs().max() < 1e-9

    @pytest.mark.parametrize("kind", ["memit", "alphaedit"])
    def test_facts_are_written_into_matrices_and_nothing_else_changes(self, kind):
        model = llama(256, blocks=3)
        with torch.no_grad():  # in a model that was just made tokens hardly depend on each other
            for parameter in model.parameters():
                parameter.mul_(3 if parameter.dim() > 1 else 1)
        edited = learner(
            kind, {**BRIEF, "passes": 40, "enough": 0.05}, model, rate=1e-4 if kind == "memit" else 0.5
        )
        done = edited.learn(LESSONS, 0)
        assert done["left of the targets"] < (0.05 if kind == "memit" else 0.6)
        changed = {
            name
            for (name, now), then in zip(edited.tuned.named_parameters(), model.parameters(), strict=True)
            if not torch.equal(now, then)
        }
        assert changed
        assert all(name.endswith("mlp.down_proj.weight") for name in changed)
        prompt, answer = (encode(part) for part in LESSONS[0][0])
        tokens = torch.tensor([prompt + answer])

        def nats(call):
            return F.cross_entropy(call(tokens)[0, len(prompt) - 1 : -1], tokens[0, len(prompt) :]).item()

        assert nats(edited) < nats(lambda tokens: model(tokens).logits) - 0.01

    def test_targets_are_as_long_as_the_clamp_allows_and_do_not_depend_on_the_weight(self):
        settings = {**BRIEF, "passes": 12, "enough": 0.0}
        short, long = (learner("memit", settings, clamp=clamp, rate=1e-4) for clamp in (0.02, 4.0))
        lengths = [own.learn(LESSONS, 0)["length of the targets"] for own in (short, long)]
        assert lengths[0] == pytest.approx(0.02, rel=1e-4)
        assert 0.02 < lengths[1] <= 4
        again = learner("memit", settings, clamp=0.02, rate=1e3)
        missed = again.learn(LESSONS, 0, found=short.found)
        assert again.found is short.found
        assert missed["left of the targets"] > 0.9

    def test_a_model_that_norms_what_its_ffn_makes_is_refused(self):
        model = llama(256, blocks=3)
        model.model.layers[1].post_feedforward_layernorm = torch.nn.Identity()
        with pytest.raises(ValueError, match="norms what its FFN makes"):
            learner("memit", model=model)


class TestGrace:
    @pytest.fixture
    def book(self):
        book = learner("grace", rate=1.0)
        book.epsilon = 1.0
        return book

    def at(self, *places):
        """Keys on a line."""
        keys = torch.zeros(len(places), 32)
        keys[:, 0] = torch.tensor(places)
        return keys

    def test_a_key_is_added_expanded_split_or_given_another_answer(self, book):
        none = torch.zeros(1, 32)
        assert book._place(self.at(0.0), none, [(1,)]).tolist() == [0]
        assert book._place(self.at(2.5), none, [(2,)]).tolist() == [1]  # farther than 1 + 1: new
        assert book.radius == [1.0, 1.0]
        assert book._place(self.at(-1.5), none, [(1,)]).tolist() == []  # the same answer: grows
        assert book.radius == pytest.approx([1.5, 1.0])
        assert book._place(self.at(1.0), none, [(3,)]).tolist() == [2]  # another one: split
        assert book.radius == pytest.approx([0.5, 1.0, 0.5])
        assert book._place(self.at(2.5), none, [(4,)]).tolist() == [1]  # met again: the new answer
        assert book.labels == [(1,), (4,), (3,)]
        assert book.keys[:, 0].tolist() == [0.0, 2.5, 1.0]

    def test_outside_of_all_balls_it_is_the_base_to_the_bit(self):
        model = llama(256, blocks=3)
        book = learner("grace", {**BRIEF, "passes": 30}, model, rate=0.02)
        book.learn(LESSONS, 0)
        assert len(book.keys) > 0
        tokens = background()
        assert torch.equal(book(tokens), model(tokens).logits)
        prompt, answer = LESSONS[1][0]
        told = torch.tensor([encode(prompt + answer)])
        assert not torch.equal(book(told), model(told).logits)

    def test_it_learns_what_it_is_taught_and_what_is_known_is_no_edit(self):
        lessons = [[("Zorvan Quill plays the", "c")], [("Marla Tamsin lives in", "O")]]  # answers of a token
        book = learner("grace", {**BRIEF, "passes": 200, "enough": 0.1}, rate=0.02)
        assert book.learn(lessons, 0, ["Zorvan Quill", "Marla Tamsin"])["edits"] == 2
        assert book.learn(lessons, 0, ["Zorvan Quill", "Marla Tamsin"])["edits"] == 0


class TestKeeps:
    def test_l2_pulls_to_where_the_parameters_began(self):
        tuned = learner("full", keep="l2", strength=3.0)
        with torch.no_grad():
            for parameter in tuned.parameters:
                parameter += 0.01
        loss = tuned.strength * tuned._kept(None)
        assert loss.item() == pytest.approx(
            3.0 / 2 * 0.01**2 * sum(p.numel() for p in tuned.parameters), rel=1e-3
        )
        loss.backward()
        pulls = torch.cat([p.grad.flatten() for p in tuned.parameters])
        assert torch.allclose(pulls, torch.full_like(pulls, 3.0 * 0.01), rtol=1e-2)

    def test_dark_experience_replay_is_squared_error_of_logits_and_likelihood_of_others(self):
        tuned = learner("full", keep="der", strength=0.5)
        draw = torch.Generator().manual_seed(0)
        again = torch.randint(256, (6, 9), generator=draw)
        position, target = torch.tensor([2, 8, 4, 3, 7, 5]), torch.randint(256, (6,), generator=draw)
        then = torch.randn(3, 256, generator=draw)
        none = [torch.zeros(0)] * 7
        inputs = Inputs(*none, again, position, target, then, torch.zeros(()))
        logits = tuned(again)[range(6), position]
        wanted = (logits[:3] - then).square().mean() - logits[3:].log_softmax(-1)[range(3), target[3:]].mean()
        assert tuned._kept(inputs).item() == pytest.approx(wanted.item(), rel=1e-5)

    def test_a_reservoir_keeps_every_token_with_the_same_chance_and_whole(self):
        counts = torch.zeros(60)
        for seed in range(300):
            memory = Reservoir(12, seed)
            for start in range(0, 60, 5):  # number n: text n n n, place n, token n, logits n
                own = torch.arange(start, start + 5)
                memory.add(own[:, None].expand(5, 3), own, own, own[:, None].float())
            assert torch.equal(memory.tokens[:, 0], memory.position)
            assert torch.equal(memory.target, memory.position)
            assert torch.equal(memory.logits[:, 0], memory.position.float())
            counts[memory.position] += 1
        expected = 300 * 12 / 60
        assert (counts - expected).abs().max() < 5 * expected**0.5

    def test_what_was_taught_is_remembered_in_texts_of_any_length(self, monkeypatch):
        monkeypatch.setattr(facts_tuning, "AGAIN", 2)
        tuned = learner("full", {**BRIEF, "passes": 2}, keep="der", strength=0.5, rate=1e-3)
        tuned.learn(LESSONS, 0)
        tuned.learn([[("In the long winters of the north Pella Grond drinks", " tea")]], 0, ["Pella Grond"])
        memory = tuned.remembered
        assert memory.seen == 2 * (2 * 6 + 2 * 5 + 4)
        text = bytes(memory.tokens[memory.seen - 1].tolist()).decode().rstrip("\0")
        assert text == "In the long winters of the north Pella Grond drinks tea"

    def test_others_are_told_that_they_keep_nothing(self):
        with pytest.raises(ValueError, match="--keep l2 is for methods that fine-tune, not for grace"):
            learner("grace", keep="l2")


def test_interpolation_is_a_mean_of_weights_and_passes_by():
    model, mean = llama(256, blocks=2), llama(256, blocks=2)
    tuned = learner("full", {**BRIEF, "passes": 3}, model, rate=1e-3)
    tuned.learn(LESSONS, 0)
    tokens = background()[:1]
    after, base = tuned(tokens), model(tokens).logits
    assert not torch.equal(after, base)
    with torch.no_grad():
        for own, then, now in zip(mean.parameters(), model.parameters(), tuned.parameters, strict=True):
            own.copy_(0.7 * then + 0.3 * now)
    with tuned.interpolated(0.0):
        assert torch.equal(tuned(tokens), base)
    with tuned.interpolated(0.3):
        assert torch.allclose(tuned(tokens), mean(tokens).logits, atol=1e-6)
    assert torch.equal(tuned(tokens), after)


def test_a_lora_is_merged_after_each_chunk_and_changes_nothing_by_that():
    model = llama(256, blocks=2)
    tuned = learner("lora-chunks", {**BRIEF, "passes": 4}, model, rate=1e-2)
    plain = learner("lora", {**BRIEF, "passes": 4}, model, rate=1e-2)
    plain.tuned.load_state_dict(tuned.tuned.state_dict())
    tokens = background()[:1]
    for own in (tuned, plain):
        own.learn(LESSONS, 0)
    assert torch.allclose(tuned(tokens), plain(tokens), atol=1e-5)
    assert not torch.allclose(tuned(tokens), model(tokens).logits, atol=1e-3)
    for name, parameter in tuned.tuned.named_parameters():
        if "lora_B" in name:
            assert not parameter.any()


def test_lora_may_change_embedding_and_norms_too():
    def learned(*also, rank=4):
        tuned = low_rank(llama(256, blocks=2), rank, also)
        return {name: p.numel() for name, p in tuned.named_parameters() if p.requires_grad}

    plain, wide = learned(), learned("embedding", "norms")
    assert not any("norm" in name or "embed" in name or "lm_head" in name for name in plain)
    assert sum("norm" in name for name in wide) == 5
    assert sum(numbers for name, numbers in wide.items() if "embed" in name) == 4 * (256 + 32)
    assert sum(learned(rank=8).values()) == 2 * sum(plain.values())


def test_everybody_reads_the_same_words_in_the_same_frames():
    config = LessonConfig(**BRIEF)
    frames = ("{}", "Quiz.\n{}")
    model = llama(256, blocks=2)
    reading = Reading(encode, Undivided(model), config, frames=frames)
    free = background()
    book = Grace(model, reading, free, 0.1, 1)
    editor = ClosedForm(llama(256, blocks=3), reading, free, "memit", 1.0, range(1, 2))
    assert book.reading is editor.reading
    assert len(reading.texts(LESSONS, ["Zorvan Quill", "Marla Tamsin"])[0]) == 4
