"""A model in two halves: what lies below an APN layer, which no lesson changes, and what lies above it.

    halves = Halves(net, "lessons")
    state = halves.below(tokens)                    # once
    logits = halves.above(state, rows, positions)   # in every pass: (n, vocabulary), of these places alone

A lesson reads its texts many times. The blocks below the layer that learns give the same result each time,
and of the logits, which are most of the work in a small model, only those of graded tokens are needed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from attractor.continual.reading import Whole
from attractor.hf.net import Retrofit


class Below(NamedTuple):
    """What the lower half made of tokens."""

    tokens: Tensor
    output: Any
    """What the last block of the lower half returned; None if there is no lower half."""
    read: Tensor | None
    """What the layer recognises subjects by, if that comes from the lower half."""


class _Reached(Exception):
    """What was asked for is computed: the rest of the model need not run."""


class Halves:
    """The two halves of a model with one retrofit of one layer."""

    def __init__(self, net: Retrofit, name: str) -> None:
        (number,) = net.apn_layers(name)
        self.net, self.name = net, name
        self.lower = blocks_below(net.model, net.sites[number].place.name)
        self.source = net.sites[net.sources[name]] if name in net.sources else None
        self._alike: dict[tuple[int, int], list[int]] = {}

    @torch.no_grad()
    def below(self, tokens: Tensor) -> Below:
        """The result of the blocks below the layer for tokens (B, T)."""
        if not self.lower:
            return Below(tokens, None, None)
        return Below(tokens, *self._up_to(self.lower[-1], tokens))

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """What the layer is given for tokens (B, T): (B, T, width), in float32."""
        if self.source is not None:
            _, read = self._up_to(self.source.place.modules[0], tokens)
            assert read is not None
            return read.float().reshape(*tokens.shape, -1)
        state = self.below(tokens)
        seen: list[Tensor] = []
        (layer,) = self.net.apn_layers(self.name).values()
        hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            rows = torch.zeros(1, dtype=torch.long, device=tokens.device)
            self.above(state, rows, rows)
        finally:
            hook.remove()
        return seen[0].float().reshape(*tokens.shape, -1)

    def _up_to(self, module: nn.Module, tokens: Tensor) -> tuple[Any, Tensor | None]:
        """What a module returns, and what subjects are recognised by if that comes before: no more is run."""
        returned = []

        def stop(module: nn.Module, given: Any, output: Any) -> None:
            returned.append(output)
            raise _Reached

        hook = module.register_forward_hook(stop)
        with self.net.using(self.name):
            try:
                self.net.model(input_ids=tokens, use_cache=False)
            except _Reached:
                pass
            finally:
                hook.remove()
            return returned[0], None if self.source is None else self.source.input

    def above(self, state: Below, rows: Tensor, positions: Tensor) -> Tensor:
        """The logits (n, vocabulary) after the tokens at these places, from what the lower half made."""
        with self.net.using(self.name), self._skipping(state):
            return logits_at(self.net.model, state.tokens, rows, positions)

    def write(self, texts: Sequence[list[int]], count: int) -> list[list[int]]:
        """The likeliest `count` tokens that the base would write after each of these texts."""
        with self.net.using(None):
            return likeliest(self.net.model, texts, count)

    def similar(self, token: int, count: int) -> list[int]:
        """The tokens whose embeddings are most like one's, without itself."""
        if (token, count) not in self._alike:
            table = self.net.model.get_input_embeddings().weight.detach().float()
            table = table - table.mean(0)
            found = nn.functional.cosine_similarity(table, table[token], dim=1)
            nearest = found.topk(min(count + 1, len(table))).indices.tolist()
            self._alike[token, count] = [other for other in nearest if other != token][:count]
        return self._alike[token, count]

    @contextmanager
    def _skipping(self, state: Below) -> Iterator[None]:
        """Every block of the lower half returns at once what the last one did."""
        found = [vars(block).get("forward") for block in self.lower]
        if self.source is not None and self.lower:
            self.source.input = state.read
        for block in self.lower:
            setattr(block, "forward", lambda *_, **__: state.output)  # noqa: B010 (a method for mypy)
        try:
            yield
        finally:
            for block, before in zip(self.lower, found, strict=True):
                if before is None:
                    del block.forward
                else:
                    setattr(block, "forward", before)  # noqa: B010


class Undivided(Whole):
    """A Hugging Face model of which everything may change."""

    def above(self, state: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return logits_at(self.model, state, rows, positions)

    def write(self, texts: Sequence[list[int]], count: int) -> list[list[int]]:
        return likeliest(self.model, texts, count)


@torch.no_grad()
def likeliest(model: Any, texts: Sequence[list[int]], count: int) -> list[list[int]]:
    """What a Hugging Face model writes after each of these texts: `count` tokens, even if it would end."""
    longest = max(map(len, texts))
    rows = [[0] * (longest - len(text)) + text for text in texts]  # its caches want the ends in one column
    mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
    never = model.get_output_embeddings().weight.shape[0]  # no token ends a text
    settings = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=never, pad_token_id=0)
    tokens = model.generate(
        torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=settings,
    )
    return tokens[:, longest:].tolist()


def logits_at(model: Any, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """The logits (n, vocabulary) of a Hugging Face model at these places alone."""
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: (given[0][rows, positions][None],))
    try:
        return model(input_ids=tokens, use_cache=False).logits[0]
    finally:
        hook.remove()


def blocks_below(model: Any, path: str) -> list[nn.Module]:
    """The blocks before the one that holds the module at `path`."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        held = model.get_submodule(".".join(parts[:end]))
        if isinstance(held, nn.ModuleList):
            return list(held[: int(parts[end])])
    return []
