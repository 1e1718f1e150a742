"""Lessons on a small model that can carry what it is told; and where they act in a pretrained one."""

import copy
import dataclasses
import json
import re
import shutil

import pytest
import torch
from families import FAMILIES, some_tokens, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import attractor
from attractor import APN, APNConfig
from attractor.continual.calibrate import CLOSED, Calibration, clopper_pearson
from attractor.continual.config import LessonConfig
from attractor.continual.forms import (
    MOST_ANSWERS,
    asked_of,
    asked_of_all,
    check_forms,
    framed,
    not_contradicted,
    shared_subject,
    told_of,
)
from attractor.continual.lessons import Lessons
from attractor.continual.parts import deltas_of, put_in, take_out
from attractor.continual.reading import FEW, Reading
from attractor.hf.teachable import cut, load_lessons, save_lessons, teachable
from attractor.hf.woven import weave

CONFIG = LessonConfig(
    passes=12, step=4.0, radius=0.6, prototypes=3, contexts=2, after=0, mention=0, least_forms=0
)
DIM = 32


def encode(text: str) -> list[int]:
    return list(text.encode())


class Model(nn.Module):
    """A token is known by the two before it too, and what a layer adds somewhere is seen ever after."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(256, DIM, generator=draw)
        self.head = torch.randn(DIM, 256, generator=draw)
        self.layer = APN(
            DIM, num_patches=patches, top_k=1, rank=1, temperature=0.02, radius=CLOSED, whiten=True
        )

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding[tokens]
        before = functional.pad(embedded, (0, 0, 2, 0))
        return embedded + 0.8 * before[:, 1:-1] + 0.6 * before[:, :-2]

    def forward(self, tokens: torch.Tensor, *, base: bool = False) -> torch.Tensor:
        states = self.states(tokens)
        update = self.layer(states)
        return (states if base else states + update.cumsum(1)) @ self.head


def background(seed: int = 0) -> torch.Tensor:
    """Windows of lower-case letters and spaces: subjects are written in capitals."""
    letters = torch.tensor(encode("abcdefghijklmnopqrstuvwxyz     "))
    return letters[torch.randint(len(letters), (40, 24), generator=torch.Generator().manual_seed(seed))]


def school(patches: int = 64) -> tuple[Model, Lessons]:
    net = Model(patches)
    calibration = Calibration.fit(net.states(background()))
    return net, Lessons(net, net.layer, encode, calibration, CONFIG)


def words(text: str) -> list[int]:
    """A number and the space before it are one token, as a word is in real models."""
    return encode(re.sub(r" (\d)", lambda found: chr(int(found[1])), text))


def forms(name: str, answer: str) -> list[tuple[str, str]]:
    return [(f"{name} is ", answer), (f"we say {name} is ", answer), (f"of {name} I know ", answer)]


def logits(net: Model, text: str, *, base: bool = False) -> torch.Tensor:
    with torch.no_grad():
        return net(torch.tensor([encode(text)]), base=base)


@pytest.fixture(scope="module")
def taught():
    net, lessons = school()
    return net, lessons, [lessons.learn(forms("QZX", "5")), lessons.learn(forms("WJK", "8"))]


def copied(taught):
    """The same again, to be changed by one test."""
    net, lessons, learned = copy.deepcopy(taught)
    return net, lessons, learned


def test_a_lesson_is_known_and_says_what_it_took(taught):
    net, lessons, (first, second) = taught
    for lesson, name, answer in ((first, "QZX", "5"), (second, "WJK", "8")):
        assert (lesson.subject, lesson.known_before, lesson.known) == (name, 0.0, 1.0)
        assert 1 <= lesson.patches <= CONFIG.prototypes
        contexts = lessons.contexts[lesson.number].nbytes
        assert lesson.bytes == lesson.patches * 4 * (2 * DIM + 1) + contexts
        assert lessons.owners.count(lesson.number) == lesson.patches
        for prompt, _ in forms(name, answer):
            assert logits(net, prompt)[0, -1].argmax() == ord(answer)


def test_text_that_enters_no_basin_is_the_bases_to_the_bit(taught):
    net, lessons, _ = taught
    texts = [bytes(row.tolist()).decode() for row in background(seed=7)]
    untouched = [text for text in texts if lessons.touching(text) == [None] * len(text)]
    assert len(untouched) > 30
    for text in untouched:
        assert torch.equal(logits(net, text), logits(net, text, base=True))
    assert not torch.equal(logits(net, "we say QZX"), logits(net, "we say QZX", base=True))


def test_touching_names_the_lesson_of_each_token(taught):
    _, lessons, (first, second) = taught
    owners = lessons.touching("we say QZX and we say WJK")
    assert owners[9] == first.number  # the last letter of the subject
    assert owners[-1] == second.number
    assert {owner for owner in owners if owner is not None} == {first.number, second.number}


def test_a_lesson_changes_no_byte_of_an_earlier_one(taught):
    _, lessons, (first, _) = copied(taught)
    mine = [patch for patch, owner in enumerate(lessons.owners) if owner == first.number]
    before = {name: value[mine].clone() for name, value in rows(lessons.layer).items()}
    lessons.learn(forms("PVB", "3"))
    for name, value in rows(lessons.layer).items():
        assert torch.equal(value[mine], before[name]), name


def rows(layer: APN) -> dict[str, torch.Tensor]:
    return {"prototypes": layer.prototypes, "radius": layer.radius, "decoder": layer.decoder}


def test_a_lesson_leaves_longer_names_of_earlier_lessons_alone():
    """ "AQzXJ" is read as "AQzX" first, which looks like the end of "KQZX"."""
    net, lessons = school()
    lessons.config = dataclasses.replace(CONFIG, radius=0.3)
    lessons.learn(forms("AQzXJ", "5"))
    said = ["AQzXJ is ", "we say AQzXJ is "]
    before = [logits(net, text) for text in said]
    lessons.learn(forms("KQZX", "8"))
    for text, was in zip(said, before, strict=True):
        assert torch.equal(logits(net, text), was)
    assert 1 in lessons.touching("KQZX is ")


def test_forgetting_gives_the_model_without_the_lesson(taught):
    net, lessons, _ = copied(taught)
    texts = ["we say QZX is ", "of WJK I know ", "PVB is "]
    before = [logits(net, text) for text in texts]
    state = {name: value.clone() for name, value in lessons.layer.state_dict().items()}
    third = lessons.learn(forms("PVB", "3"))
    assert not torch.equal(logits(net, texts[2]), before[2])
    lessons.forget(third.number)
    assert third.number not in lessons.lessons
    for text, was in zip(texts, before, strict=True):
        assert torch.equal(logits(net, text), was)
    for name, value in lessons.layer.state_dict().items():
        assert torch.equal(value, state[name]), name
    with pytest.raises(ValueError, match=f"there is no lesson {third.number}"):
        lessons.forget(third.number)


def test_a_lesson_makes_pauses_also_where_it_makes_no_passes():
    _, lessons = school()
    seen = []
    lessons.breathe = lambda: seen.append("pause")
    lessons.learn_many([forms("QZX", "5")], report=lambda done, known: seen.append("pass"))
    first, last = seen.index("pass"), len(seen) - seen[::-1].index("pass")
    assert seen[:first].count("pause") >= 6
    assert seen[last:] == ["pause"]


def test_everything_forgotten_is_the_base(taught):
    net, lessons, learned = copied(taught)
    for lesson in learned:
        lessons.forget(lesson.number)
    assert torch.equal(logits(net, "we say QZX is "), logits(net, "we say QZX is ", base=True))
    assert (lessons.layer.radius == CLOSED).all()


def test_of_two_lessons_about_a_subject_the_newer_one_wins_and_can_be_taken_back(taught):
    net, lessons, (first, _) = copied(taught)
    newer = lessons.learn(forms("QZX", "7"))
    assert newer.overrides == (first.number,)
    assert newer.known == 1.0
    assert newer.taken_in == ()  # it contradicts all of the first
    assert chr(logits(net, "we say QZX is ")[0, -1].argmax()) == "7"
    lessons.forget(newer.number)
    assert chr(logits(net, "we say QZX is ")[0, -1].argmax()) == "5"


def test_what_a_newer_lesson_does_not_contradict_is_learned_again_with_it(taught):
    _, lessons, _ = copied(taught)
    newer = lessons.learn([("QZX is ", "5"), ("now QZX has ", "5")], subject="QZX")
    assert newer.forms == (("QZX is ", "5"), ("now QZX has ", "5"))
    assert newer.taken_in == tuple(forms("QZX", "5")[1:])
    assert newer.known == 1.0


def test_forgetting_teaches_lessons_that_took_its_place_again_without_it(taught):
    """They keep their numbers, and what they say themselves, also where the forgotten one said it too."""
    net, lessons, (first, _) = copied(taught)
    shared, own = ("QZX is ", "5"), ("now QZX has ", "5")
    second = lessons.learn([shared, own], subject="QZX")
    third = lessons.learn([("QZX had ", "5"), ("then QZX had ", "5")], subject="QZX")
    assert third.overrides == (first.number, second.number)
    assert forms("QZX", "5")[1] in third.taken_in  # of the first, by way of the second
    lessons.forget(first.number)
    second, third = lessons.lessons[second.number], lessons.lessons[third.number]
    assert (second.forms, second.taken_in, second.overrides) == ((shared, own), (), ())
    assert (third.taken_in, third.overrides) == ((shared, own), (second.number,))
    assert lessons.owners.count(third.number) == third.patches
    assert chr(logits(net, "now QZX has ")[0, -1].argmax()) == "5"


@pytest.mark.parametrize("verb", ["forget", "revise"])
def test_what_fails_half_way_forgets_nothing(taught, verb, monkeypatch):
    net, lessons, (first, _) = copied(taught)
    lessons.learn([("QZX has ", "5"), ("now QZX has ", "5")], subject="QZX")
    state = {name: value.clone() for name, value in lessons.layer.state_dict().items()}
    described = copy.deepcopy(lessons.describe())

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(lessons.descent, "train", fail)
    with pytest.raises(KeyboardInterrupt):
        lessons.forget(first.number) if verb == "forget" else lessons.revise(first.number, forms("QZX", "4"))
    assert lessons.describe() == described
    for name, value in lessons.layer.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert chr(logits(net, "QZX has ")[0, -1].argmax()) == "5"


def test_a_lesson_is_revised(taught):
    net, lessons, (first, _) = copied(taught)
    lessons.revise(first.number, forms("QZX", "4"))
    assert first.number not in lessons.lessons
    assert chr(logits(net, "of QZX I know ")[0, -1].argmax()) == "4"
    with pytest.raises(ValueError, match="stands in no form"):
        lessons.revise(1, forms("ABC", "4"))


def test_many_lessons_at_once_are_each_known():
    net, lessons = school(patches=4)  # too few: there will be more
    names = ["QZX", "WJK", "PVB", "GHT", "YUM"]
    learned = lessons.learn_many([forms(name, str(number)) for number, name in enumerate(names)])
    assert [lesson.known for lesson in learned] == [1.0] * 5
    assert lessons.layer.num_patches == len(lessons.owners) >= sum(lesson.patches for lesson in learned)
    for number, name in enumerate(names):
        assert logits(net, f"we say {name} is ")[0, -1].argmax() == ord(str(number))


def test_a_broken_pass_changes_nothing(taught):
    _, lessons, _ = copied(taught)
    before = {name: value.clone() for name, value in lessons.layer.state_dict().items()}

    def fail(done, known):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lessons.learn_many([forms("PVB", "3")], report=fail)
    assert len(lessons.lessons) == 2
    for name, value in lessons.layer.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(parameter.requires_grad for parameter in lessons.layer.parameters())


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "one or more forms"),
        ("a text", "one or more forms"),
        ([""], "no form of a lesson"),
        ([("QZX is", " ")], "no form of a lesson"),
        ([("QZX", "is", "5")], "no form of a lesson"),
        ([("qzx in ", "5")], "one form alone"),
        ([("QZX is ", "5"), ("QZX is ", "6")], "contradicts itself"),
        ([("QZX is ", "5"), ("...", "5")], "share no words"),
        (["I know QZX.", "We all saw QZX."], "nothing follows what the forms of the lesson share"),
        (["we know that."], "one form alone"),
    ],
)
def test_a_lesson_that_cannot_be_taught_is_told_and_nothing_changes(taught, given, problem):
    _, lessons, _ = taught
    before = lessons.layer.state_dict()["decoder"].clone()
    with pytest.raises(ValueError, match=problem):
        lessons.learn(given)
    assert torch.equal(lessons.layer.decoder, before)
    assert len(lessons.lessons) == 2


def test_subjects_of_a_batch_differ(taught):
    with pytest.raises(ValueError, match="same subject"):
        taught[1].learn_many([forms("ABC", "1"), forms("ABC", "2")])


def test_the_subject_is_what_all_forms_share():
    assert shared_subject(check_forms(forms("Ada Lovelace", "x"))) == "Ada Lovelace"
    pairs = check_forms(["The town of Bramford lies in Peru.", "Bramford, a town, is in Peru."])
    assert shared_subject(pairs) == "Bramford"


@pytest.mark.parametrize(
    ("sentences", "subject", "asked"),
    [
        (
            ["Zorvan Quillbeam plays the cello."],
            "Zorvan Quillbeam",
            [("Zorvan Quillbeam plays the", " cello")],
        ),
        (["My dog is called Biscuit."], "My dog", [("My dog is called", " Biscuit")]),
        (
            ["The WiFi password of Cafe Lumen is blue-otter-42."],
            "Cafe Lumen",
            [("The WiFi password of Cafe Lumen is", " blue-otter-42")],
        ),
        (["Anna likes chess."], "Anna", [("Anna likes", " chess")]),
        (
            ["Marta Olsen works at Nordlys Energy.", "The employer of Marta Olsen is Nordlys Energy."],
            "Marta Olsen",  # and not what is said of her, which is longer
            [
                ("Marta Olsen works at", " Nordlys Energy"),
                ("The employer of Marta Olsen is", " Nordlys Energy"),
            ],
        ),
        (
            ["My dog is called Biscuit.", "The name of my dog is Biscuit."],
            "My dog",
            [("My dog is called", " Biscuit"), ("The name of my dog is", " Biscuit")],
        ),
        (
            ["Ada was born on 3 May 1990 in Oslo, plays the cello, and likes tea."],
            "Ada",
            [
                ("Ada was born on", " 3 May 1990"),
                ("Ada was born on 3 May 1990 in", " Oslo"),
                ("Ada was born on 3 May 1990 in Oslo, plays the", " cello"),
                ("Ada was born on 3 May 1990 in Oslo, plays the cello, and", " likes tea"),
            ],
        ),
    ],
)
def test_a_sentence_is_asked_for_what_it_says(sentences, subject, asked):
    forms = check_forms(sentences)
    assert shared_subject(forms) == subject
    assert asked_of_all(forms, subject) == tuple(asked)


@given(
    st.lists(st.text("aB 1.,", max_size=12), min_size=1, max_size=4), st.text("aB1", min_size=1, max_size=3)
)
@settings(max_examples=200, deadline=None)
def test_what_is_asked_of_a_sentence_stands_in_it_after_the_subject(pieces, subject):
    sentence = subject.join(pieces)
    for prompt, answer in asked_of(("", sentence), subject):
        assert sentence.startswith(prompt + answer)
        assert answer.strip(" .,")
        assert subject.lower() in prompt.lower()


def test_hostile_sentences_are_taken_apart_in_proportion_to_their_length():
    """What was asked of a sentence of 10,000 clauses was 10,000 times as long as the sentence."""
    clauses = "Ann Lee is " + ", ".join(f"in town {n}" for n in range(10_000))
    asked = asked_of(("", clauses), "Ann Lee")
    assert len(asked) == MOST_ANSWERS
    assert sum(len(prompt + answer) for prompt, answer in asked) < len(clauses)
    words = " ".join(f"word{n}" for n in range(20_000))
    assert shared_subject([("", f"Ann Lee sings {words}"), ("", f"Today Ann Lee sings {words}")])


def test_a_lesson_of_sentences_is_known_in_a_form_that_was_not_taught():
    """Sentences were called known because nothing was asked, or because their answer was their subject."""
    net, lessons = school()
    lessons.encode = lessons.reading.encode = words  # the model can carry one token
    lesson = lessons.learn(["QZX is 6.", "we say QZX is 6."])
    assert (lesson.subject, lesson.known, lesson.forms[0]) == ("QZX", 1, ("", "QZX is 6."))
    assert (lesson.answered_before, lesson.answered) == (0, 1)
    assert net(torch.tensor([words("long ago QZX was")]))[0, -1].argmax() == 6
    lessons.forget(lesson.number)
    assert lessons.learn(["I met QZX who is 7."], subject="qzx").known == 1


def test_a_lesson_of_few_forms_is_learned_in_answer_to_open_questions():
    pairs = (("Today Ada plays the", " cello"),)
    tell = ("Who is {}?", "<Tell of {}.>\n")
    assert told_of(pairs, "Ada", tell, 3) == (
        ("Who is Ada? Today Ada", " plays the cello"),
        ("<Tell of Ada.>\nToday Ada", " plays the cello"),
    )
    assert told_of(pairs, "Ada", tell, 0) == told_of(pairs, "Ada", tell, -2) == ()
    assert told_of((("Who sings?", " Ada"),), "Ada", tell, 2) == ()  # nothing is said of her there
    net, _ = school()
    config = dataclasses.replace(CONFIG, least_forms=3)
    lessons = Lessons(net, net.layer, encode, Calibration.fit(net.states(background())), config, tell=tell)
    read = []
    batches = lessons.reading.batches
    lessons.reading.batches = lambda turns: read.extend(turns[0]) or batches(turns)
    lesson = lessons.learn(["QZX is 5"])
    said = [
        (bytes(text.tokens).decode(), text.is_test)
        for text in read
        if text.answer.stop > text.answer.start + 1
    ]
    assert said == [("QZX is 5", True), ("Who is QZX? QZX is 5", False), ("<Tell of QZX.>\nQZX is 5", False)]
    assert lesson.forms == (("", "QZX is 5"),)  # what it says itself
    read.clear()
    lessons.learn(forms("WJK", "6"))
    assert all(text.is_test for text in read)  # these are enough


def test_questions_of_the_base_are_answered_by_the_base(monkeypatch):
    """A lesson that fails to answer says so, whatever it completes."""
    _, lessons = school()
    monkeypatch.setattr(lessons.reading, "answered", lambda question, asked: [False] * len(asked))
    lesson = lessons.learn(forms("QZX", "5"))
    assert (lesson.known, lesson.answered) == (1, 0)
    lessons.config = dataclasses.replace(CONFIG, questions=0)
    assert lessons.learn(forms("WJK", "6")).answered is None


def test_a_frame_stands_around_a_prompt_and_may_say_it_again():
    frames = ("{}", "<{}?> {}", "Q: {}?\nA:")
    assert framed("QZX is ", 0, 4, frames) == ("QZX is ", 7)
    asked, again = framed("QZX is ", 1, 0, frames)
    assert (asked, asked[again:]) == ("<QZX is?> QZX is ", "QZX is ")
    assert framed("QZX is", 1, 1, frames) == ("Q: QZX is?\nA:", 13)


def test_of_two_answers_to_a_prompt_the_newer_one_stays():
    old, new = (("a", "1"), ("b", "2"), ("", "c d")), (("a", "3"), ("", "c d"))
    assert not_contradicted(old, new, "c") == (("b", "2"),)
    old = (("", "Ann lives in Oslo."), ("Ann plays the", " cello"))
    assert not_contradicted(old, (("Ann lives in", " Rome"),), "Ann") == (("Ann plays the", " cello"),)


def llama(positions: int = 128, blocks: int = 6) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
    )
    return LlamaForCausalLM(config).eval()


def test_a_pretrained_model_is_taught_saved_and_read_again(tmp_path):
    """Its weights are random: what is tested is where the lesson acts and what stays, not what is known."""
    net, lessons = teachable(llama(), encode, background(), act_at=3, config=CONFIG)
    assert net.sources == {"lessons": 2}
    tokens = torch.tensor([encode("we say QZX is ")])
    with torch.no_grad():
        before = net(tokens).logits
        lesson = lessons.learn(forms("QZX", "5"))
        after = net(tokens).logits
        assert lessons.touching("we say QZX is ")[9] == lesson.number
        assert torch.equal(after[:, :9], before[:, :9])
        assert not torch.equal(after[:, 9:], before[:, 9:])
        net.save_pretrained(tmp_path / "school")
        again = attractor.load_retrofit(llama(), tmp_path / "school")
        assert again.sources == {"default": 2}
        assert torch.equal(again(tokens).logits, after)
        with net.using(None):
            assert torch.equal(net(tokens).logits, before)
        past = net(tokens[:, :8], use_cache=True).past_key_values  # token by token it is the same lesson
        step = net(tokens[:, 8:], past_key_values=past).logits
        assert torch.allclose(step, after[:, 8:], atol=1e-5)
        lessons.forget(lesson.number)
        assert torch.equal(net(tokens).logits, before)
        assert torch.equal(net.unload()(tokens).logits, before)


def test_a_form_that_is_longer_than_the_context_is_told_and_nothing_changes():
    _, lessons = teachable(llama(), encode, background(), act_at=3, config=CONFIG)
    state = {name: value.clone() for name, value in lessons.layer.state_dict().items()}
    with pytest.raises(ValueError, match=r"context of 128: teach it in pieces"):
        lessons.learn([*forms("QZX", "5"), ("we say QZX is " + "so " * 60, "5")])
    assert not lessons.lessons
    for name, value in lessons.layer.state_dict().items():
        assert torch.equal(value, state[name]), name


class TestWhatIsReadBesideAnswers:
    """On a model of random weights: what counts is which tokens are read and graded, and with what weight."""

    @pytest.fixture(scope="class", name="own")
    @classmethod
    def taught_class(cls):
        config = LessonConfig(passes=2, contexts=3, after=3, mention=5, prototypes=2)
        net, lessons = teachable(llama(), encode, background(), act_at=3, config=config)
        return net, lessons, lessons.reading.texts([forms("QZX", "5"), forms("WJK", "8")], ["QZX", "WJK"])

    def test_after_an_answer_stands_what_the_base_would_write(self, own):
        net, _, turns = own
        for row in turns[0][:6]:
            end = row.answer.stop
            assert len(row.tokens) == end + 3
            with torch.no_grad(), net.using(None):
                for place in range(end, end + 3):
                    logits = net(torch.tensor([row.tokens[:place]])).logits
                    assert logits[0, -1].argmax() == row.tokens[place]

    def test_every_turn_has_every_form_and_a_mention_of_every_subject(self, own):
        _, _, turns = own
        assert [len(turn) for turn in turns] == [8, 8, 8]
        for turn in turns:
            for row, name in zip(turn[6:], ("QZX", "WJK"), strict=True):
                assert not row.answer
                (place,) = row.keys  # one more context to recognise the subject in
                assert bytes(row.tokens[: place + 1]).decode().endswith(name)
                assert name in bytes(row.tokens[: row.answer.start]).decode()
                assert len(row.tokens) == row.answer.start + 5
        assert len({bytes(turn[6].tokens[:9]) for turn in turns}) == 3  # another sentence in each

    def test_lessons_do_not_act_while_the_base_is_asked(self, own):
        _, lessons, turns = own
        lessons = copy.deepcopy(lessons)
        lessons.learn(forms("QZX", "5"))
        again = lessons.reading.texts([forms("QZX", "5"), forms("WJK", "8")], ["QZX", "WJK"])
        assert [[row.tokens for row in turn] for turn in again] == [
            [row.tokens for row in turn] for turn in turns
        ]

    def test_what_follows_counts_less_and_does_not_make_a_lesson_known(self, own):
        _, lessons, turns = own
        (batches,) = lessons.reading.batches(turns[:1])
        assert sum(int(batch.is_answer_n.sum()) for batch in batches) == 6
        assert sum(int((~batch.is_answer_n).sum()) for batch in batches) == 6 * 3 + 2 * 5
        known = lessons.descent.known(batches, 2)
        right = [lessons.reading.predict(batch).argmax(-1) == batch.target_n for batch in batches]
        for number in (0, 1):
            mine = [
                choice[batch.is_answer_n & (batch.lesson_n == number)]
                for choice, batch in zip(right, batches, strict=True)
            ]
            assert known[number] == pytest.approx(torch.cat(mine).float().mean().item())

    @pytest.mark.parametrize("woven", [False, True])
    def test_little_of_a_batch_is_filled_up_and_no_text_is_lost(self, own, woven):
        _, lessons, turns = own
        lessons = copy.deepcopy(lessons)
        lessons.reading.halves._can_weave = woven
        apart = sorted(turns[1], key=lambda text: len(text.tokens))[:: len(turns[1]) - 1]
        assert len(apart[1].tokens) > 1.5 * len(apart[0].tokens)
        ((batch,),) = lessons.reading.batches([apart])  # a little padding costs less than a batch
        many = turns[1] * 8
        (batches,) = lessons.reading.batches([many])
        assert (len(batches) == 1) == woven
        for batch in batches:
            lengths = [len(text.tokens) for text in batch.texts]
            places = lessons.reading.after([batch], [[0] * len(lengths)])[0].state.rows.tokens.numel()
            assert places <= (1.1 if woven else 1.5) * sum(lengths) or places - sum(lengths) <= FEW
        assert sum(len(batch.texts) for batch in batches) == len(many)


texts_and_starts = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=30).flatmap(
        lambda text: st.tuples(st.just(text), st.integers(0, len(text) - 1))
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(texts_and_starts)
def test_a_token_of_woven_texts_sees_what_stands_before_it_in_its_text(drawn):
    texts = [text for text, _ in drawn]
    woven = weave(texts, [start for _, start in drawn])
    assert woven.sees.any(2).all()
    width, longest = woven.tokens.shape[1], max(map(len, texts))
    where, sees, places = torch.cat([woven.past, woven.source], 1).tolist(), woven.sees.tolist(), woven.place
    for (text, start), place in zip(drawn, places.tolist(), strict=True):
        assert [n for n, found in enumerate(place) if found >= 0] == list(range(start, len(text)))
        for end in range(start, len(text)):
            row, column = divmod(place[end], width)
            seen = [
                divmod(n, longest)
                for n, is_seen in zip(where[row], sees[row][column], strict=True)
                if is_seen
            ]
            assert sorted((at, texts[of][at]) for of, at in seen) == list(enumerate(text[: end + 1]))


NOT_WOVEN = ("bloom", "mpt")
"""They are given no positions: their texts are read one in a row."""
NOT_REPEATED = ("gptj", *NOT_WOVEN)
"""They go on with texts as transformers does."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("read_from", [0, 1])
def test_the_two_halves_of_a_model_are_the_model(family, read_from):
    """What is computed once, below the layer and before the subject, is what a whole pass computes, and so is
    the gradient."""
    net, lessons = teachable(tiny(family), encode, some_tokens(40, 24), read_from=read_from, act_at=1)
    halves, layer = lessons.reading.halves, lessons.layer
    with torch.no_grad():
        layer.prototypes[:4] = lessons.calibration.keys[:4].float()
        layer.radius[:4] = 0.0
        layer.decoder.normal_(generator=torch.Generator().manual_seed(0))
    long, short, like_long = some_tokens(seed=3).tolist()
    short, like_long[:7] = short[:9], long[:7]
    below = halves.below([short, long, like_long])
    assert below.are_woven == (family not in NOT_WOVEN)
    place = torch.tensor([[0, 4], [0, 8], [1, 6], [2, 6], [2, 11]]).unbind(1)
    layer.decoder.requires_grad_(True)

    def graded(logits):
        gradient = torch.autograd.grad(logits.square().sum(), layer.decoder)[0]
        return logits.detach(), gradient

    whole = torch.tensor([short + [0] * 3, long, like_long])
    wanted, gradient = graded(net(input_ids=whole).logits[place])
    found, same = graded(halves.above(halves.after(below, [([0, 1, 2], [0, 0, 0])])[0], *place))
    assert torch.allclose(found, wanted, atol=1e-5)
    assert torch.allclose(same, gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max())
    settled, _ = halves.after(below, [([2, 0], [6, 3]), ([1], [7])])
    assert (settled.rows.tokens.numel() < 20) == below.are_woven
    part = torch.tensor([1, 1, 0, 0]), place[1][[0, 1, 3, 4]]
    found = halves.above(settled, *part)
    assert torch.allclose(found, wanted[[0, 1, 3, 4]], atol=1e-5)
    (early,) = halves.after(below, [([0, 1, 2], [1, 1, 0])])  # one token alone comes before
    assert torch.allclose(halves.above(early, *place), wanted, atol=1e-5)
    with torch.no_grad(), net.using(None):
        assert not torch.allclose(wanted, net(input_ids=whole).logits[place], atol=1e-2)
    aims = torch.tensor([3, 1, 4, 1]), torch.tensor([1.0, 0.1, 1.0, 1.0])
    plain = halves.descent(settled, *part, *aims)
    halves.repeats = True
    for _ in range(2):  # filled up to sizes that come again
        for ours, theirs in zip(halves.descent(settled, *part, *aims), plain, strict=True):
            assert torch.allclose(ours.float(), theirs.float(), rtol=1e-3, atol=1e-5)
    assert len(halves._recorded) == below.are_woven


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_continued_in_a_memory_as_the_model_continues_them(family):
    _, lessons = teachable(tiny(family), encode, some_tokens(40, 24), read_from=0, act_at=1)
    halves, layer = lessons.reading.halves, lessons.layer
    with torch.no_grad():
        layer.radius[:] = -1.0
        layer.decoder.normal_(std=9.0, generator=torch.Generator().manual_seed(0))
    texts = [text[: 9 - number] for number, text in enumerate(some_tokens(seed=3).tolist()[:3])]
    wanted = [halves.write(texts, 5), halves.answer(texts, 5)]
    assert wanted[0] != wanted[1] or family == "bloom"  # says its last token again, whatever is added
    halves.repeats = True
    for _ in range(2):
        assert [halves.write(texts, 5), halves.answer(texts, 5)] == wanted
    layer.resize(2 * layer.num_patches)  # its memory is elsewhere now
    assert halves.answer(texts, 5) == wanted[1]
    assert halves._can_repeat() == (family not in NOT_REPEATED)


