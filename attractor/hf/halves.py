"""A model in two halves: what lies below an APN layer, which no lesson changes, and what lies above it.

    halves = Halves(net, "lessons")
    below = halves.below(texts)                         # once
    (state,) = halves.after(below, [([0, 2], [7, 4])])  # once
    logits = halves.above(state, texts, positions)      # in each pass: of these places alone

A lesson reads its texts many times, and most of what is computed is the same each time:

- `below`: what the blocks below the layer make of all texts.
- `after`: keys and values that the blocks above it have for the tokens before the subject, here for texts 0
  and 2 before their tokens 7 and 4. What a lesson changes begins at the subject.
- `above`: the rest of the upper half. Logits are most of the work in a small model, so only those of graded
  tokens are computed.

Texts are read side by side (`woven`). A model that takes no positions and no mask reads one in a row.

On a GPU passes of few texts are filled up to sizes that come again, and recorded (`attractor.hf.recorded`).
"""

import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attractor.continual.reading import Graded, Whole, descent, padded
from attractor.hf.net import Retrofit
from attractor.hf.passes import Above, Rows, filled_up, tensors_of, with_tensors
from attractor.hf.recorded import Continued, Recorded
from attractor.hf.woven import NOWHERE, weave

log = logging.getLogger("attractor")

AT_ONCE = 256
"""So many texts are read at once, where there is no gradient."""
ROWS = 16
"""On a CPU a product with so many rows takes less time than with a few less."""
FEW_COLUMNS = 1024
"""Texts that would be longer are continued as transformers does."""
MOST_RECORDED = 64
"""So many passes are kept."""
Part = tuple[Sequence[int], Sequence[int]]
"""The numbers of some texts, and the first token of each that may change."""


class Below(NamedTuple):
    """What the lower half made of texts; their tokens are counted through all of them."""

    texts: Sequence[list[int]]
    are_woven: bool
    place: Tensor  # (texts, longest) of each token
    output: Tensor | None  # (tokens, dim) of the last block of the lower half, if it has one
    read: Tensor  # (tokens, width) what the layer recognises subjects by


class Before(NamedTuple):
    """What the upper half keeps of the tokens that no lesson changes."""

    place: Tensor  # (texts, longest) of each token
    kept: dict[int, tuple[Tensor, Tensor]]  # block -> keys and values (tokens, heads, size)


class _Reached(Exception):
    """What was asked for is computed: the rest of the model need not run."""


