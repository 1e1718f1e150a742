"""Sequences of different lengths that are written together: one step gives each of them its next token.

    batch = Batch(publication.device)
    batch.add(sequence)                  # whose prompt was read
    generated, failed = batch.step()     # a token for every sequence
    batch.remove([sequence])

Publications that share a path share its model, and so the pass over it.
"""

import logging
from collections.abc import Collection

import torch
from torch import Tensor

from attractor.continual.guard import log_probabilities
from attractor.generate import candidates
from attractor.model import RaggedCache
from attractor.serve.decode.fixed import FixedRows
from attractor.serve.decode.sequences import (
    Evidence,
    Found,
    GeneratedToken,
    PathCache,
    Sequence,
    Touch,
    read_together,
    rows_for,
)

log = logging.getLogger("attractor")


class ModelBatch:
    """The sequences that read in one pass, as rows of one cache: their models are of one group."""

    def __init__(self) -> None:
        self.shared: RaggedCache | FixedRows | None = None
        self.rows: list[PathCache] = []
        self.logits: Tensor | None = None  # (B, V) of this step

    def read(self, tokens: Tensor) -> Found:
        """Read a token in every row, and return on which of them lessons acted."""
        models = [cache.model for cache in self.rows]
        logits, found = read_together(models, tokens[:, None], self.shared)
        self.logits = logits[:, -1]
        return found

    def add(self, cache: PathCache) -> None:
        """Take over what a path has read on its own."""
        assert cache.own is not None, "it has not read anything"
        assert cache.logits is not None
        logits = cache.logits[None]
        if self.shared is None:
            self.shared = rows_for(cache.model)
            self.logits = logits[:0]
        assert self.logits is not None, "sequences are added within a step"
        if self.shared is None:
            self.shared = cache.own
        else:
            self.shared.add(cache.own)
        self.logits = torch.cat([self.logits, logits])
        cache.row, cache.own, cache.logits = len(self.rows), None, None
        self.rows.append(cache)

    def remove(self, cache: PathCache) -> None:
        """Free a row; the last row takes its place."""
        assert self.shared is not None
        row, last = cache.row, self.rows.pop()
        self.shared.remove(row)
        if last is not cache:
            self.rows[row], last.row = last, row
        if self.logits is not None:
            if last is not cache:
                self.logits[row] = self.logits[-1]
            self.logits = self.logits[:-1]
        cache.row = -1

    def copy_of(self, cache: PathCache) -> RaggedCache:
        assert self.shared is not None
        return self.shared.copy_of(cache.row)


