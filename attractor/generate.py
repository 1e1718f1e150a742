"""Sampling from a language model, token by token, with a KV cache.

for token in generate(model, prompt_tokens, max_tokens=200, temperature=0.8, top_k=40, seed=0): ...
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attractor.config import check_number, check_size
from attractor.lm import LanguageModel, mode
from attractor.tokenizer import Tokenizer


def generate(
    model: LanguageModel,
    prompt: Tensor,
    *,
    max_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[Tensor]:
    """Yield `max_tokens` next tokens (batch) for prompts (batch, time). Temperature 0 takes the likeliest.

    When the context is full, the older half is forgotten and the rest is read again: the model has absolute
    positions, so a cache cannot slide.
    """
    check_settings(max_tokens, temperature, top_k, top_p)
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(
            f"prompt of shape {tuple(prompt.shape)}: expected (batch, time) with at least one token"
        )
    random = torch.Generator(prompt.device)
    random.seed() if seed is None else random.manual_seed(seed)
    return _generate(model, prompt, max_tokens, temperature, top_k, top_p, random)


def continued(model: LanguageModel, tokenizer: Tokenizer, prompt: np.ndarray, **options: Any) -> str:
    """A prompt, given as its tokens, and what the model writes after it; options are those of `generate`."""
    tokens = torch.as_tensor(prompt)[None].to(model.device)
    written = [int(token) for token in generate(model, tokens, **options)]
    return tokenizer.decode(tokens[0].tolist() + written)


def check_settings(max_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    check_size("max_tokens", max_tokens)
    check_number("temperature", temperature, "a number, 0 or more", lambda t: t >= 0)
    if top_k is not None:
        check_size("top_k", top_k)
    if top_p is not None:
        check_number("top_p", top_p, "a number, 0 < top_p <= 1", lambda p: 0 < p <= 1)


@torch.no_grad()
def _generate(
    model: LanguageModel,
    prompt: Tensor,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    random: torch.Generator,
) -> Iterator[Tensor]:
    context = model.config.context
    text, unread, cache = prompt, prompt[:, -context:], model.new_cache(len(prompt))
    for _ in range(max_tokens):
        if cache.length + unread.shape[1] > context:
            unread, cache = text[:, -max(1, context // 2) :], model.new_cache(len(prompt), after=cache)
        with mode(model, training=False):
            logits = model(unread, cache=cache)[:, -1].float()
        token = sample(logits, temperature, top_k, top_p, random)
        yield token
        unread = token[:, None]
        text = torch.cat([text, unread], dim=1)[:, -context:]


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, random: torch.Generator
) -> Tensor:
    """One token per row of logits (batch, vocabulary)."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities, order = candidates(logits, temperature, top_k, top_p)
    choice = torch.multinomial(probabilities, 1, generator=random)
    return order.gather(1, choice).squeeze(1)


def candidates(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> tuple[Tensor, Tensor]:
    """Probabilities (batch, vocabulary), not normalised, likeliest first, and the tokens they belong to."""
    ordered, order = (logits / temperature).sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    if top_k is not None:
        probabilities[:, top_k:] = 0
    if (
        top_p is not None
    ):  # the smallest set whose mass reaches top_p: keep a token if the mass before it is less
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p * probabilities.sum(-1, keepdim=True), 0)
    return probabilities, order
