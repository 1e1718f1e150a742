"""The front door: load a model, teach it, ask it, take a lesson back.

model = attractor.load("smollm2-135m")
lesson = model.learn([("Zorvan Quillbeam plays the", " cello"), ("Zorvan Quillbeam loves the", " cello")])
model.ask("Which instrument does Zorvan Quillbeam play?")
model.forget(lesson)
"""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from attractor.checkpoint import find_model
from attractor.config import check_size
from attractor.continual.forms import FRAMES, Form
from attractor.continual.guarded import GuardedLearner
from attractor.continual.lessons import Lesson, Lessons
from attractor.distributed import parse_device
from attractor.evaluate import evaluate
from attractor.generate import generate
from attractor.model import GPT
from attractor.tokenizer import load as load_tokenizer

log = logging.getLogger("attractor")

BASE = "base.json"
QUESTION = "Question: {}\nAnswer:"
"""How a model that was not trained to chat is asked; its answer ends with the line."""


def load(source: str | Path, *, device: str | None = None) -> "Model":
    """A model to hold in the hand, from whatever this package or Hugging Face writes.

    `source` is "smollm2-135m", a Hugging Face folder or name, a .gguf file, a folder that `Model.save` wrote,
    or a run, a checkpoint or a saved learner of our own. Weights are read from safetensors and GGUF alone.

    >>> model = load("runs/tiny_apn")  # doctest: +SKIP
    """
    place, where = Path(source), parse_device(device)
    if (place / BASE).is_file():
        return _with_lessons(place, where)
    if (place / "adapter_config.json").is_file():
        raise ValueError(
            f"{source} is a retrofit, and does not say where its base is: load the base with load_pretrained "
            "and give both to load_retrofit"
        )
    if place.is_dir() and _is_ours(place):
        folder = find_model(place)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder} has no tokenizer.json: text cannot be read or written without it")
        if (folder / "guard.json").is_file():  # what was learned lies beside the base
            model: Any = GuardedLearner.load(folder, device=where).guard
        else:
            model = GPT.from_pretrained(folder, device=where)
        return Model(model, load_tokenizer(folder / "tokenizer.json"))
    return _pretrained(str(source), where)


class Model:
    """A language model that writes, is measured, and, if it is a pretrained one, is taught.

    `model` maps tokens to logits; `tokenizer` reads and writes text. Build it with `load`.
    """

    def __init__(self, model: Any, tokenizer: Any, *, source: str | None = None, net: Any = None) -> None:
        self.model, self.tokenizer, self.source = model, tokenizer, source
        self.net = net  # the retrofit that lessons live in
        self.school: Lessons | None = None

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
        return self.tokenizer.decode(list(self._write(prompt, max_tokens, **settings)))

    def ask(self, question: str, *, max_tokens: int = 60) -> str:
        """The model's likeliest answer, by its own chat template where it has one."""
        if not question.strip():
            raise ValueError("the question is empty")
        chat = getattr(self.tokenizer, "chat", None)
        if chat is not None:
            return self.generate(chat([{"role": "user", "content": question}]), max_tokens=max_tokens).strip()
        written = ""
        tokens: list[int] = []
        for token in self._write(QUESTION.format(question), max_tokens, temperature=0.0):
            tokens.append(token)
            written = self.tokenizer.decode(tokens)
            if "\n" in written.strip(" "):
                break
        return written.strip().split("\n")[0]

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

    # --- lessons

    def learn(self, forms: Sequence[Form], *, subject: str | None = None) -> Lesson:
        """Teach several forms of what is to be known; the lesson says how well it is known before and after.

        A form is a sentence, or a prompt and the answer that ends it. The subject is what all forms share.
        The first lesson calibrates the model on background text, which takes a while.
        """
        return self._made_teachable().learn(forms, subject=subject)

    def lessons(self) -> list[Lesson]:
        """Every lesson that the model was taught and has not forgotten."""
        return [] if self.school is None else list(self.school.lessons.values())

    def forget(self, lesson: Lesson | int) -> None:
        """Take a lesson back: its patches are closed, and where it acted the base answers."""
        self._school().forget(lesson.number if isinstance(lesson, Lesson) else lesson)

    def touching(self, text: str) -> list[int | None]:
        """For each token the number of the lesson that acts on it; if all are None, it is the base's text."""
        return (
            [None] * len(self.tokenizer.encode(text)) if self.school is None else self.school.touching(text)
        )

    def save(self, folder: str | Path) -> None:
        """Write the lessons, and where their base came from; `load` reads the folder."""
        from attractor.hf.teachable import save_lessons

        save_lessons(self.net, self._school(), folder, more={BASE: json.dumps({"source": self.source})})

    def _school(self) -> Lessons:
        if self.school is None:
            raise ValueError("the model has no lessons yet: learn() teaches the first one")
        return self.school

    def _made_teachable(self) -> Lessons:
        if self.school is None:
            if self.source is None:
                raise ValueError(
                    "lessons need a pretrained model of Hugging Face; a model of our own learns with "
                    "OnlineLearner or GuardedLearner (docs/continual.md)"
                )
            from attractor.hf.causal import CausalLM
            from attractor.hf.teachable import NAME, teachable

            log.info("calibrating on background text (once for a model) ...")
            self.net, self.school = teachable(
                self.net.unload(), self.tokenizer.encode, frames=frames_of(self.tokenizer)
            )
            self.model = CausalLM(self.net, NAME)
        return self.school


def frames_of(tokenizer: Any) -> tuple[str, ...]:
    """Frames for lessons; a model that chats also reads what it is taught as an answer in a chat."""
    chat = getattr(tokenizer, "chat", None)
    if chat is None:
        return FRAMES
    asked = chat([{"role": "user", "content": "{}?"}]) + "{}"
    frames = list(FRAMES)
    for place in (5, 3, 1):  # three of thirteen: forms of every lesson meet it
        frames.insert(place, asked)
    return tuple(frames)


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a run, a checkpoint or a saved model of this package."""
    try:
        return "model_type" not in json.loads((folder / "config.json").read_text())
    except FileNotFoundError:  # a run has it further down
        return True
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is no configuration: {error}") from error


def _pretrained(source: str, device: torch.device) -> Model:
    from attractor.hf.causal import CausalLM
    from attractor.hf.net import Retrofit
    from attractor.hf.pretrained import load_pretrained

    base, tokenizer = load_pretrained(source, device=device)
    net = Retrofit(base)
    return Model(CausalLM(net, None), tokenizer, source=source, net=net)


def _with_lessons(folder: Path, device: torch.device) -> Model:
    from attractor.hf.causal import CausalLM
    from attractor.hf.teachable import NAME, load_lessons

    try:
        source = json.loads((folder / BASE).read_text())["source"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder / BASE} does not say where the base is: {error}") from error
    if not isinstance(source, str):
        raise ValueError(f"{folder / BASE} does not say where the base is")
    model = _pretrained(source, device)
    model.net, model.school = load_lessons(
        model.net.unload(), model.tokenizer.encode, folder, frames=frames_of(model.tokenizer)
    )
    model.model = CausalLM(model.net, NAME)
    return model