class Halves:
    """The two halves of a model with one retrofit of one layer."""

    def __init__(self, net: Retrofit, name: str) -> None:
        ((number, self.layer),) = net.apn_layers(name).items()
        self.net, self.name = net, name
        self.lower = blocks_below(net.model, net.sites[number].place.name)
        self.source = net.sites[net.sources[name]] if name in net.sources else None
        self.repeats = self.device.type == "cuda"  # whether passes have few sizes, and are recorded
        self.most_rows, self.most_tokens = (
            16,
            1024,
        )  # larger ones keep a GPU busy, and take memory while they wait
        self._recorded: dict[Any, Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.repeats else None
        self._going_on: dict[Any, tuple[list[int], Continued]] = {}
        self._memory: dict[torch.dtype | None, tuple[list[tuple[int, int]], Tensor] | None] = {}
        self._alike: dict[tuple[int, int], list[int]] = {}
        self._beside: tuple[None, ...] | None = None  # so many more things a block returns, in a tuple
        self._is_flat = False  # whether the model hands over tokens of all texts as one

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """What the layer is given for tokens (B, T): (B, T, width), in float32."""
        if self.source is not None:
            _, read = self._up_to(self.source.place.modules[0], tokens)
            assert read is not None
        else:
            _, read = self._lower(_one_in_a_row(tokens))
        return read.float().reshape(*tokens.shape, -1)

    @torch.no_grad()
    def below(self, texts: Sequence[list[int]]) -> Below:
        """The result of the blocks below the layer."""
        return self._below(texts, max(map(len, texts)) <= self._longest and self._can_weave)

    def given(self, below: Below, texts: Tensor, positions: Tensor) -> Tensor:
        """What the layer is given at these places of texts: (n, width)."""
        return below.read[below.place[texts, positions]]

    @torch.no_grad()
    def after(self, below: Below, parts: Sequence[Part]) -> list[Above]:
        """For each part some texts from their tokens `first` on: what comes before them is computed now."""
        ends = {n: end for part in parts for n, end in zip(*part, strict=True)}
        has_past = below.are_woven and max(ends.values()) > 0
        before = self._before(below, {n: max(1, end) for n, end in ends.items()}) if has_past else None
        return [self._after(below, before, *part) for part in parts]

    def above(self, state: Above, texts: Tensor, positions: Tensor) -> Tensor:
        """The logits (n, vocabulary) after the tokens at these places."""
        return self._above_at(state, state.rows.place[texts, positions])

    def descent(
        self, state: Above, texts: Tensor, positions: Tensor, target_n: Tensor, weight_n: Tensor
    ) -> Graded:
        """What a pass says of these places, and the gradient of the layer's decoder."""
        decoder, place = self.layer.decoder, state.rows.place[texts, positions]
        assert decoder is not None
        if not self._records(state):
            return descent(lambda: self._above_at(state, place), target_n, weight_n, decoder)
        state, graded = filled_up(state, place, target_n, weight_n)
        given = [*graded, *tensors_of(state)]
        key = decoder.data_ptr(), self._products, *state.past, *(x.shape for x in given)
        if key not in self._recorded:
            while len(self._recorded) >= MOST_RECORDED:
                del self._recorded[next(iter(self._recorded))]

            def compute(place: Tensor, target: Tensor, weight: Tensor, *rest: Tensor) -> Graded:
                own = with_tensors(state, rest)
                return descent(lambda: self._above_at(own, place), target, weight, decoder)

            self._recorded[key] = Recorded(compute, *given, pool=self._pool)
        loss, choice, gradient = (x.clone() for x in self._recorded[key](*given))
        return Graded(loss[: len(target_n)], choice[: len(target_n)], gradient)

    def write(self, texts: Sequence[list[int]], count: int) -> list[list[int]]:
        """The likeliest `count` tokens that the base would write after each of these texts."""
        return self._continue(None, texts, count)

    def answer(self, texts: Sequence[list[int]], count: int) -> list[list[int]]:
        """The same for the model with its lessons."""
        return self._continue(self.name, texts, count)

    # --- inside

    def _above_at(self, state: Above, place: Tensor) -> Tensor:
        from attractor.hf.caches import cache_of

        return self._logits(state, place, cache_of(state.past) if state.past else None)

    @property
    def _products(self) -> torch.dtype | None:
        """What autocast computes products in, if it does."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _records(self, state: Above) -> bool:
        """Whether a pass is recorded: where only its tensors differ from those of others, and it is small."""
        return self.repeats and bool(state.rows.given) and state.rows.tokens.numel() <= self.most_tokens

    def _continue(self, name: str | None, texts: Sequence[list[int]], count: int) -> list[list[int]]:
        longest = max(map(len, texts)) + count
        is_small = len(texts) <= self.most_rows and longest <= min(FEW_COLUMNS, self._longest)
        with self.net.using(name):
            if self.repeats and is_small and self._can_repeat():
                return self._continued(name)(texts, count)
            return likeliest(self.net.model, texts, count)

    def _continued(self, name: str | None) -> Continued:
        """What goes on with texts, of the layer's tensors where they are now."""
        held = [*self.layer.parameters(), *self.layer.buffers()] if name else []
        key, where = (name, self._products), [x.data_ptr() for x in held]
        if key not in self._going_on or self._going_on[key][0] != where:

            def read(tokens: Tensor, cache: Any, places: Tensor, mask: Tensor, last: Tensor) -> Tensor:
                row = torch.arange(len(tokens), device=tokens.device)
                given: dict[str, Any] = {"position_ids": places, "attention_mask": mask, "use_cache": True}
                with self.net.using(name):
                    return logits_at(self.net.model, tokens, row, last, past_key_values=cache, **given)

            memory = self._memory[self._products]
            assert memory is not None
            self._going_on[key] = where, Continued(read, *memory)
        return self._going_on[key][1]

    def _can_repeat(self) -> bool:
        """Whether texts can be continued in a memory of our own: what is written tells."""
        products = self._products
        if products not in self._memory:
            self._memory[products] = self._like_its_memory()
            texts = [[5, 6, 7, 8], [9, 10, 11]]
            with self.net.using(None):
                try:
                    if self._memory[products] and self._continued(None)(texts, 4) != likeliest(
                        self.net.model, texts, 4
                    ):
                        self._memory[products] = None
                except (TypeError, ValueError, RuntimeError, IndexError) as error:
                    log.info("lessons take longer: this model's passes are not recorded (%s)", error)
                    self._memory[products] = None
        return self._memory[products] is not None

    @torch.no_grad()
    def _like_its_memory(self) -> tuple[list[tuple[int, int]], Tensor] | None:
        """Heads and their size in each layer of its cache, and a tensor of that; None if they differ."""
        from transformers.cache_utils import DynamicCache

        model, cache = self.net.model, DynamicCache()
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return None
        with self.net.using(None):
            try:
                tokens = torch.tensor([[5, 6, 7, 8]], device=self.device)
                model(input_ids=tokens, past_key_values=cache, use_cache=True)
                held = [x for layer in cache.layers for x in (layer.keys, layer.values)]
                shapes = [(x.shape[1], x.shape[3]) for x in held]
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
                log.info("lessons take longer: this model's passes are not recorded (%s)", error)
                return None
        return (shapes[::2], held[0]) if len(set(shapes)) == 1 else None

    @property
    def device(self) -> torch.device:
        return self.layer.prototypes.device

    @property
    def _longest(self) -> float:
        """In a longer text tokens do not see all of it."""
        config = self.net.model.config.get_text_config()
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
        return min((window for window in windows if window), default=math.inf)

    @cached_property
    @torch.no_grad()
    def _can_weave(self) -> bool:
        """Whether the model heeds the positions and the mask that it is given: its logits tell."""
        model = self.net.model
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return False
        texts = [[5, 6, 7, 8], [5, 6, 9, 10, 11]]
        text, position = torch.tensor([[0, 3], [1, 2], [1, 4]], device=self.device).unbind(1)
        with torch.autocast(self.device.type, enabled=False), self.net.using(self.name):
            wanted = logits_at(model, padded(texts).to(self.device), text, position)
            try:
                (state,) = self.after(self._below(texts, True), [([0, 1], [2, 2])])
                found = self.above(state, text, position)
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                log.info("lessons take longer: this model cannot read texts side by side (%s)", error)
                return False
        allowed = torch.finfo(model.dtype).eps ** 0.5 * wanted.std()
        return bool((found - wanted).abs().max() < allowed)

    def _below(self, texts: Sequence[list[int]], weaves: bool) -> Below:
        count = 0
        place = torch.full((len(texts), max(map(len, texts))), NOWHERE, device=self.device)
        order = sorted(range(len(texts)), key=lambda n: texts[n] if weaves else [len(texts[n])])
        outputs, reads = [], []
        for start in range(0, len(texts), AT_ONCE):
            part = order[start : start + AT_ONCE]
            rows = self._rows([texts[n] for n in part], [0] * len(part), weaves)
            output, read = self._lower(rows)
            place[part, : rows.place.shape[1]] = counted(rows.place, count)
            count += rows.tokens.numel()
            outputs += [] if output is None else [output.flatten(0, 1)]
            reads.append(read.reshape(rows.tokens.numel(), -1))
        return Below(texts, weaves, place, torch.cat(outputs) if outputs else None, torch.cat(reads))

    def _rows(self, texts: Sequence[list[int]], first: Sequence[int], weaves: bool) -> Rows:
        if not weaves:
            return _one_in_a_row(padded(texts).to(self.device))
        woven, dtype = weave(texts, first), self.net.model.dtype
        mask = torch.zeros(woven.sees.shape, dtype=dtype).masked_fill_(~woven.sees, torch.finfo(dtype).min)
        device = self.device
        return Rows(
            tokens=woven.tokens.to(device),
            place=woven.place.to(device),
            source=woven.source.to(device),
            past=woven.past.to(device),
            given={"position_ids": woven.positions.to(device), "attention_mask": mask[:, None].to(device)},
        )

    def _above(
        self, below: Below, chosen: Sequence[int], rows: Rows, past: dict[int, tuple[Tensor, Tensor]]
    ) -> Above:
        place = below.place[list(chosen), : rows.place.shape[1]].flatten()[rows.source].clamp(min=0)
        output = None if below.output is None else below.output[place]
        read = None
        if self._reads_below:
            read = below.read[place.flatten() if self._is_flat else place]
        return Above(rows, output, read, past)

    def _before(self, below: Below, ends: dict[int, int]) -> Before:
        """What every block of the upper half makes of these texts up to their ends."""
        from attractor.hf.caches import cache_of

        place, count = torch.full_like(below.place, NOWHERE), 0
        kept: dict[int, list[tuple[Tensor, Tensor]]] = {}
        order = sorted(ends, key=below.texts.__getitem__)
        for start in range(0, len(order), AT_ONCE):
            part = order[start : start + AT_ONCE]
            rows = self._rows([below.texts[n][: ends[n]] for n in part], [0] * len(part), True)
            cache = cache_of({})
            self._logits(self._above(below, part, rows, {}), rows.place[0, :1], cache)
            place[part, : rows.place.shape[1]] = counted(rows.place, count)
            count += rows.tokens.numel()
            for number, layer in enumerate(cache.layers):
                if layer.is_initialized:
                    keys, values = (of.transpose(1, 2).flatten(0, 1) for of in (layer.keys, layer.values))
                    kept.setdefault(number, []).append((keys, values))
        whole = {n: [torch.cat(part) for part in zip(*own, strict=True)] for n, own in kept.items()}
        return Before(place, {number: (keys, values) for number, (keys, values) in whole.items()})

    def _after(
        self, below: Below, before: Before | None, chosen: Sequence[int], first: Sequence[int]
    ) -> Above:
        rows = self._rows([below.texts[n] for n in chosen], first, below.are_woven)
        if before is None or not rows.past.numel():
            return self._above(below, chosen, rows, {})
        place = before.place[list(chosen), : rows.place.shape[1]].flatten()[rows.past.clamp(min=0)]
        place = place.clamp(min=0)  # what no text sees may be anything
        past = {
            number: (keys[place].transpose(1, 2), values[place].transpose(1, 2))
            for number, (keys, values) in before.kept.items()
        }
        return self._above(below, chosen, rows, past)

    @property
    def _reads_below(self) -> bool:
        """Whether subjects are recognised by what comes from the lower half."""
        return self.source is not None and bool(self.lower)

    def _lower(self, rows: Rows) -> tuple[Tensor | None, Tensor]:
        """What the last block of the lower half returns, and what the layer is given."""
        output, read = None, None
        if self.lower:
            output, read = self._up_to(self.lower[-1], rows.tokens, **rows.given)
            self._beside = tuple(None for _ in output[1:]) if isinstance(output, tuple) else None
            output = output if self._beside is None else output[0]
        if read is not None:
            self._is_flat = read.dim() == 2
            return output, read
        seen: list[Tensor] = []

        def stop(layer: nn.Module, given: Any) -> None:
            seen.append(given[0])
            raise _Reached

        hook = self.layer.register_forward_pre_hook(stop)
        try:
            self._logits(Above(rows, output, None, {}), rows.place.flatten()[:1])
        except _Reached:
            pass
        finally:
            hook.remove()
        return output, seen[0]

    def _up_to(self, module: nn.Module, tokens: Tensor, **given: Tensor) -> tuple[Any, Tensor | None]:
        """What a module returns, and what subjects are recognised by if that comes before: no more is run."""
        returned = []

        def stop(module: nn.Module, given: Any, output: Any) -> None:
            returned.append(output)
            raise _Reached

        hook = module.register_forward_hook(stop)
        with self.net.using(self.name):
            try:
                self.net.model(input_ids=tokens, use_cache=False, **given)
            except _Reached:
                pass
            finally:
                hook.remove()
            return returned[0], None if self.source is None else self.source.input

    def _logits(self, state: Above, place: Tensor, cache: Any = None) -> Tensor:
        """The logits after tokens that are counted through all rows."""
        tokens, width = state.rows.tokens, state.rows.tokens.shape[1]
        given = (
            state.rows.given
            if cache is None
            else {**state.rows.given, "past_key_values": cache, "use_cache": True}
        )
        with self.net.using(self.name), self._skipping(state):
            return logits_at(self.net.model, tokens, place // width, place % width, **given)

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
    def _skipping(self, state: Above) -> Iterator[None]:
        """Every block of the lower half returns at once what the last one did."""
        found = [vars(block).get("forward") for block in self.lower]
        output = state.output if self._beside is None else (state.output, *self._beside)
        if self.source is not None and self.lower:
            self.source.input = state.read
        for block in self.lower:
            setattr(block, "forward", lambda *_, **__: output)  # noqa: B010 (a method for mypy)
        try:
            yield
        finally:
            for block, before in zip(self.lower, found, strict=True):
                if before is None:
                    del block.forward
                else:
                    setattr(block, "forward", before)  # noqa: B010


def counted(place: Tensor, before: int) -> Tensor:
    """Places of tokens, if so many stand before them."""
    return torch.where(place == NOWHERE, NOWHERE, place + before)


def _one_in_a_row(tokens: Tensor) -> Rows:
    place = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    return Rows(tokens, place, place, place[:, :0], {})


class Undivided(Whole):
    """A Hugging Face model of which everything may change."""

    def above(self, state: Tensor, texts: Tensor, positions: Tensor) -> Tensor:
        return logits_at(self.model, state, texts, positions)

    def write(self, texts: Sequence[list[int]], count: int) -> list[list[int]]:
        return likeliest(self.model, texts, count)


@torch.no_grad()
def likeliest(model: Any, texts: Sequence[list[int]], count: int) -> list[list[int]]:
    """What a Hugging Face model writes after each of these texts: `count` tokens, even if it would end."""
    from transformers import GenerationConfig

    longest, written = max(map(len, texts)), len(texts)
    if model.device.type == "cpu" and written > ROWS // 2:
        texts = [*texts, *[texts[0]] * (-written % ROWS)]
    rows = [[0] * (longest - len(text)) + text for text in texts]  # its caches want the ends in one column
    mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
    never = model.get_output_embeddings().weight.shape[0]  # no token ends a text
    settings = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=never, pad_token_id=0)
    tokens = model.generate(
        torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=settings,
    )
    return tokens[:written, longest:].tolist()


def logits_at(model: Any, tokens: Tensor, rows: Tensor, positions: Tensor, **given: Any) -> Tensor:
    """The logits (n, vocabulary) of a Hugging Face model at these places alone; `given` is passed to it."""
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: (given[0][rows, positions][None],))
    try:
        return model(input_ids=tokens, **{"use_cache": False, **given}).logits[0]
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