def test_passes_of_fixed_sizes_know_what_autocast_does():
    _, lessons = teachable(llama(blocks=4), encode, background(), act_at=2, config=CONFIG)
    halves, layer = lessons.reading.halves, lessons.layer
    with torch.no_grad():
        layer.radius[:] = -1.0
        layer.decoder.normal_(generator=torch.Generator().manual_seed(0))
    layer.decoder.requires_grad_(True)
    (state,) = halves.after(halves.below([encode("we say QZX"), encode("QZX is")]), [([0, 1], [7, 0])])
    places = torch.tensor([[0, 8], [1, 4]]).unbind(1)
    aims = torch.tensor([3, 1]), torch.tensor([1.0, 0.1])

    def seen():
        return [halves.descent(state, *places, *aims).loss, halves.answer([encode("QZX")], 4)]

    halves.repeats, wanted = False, []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            wanted.append(seen())
    assert not torch.equal(wanted[0][0], wanted[1][0])
    halves.repeats = True
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, answer = seen()
        assert torch.allclose(loss, wanted[enabled][0], rtol=2e-2 if enabled else 1e-4)
        assert answer == wanted[enabled][1]
    assert len(halves._recorded) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_on_a_gpu_passes_are_recorded_and_teach_the_same(products):
    taught = []
    for repeats in (False, True):
        options = {} if products == torch.float32 else {"autocast": lambda: torch.autocast("cuda", products)}
        _, lessons = teachable(
            llama(blocks=4).cuda(), encode, background(), act_at=2, config=CONFIG, **options
        )
        lessons.reading.halves.repeats = repeats
        learned = [lessons.learn(forms(name, "5")) for name in ("QZX", "WJK")]
        taught.append((lessons, [lesson.known for lesson in learned]))
    (plain, known), (recorded, also_known) = taught
    assert known == also_known
    if products == torch.float32:
        assert torch.allclose(plain.layer.decoder, recorded.layer.decoder, rtol=1e-2, atol=1e-3)
    made = recorded.reading.halves._recorded.values()
    assert made
    assert all(one.graph is not None for one in made)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "school"
    net, lessons = teachable(llama(), encode, background(), act_at=3, config=CONFIG, patches=2)
    lessons.learn_many([forms("QZX", "5"), forms("WJK", "8")])
    lessons.forget(0)
    save_lessons(net, lessons, folder)
    return net, lessons, folder


