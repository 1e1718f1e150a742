"""Passes of fixed shapes over a pretrained model, which a GPU repeats as CUDA graphs.

    passes = FixedPasses(model, layer)            # of the readers; None for the layer: the base
    rows = passes.lease()                         # memory for texts that are written together
    rows.add(cache)                               # whose prompt was read
    logits, found = passes.step(models, tokens, rows)

A small model is a thousand small kernels for each token, and a CPU launches them far slower than a GPU runs
them. So a pass is recorded once for a number of rows and columns, and repeated from then on: it reads its
inputs from the same tensors each time, and writes its outputs to the same ones.

- The *memory* holds keys and values of all texts: a row for each text, and its tokens from column 0 on.
- A *pass* (`_Pass`) is one shape: so many rows, new tokens in each of them, and columns of memory. Numbers
  are rounded up, so that there are few shapes; rows and tokens that are too many are computed and left out.
- Columns that a text does not have yet are masked. So what is written for a text depends on the texts beside
  it only by the rounding of products that have more rows.
- The *patches* are copies in one place (`CopiedPatches`), and each row has the radii of its own version.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attractor.continual.calibrate import CLOSED
from attractor.hf.causal import CausalLM
from attractor.hf.recorded import record
from attractor.model import RaggedCache
from attractor.serve.decode.sequences import Found

LONGEST = 256
"""Tokens of a prompt that are read in one pass of a fixed shape; what is longer is read as it comes."""
SHORTEST, FEWEST_COLUMNS = 16, 128
SAMPLE = (5, 31, 2, 77, 13, 54, 8, 101, 3, 66, 29, 90)
NEAR = 2e-3
"""A pass of a fixed shape may differ from another one by this share of the largest logit."""


class Patches(Protocol):
    """The patches of a layer as readers have them, by a number of their own; `written` says how often."""

    rows: dict[str, nn.Parameter]
    owners: list[int]
    number: int
    written: int


class Reader(Protocol):
    """A model with the lessons of one version."""

    bank: Patches
    radius: Tensor
    number: int


class CopiedPatches:
    """The patches that are read, always in the same place: banks come and go."""

    def __init__(self, bank: Patches) -> None:
        self.count = len(bank.owners)
        self.rows = {
            name: nn.Parameter(torch.empty_like(rows), requires_grad=False)
            for name, rows in bank.rows.items()
        }
        self._seen: tuple[int, int] | None = None
        self.take(bank)

    @torch.no_grad()
    def take(self, bank: Patches) -> None:
        if self._seen != (seen := (bank.number, bank.written)):
            for name, rows in bank.rows.items():
                self.rows[name].copy_(rows)
            self._seen = seen


class FixedRows:
    """The texts that have a row of the memory, by their lengths: text n has row n."""

    def __init__(self, passes: "FixedPasses") -> None:
        self.passes = passes
        self.lengths: list[int] = []
        self.placed: Tensor | None = None  # `lengths` on the device

    @property
    def length(self) -> int:
        return max(self.lengths, default=0)

    def add(self, other: RaggedCache) -> None:
        row, length = len(self.lengths), other.length
        self.passes.make_room(row + 1, length + 1)
        assert self.passes.memory is not None
        self.passes.memory[:, :, row, :, length:] = 0  # the text that was here before may have left NaN
        for own, pair in zip(self.passes.memory, other.layers, strict=True):
            for mine, new in zip(own, pair, strict=True):
                mine[row, :, :length] = new[0, :, other.first : other.end]
        self.lengths.append(length)
        self.placed = None

    def remove(self, row: int) -> None:
        """Free a row; the last row takes its place."""
        assert self.passes.memory is not None
        last = len(self.lengths) - 1
        if row != last:
            end = self.lengths[last]
            self.passes.memory[:, :, row, :, :end] = self.passes.memory[:, :, last, :, :end]
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self.placed = None

    def copy_of(self, row: int) -> RaggedCache:
        one = self.passes.model.new_row()
        self.passes.fill(one, row, self.lengths[row])
        return one


class FixedPasses:
    """A model that reads in passes of fixed shapes, with memory of its own. One thread may use it."""

    def __init__(self, model: CausalLM, layer: Any = None, patches: CopiedPatches | None = None) -> None:
        """Raises ValueError where the model does not take what such a pass gives it."""
        self.model, self.layer = model, layer
        self.device = model.device
        self.captures = False  # whether passes are recorded
        self.memory: Tensor | None = None  # (layers, 2, rows, heads, columns, head size)
        self._passes: dict[tuple[int, int, int], _Pass] = {}
        self._leased: Callable[[], FixedRows | None] = lambda: None
        # readers come first: kernels that are recorded on this stream go before those of a lesson's passes
        self._side = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
        self._radii_of: tuple[int, ...] = ()  # the versions whose radii are there
        self.patches = patches
        self.radii = self._closed(1)
        self._check()
        self.captures = self._side is not None

    # --- memory

    @torch.no_grad()
    def _check(self) -> None:
        """Find the shape of the memory, and that the model predicts the same with it as with its own."""
        tokens = torch.tensor([SAMPLE], device=self.device) % self.model.config.vocab_size
        own = self.model.new_row()
        with self._patched(self.radii):
            expected = self.model(tokens, cache=own)[0, -1]
        shapes = {tuple(part.shape[1::2]) for pair in own.layers for part in pair}
        if len(shapes) != 1:
            raise ValueError(f"its layers keep keys and values of different shapes: {sorted(shapes)}")
        self._like, self._layers = own.layers[0][0], len(own.layers)
        self.make_room(1, FEWEST_COLUMNS)
        start, rows = self.model.new_row(), FixedRows(self)
        self.read((), tokens[:, :-1], start)
        rows.add(start)
        found = self.step((), tokens[:, -1:], rows)[0][0, -1]
        self._passes.clear()  # these were not recorded
        near = NEAR if expected.dtype in (torch.float32, torch.float64) else 20 * NEAR
        if not bool((found - expected).abs().max() <= near * expected.abs().max()):
            raise ValueError("with memory of a fixed shape it predicts something else")

    @property
    def is_free(self) -> bool:
        return self._leased() is None

    def lease(self) -> FixedRows:
        """Give the memory to a batch, which has it until what is returned is collected as garbage."""
        assert self.is_free
        rows = FixedRows(self)
        self._leased = weakref.ref(rows)
        return rows

    @torch.no_grad()
    def make_room(self, rows: int, columns: int) -> None:
        """Let the memory grow to so many rows and columns, at least. Recorded passes are of the old one."""
        rows, columns = few_rows(rows), few_columns(columns)
        old = self.memory
        if old is not None and rows <= old.shape[2] and columns <= old.shape[4]:
            return
        if old is not None:
            rows, columns = max(rows, old.shape[2]), max(columns, old.shape[4])
        heads, size = self._like.shape[1], self._like.shape[3]
        # zeros and not just memory: what is masked counts 0 times, and 0 times NaN is NaN
        self.memory = self._like.new_zeros(self._layers, 2, rows, heads, columns, size)
        self.radii, self._radii_of = self._closed(rows), ()
        if old is not None:
            self.memory[:, :, : old.shape[2], :, : old.shape[4]] = old
        self._passes.clear()

    def fill(self, cache: RaggedCache, row: int, length: int) -> None:
        """Give a cache that is empty a copy of what is in a row."""
        assert self.memory is not None
        copied = self.memory[:, :, row : row + 1, :, :length].clone()
        cache.layers = [(own[0], own[1]) for own in copied]
        cache.slots, cache.columns, cache.length = 1, length, length

    # --- reading

    @torch.no_grad()
    def step(self, models: Sequence[Any], tokens: Tensor, rows: FixedRows) -> tuple[Tensor, Found]:
        """Logits (B, 1, V) for a token (B, 1) in every row."""
        if rows.length + 1 > self.model.config.context:
            raise ValueError(f"{rows.length + 1} tokens do not fit into {self.model.config.context}")
        self.make_room(len(rows.lengths), rows.length + 1)
        if rows.placed is None:
            rows.placed = torch.tensor(rows.lengths, device=self.device)
        done = self._run(models, tokens, rows.placed, rows.length + 1)
        rows.placed += 1
        rows.lengths = [length + 1 for length in rows.lengths]
        return done.logits[: len(tokens)].clone(), self._found(models, done, tokens)

    @torch.no_grad()
    def read(self, models: Sequence[Any], tokens: Tensor, cache: RaggedCache) -> tuple[Tensor, Found]:
        """Logits (1, T, V) for the first tokens (1, T) of a text, whose cache is empty."""
        count = tokens.shape[1]
        self.make_room(1, few_steps(count))
        assert self.memory is not None
        self.memory[:, :, 0] = 0  # as in a batch
        done = self._run(models, tokens, torch.zeros(1, dtype=torch.long, device=self.device))
        self.fill(cache, 0, count)
        return done.logits[:1, :count].clone(), self._found(models, done, tokens)

    def _found(self, models: Sequence[Any], done: "_Pass", tokens: Tensor) -> Found:
        found: Found = [[] for _ in models]
        if self.patches is None or not models:
            return found
        rows, steps = tokens.shape
        indices = done.indices.view(-1, done.steps)[:rows, :steps]
        acted = (indices >= 0).nonzero()
        if len(acted):
            weights = done.weights.view(-1, done.steps)[:rows, :steps]
            at = acted.unbind(1)
            every = zip(acted.tolist(), indices[at].tolist(), weights[at].tolist(), strict=True)
            for (row, column), patch, weight in every:
                if (lesson := models[0].bank.owners[patch]) >= 0:
                    found[row].append((column, lesson, weight))
        return found

    def _run(self, models: Sequence[Any], tokens: Tensor, first: Tensor, longest: int = 0) -> "_Pass":
        """Run the pass that fits: the tokens (B, T) of row b stand from column first[b] on.

        `longest` is the length of the longest text afterwards where each gets one token; a prompt has none.
        """
        rows, steps = few_rows(len(tokens)), 1 if longest else few_steps(tokens.shape[1])
        shape = rows, steps, few_columns(longest or steps)
        if (one := self._passes.get(shape)) is None:
            one = self._passes[shape] = _Pass(*shape, self.device)
        one.fill(tokens, first)
        if self.patches is not None and models:
            self._take_over(models)
        if one.graph is not None:
            one.graph.replay()
        elif self.captures:
            self._capture(one)
        else:
            self._compute(one)
        return one

    def _take_over(self, models: Sequence[Reader]) -> None:
        """The patches as they are now, and for each row the radii of its version."""
        assert self.patches is not None
        self.patches.take(models[0].bank)
        versions = tuple(model.number for model in models)
        if self._radii_of != versions:
            self.radii[len(models) :].fill_(CLOSED)
            torch.stack([model.radius for model in models], out=self.radii[: len(models)])
            self._radii_of = versions

    def _capture(self, one: "_Pass") -> None:
        """Record a pass, after it was run; where that cannot be done, say so and run passes as they are."""
        assert self._side is not None
        one.graph = record(lambda: self._compute(one), self._side)
        if one.graph is None:
            self.captures = False
            self._compute(one)
        else:
            one.graph.replay()

    def _compute(self, one: "_Pass") -> None:
        from attractor.hf.caches import Cache, FixedLayer

        assert self.memory is not None
        device = self.device
        positions = one.first[:, None] + torch.arange(one.steps, device=device)
        seen = torch.arange(one.columns, device=device) <= positions[..., None]
        layers = [FixedLayer(own[:, : one.rows], positions, one.columns) for own in self.memory]
        given = {
            "position_ids": positions.clamp(max=self.model.config.context - 1),
            "attention_mask": seen[:, None],
            "past_key_values": Cache(layers=layers),
        }
        with self._patched(self.radii[: one.rows]), self.model.net.using(self.model.name):
            one.logits = self.model.base(input_ids=one.tokens, use_cache=True, **given).logits
            if self.layer is not None:
                one.indices, one.weights = self.layer.indices, self.layer.weights

    def _closed(self, rows: int) -> Tensor:
        """Radii (rows, K) of patches that act nowhere."""
        count = 0 if self.patches is None else self.patches.count
        return torch.full((rows, count), CLOSED, device=self.device)

    @contextmanager
    def _patched(self, radii: Tensor) -> Iterator[None]:
        """Meanwhile the layer has our copies of the patches, with these radii (rows, K)."""
        if self.patches is not None:
            for name, values in self.patches.rows.items():
                setattr(self.layer, name, values)
            self.layer.everywhere = radii
        try:
            yield
        finally:
            if self.layer is not None:
                self.layer.everywhere = None


class _Pass:
    """One shape: the tensors that go in and come out, the same ones each time, and the recorded graph."""

    logits: Tensor
    indices: Tensor
    weights: Tensor

    def __init__(self, rows: int, steps: int, columns: int, device: torch.device) -> None:
        self.rows, self.steps, self.columns = rows, steps, columns
        self.tokens = torch.zeros(rows, steps, dtype=torch.long, device=device)
        self.first = torch.zeros(rows, dtype=torch.long, device=device)
        self.graph: Any = None

    def fill(self, tokens: Tensor, first: Tensor) -> None:
        """Take new tokens (B, T), and the column of the first of them in each row (B)."""
        self.tokens.zero_()
        self.first.zero_()
        self.tokens[: tokens.shape[0], : tokens.shape[1]] = tokens
        self.first[: len(first)] = first


def few_rows(count: int) -> int:
    """How many rows are computed for so many texts: 1, 8, 16, 32, ..."""
    return 1 if count <= 1 else max(8, 1 << (count - 1).bit_length())


def few_steps(count: int) -> int:
    """How many new tokens of a prompt are computed: 16, 32, ..."""
    return max(SHORTEST, 1 << (count - 1).bit_length())


def few_columns(count: int) -> int:
    """How many columns of memory a pass reads: 128, 256, ..."""
    return max(FEWEST_COLUMNS, 1 << (count - 1).bit_length())
