"""How the vectors of lessons are learned: passes over texts, in a layer that has their patches alone."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attractor import ops
from attractor.continual.calibrate import CLOSED
from attractor.continual.reading import Batch, Reading
from attractor.layer import APN, PATCH_ROLES, ROLES


class Descent:
    """Steps of a given length, of one vector per lesson, against its own gradient."""

    def __init__(self, layer: APN, reading: Reading) -> None:
        self.layer, self.reading = layer, reading
        self._rooms: dict[int, dict[str, Tensor]] = {}  # memory of those patches alone that learn

    @torch.no_grad()
    def known(self, batches: Sequence[Batch], lessons: int) -> list[float]:
        """The share of each lesson's forms whose answers are the model's first choice, token by token."""
        right, count = [0] * lessons, [0] * lessons
        for batch in batches:
            choice = self.reading.predict(batch).argmax(-1)
            wrong = set(batch.row_n[(choice != batch.target_n) & batch.is_answer_n].tolist())
            for line, row in enumerate(batch.texts):
                if row.answer and row.is_test:
                    right[row.lesson] += line not in wrong
                    count[row.lesson] += 1
        return [hits / number for hits, number in zip(right, count, strict=True)]

    def train(
        self,
        turns: Sequence[Sequence[Batch]],
        patches: list[int],
        lesson_of: list[int],
        *,
        unit: float,
        breathe: Callable[[], None],
        report: Callable[[int, float], None],
    ) -> tuple[int, list[float]]:
        """Learn in these patches, one vector for each lesson they belong to.

        `unit` is what steps are measured in. Returns the passes, and the share of each lesson's forms that
        are known then.
        """
        batches = list(itertools.chain.from_iterable(turns))
        acting = [self._acting(batch) for batch in batches]
        breathe()
        first = [changes_from(*both, patches) for both in zip(batches, acting, strict=True)]
        order = sorted(self._entered(acting) | set(patches))
        place = {patch: number for number, patch in enumerate(order)}
        with self._only(order):
            ready = iter(self.reading.after(batches, first))
            turns = [list(itertools.islice(ready, len(turn))) for turn in turns]
            breathe()
            passes = self._descend(turns, [place[patch] for patch in patches], lesson_of, unit, report)
            return passes, self.known(turns[0], max(lesson_of) + 1)

    def _descend(
        self,
        turns: Sequence[Sequence[Batch]],
        patches: list[int],
        lesson_of: list[int],
        unit: float,
        report: Callable[[int, float], None],
    ) -> int:
        config, decoder = self.reading.config, self.layer.decoder
        assert decoder is not None
        owner = torch.tensor(lesson_of, device=decoder.device)
        vector = torch.zeros(max(lesson_of) + 1, decoder.shape[-1], device=decoder.device)
        velocity = torch.zeros_like(vector)
        losses = torch.full((len(turns), len(vector)), torch.inf, device=decoder.device)  # when last read
        decoder.requires_grad_(True)
        try:
            for done in range(config.passes):
                turn = done % len(turns)
                losses[turn], right, gradient = self._gradient(turns[turn], len(vector))
                report(done, right)
                goes_on = losses.amax(0) >= config.enough
                if not goes_on.any():  # a vector stays as it was when it was found to be good enough
                    return done + 1
                gradient = torch.zeros_like(vector).index_add_(0, owner, gradient[patches, 0].float())
                velocity = config.momentum * velocity + ops.unit(gradient)
                pace = 0.1 + 0.45 * (1 + math.cos(math.pi * done / config.passes))
                vector *= 1 - config.decay * pace * goes_on[:, None]
                vector -= config.step * unit * pace * goes_on[:, None] * ops.unit(velocity)
                with torch.no_grad():
                    decoder[patches, 0] = vector[owner].to(decoder.dtype)
        finally:
            decoder.requires_grad_(False)
        return config.passes

    @torch.no_grad()
    def _acting(self, batch: Batch) -> Tensor:
        """The patch that acts on each token of these texts (texts, longest), or -1."""
        lengths = torch.tensor([len(text.tokens) for text in batch.texts])
        rows, positions = (torch.arange(int(lengths.max())) < lengths[:, None]).nonzero().unbind(1)
        given = self.reading.given(batch, rows.tolist(), positions.tolist()).to(self.layer.encoder.dtype)
        patches = self.layer.choose(given)[..., 0]
        acting = patches.new_full((len(lengths), int(lengths.max())), -1)
        acting[rows, positions] = patches
        return acting

    def _entered(self, acting: Sequence[Tensor]) -> set[int]:
        """The patches that act on any token."""
        return set(torch.cat([patches.unique() for patches in acting]).tolist()) - {-1}

    def _room(self, count: int) -> int:
        """How many patches the layer has while so many learn; closed ones fill it up.

        Kernels for a GPU are compiled for a number of patches, so there that takes few values.
        """
        return max(256, 1 << (count - 1).bit_length()) if self.layer.prototypes.is_cuda else count

    @contextmanager
    def _only(self, patches: list[int]) -> Iterator[None]:
        """For a while the layer has these patches alone, whose decoders may change; others cost nothing."""
        layer, radius, count = self.layer, self.layer.radius, self._room(len(patches))
        assert radius is not None
        named = dict(layer.named_parameters(recurse=False))
        whole = {name: bank for name, bank in named.items() if ROLES[name] in PATCH_ROLES}
        few = self._rooms.get(count)
        if few is None:
            few = {name: bank.new_empty(count, *bank.shape[1:]) for name, bank in whole.items()}
            few["radius"] = radius.new_empty(count)
        if radius.is_cuda:  # passes that were recorded go on with the same memory
            self._rooms[count] = few
        for name, bank in {**whole, "radius": radius}.items():
            few[name][: len(patches)] = bank.detach()[patches]
            few[name][len(patches) :] = CLOSED if name == "radius" else 0
        for name in whole:
            setattr(layer, name, nn.Parameter(few[name], requires_grad=False))
        layer.radius = few["radius"]
        try:
            yield
        finally:
            assert layer.decoder is not None
            whole["decoder"].detach()[patches] = layer.decoder.detach()[: len(patches)]
            for name, bank in whole.items():
                setattr(layer, name, bank)
            layer.radius = radius

    def _gradient(self, batches: Sequence[Batch], lessons: int) -> tuple[Tensor, float, Tensor]:
        """Each lesson's loss per token of its answers, the share of them predicted, and the gradient."""
        assert self.layer.decoder is not None
        gradient = torch.zeros_like(self.layer.decoder)
        total, count = torch.zeros(2, lessons, device=gradient.device)
        right = torch.zeros((), dtype=torch.long, device=gradient.device)
        for batch in batches:
            loss, choice, part = self.reading.descent(batch)
            gradient += part
            answers = batch.is_answer_n
            right += (choice == batch.target_n)[answers].sum()
            total.index_add_(0, batch.lesson_n[answers], loss[answers])
            count.index_add_(0, batch.lesson_n[answers], torch.ones_like(loss[answers]))
        return total / count, right.item() / count.sum().item(), gradient


def changes_from(batch: Batch, acting: Tensor, patches: Sequence[int]) -> list[int]:
    """The first token of each text that one of these patches acts on, or before one that is graded."""
    acts = torch.isin(acting, torch.tensor(patches, device=acting.device))
    place = torch.arange(acts.shape[1], device=acts.device)
    first = torch.where(acts, place, acts.shape[1]).amin(1).tolist()
    graded = [min(text.answer.start - text.repeated, len(text.tokens)) - 1 for text in batch.texts]
    return list(map(min, first, graded))