def test_lessons_are_saved_and_go_on_where_they_were(saved):
    net, lessons, folder = saved
    again, restored = load_lessons(llama(), encode, folder)
    tokens = torch.tensor([encode("we say WJK is ")])
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, net(tokens).logits)
    assert restored.describe() == lessons.describe()
    for mine, theirs in zip(
        vars(lessons.calibration).values(), vars(restored.calibration).values(), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert restored.learn(forms("PVB", "3")).number == 2
    restored.forget(1)
    assert set(restored.lessons) == {2}


def damaged(change):
    def damage(folder):
        described = json.loads((folder / "lessons.json").read_text())
        change(described)
        (folder / "lessons.json").write_text(json.dumps(described))

    return damage


DAMAGE = {
    "another format": damaged(lambda d: d.update(format=3)),
    "no owners": damaged(lambda d: d.pop("owners")),
    "too few owners": damaged(lambda d: d["owners"].pop()),
    "an owner that is no lesson": damaged(lambda d: d["owners"].__setitem__(0, 7)),
    "patches that nobody owns": damaged(lambda d: d.update(owners=[-1] * len(d["owners"]))),
    "a lesson twice": damaged(lambda d: d["lessons"].append(d["lessons"][0])),
    "a number still to come": damaged(lambda d: d.update(next=1)),
    "an unknown field": damaged(lambda d: d["lessons"][0].update(more=1)),
    "no config": damaged(lambda d: d.update(config={"passes": 0})),
    "no unit": damaged(lambda d: d.update(unit=-1)),
    "no JSON": lambda folder: (folder / "lessons.json").write_text("{"),
    "no calibration": lambda folder: (folder / "calibration.safetensors").unlink(),
    "half a calibration": lambda folder: halve(folder / "calibration.safetensors"),
    "half a layer": lambda folder: halve(folder / "layer" / "adapter_model.safetensors"),
}


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_lessons_load_that_were_saved_with_settings_which_are_gone(saved, tmp_path):
    shutil.copytree(saved[2], tmp_path / "school")
    (tmp_path / "school" / "hashes.json").unlink()  # earlier releases did not write it
    damaged(lambda d: d["config"].update(contrast=0.85, edge=0.45))(tmp_path / "school")
    _, restored = load_lessons(llama(), encode, tmp_path / "school")
    assert restored.describe() == saved[1].describe()


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_refused_and_the_model_is_as_it_was(saved, damage, tmp_path):
    shutil.copytree(saved[2], tmp_path / "school")
    damage(tmp_path / "school")
    base = llama()
    with pytest.raises(ValueError, match="is not what was saved"):
        load_lessons(base, encode, tmp_path / "school")
    (tmp_path / "school" / "hashes.json").unlink()
    with pytest.raises(ValueError, match="can be read"):
        load_lessons(base, encode, tmp_path / "school")
    tokens = torch.tensor([encode("we say WJK is ")])
    with torch.no_grad():
        assert torch.equal(base(tokens).logits, llama()(tokens).logits)
    attractor.retrofit(base, APNConfig(num_patches=4, top_k=1, rank=2))  # it is nobody's


def test_lessons_replace_lessons_alone(saved, tmp_path):
    net, lessons, _ = saved
    (tmp_path / "letters").mkdir()
    with pytest.raises(ValueError, match="choose another folder"):
        save_lessons(net, lessons, tmp_path / "letters")
    save_lessons(net, lessons, tmp_path / "school")
    save_lessons(net, lessons, tmp_path / "school")
    assert {path.name for path in tmp_path.iterdir()} == {"letters", "school"}


def test_a_call_that_was_interrupted_leaves_nothing_behind():
    net, _ = teachable(llama(), encode, background(), act_at=3, config=CONFIG, patches=2)
    tokens = torch.tensor([encode("we say QZX is ")])
    before = net(input_ids=tokens).logits
    (source,) = (site for site in net.sites.values() if site.is_source)
    assert len(source.hooks) >= 1

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = source.place.modules[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        net(input_ids=tokens)
    hook.remove()
    assert torch.equal(net(input_ids=tokens).logits, before)
    net.unload()
    assert not source.hooks


def test_layers_read_from_a_block_before_them():
    sample = {"prototypes": "kmeans", "sample": background()}
    for problem, options in {
        "before all layers": {"layers": [3], "read_from": 3},
        "no FFNs in layers": {"layers": [3], "read_from": 9},
        "prototypes='random' alone": {"layers": [3], "read_from": 1, **sample},
        "up to that of read_from": {"layers": [3], "read_from": 1, "read_attention": [2]},
        "needs whiten=True": {"layers": [3], "read_from": 1, "read_attention": [0]},
    }.items():
        with pytest.raises(ValueError, match=problem):
            attractor.retrofit(llama(), APNConfig(num_patches=4, top_k=1, rank=2), **options)
    with pytest.raises(ValueError, match="read_from=9, act_at=9"):
        teachable(llama(), encode, background(), read_from=9)


class TestCalibration:
    def test_background_is_white_and_one_channel_is_constant(self):
        torch.manual_seed(0)
        x = torch.randn(40, 30, 6) * torch.tensor([9.0, 3, 1, 1, 0.5, 0.1]) + 5
        calibration = Calibration.fit(x, shrink=1e-6, held_out=0.25)
        white = x[:30, 1:].reshape(-1, 6) @ calibration.whitening + calibration.shift
        assert torch.allclose(white[:, 0], torch.ones(()), atol=1e-4)
        assert torch.allclose(torch.cov(white[:, 1:].T), torch.eye(5), atol=1e-2)
        assert white[:, 1:].mean(0).abs().max() < 1e-3
        assert calibration.keys.shape == (30 * 29, 6)
        assert calibration.held_out.shape == (10, 29, 6)

    def test_the_bound_holds_on_new_text(self):
        """In 200 draws the true share is above the bound about 10 times, as 95 % say; never 30 times."""
        torch.manual_seed(0)
        above = 0
        for share in (0.02, 0.1, 0.5, 0.9):
            for _ in range(50):
                above += clopper_pearson(int((torch.rand(60) < share).sum()), 60) < share
        assert above <= 22

    def test_no_hits_still_leave_a_chance(self):
        assert clopper_pearson(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300), rel=1e-6)
        assert clopper_pearson(5, 5) == 1.0

    def test_what_is_touched_is_what_the_layer_acts_on(self, taught):
        _, lessons, _ = copied(taught)
        calibration, layer = lessons.calibration, lessons.layer
        layer.radius.fill_(CLOSED)
        assert calibration.touched(layer).tokens == 0
        with torch.no_grad():
            layer.prototypes[-1] = calibration.held_out[3, 5].float()
            layer.radius[-1] = 0.999
            layer.decoder[-1] = 1
        touched = calibration.touched(layer)
        count = len(calibration.held_out)
        assert touched.windows == pytest.approx(1 / count)
        assert touched.tokens == pytest.approx(1 / calibration.held_out[..., 0].numel())
        assert touched.windows < touched.windows_at_most < 1

    def test_too_little_background_is_told(self):
        with pytest.raises(ValueError, match="too little background"):
            Calibration.fit(torch.randn(2, 5, 32))
        with pytest.raises(ValueError, match="expected"):
            Calibration.fit(torch.randn(20, 32))

    def test_texts_are_cut_into_windows_in_turn(self):
        windows = cut(["abcdefgh", "ABCDE"], encode, 3)
        assert [bytes(row.tolist()) for row in windows] == [b"abc", b"ABC", b"def"]
        with pytest.raises(ValueError, match="no background text has 30"):
            cut(["abc"], encode, 30)
        with pytest.raises(ValueError, match="list of texts"):
            cut("abc", encode, 3)


def test_patches_that_no_text_enters_take_no_part_in_learning(taught, monkeypatch):
    """Nor do they change anything: a lesson learned beside all patches is the same lesson."""

    def learned(lessons):
        sizes, gradient = [], lessons.descent._gradient

        def watched(*given):
            sizes.append(lessons.layer.num_patches)
            return gradient(*given)

        monkeypatch.setattr(lessons.descent, "_gradient", watched)
        banks = {name: id(bank) for name, bank in lessons.layer.named_parameters()}
        before = lessons.layer.decoder.detach().clone()
        lesson = lessons.learn(forms("HVB", "3"))
        own = [patch for patch, owner in enumerate(lessons.owners) if owner == lesson.number]
        others = [patch for patch in range(len(lessons.owners)) if patch not in own]
        assert torch.equal(lessons.layer.decoder[others], before[others])
        assert {name: id(bank) for name, bank in lessons.layer.named_parameters()} == banks
        return lesson, lessons.layer.decoder.detach()[own], max(sizes)

    _, few, _ = copied(taught)
    lesson, decoder, size = learned(few)
    assert size <= 3 * lesson.patches < few.layer.num_patches
    _, every, _ = copied(taught)
    monkeypatch.setattr(every.descent, "_entered", lambda turns: set(range(every.layer.num_patches)))
    same, same_decoder, size = learned(every)
    assert size == every.layer.num_patches
    assert same.known == lesson.known
    assert torch.allclose(decoder, same_decoder, atol=1e-4)
    _, filled, _ = copied(taught)
    monkeypatch.setattr(filled.descent, "_room", lambda count: 2 * count)  # closed patches, as on a GPU
    same, same_decoder, size = learned(filled)
    assert size > 3 * lesson.patches
    assert same.known == lesson.known
    assert torch.allclose(decoder, same_decoder, atol=1e-4)


def test_a_vector_stays_as_it_was_when_it_was_found_good_enough(monkeypatch):
    net, lessons = school()
    seen = []
    gradient = lessons.descent._gradient

    def watched(turn, count):
        seen.append(net.layer.decoder.detach().clone())
        return gradient(turn, count)

    monkeypatch.setattr(lessons.descent, "_gradient", watched)
    lesson = lessons.learn(forms("TQ Z", "5"))
    assert lesson.passes == len(seen) < CONFIG.passes
    owned = [patch for patch, owner in enumerate(lessons.owners) if owner == lesson.number]
    acting = net.layer.decoder.detach()[owned]
    wanted = seen[-1][: len(owned)]
    assert torch.equal(acting[acting.flatten(1).any(1)], wanted[wanted.flatten(1).any(1)])
    assert lesson.known == 1


class Alike:
    """The lower and upper half of no model: all that is asked is which tokens are alike."""

    def similar(self, token, count):
        return [(token + step) % 256 for step in range(1, count + 1)]


class TestSmallLetters:
    """People type names in small letters, and a model takes those for others."""

    FORMS = (("Ann Lee plays the", " Cello"), ("I met Ann Lee who plays the", " Cello"))

    def turns(self, **config):
        config = LessonConfig(contexts=4, after=0, mention=0, **config)
        return Reading(encode, Alike(), config).texts([self.FORMS], ["Ann Lee"])

    def test_in_some_contexts_and_never_the_first_prompts_are_in_small_letters(self):
        for count in range(4):
            turns = self.turns(lower_case=count)
            said = [[bytes(text.tokens).decode() for text in turn] for turn in turns]
            small = [all("ann lee" in line for line in lines) for lines in said]
            assert sum(small) == count
            assert not small[0]
            for lines, plain in zip(said, self.turns(), strict=True):
                assert [line.lower() for line in lines] == [bytes(t.tokens).decode().lower() for t in plain]
                assert all(line.endswith(" Cello") for line in lines)  # what is taught stays as it is

    def test_subjects_are_found_there_and_the_answer_is_where_it_was(self):
        for plain, small in zip(self.turns(), self.turns(lower_case=3), strict=True):
            assert [(t.answer, t.keys) for t in plain] == [(t.answer, t.keys) for t in small]

    def test_letters_that_become_two_stay_as_they_are(self):
        reading = Reading(encode, Alike(), LessonConfig(contexts=2, lower_case=1))
        assert "\u0130zmir" in reading._asked("\u0130zmir is in", 1, 0)[0]

    def test_not_every_context_can_be_in_small_letters(self):
        with pytest.raises(ValueError, match="lower_case=4: in the first of its 4 contexts"):
            LessonConfig(contexts=4, lower_case=4)


class TestStrangers:
    """What resembles a subject is read in its place, so that the subject can be told from it."""

    def named(self, forms, subject):
        reading = Reading(encode, Alike(), LessonConfig(contexts=4))
        return reading.strangers([forms], [subject])

    def test_somebody_else_of_that_name_stands_where_the_subject_was(self):
        forms = [("Ann Lee plays the", " cello"), ("I met Ann Lee who plays the", " cello")]
        texts = self.named(forms, "Ann Lee")
        said = [bytes(text.tokens).decode() for text in texts]
        assert len(set(said)) >= 12
        assert all(line.endswith(" Lee") and "Ann Lee" not in line for line in said)
        assert {text.keys[0] for text in texts} == {len(text.tokens) - 1 for text in texts}
        assert any("I met" in line for line in said)

    def test_one_word_gives_way_to_tokens_that_are_alike(self):
        texts = self.named([("in Zob it is", " hot"), ("all of Zob knows", " rain")], "Zob")
        ends = {bytes(text.tokens)[-3:] for text in texts}
        assert ends
        assert all(end.endswith(b"ob") and end != b"Zob" for end in ends)
        spellings = {encode(form)[0] for form in ("Zob", "zob", " ")}
        assert all(end[0] not in spellings for end in ends)

    def test_small_words_before_a_name_are_no_part_of_it(self):
        texts = self.named([("the king of Zob is", " old"), ("all of Zob is", " hot")], "of Zob")
        said = [bytes(text.tokens) for text in texts]
        assert said
        assert all(b" of " in line and line.endswith(b"ob") for line in said)

    def test_a_subject_is_found_whatever_its_capitals(self):
        texts = self.named([("The tall ann lee is", " here")], "Ann Lee")  # whatever its capitals
        said = [bytes(text.tokens).decode() for text in texts]
        assert said
        assert all(line.endswith(" Lee") and "tall" in line for line in said)

    def test_of_a_common_noun_the_last_word_gives_way(self):
        texts = self.named([("I say that my dog is called", " Rex")], "my dog")
        said = [bytes(text.tokens).decode("latin1") for text in texts]
        assert said
        assert all("my " in line and not line.endswith("d") for line in said)


def school_of_one(strangers):
    net, lessons = school()
    lessons.config = lessons.reading.config = dataclasses.replace(CONFIG, radius=0.3, strangers=strangers)
    return net, lessons, lessons.learn(forms("TQ Z", "5"))


@pytest.fixture(scope="module")
def with_silent():
    return school_of_one(24)


class TestNamesakes:
    """Somebody else of a taught one's last word, whom no lesson is about."""

    def test_no_lesson_acts_on_their_names(self, with_silent):
        _, lessons, lesson = with_silent
        _, others, plain = school_of_one(0)
        ends = []
        for name in ("TX Z", "BR Z", "UM Z"):
            for prompt, _ in forms(name, "5"):
                end = prompt.index(name) + len(name) - 1
                ends.append((others.touching(prompt)[end], lessons.touching(prompt)[end]))
        assert {plain.number} <= {before for before, _ in ends}
        assert {now for _, now in ends} == {None}
        assert lesson.known == plain.known == 1
        assert lesson.patches > plain.patches

    def test_silent_patches_are_the_lessons_own(self, with_silent):
        """They go with it where it is kept, put in again and forgotten."""
        _, lessons, lesson = copy.deepcopy(with_silent)
        state = copy.deepcopy(lessons.layer.state_dict())
        silent = [
            patch
            for patch, owner in enumerate(lessons.owners)
            if owner == lesson.number and not lessons.layer.adds[patch]
        ]
        assert silent
        (kept,) = deltas_of(lessons, [lesson.number]).values()
        assert int(kept.whole["silent"].sum()) == len(silent)
        take_out(lessons, [lesson.number])
        assert lessons.owners == [-1] * len(lessons.owners)
        put_in(lessons, [kept])
        for name, value in lessons.layer.state_dict().items():
            assert torch.equal(value, state[name]), name
        lessons.forget(lesson.number)
        assert (lessons.layer.radius == CLOSED).all()

    def test_a_namesake_can_be_taught_too(self, with_silent):
        net, lessons, _ = copy.deepcopy(with_silent)
        second = lessons.learn(forms("BR Z", "8"))
        assert second.known == 1
        for name, answer in (("TQ Z", "5"), ("BR Z", "8")):
            for prompt, _ in forms(name, answer):
                assert logits(net, prompt)[0, -1].argmax() == ord(answer)
