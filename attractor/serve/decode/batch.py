"""The desk where texts are written: one step gives each of them its next token."""

import logging
from collections.abc import Collection

import torch
from torch import Tensor

from attractor.continual.guard import LEAST, log_probabilities
from attractor.generate import candidates
from attractor.serve.decode.mixture import Evidence
from attractor.serve.decode.sequences import Lane, Row, Seat, Written

log = logging.getLogger("attractor")


class Desk:
    """The rows that are written now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows: list[Row] = []
        self.fresh: list[Row] = []  # have read, and join with the next step
        self.lanes: dict[int, Lane] = {}  # by the model's id
        self.evidence = Evidence.of_nobody(device)
        self.gave = torch.zeros(0, 0)  # (M, B) what the paths gave the last token, 0 at rest
        self.failed: dict[Row, str] = {}  # of this step
        self._entries: tuple[Tensor, Tensor] | None = None  # path and column of all seats, lane by lane

    def join(self, row: Row) -> None:
        self.fresh.append(row)

    def leave(self, rows: Collection[Row]) -> None:
        gone = set(rows)
        self.fresh = [row for row in self.fresh if row not in gone]
        if not gone.intersection(self.rows):
            return
        for row in gone.intersection(self.rows):
            for seat in row.seats:
                if seat.place >= 0:
                    self._unseat(seat)
                seat.cache = None
        kept = [row.column for row in self.rows if row not in gone]
        self.rows = [self.rows[column] for column in kept]
        self.evidence = self.evidence.keep(kept) if kept else Evidence.of_nobody(self.device)
        self.gave = self.gave[:, kept]
        self._number()

    def _number(self) -> None:
        self._entries = None
        for column, row in enumerate(self.rows):
            row.column = column

    def _seat(self, seat: Seat) -> None:
        self._entries = None
        self.lanes.setdefault(id(seat.model), Lane(seat.model)).join(seat)

    def _unseat(self, seat: Seat) -> None:
        self._entries = None
        lane = self.lanes[id(seat.model)]
        lane.leave(seat)
        if not lane.seats:
            del self.lanes[id(seat.model)]

    @torch.no_grad()
    def set_aside(self, row: Row) -> None:
        """A row whose context is full leaves, to `read` its end again; what it knows of the paths goes on."""
        evidence = self.evidence.keep([row.column])
        begins = evidence.count(self.gave[:, [row.column]])
        for path, seat in enumerate(row.seats):
            if seat.place < 0 and not begins:
                tokens = [*seat.missed, row.text[-1]]
                evidence.sums[path] += seat.catch_up(tokens, also_last=False)
        evidence.awake = evidence.prior.isfinite()
        self.leave([row])
        row.evidence = evidence

    def posterior(self, row: Row) -> dict[str, float]:
        shares = self.evidence.sums[: len(row.names), row.column].softmax(0).tolist()
        return dict(zip(row.names, shares, strict=True))

    @torch.no_grad()
    def step(self) -> tuple[list[tuple[Row, Written]], dict[Row, str]]:
        """The next token of every row. Rows that failed have left, and these are the reasons."""
        self.failed = {}
        if self.rows:
            self._let_rest()
            self._read()
        for row in self.fresh:
            self._take(row)
        self.fresh = []
        written = self._write() if self.rows else []
        failed, self.failed = self.failed, {}
        self.leave(failed)
        return [(row, one) for row, one in written if row not in failed], failed

    def _let_rest(self) -> None:
        if not any(row.publication.pause for row in self.rows):
            return
        for path, column in self.evidence.to_rest().nonzero().tolist():
            row = self.rows[column]
            if row.may_rest:
                seat = row.seats[path]
                seat.rest(self.lanes[id(seat.model)].copy_of(seat), float(self.gave[path, column]))
                self._unseat(seat)
                self.evidence.awake[path, column] = False
                self.gave[path, column] = 0
        for row in self.rows:
            row.may_rest = True

    def _read(self) -> None:
        """Every path that is awake reads the last token; those that must wake read what they missed."""
        begins = self.evidence.count(self.gave)
        last = torch.tensor([row.text[-1] for row in self.rows], device=self.device)
        _, columns = self._seats()
        lanes = list(self.lanes.values())
        parts = last[columns].split([len(lane.seats) for lane in lanes])
        for lane, tokens in zip(lanes, parts, strict=True):
            try:
                lane.read(tokens)
            except Exception as error:  # its rows end with this step; those of other lanes go on
                lane.logits = torch.zeros(len(tokens), lane.model.config.vocab_size, device=self.device)
                for row in self.rows:
                    if any(seat in lane.seats for seat in row.seats):
                        self._fail(row, error)
        for row in self.rows:
            row.length += 1
        self.evidence.predicted += 1
        if len(columns) < sum(len(row.seats) for row in self.rows):
            self._wake(begins)

    def _fail(self, row: Row, error: Exception) -> None:
        log.warning("a row failed", exc_info=error)
        self.failed[row] = f"{type(error).__name__}: {error}"

    def _wake(self, begins: Tensor) -> None:
        to_wake, is_new = self.evidence.to_wake(begins).tolist(), begins.tolist()
        for column, row in enumerate(self.rows):
            for path, seat in enumerate(row.seats):
                if seat.place >= 0:
                    continue
                seat.missed.append(row.text[-1])
                if to_wake[column] and row not in self.failed:
                    try:
                        gained = seat.catch_up(seat.missed, also_last=True)
                    except Exception as error:
                        self._fail(row, error)
                        continue
                    self.evidence.sums[path, column] += 0.0 if is_new[column] else gained
                    self.evidence.awake[path, column] = True
                    self._seat(seat)

    def _take(self, row: Row) -> None:
        """A row that has read joins its lanes."""
        self.evidence = self.evidence.beside(row.evidence)
        self.rows.append(row)
        self._number()
        for seat in row.seats:
            self._seat(seat)

    def _seats(self) -> tuple[Tensor, Tensor]:
        """(N) path and column of everybody in a lane, lane by lane."""
        if self._entries is None:
            starts, count = {}, 0
            for key, lane in self.lanes.items():
                starts[key], count = count, count + len(lane.seats)
            paths, columns = [0] * count, [0] * count
            for column, row in enumerate(self.rows):
                for path, seat in enumerate(row.seats):
                    if seat.place >= 0:
                        at = starts[id(seat.model)] + seat.place
                        paths[at], columns[at] = path, column
            both = torch.tensor([paths, columns], dtype=torch.long, device=self.device)
            self._entries = (both[0], both[1])
        return self._entries

    def _write(self) -> list[tuple[Row, Written]]:
        """Mix, draw, and remember what each path gave the token that came of it."""
        paths, columns = self._seats()
        logits = [lane.logits for lane in self.lanes.values() if lane.logits is not None]
        predictions = log_probabilities(torch.cat(logits))  # (N, V)
        for lane in self.lanes.values():
            lane.logits = None
        log_weights = self.evidence.log_weights()
        mixture = self._mixed(predictions, log_weights[paths, columns], columns)
        tokens = torch.tensor(self._draw(mixture), device=self.device)
        gave = predictions.gather(1, tokens[columns, None])[:, 0].double()
        self.gave = torch.zeros_like(log_weights).index_put_((paths, columns), gave)
        shares = (log_weights + self.gave).softmax(0).T.tolist()
        logprobs = mixture.gather(1, tokens[:, None])[:, 0].tolist()
        written = []
        for row, token, logprob, share in zip(self.rows, tokens.tolist(), logprobs, shares, strict=True):
            row.text.append(token)
            written.append((row, Written(token, logprob, dict(zip(row.names, share, strict=False)))))
        return written

    def _mixed(self, predictions: Tensor, log_weights: Tensor, columns: Tensor) -> Tensor:
        """Log-probabilities (B, V) of (N, V) predictions, weighted."""
        count, vocabulary = len(self.rows), predictions.shape[1]
        is_floored = len(columns) < sum(len(row.seats) for row in self.rows)
        if len(columns) == count and not is_floored:  # one path each
            return predictions[columns.argsort()]
        parts = predictions.exp().mul_(log_weights.exp().to(predictions.dtype)[:, None])
        sums = parts.new_zeros(count, vocabulary).index_add_(0, columns, parts)
        if is_floored:
            floor = (self.evidence.floor * self.evidence.at_rest.any(0)).to(sums.dtype)[:, None]
            sums = sums * (1 - floor) + floor / vocabulary
        return sums.log_().clamp_(min=LEAST)

    def _draw(self, mixture: Tensor) -> list[int]:
        """A token for each row: rows with the same settings at once, each with its own random numbers."""
        tokens = [0] * len(self.rows)
        alike: dict[tuple[float, int | None, float | None], list[int]] = {}
        for column, row in enumerate(self.rows):
            draw = row.draw
            alike.setdefault((draw.temperature, draw.top_k, draw.top_p), []).append(column)
        for (temperature, top_k, top_p), columns in alike.items():
            some = mixture if len(columns) == len(self.rows) else mixture[columns]
            if temperature == 0:
                chosen = some.argmax(-1)
            else:
                probabilities, order = candidates(some, temperature, top_k, top_p)
                mine = zip(columns, probabilities, strict=True)
                choice = [self._choose(self.rows[column], one) for column, one in mine]
                chosen = order.gather(1, torch.stack(choice))[:, 0]
            for column, token in zip(columns, chosen.tolist(), strict=True):
                tokens[column] = token
        return tokens

    def _choose(self, row: Row, probabilities: Tensor) -> Tensor:
        try:
            return torch.multinomial(probabilities, 1, generator=row.random)
        except Exception as error:
            self._fail(row, error)
            return torch.zeros(1, dtype=torch.long, device=self.device)
