"""A tiny pretrained model that is taught lessons, to be served."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from attractor.continual.config import LessonConfig
from attractor.continual.lessons import Lessons
from attractor.continual.parts import deltas_of
from attractor.hf.net import Retrofit
from attractor.serve.decode.engine import Job
from attractor.serve.learning.canaries import Rules
from attractor.serve.learning.catalogue import Asked
from attractor.serve.service import Limits, Service
from attractor.tokenizer import ByteTokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed: the extra hf")

QUICK = LessonConfig(
    passes=14, step=8.0, decay=0.02, prototypes=3, contexts=2, after=0, mention=0, least_forms=0
)
RULES = Rules(canary_tokens=16)
BACKGROUND = [" ".join(f"plain words about nothing in particular, number {n}" for n in range(200))]


def school(blocks: int = 4, device: str = "cpu") -> tuple[Retrofit, Lessons]:
    """A model of one's own each time."""
    return copy.deepcopy(_school(blocks, device))


@functools.cache
def _school(blocks: int, device: str) -> tuple[Retrofit, Lessons]:
    from attractor.hf.teachable import teachable

    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    model = transformers.LlamaForCausalLM(shape).eval().to(device)
    tokenizer = ByteTokenizer()
    options: dict[str, Any] = {"config": QUICK, "patches": 32, "read_from": 2, "act_at": 2}
    return teachable(model, tokenizer.encode, BACKGROUND, window=32, **options)


def serve(
    folder: Path, blocks: int = 4, device: str = "cpu", repeats: bool = False, **options: Any
) -> Service:
    """A server that can be taught; with `repeats` its passes have sizes that come again, as on a GPU."""
    settings: dict[str, Any] = {"limits": Limits(drain=0.5), "context": 128, "rules": RULES}
    net, lessons = school(blocks, device)
    lessons.reading.halves.repeats |= repeats  # type: ignore[attr-defined]
    return Service.open_lessons(net, lessons, ByteTokenizer(), folder, **(settings | options))


def about(name: str, answer: str) -> Asked:
    """What is said right after a name: more than this so small a model cannot carry."""
    return Asked(((f"I met {name}", answer), (f"Yesterday we saw {name}", answer)), name)


def text_of(service: Service, prompt: str, path: str | None = None, tokens: int = 8, **options: Any) -> Any:
    """What is written after a prompt: tokens and log-probabilities, and the lessons that acted, by place."""
    job = Job(prompt=list(prompt.encode()), max_tokens=tokens, path=path, **({"temperature": 0} | options))
    stream = service.submit(job)
    written = list(stream)
    touched = {touch.index: touch.lesson for one in written for touch in one.touched}
    return [(one.token, one.logprob) for one in written], touched


def bits(service: Service) -> dict[str, Any]:
    """All that a server knows: every open patch to the bit, and what is told of every lesson."""
    lessons = service.teacher.lessons  # type: ignore[attr-defined]
    deltas = deltas_of(lessons, sorted(lessons.lessons))
    return {str(number): delta.to_bytes() for number, delta in deltas.items()}