class Batch:
    """The sequences that are being written now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sequences: list[Sequence] = []
        self.added: list[Sequence] = []  # these take part from the next step on
        self.models: dict[int, ModelBatch] = {}  # by the id of the group
        self.evidence = Evidence.empty(device)
        self.logprobs = torch.zeros(0, 0)  # (M, B) what the paths gave the last token, 0 at rest
        self.failed: dict[Sequence, str] = {}  # in this step
        self._entries: tuple[Tensor, Tensor] | None = None  # path and column of all rows, model by model

    def add(self, sequence: Sequence) -> None:
        self.added.append(sequence)

    def remove(self, sequences: Collection[Sequence]) -> None:
        gone = set(sequences)
        self.added = [sequence for sequence in self.added if sequence not in gone]
        if not gone.intersection(self.sequences):
            return
        for sequence in gone.intersection(self.sequences):
            for cache in sequence.caches:
                if cache.row >= 0:
                    self._remove_row(cache)
                cache.own = None
        kept = [sequence.column for sequence in self.sequences if sequence not in gone]
        self.sequences = [self.sequences[column] for column in kept]
        self.evidence = self.evidence.keep(kept) if kept else Evidence.empty(self.device)
        self.logprobs = self.logprobs[:, kept]
        self._number()

    def _number(self) -> None:
        self._entries = None
        for column, sequence in enumerate(self.sequences):
            sequence.column = column

    def _add_row(self, cache: PathCache) -> None:
        self._entries = None
        self.models.setdefault(id(cache.group), ModelBatch()).add(cache)

    def _remove_row(self, cache: PathCache) -> None:
        self._entries = None
        model = self.models[id(cache.group)]
        model.remove(cache)
        if not model.rows:
            del self.models[id(cache.group)]

    @torch.no_grad()
    def take_out(self, sequence: Sequence) -> None:
        """Remove a sequence whose context is full, to `read_prompt` its end again; its evidence stays."""
        evidence = self.evidence.keep([sequence.column])
        begins = evidence.count(self.logprobs[:, [sequence.column]])
        for path, cache in enumerate(sequence.caches):
            if cache.row < 0 and not begins:
                tokens = [*cache.missed, sequence.text[-1]]
                evidence.sums[path] += cache.catch_up(tokens, also_last=False)
        evidence.awake = evidence.prior.isfinite()
        self.remove([sequence])
        sequence.evidence = evidence

    def posterior(self, sequence: Sequence) -> dict[str, float]:
        shares = self.evidence.sums[: len(sequence.names), sequence.column].softmax(0).tolist()
        return dict(zip(sequence.names, shares, strict=True))

    @torch.no_grad()
    def step(self) -> tuple[list[tuple[Sequence, GeneratedToken]], dict[Sequence, str]]:
        """The next token of every sequence, and the reasons of those that failed and were removed."""
        self.failed = {}
        if self.sequences:
            self._let_rest()
            self._read()
        for sequence in self.added:
            self._take_in(sequence)
        self.added = []
        generated = self._write() if self.sequences else []
        failed, self.failed = self.failed, {}
        self.remove(failed)
        return [(sequence, one) for sequence, one in generated if sequence not in failed], failed

    def _let_rest(self) -> None:
        if not any(sequence.publication.pause for sequence in self.sequences):
            return
        for path, column in self.evidence.to_rest().nonzero().tolist():
            sequence = self.sequences[column]
            if sequence.may_rest:
                cache = sequence.caches[path]
                own = self.models[id(cache.group)].copy_of(cache)
                cache.rest(own, float(self.logprobs[path, column]))
                self._remove_row(cache)
                self.evidence.awake[path, column] = False
                self.logprobs[path, column] = 0
        for sequence in self.sequences:
            sequence.may_rest = True

    def _read(self) -> None:
        """Every path that is awake reads the last token; those that must wake read what they missed."""
        alone = self._all_alone()
        begins = None if alone else self.evidence.count(self.logprobs)
        last = torch.tensor([sequence.text[-1] for sequence in self.sequences], device=self.device)
        _, columns = self._rows()
        models = list(self.models.values())
        sizes = [len(model.rows) for model in models]
        for model, part in zip(models, columns.split(sizes), strict=True):
            tokens = last[part]
            try:
                found = model.read(tokens)
                if any(found):
                    self._note_touches(part.tolist(), found)
            except Exception as error:  # its sequences end with this step; those of other models go on
                vocabulary = model.rows[0].model.config.vocab_size
                model.logits = torch.zeros(len(tokens), vocabulary, device=self.device)
                for sequence in self.sequences:
                    if any(cache in model.rows for cache in sequence.caches):
                        self._fail(sequence, error)
        for sequence in self.sequences:
            sequence.length += 1
        if begins is not None:
            self.evidence.predicted += 1
            if self._some_rest():
                self._wake(begins)

    def _all_alone(self) -> bool:
        """Whether every text has one path, whose share is all: no evidence has to be counted."""
        return all(len(sequence.caches) == 1 for sequence in self.sequences)

    def _note_touches(self, columns: list[int], found: Found) -> None:
        for column, touches in zip(columns, found, strict=True):
            sequence = self.sequences[column]
            last = sequence.first + len(sequence.text) - 1
            sequence.touched += [Touch(last + at, lesson, weight) for at, lesson, weight in touches]

    def _some_rest(self) -> bool:
        return len(self._rows()[0]) < sum(len(sequence.caches) for sequence in self.sequences)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        log.warning("a sequence failed", exc_info=error)
        self.failed[sequence] = f"{type(error).__name__}: {error}"

    def _wake(self, begins: Tensor) -> None:
        to_wake, is_new = self.evidence.to_wake(begins).tolist(), begins.tolist()
        for column, sequence in enumerate(self.sequences):
            for path, cache in enumerate(sequence.caches):
                if cache.row >= 0:
                    continue
                cache.missed.append(sequence.text[-1])
                if to_wake[column] and sequence not in self.failed:
                    try:
                        gained = cache.catch_up(cache.missed, also_last=True)
                    except Exception as error:
                        self._fail(sequence, error)
                        continue
                    self.evidence.sums[path, column] += 0.0 if is_new[column] else gained
                    self.evidence.awake[path, column] = True
                    self._add_row(cache)

    def _take_in(self, sequence: Sequence) -> None:
        """Give a sequence whose prompt was read a column, and a row with each of its models."""
        self.evidence = self.evidence.beside(sequence.evidence)
        self.sequences.append(sequence)
        self._number()
        for cache in sequence.caches:
            self._add_row(cache)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """(N) path and column of every row, model by model."""
        if self._entries is None:
            starts, count = {}, 0
            for key, model in self.models.items():
                starts[key], count = count, count + len(model.rows)
            paths, columns = [0] * count, [0] * count
            for column, sequence in enumerate(self.sequences):
                for path, cache in enumerate(sequence.caches):
                    if cache.row >= 0:
                        at = starts[id(cache.group)] + cache.row
                        paths[at], columns[at] = path, column
            both = torch.tensor([paths, columns], dtype=torch.long, device=self.device)
            self._entries = (both[0], both[1])
        return self._entries

    def _write(self) -> list[tuple[Sequence, GeneratedToken]]:
        """Mix, draw, and remember what each path gave the token that was drawn."""
        paths, columns = self._rows()
        logits = [model.logits for model in self.models.values() if model.logits is not None]
        predictions = log_probabilities(torch.cat(logits))  # (N, V)
        for model in self.models.values():
            model.logits = None
        if self._all_alone():
            return self._write_alone(predictions[columns.argsort()])
        log_weights = self.evidence.log_weights()
        mixture = self.evidence.mixed(
            predictions, log_weights[paths, columns], columns, some_rest=self._some_rest()
        )
        tokens = torch.tensor(self._draw(mixture), device=self.device)
        logprobs = predictions.gather(1, tokens[columns, None])[:, 0].double()
        self.logprobs = torch.zeros_like(log_weights).index_put_((paths, columns), logprobs)
        shares = (log_weights + self.logprobs).softmax(0).T.tolist()
        mixed = mixture.gather(1, tokens[:, None])[:, 0].tolist()
        generated = []
        for sequence, token, logprob, share in zip(
            self.sequences, tokens.tolist(), mixed, shares, strict=True
        ):
            sequence.text.append(token)
            named = dict(zip(sequence.names, share, strict=False))
            generated.append((sequence, GeneratedToken(token, logprob, named, tuple(sequence.touched))))
            sequence.touched = []
        return generated

    def _write_alone(self, predictions: Tensor) -> list[tuple[Sequence, GeneratedToken]]:
        """Draw from predictions (B, V) of one path for each text."""
        tokens = self._draw(predictions)
        self.logprobs = predictions.new_zeros(self.evidence.prior.shape, dtype=torch.float64)
        drawn = predictions.gather(1, torch.tensor(tokens, device=self.device)[:, None])[:, 0].tolist()
        generated = []
        for sequence, token, logprob in zip(self.sequences, tokens, drawn, strict=True):
            sequence.text.append(token)
            shares = {sequence.names[0]: 1.0}
            generated.append((sequence, GeneratedToken(token, logprob, shares, tuple(sequence.touched))))
            sequence.touched = []
        return generated

    def _draw(self, mixture: Tensor) -> list[int]:
        """Draw sequences with the same settings at once, each with its own random numbers."""
        tokens = [0] * len(self.sequences)
        alike: dict[tuple[float, int | None, float | None], list[int]] = {}
        for column, sequence in enumerate(self.sequences):
            sampling = sequence.sampling
            alike.setdefault((sampling.temperature, sampling.top_k, sampling.top_p), []).append(column)
        for (temperature, top_k, top_p), columns in alike.items():
            some = mixture if len(columns) == len(self.sequences) else mixture[columns]
            if temperature == 0:
                chosen = some.argmax(-1)
            else:
                probabilities, order = candidates(some, temperature, top_k, top_p)
                mine = zip(columns, probabilities, strict=True)
                choice = [self._choose(self.sequences[column], one) for column, one in mine]
                chosen = order.gather(1, torch.stack(choice))[:, 0]
            for column, token in zip(columns, chosen.tolist(), strict=True):
                tokens[column] = token
        return tokens

    def _choose(self, sequence: Sequence, probabilities: Tensor) -> Tensor:
        try:
            return torch.multinomial(probabilities, 1, generator=sequence.random)
        except Exception as error:
            self._fail(sequence, error)
            return torch.zeros(1, dtype=torch.long, device=self.device)
