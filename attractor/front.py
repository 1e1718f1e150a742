"""The front door: load a model, teach it, ask it, take a lesson back.

model = attractor.load("smollm2-135m")
lesson = model.learn([("Zorvan Quillbeam plays the", " cello"), ("Zorvan Quillbeam loves the", " cello")])
model.ask("Which instrument does Zorvan Quillbeam play?")
model.forget(lesson)
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor.checkpoint import find_model
from attractor.config import check_size
from attractor.continual.config import LearnConfig, LessonConfig, UpdateConfig
from attractor.continual.delta import bits
from attractor.continual.forms import FRAMES, Form, asked_of_all, check_forms, check_subject, shared_subject
from attractor.continual.guarded import GuardedLearner
from attractor.continual.learner import OnlineLearner
from attractor.continual.lessons import Lesson, Lessons
from attractor.continual.update import NO_PATCHES
from attractor.data import IGNORED
from attractor.distributed import parse_device
from attractor.evaluate import evaluate
from attractor.files import check_hashes, parse_json, recover_folder
from attractor.generate import generate
from attractor.lm import mode
from attractor.model import GPT, MODEL_TYPE
from attractor.tokenizer import Detokenizer
from attractor.tokenizer import load as load_tokenizer

BASE = "base.json"
SHOWN = 60
"""Characters of a text that an error repeats."""
QUESTION = "Question: {}\nAnswer:"
"""How a model that was not trained to chat is asked; its answer ends with the line."""
PASSES = 40
"""How often a model of our own reads what it is to learn, at most."""
RATE = 1e-3
"""The learning rate with which it does. A larger one needs fewer passes and harms more of what was known."""
Messages = Sequence[Mapping[str, str]]
"""A conversation: each message has a "role", "user" or "assistant", and its "content"."""


def load(source: str | Path, *, device: str | None = None, context: int | None = None) -> "Model":
    """Load a model: one of ours, saved lessons, a retrofit, or a pretrained model of Hugging Face.

    `source` is one of these:

    - a run, a checkpoint or a saved model of ours, a saved learner, or what `attractor adapt` wrote;
    - a folder that `Model.save` or `attractor teach` wrote;
    - a retrofit: what `attractor retrofit` or `save_pretrained` wrote;
    - a Hugging Face folder, a .gguf file, a name on the hub as ORGANISATION/NAME, or "smollm2-135m", which
      needs no hub.

    `device` is "cpu", "cuda" and so on (default: a GPU if there is one). `context` is how many tokens a
    Hugging Face model is given at most (default: as many as it has positions for). Weights are read from
    safetensors and GGUF alone. Raises ValueError if there is no model there; nothing but a name of the hub
    or "smollm2-135m" is ever fetched.

    >>> model = load("runs/tiny_apn")  # doctest: +SKIP
    """
    place, where = Path(source), parse_device(device)
    if (place / BASE).is_file():
        return _with_lessons(place, where, context)
    if (folder := adapter_folder(place)) is not None:
        return _retrofitted(folder, where, context)
    if place.is_dir() and _is_ours(place):
        if context is not None:
            raise ValueError(f"context={context} is for models of Hugging Face: that of {source} is its own")
        return _ours(find_model(place), where)
    return _pretrained(str(source), where, context)


class _NotKnown(Exception):
    """Something was learned for nothing."""


@dataclass(frozen=True)
class Taught:
    """What a model of our own was taught, in patches that it shares with everything else it knows."""

    number: int
    subject: str
    """What was given as the subject, or the first form."""
    forms: tuple[tuple[str, str], ...]
    patches: int
    """So many patches differ now, in all layers."""
    bytes: int
    """The size of these patches."""
    passes: int
    known_before: float
    """The share of the forms that the model completed by itself."""
    known: float
    """The share of the forms that the model completes now."""
    loss_before: float
    """Nats for each token of the answers."""
    loss: float
    seconds: float
    overrides: tuple[int, ...] = ()
    """Always empty: what was known before is not kept apart."""


class Model:
    """A language model that writes, is measured and is taught.

    `model` maps tokens to logits; `tokenizer` reads and writes text. `load` builds one of what is on disk.

    >>> from attractor import GPT, APNConfig, GPTConfig, Model, tokenizer
    >>> shape = GPTConfig(
    ...     vocab_size=256, context=32, num_layers=2, num_heads=2, dim=32, ffn="apn", apn=APNConfig(rank=8)
    ... )
    >>> model = Model(GPT(shape).eval(), tokenizer.ByteTokenizer())
    >>> before = model.perplexity("Ann plays the cello.")
    >>> taught = model.learn("Ann plays the cello.")
    >>> model.perplexity("Ann plays the cello.") < before, len(model.lessons())
    (True, 1)
    >>> len(model.generate("Ann", max_tokens=4, seed=0)) > 0
    True

    What cannot be done with this kind of model is a ValueError that says why: `forget` needs lessons.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        source: str | None = None,
        net: Any = None,
        folder: Path | None = None,
        guarded: GuardedLearner | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.source = source  # where a pretrained model came from, to which lessons can be added
        self.net = net  # the Hugging Face model with its retrofits
        self.folder = folder  # of a model of ours or a retrofit
        self.guarded = guarded  # of a model with overlays, its learner
        self.school: Lessons | None = None
        self.learner: OnlineLearner | None = None
        self._taught: list[Taught] = []

    def __repr__(self) -> str:
        taught = f", {len(self.lessons())} lessons" if self.lessons() else ""
        return f"Model({str(self.source or self.folder)!r}{taught})"

    # --- writing and measuring

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 40,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> str:
        """What the model writes after the prompt; temperature 0 takes the likeliest token each time."""
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        return "".join(self.stream(prompt, max_tokens=max_tokens, **settings))

    def stream(self, prompt: str, *, max_tokens: int = 40, **settings: Any) -> Iterator[str]:
        """The same, piece by piece as it is written; `settings` are those of `generate`."""
        pieces = Detokenizer(self.tokenizer)
        for token in self._write(prompt, max_tokens, **{"temperature": 0.0, **settings}):
            if text := pieces.push(token)[0]:
                yield text
        if rest := pieces.finish()[0]:
            yield rest

    def ask(self, question: str, *, max_tokens: int = 60) -> str:
        """The model's likeliest answer, by its own chat template where it has one."""
        if not isinstance(question, str):
            raise ValueError(f"{question!r} is no question: give a text")
        if not question.strip():
            raise ValueError("the question is empty")
        return "".join(self.reply([{"role": "user", "content": question}], max_tokens=max_tokens)).strip()

    def reply(self, messages: Messages, *, max_tokens: int = 200, **settings: Any) -> Iterator[str]:
        """The answer to a conversation, piece by piece; `settings` are those of `generate`."""
        pieces = self.stream(self.prompt_for(messages), max_tokens=max_tokens, **settings)
        if getattr(self.tokenizer, "chat", None) is not None:
            yield from pieces
            return
        started = False
        for piece in pieces:  # up to the end of the line
            text = piece if started else piece.lstrip()
            started = started or bool(text)
            line, ended, _ = text.partition("\n")
            if line:
                yield line
            if ended:
                return

    def prompt_for(self, messages: Messages) -> str:
        """A conversation as the text that the model goes on from; the oldest turns go if all do not fit."""
        chat = getattr(self.tokenizer, "chat", None)
        for first in range(0, len(messages), 2):
            said = messages[first:]
            text = _transcript(said) if chat is None else chat([dict(message) for message in said])
            try:
                count = len(self.tokenizer.encode(text))
            except ValueError as error:
                raise ValueError(
                    f"a question is asked as {text[-SHOWN:]!r}, which this model cannot read ({error}): give "
                    "it a text to go on from, by generate() or `attractor sample`"
                ) from error
            if count <= self.model.config.context * 3 // 4:
                break
        return text

    def perplexity(self, text: str) -> float:
        """How hard the text is for the model: exp of the mean loss per token."""
        tokens = self.tokenizer.encode(text)
        if len(tokens) < 2:
            raise ValueError(f"a text of {len(tokens)} tokens has no token to predict: give at least two")
        return math.exp(evaluate(self.model, tokens, batch_size=4))

    def _write(self, prompt: str, max_tokens: int, **settings: Any) -> Iterator[int]:
        check_size("max_tokens", max_tokens)
        tokens = torch.as_tensor(self.tokenizer.encode(prompt), dtype=torch.long)
        if not len(tokens):
            raise ValueError("the prompt is empty: give some text to go on from")
        tokens = tokens[None].to(self.model.device)
        for token in generate(self.model, tokens, max_tokens=max_tokens, **settings):
            if int(token) in getattr(self.tokenizer, "ends", ()):
                return
            yield int(token)

    # --- learning

    def learn(
        self,
        forms: Sequence[Form] | str,
        *,
        subject: str | None = None,
        require_known: bool = True,
        report: Callable[[int, float], None] = lambda done, known: None,
    ) -> Lesson | Taught:
        """Teach several forms of what is to be known; the record says how well it is known before and after.

        What is not known afterwards, in all its forms, is taken back at once: `known` of the record is below
        1, and the model is as it was. With `require_known=False` it stays.

        A form is a sentence, or a prompt and the answer that ends it. The subject is what all forms share; a
        sentence alone needs one. A pretrained model learns a lesson with patches of its own, which `forget`
        takes back; the first lesson of a base calibrates it on background text, which is kept. A model
        with APN layers of its own learns in those patches (a `Taught`): other texts use them too and are
        predicted worse afterwards, and nothing takes that back. `report` is called after each pass with the
        number of passes and with what is known: a share of tokens, or of forms for a `Taught`.
        """
        checked = check_forms([forms] if isinstance(forms, str) else forms)
        if self.source is None:
            return self._learn_in_patches(checked, subject or "".join(checked[0]), report, require_known)
        subject = shared_subject(checked) if subject is None else check_subject(subject, checked)
        asked_of_all(checked, subject)  # a mistake is told before the first lesson calibrates the base
        school = self._made_teachable()
        (lesson,) = school.learn_many([checked], subjects=[subject], report=report)
        if require_known and lesson.known < 1:
            school.forget(lesson.number)
        return lesson

    @property
    def most_passes(self) -> int:
        """So many passes over its forms a lesson takes at most."""
        if self.source is None:
            return PASSES
        return (LessonConfig() if self.school is None else self.school.config).passes

    def lessons(self) -> list[Lesson | Taught]:
        """What the model was taught and has not forgotten; of patch-local learning, since it was loaded."""
        return [*self._taught, *(() if self.school is None else self.school.lessons.values())]

    def forget(self, lesson: Lesson | Taught | int) -> None:
        """Take a lesson back: its patches are closed, and where it acted the base answers."""
        if self.source is None:
            raise ValueError(
                "this model learns in patches that everything it knows shares, so nothing can be taken back: "
                "load it again, or learn beside it with `attractor adapt --guard`"
            )
        if not isinstance(lesson, int) and not hasattr(lesson, "number"):
            raise ValueError(f"{lesson!r} is no lesson: give what learn() returned, or its number")
        self._school().forget(lesson if isinstance(lesson, int) else lesson.number)

    def touching(self, text: str) -> list[int | None]:
        """For each token the number of the lesson that acts on it; if all are None, it is the base's text."""
        count = len(self.tokenizer.encode(text))
        return [None] * count if self.school is None or not count else self.school.touching(text)

    def save(self, folder: str | Path) -> None:
        """Write what was learned, and where the base came from; `load` reads the folder."""
        if self.learner is not None:
            self.learner.save(folder)
            return
        from attractor.hf.files import whole_path
        from attractor.hf.teachable import save_lessons

        lessons = self._school()
        base = {"source": whole_path(self.source or "")}
        save_lessons(self.net, lessons, folder, more={BASE: json.dumps(base)})

    def _school(self) -> Lessons:
        if self.school is None:
            raise ValueError("the model has no lessons yet: learn() teaches the first one")
        return self.school

    def _made_teachable(self) -> Lessons:
        if self.school is None:
            from attractor.hf.teachable import NAME, teachable

            self.net, self.school = teachable(
                self.net.unload(), self.tokenizer.encode, **read_by(self.tokenizer)
            )
            self.model = _language_model(self.net, NAME, self.model.config.context)
        return self.school

    def _learn_in_patches(
        self,
        forms: tuple[tuple[str, str], ...],
        subject: str,
        report: Callable[[int, float], None],
        require_known: bool,
    ) -> Taught:
        started = time.perf_counter()
        learner = self._local_learner()
        inputs, targets = self._rows(forms)
        banks = {n: [*layer.patch_parameters()] for n, layer in learner.layers.items()}
        old = {n: [bank.detach().clone() for bank in own] for n, own in banks.items()}
        loss_before, known_before = loss, known = self._grade(inputs, targets)
        passes = 0
        with suppress(_NotKnown), learner.attempt():
            while known < 1 and passes < PASSES:
                learner.step(inputs, targets)
                loss, known = self._grade(inputs, targets)
                passes += 1
                report(passes, known)
            if require_known and known < 1:
                raise _NotKnown
        patches = size = 0
        for n, own in banks.items():
            rows = [(bits(new) != bits(was)).flatten(1).any(1) for new, was in zip(own, old[n], strict=True)]
            differ = int(torch.stack(rows).any(0).sum())
            patches += differ
            size += differ * sum(bank[0].nbytes for bank in own)
        taught = Taught(
            number=len(self._taught),
            subject=subject,
            forms=forms,
            patches=patches,
            bytes=size,
            passes=passes,
            known_before=known_before,
            known=known,
            loss_before=loss_before,
            loss=loss,
            seconds=time.perf_counter() - started,
        )
        if known == 1 or not require_known:
            self._taught.append(taught)
        return taught

    def _local_learner(self) -> OnlineLearner:
        if self.learner is None:
            if self.guarded is not None:
                raise ValueError(
                    "this model keeps what it learns in overlays over its base: `attractor adapt --guard` "
                    "or GuardedLearner.observe teaches it"
                )
            if not self.model.apn_layers():
                raise ValueError(NO_PATCHES)
            if self.folder is not None and (self.folder / "learner.json").is_file():
                self.learner = OnlineLearner.load(self.folder, model=self.model, device=self.device)
                self.learner.tokenizer = self.tokenizer
            else:
                config = LearnConfig(update=UpdateConfig(learning_rate=RATE))
                self.learner = OnlineLearner(self.model, self.tokenizer, config)
        return self.learner

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _rows(self, forms: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
        """Tokens (forms, time) and what is to follow each, where it is part of an answer."""
        context = self.model.config.context
        rows = []
        for prompt, answer in forms:
            before = len(self.tokenizer.encode(prompt)) if prompt else 0
            tokens = torch.as_tensor(self.tokenizer.encode(prompt + answer), dtype=torch.long)
            targets = tokens[1:].clone()
            targets[: max(0, before - 1)] = IGNORED
            if len(tokens) < 2 or (targets == IGNORED).all():
                raise ValueError(f"{prompt + answer!r} is too short: there is no token to predict")
            rows.append((tokens[:-1][-context:], targets[-context:]))
        inputs, targets = (
            torch.nn.utils.rnn.pad_sequence([row[part] for row in rows], batch_first=True, padding_value=fill)
            for part, fill in ((0, 0), (1, IGNORED))
        )
        return inputs.to(self.device), targets.to(self.device)

    @torch.no_grad()
    def _grade(self, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        """Nats for each token of the answers, and the share of rows whose every token is the first choice."""
        with mode(self.model, training=False):
            logits = self.model(inputs).float()
        asked = targets != IGNORED
        loss = torch.nn.functional.cross_entropy(logits[asked], targets[asked])
        right = (logits.argmax(-1) == targets) | ~asked
        return float(loss), float(right.all(1).float().mean())


def read_by(tokenizer: Any) -> dict[str, Any]:
    """How lessons are read and tested: where a model chats, they are asked for in a chat, too."""
    chat = getattr(tokenizer, "chat", None)
    if chat is None:
        return {}

    def asked(content: str) -> str:
        return chat([{"role": "user", "content": content}])

    frames = list(FRAMES)
    for place in (5, 3, 1):  # three of thirteen: forms of every lesson meet it
        frames.insert(place, asked("{}?") + "{}")
    return {
        "frames": tuple(frames),
        "question": asked("Please finish this sentence: {}"),
        "tell": (asked("What do you know about {}?"), asked("Tell me about {}.")),
    }


def adapter_folder(place: Path) -> Path | None:
    """Where the layers of a retrofit are: in the folder itself, or where our commands put them."""
    from attractor.hf.files import holds_retrofit

    for folder in (place, place / "learner", place / "adapter"):
        if folder.name:
            recover_folder(folder)
        if holds_retrofit(folder):
            return folder
    return None


def base_of(folder: Path) -> str:
    """The name or path of a retrofit's base."""
    from attractor.hf.files import loaded_from

    found = loaded_from(folder)
    if found is None:  # an earlier release wrote it beside the layers alone
        found = _field(folder.parent / "summary.json", "model")
    if not isinstance(found, str):
        raise ValueError(
            f"{folder} is a retrofit and does not say where its base is: load the base with "
            "attractor.load_pretrained and give both to attractor.load_retrofit"
        )
    return found


def _field(path: Path, name: str) -> Any:
    """One field of a JSON file; None where it is not to be had."""
    try:
        return parse_json(path.read_text()).get(name)
    except (OSError, ValueError, AttributeError):
        return None


def _language_model(net: Any, name: str | None, context: int | None) -> Any:
    """A Hugging Face model as our tools know models, with a context that its positions allow."""
    from attractor.hf.causal import CausalLM

    longest = getattr(net.model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and longest is not None:
        context = min(context, longest)
    return CausalLM(net, name, context=context)


def _transcript(messages: Messages) -> str:
    """A conversation for a model that was not trained to chat."""
    parts = [
        QUESTION.format(message["content"]) if message["role"] == "user" else f" {message['content']}\n\n"
        for message in messages
    ]
    return "".join(parts)


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a run, a checkpoint or a saved model of this package."""
    try:
        fields = parse_json((folder / "config.json").read_text())
        return not isinstance(fields, dict) or fields.get("model_type", MODEL_TYPE) == MODEL_TYPE
    except FileNotFoundError:  # a run has it further down
        return True
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is no configuration: {error}") from error


def _ours(folder: Path, device: torch.device) -> Model:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json: text cannot be read or written without it")
    if (folder / "guard.json").is_file():  # what was learned lies beside the base
        return _guarded(GuardedLearner.load(folder, device=device), folder)
    model = GPT.from_pretrained(folder, device=device)
    return Model(model, load_tokenizer(folder / "tokenizer.json"), folder=folder)


def _guarded(learner: GuardedLearner, folder: Path, net: Any = None) -> Model:
    return Model(learner.guard, learner.tokenizer, folder=folder, net=net, guarded=learner)


def _pretrained(source: str, device: torch.device, context: int | None) -> Model:
    from attractor.hf.net import Retrofit
    from attractor.hf.pretrained import load_pretrained

    base, tokenizer = load_pretrained(source, device=device)
    net = Retrofit(base)
    return Model(_language_model(net, None, context), tokenizer, source=source, net=net)


def _retrofitted(folder: Path, device: torch.device, context: int | None) -> Model:
    from attractor.hf.net import load_retrofit
    from attractor.hf.pretrained import load_pretrained

    base, tokenizer = load_pretrained(base_of(folder), device=device)
    net = load_retrofit(base, folder)
    is_guarded = (folder / "guard.json").is_file()
    if is_guarded and context is None:  # overlays fit their base alone, and its context is part of it
        context = _field(folder / "guard.json", "context")
    model = _language_model(net, net.active, context)
    if is_guarded:
        learner = GuardedLearner.load(folder, model=model, device=device)
        learner.tokenizer = tokenizer
        return _guarded(learner, folder, net)
    return Model(model, tokenizer, folder=folder, net=net)


def base_of_lessons(folder: Path) -> str:
    """The model that the lessons in a folder were taught to."""
    try:
        check_hashes(folder, BASE)
        source = parse_json((folder / BASE).read_text())["source"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder / BASE} does not say where the base is: {error}") from error
    if not isinstance(source, str):
        raise ValueError(f"{folder / BASE} does not say where the base is")
    return source


def _with_lessons(folder: Path, device: torch.device, context: int | None) -> Model:
    from attractor.hf.teachable import NAME, load_lessons

    source = base_of_lessons(folder)
    model = _pretrained(source, device, context)
    model.net, model.school = load_lessons(
        model.net.unload(), model.tokenizer.encode, folder, **read_by(model.tokenizer)
    )
    model.model = _language_model(model.net, NAME, context)
    return model
