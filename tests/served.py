"""A tiny model to serve, and how to tell two states of a server apart."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attractor.checkpoint import tensors_hash
from attractor.config import APNConfig, GPTConfig
from attractor.continual.config import GuardConfig, LearnConfig, UpdateConfig
from attractor.continual.guarded import GuardedLearner
from attractor.model import GPT
from attractor.serve.learning.canaries import Rules
from attractor.serve.learning.readers import fields_of, tensors_of
from attractor.serve.service import Limits, Service
from attractor.tokenizer import ByteTokenizer

FOX = "the quick brown fox jumps over the lazy dog. "
LAW = "whoever breaks this law shall be punished by it; "
QUICK = Rules(canary_tokens=32)


def model() -> GPT:
    torch.manual_seed(0)
    shape = GPTConfig(
        vocab_size=256,
        context=32,
        num_layers=2,
        num_heads=2,
        dim=16,
        ffn="apn",
        apn=APNConfig(num_patches=8, top_k=2, rank=4),
    )
    return GPT(shape).eval()


def learner(**options: Any) -> GuardedLearner:
    update = UpdateConfig(learning_rate=1e-2)
    config = GuardConfig(learn=LearnConfig(update=update, max_patches=3), **options)
    return GuardedLearner(model(), ByteTokenizer(), config)


def serve(folder: Path, **options: Any) -> Service:
    settings: dict[str, Any] = {"rules": QUICK, "limits": Limits(drain=0.5)}
    return Service.open(learner(), folder, **(settings | options))


def hashes(service: Service) -> Mapping[str, str]:
    """Of everything that a source is: weights, moments, counters."""
    return {
        name: tensors_hash(
            {key: value.detach() for key, value in tensors_of(held).items()}, repr(fields_of(held))
        )
        for name, held in service.teacher.sources.items()
    }
