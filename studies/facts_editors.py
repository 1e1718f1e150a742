"""Editors after their papers: a codebook beside one FFN, and closed-form updates of a few of them.

Both read the texts that everybody reads, are graded on the same tokens with the same weights, read a chunk at
most as often, and stop by the same rule. What their papers leave to the model (layers, lengths of steps) is
given here as a share of the model's own depth and of the length of its activations.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor.continual.forms import shared_subject
from attractor.continual.reading import Reading, Text, graded, padded
from attractor.hf.find import find_places
from attractor.hf.halves import logits_at
from attractor.hf.sample import sample_batches
from studies.facts_world import Lesson

Hook = Callable[[nn.Module, Any, Tensor], Tensor | None]
PULL = 0.5
"""MEMIT's weight decay of a target value: what the square of its length, beside that of what it is added to,
counts."""
LONGEST = 0.75
"""A target value is at most so many times as long as what it is added to: "clamp_norm_factor" in MEMIT's own
settings for GPT-J (ROME's is 4)."""
STEP = 0.2
"""The rate of Adam for target values, as a share of the typical size of a number there."""
STEP_OF_VALUES = 1.0
"""The same for the codebook's values, at first; it falls by a cosine."""
SAME = 0.02
"""Two keys at less than this share of epsilon are the same one."""


class Editor:
    """A copy of a model whose FFNs are watched while texts are read."""

    def __init__(self, tuned: Any, reading: Reading) -> None:
        self.tuned, self.reading, self.config = tuned, reading, reading.config
        self.model = tuned
        self.device = torch.device(reading.device)
        self.ffns = [place.modules for place in find_places(tuned, "all")]
        tuned.requires_grad_(False)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.tuned(tokens).logits

    def parts(self, texts: Sequence[Text]) -> Iterator[list[int]]:
        """Texts of similar lengths, as many as are read at once."""
        order = sorted(range(len(texts)), key=lambda number: len(texts[number].tokens))
        for start in range(0, len(order), self.config.rows):
            yield order[start : start + self.config.rows]

    def grade(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        """For each text its weighted nats, and its nats per token of the answer; and whether all of those
        are predicted."""
        tokens = padded([text.tokens for text in texts]).to(self.device)
        row, position, target, is_answer, _ = (
            torch.tensor(column, device=self.device) for column in zip(*graded(texts), strict=True)
        )
        with self.reading.autocast():
            predicted = logits_at(self.tuned, tokens, row, position).float()
        nats = F.cross_entropy(predicted, target, reduction="none")
        weight = torch.where(is_answer, 1.0, self.config.after_weight)
        zero = torch.zeros(len(texts), device=self.device)
        count = zero.index_add(0, row, is_answer.float())
        answers = zero.index_add(0, row, nats.detach() * is_answer) / count.clamp(min=1)
        missed = zero.index_add(0, row, ((predicted.argmax(-1) != target) & is_answer).float())
        return zero.index_add(0, row, nats * weight), answers, missed == 0


@contextmanager
def hooked(module: nn.Module, hook: Hook) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class Grace(Editor):
    """A codebook beside one FFN (GRACE, arXiv 2211.11031).

    A key is what goes into the FFN at the last token of a prompt. Where it is within the radius of the
    nearest key, the FFN's output is replaced by that key's value. A text whose answer is predicted already is
    no edit. With d the distance to the nearest key, of radius r:

    - d > r + epsilon, or no key: a new key of radius epsilon, whose value is learned by Adam;
    - else, the same answer: r becomes max(r, d);
    - else, a split: both radii become d / 2, and the new key's value is learned. Here the paper leaves a key
      that is met again with another answer at a radius of 0; it gets the new answer.

    `epsilon` is a share of the median length of background keys. Unlike in the paper's code any token may
    fall into a ball, not the last one of the prompt alone: a model that is in use is not told where a prompt
    ends.
    """

    def __init__(self, tuned: Any, reading: Reading, free: Tensor, epsilon: float, block: int) -> None:
        super().__init__(tuned, reading)
        self.first, self.last = self.ffns[block][0], self.ffns[block][-1]
        width = tuned.config.get_text_config().hidden_size
        self.keys = torch.zeros(0, width, device=self.device)
        self.values = torch.zeros(0, width, device=self.device)
        self.radius: list[float] = []
        self.radii = torch.zeros(0, device=self.device)
        self.labels: list[tuple[int, ...]] = []
        self.given = self.made = torch.zeros(0)
        self.first.register_forward_pre_hook(self._see)
        self.last.register_forward_hook(self._replace)
        with torch.no_grad():
            for batch in sample_batches(tuned, free)[:1]:
                tuned(batch, use_cache=False)
        self.epsilon = epsilon * self.given.norm(dim=-1).median().item()
        self.step = STEP_OF_VALUES * self.made.norm(dim=-1).median().item() / math.sqrt(width)

    def _see(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        self.given = given[0].detach().float()

    def _replace(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        self.made = output.detach().float()
        if not len(self.keys):
            return output
        distance, nearest = torch.cdist(self.given.flatten(0, -2), self.keys).min(-1)
        inside = (distance <= self.radii[nearest]).view(output.shape[:-1])
        return torch.where(
            inside[..., None], self.values[nearest].view(output.shape).to(output.dtype), output
        )

    def learn(
        self, lessons: Sequence[Lesson], seed: int, subjects: Sequence[str] | None = None
    ) -> dict[str, Any]:
        subjects = [shared_subject(forms) for forms in lessons] if subjects is None else subjects
        turns = self.reading.texts(lessons, subjects)
        texts = [text for turn in turns for text in turn if text.answer]
        keys, values, known = self._look(texts)
        edits = [number for number, is_known in enumerate(known) if not is_known]
        labels = [tuple(texts[n].tokens[place] for place in texts[n].answer) for n in edits]
        new = self._place(keys[edits], values[edits], labels)
        passes = self._descend([texts[number] for number in edits], new)
        return {"passes": passes, "edits": len(edits), "entries": len(self.keys)}

    @torch.no_grad()
    def _look(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor, list[bool]]:
        """Of each text the key and the FFN's own output at the end of its prompt, and whether it is known."""
        found: dict[int, tuple[Tensor, Tensor, bool]] = {}
        for part in self.parts(texts):
            _, _, right = self.grade([texts[number] for number in part])
            end = torch.tensor([texts[number].answer.start - 1 for number in part], device=self.device)
            row = torch.arange(len(part), device=self.device)
            given, made = self.given[row, end], self.made[row, end]
            found |= dict(zip(part, zip(given, made, right.tolist(), strict=True), strict=True))
        keys, values, known = zip(*(found[number] for number in range(len(texts))), strict=True)
        return torch.stack(keys), torch.stack(values), list(known)

    def _place(self, keys: Tensor, values: Tensor, labels: Sequence[tuple[int, ...]]) -> Tensor:
        """Add, expand and split in the order of the edits; returns the numbers of values to be learned."""
        old = len(self.keys)
        every = torch.cat([self.keys, keys])
        between = torch.cdist(keys, every).cpu()
        order = list(range(old))  # for each entry its row in `every`
        learned: list[int] = []
        for number, label in enumerate(labels):
            distances = between[number, torch.tensor(order, dtype=torch.long)]
            near = int(distances.argmin()) if len(order) else -1
            distance = float(distances[near]) if len(order) else math.inf
            if distance > (self.radius[near] if len(order) else 0.0) + self.epsilon:
                radius = self.epsilon
            elif self.labels[near] == label:
                self.radius[near] = max(self.radius[near], distance)
                continue
            elif distance < SAME * self.epsilon:
                self.labels[near] = label
                learned.append(near)
                continue
            else:
                self.radius[near] = radius = distance / 2
            order.append(old + number)
            self.radius.append(radius)
            self.labels.append(label)
            learned.append(len(order) - 1)
        fresh = [row - old for row in order[old:]]
        self.keys = every[order]
        self.values = torch.cat([self.values, values[fresh]])
        self.radii = torch.tensor(self.radius, device=self.device)
        return torch.tensor(sorted(set(learned)), dtype=torch.long, device=self.device)

    def _descend(self, texts: Sequence[Text], new: Tensor) -> int:
        """Adam on these values until every text that reads one is good enough."""
        if not len(new):
            return 0
        frozen = self.values
        values = nn.Parameter(frozen[new].clone())
        optimizer = torch.optim.Adam([values], lr=self.step)
        passes = 0
        while passes < self.config.passes:
            pace = 0.1 + 0.45 * (1 + math.cos(math.pi * passes / self.config.passes))
            optimizer.param_groups[0]["lr"] = self.step * pace
            passes += 1
            optimizer.zero_grad()
            worst = 0.0
            for part in self.parts(texts):
                self.values = frozen.index_copy(0, new, values)
                nats, answers, _ = self.grade([texts[number] for number in part])
                nats.sum().backward()
                worst = max(worst, answers.max().item())
            if worst < self.config.enough:
                break
            optimizer.step()
        self.values = frozen.index_copy(0, new, values.detach())
        return passes

    def bytes(self) -> int:
        return 4 * (2 * self.keys.numel() + len(self.keys))


class Targets(NamedTuple):
    """What is to be added to the residual stream at each lesson's subject."""

    vectors: Tensor  # (lessons, dim)
    passes: int
    nats: float  # per token of the answers, where that is added
    length: float  # beside what it is added to, in the mean


class ClosedForm(Editor):
    """Facts written into the last matrices of a few FFNs at once: MEMIT (arXiv 2210.07229), AlphaEdit
    (arXiv 2410.02355).

    For each lesson a vector is found by Adam that, added to the residual stream after the last of these
    blocks at the last token of the subject, makes its answers likely. Then, from the first block to the last,
    with K the keys of the chunk (what the matrix is given there), R what is missing of those vectors, divided
    by the number of blocks to go, and C the mean of k k^T over background text, the matrix changes by

    - "memit": R K^T (weight C + K K^T)^-1;
    - "alphaedit": R K^T P (K' K'^T P + K K^T P + c I)^-1, where P projects onto the directions that
      background keys hardly have, K' are the keys of earlier chunks, and c is the mean eigenvalue of C.

    For "memit" the weight is given as a multiple of the width of the keys (its authors took about 1 for
    GPT-J). For "alphaedit" it is the share of the background keys' mean square that P may hold: its authors
    take what is below a threshold, which in a small model is nothing.
    """

    def __init__(
        self,
        tuned: Any,
        reading: Reading,
        free: Tensor,
        kind: str,
        weight: float,
        blocks: Sequence[int],
        longest: float = LONGEST,
    ) -> None:
        super().__init__(tuned, reading)
        self.kind, self.longest = kind, longest
        self.found: Targets | None = None
        self.block = blocks_of(tuned)[blocks[-1]]
        if hasattr(self.block, "post_feedforward_layernorm"):
            raise ValueError(
                f"{type(self.block).__name__} norms what its FFN makes: closed-form editors need a model "
                "that adds it as it is"
            )
        self.matrices = [last_linear(self.ffns[number][-1]) for number in blocks]
        self.covariance = covariances(tuned, self.matrices, free)
        self.silent, self.ridge = [], []
        for own in self.covariance:
            mean = own.trace().item() / len(own)
            self.silent.append(silent_directions(own, weight) if kind == "alphaedit" else own)
            self.ridge.append(mean if kind == "alphaedit" else weight * len(own))
        self.past = [torch.zeros_like(own) for own in self.covariance]

    def learn(
        self,
        lessons: Sequence[Lesson],
        seed: int,
        subjects: Sequence[str] | None = None,
        found: Targets | None = None,
    ) -> dict[str, Any]:
        """`found` are targets that an editor of the same model has found for these lessons already: they do
        not depend on any weight."""
        subjects = [shared_subject(forms) for forms in lessons] if subjects is None else subjects
        turns = self.reading.texts(lessons, subjects)
        texts = [text for turn in turns for text in turn if text.answer and text.keys]
        before, _ = self._at_subjects(texts, len(lessons))
        self.found = self._targets(turns, before.norm(dim=1)) if found is None else found
        wanted = self.found.vectors
        used = []
        for number, matrix in enumerate(self.matrices):
            now, keys = self._at_subjects(texts, len(lessons), matrix)
            missing = (wanted - (now - before)) / (len(self.matrices) - number)
            missing, keys = missing.double().T, keys.double().T  # (dim, n), (inner, n)
            if self.kind == "memit":
                change = spread(missing, keys, self.ridge[number] * self.covariance[number])
            else:
                change = projected(missing, keys, self.silent[number], self.past[number], self.ridge[number])
            matrix.weight.data += change.to(matrix.weight.dtype)
            used.append(keys)
        for past, keys in zip(self.past, used, strict=True):
            past += keys @ keys.T
        now, _ = self._at_subjects(texts, len(lessons))
        left = (wanted - (now - before)).norm() / wanted.norm().clamp(min=1e-9)
        return {
            "passes": self.found.passes,
            "length of the stream": before.norm(dim=1).mean().item(),
            "length of the targets": self.found.length,
            "nats with the targets": self.found.nats,
            "left of the targets": left.item(),
        }

    def bytes(self) -> int:
        return sum(matrix.weight.numel() * matrix.weight.element_size() for matrix in self.matrices)

    def _targets(self, turns: Sequence[Sequence[Text]], length: Tensor) -> Targets:
        """The vector of each lesson; `length` (lessons) is that of what it is added to."""
        lessons, width = len(length), self.tuned.config.get_text_config().hidden_size
        vectors = nn.Parameter(torch.zeros(lessons, width, device=self.device))
        rate = STEP * length.median().item() / math.sqrt(width)
        optimizer = torch.optim.Adam([vectors], lr=rate)
        losses = torch.full((len(turns), lessons), torch.inf, device=self.device)  # when last read
        passes = 0
        while passes < self.config.passes:
            turn, passes = passes % len(turns), passes + 1
            texts = turns[turn]
            optimizer.zero_grad()
            total, count = torch.zeros(2, lessons, device=self.device).unbind()
            for part in self.parts(texts):
                own = [texts[number] for number in part]
                lesson = torch.tensor([text.lesson for text in own], device=self.device)
                with hooked(self.block, adding(vectors, own)):
                    nats, answers, _ = self.grade(own)
                nats.sum().backward()
                is_form = torch.tensor([float(bool(text.answer)) for text in own], device=self.device)
                total.index_add_(0, lesson, answers * is_form)
                count.index_add_(0, lesson, is_form)
            losses[turn] = total / count
            goes_on = losses.amax(0) >= self.config.enough
            if not goes_on.any():
                break
            (PULL * (vectors.square().sum(1) / length.square()).sum()).backward()
            before = vectors.detach().clone()
            optimizer.step()
            with torch.no_grad():
                most = self.longest * length / vectors.norm(dim=1).clamp(min=1e-9)
                vectors.mul_(most.clamp(max=1)[:, None])
                vectors.copy_(torch.where(goes_on[:, None], vectors, before))
        read = losses[losses.isfinite()]
        share = vectors.detach().norm(dim=1) / length
        return Targets(vectors.detach(), passes, read.mean().item(), share.mean().item())

    @torch.no_grad()
    def _at_subjects(
        self, texts: Sequence[Text], lessons: int, matrix: nn.Linear | None = None
    ) -> tuple[Tensor, Tensor]:
        """The mean for each lesson, over all places where its subject ends, of the residual stream after the
        last block, and of what a matrix is given."""
        states: list[Tensor] = []
        given: list[Tensor] = []
        watch = [self.block.register_forward_hook(lambda _, __, output: states.append(stream(output)))]
        if matrix is not None:
            watch.append(matrix.register_forward_pre_hook(lambda _, own: given.append(own[0])))
        sums: list[Tensor] = []
        count = torch.zeros(lessons, device=self.device)
        try:
            for part in self.parts(texts):
                own = [texts[number] for number in part]
                with self.reading.autocast():
                    self.tuned.base_model(
                        padded([text.tokens for text in own]).to(self.device), use_cache=False
                    )
                row, place = subjects_in(own, self.device)
                lesson = torch.tensor([text.lesson for text in own], device=self.device)[row]
                found = [kept.pop()[row, place].float() for kept in (states, given) if kept]
                sums = sums or [seen.new_zeros(lessons, seen.shape[1]) for seen in found]
                for total, seen_here in zip(sums, found, strict=True):
                    total.index_add_(0, lesson, seen_here)
                count.index_add_(0, lesson, torch.ones(len(row), device=self.device))
        finally:
            for handle in watch:
                handle.remove()
        means = [total / count[:, None] for total in sums]
        return means[0], means[-1]


def subjects_in(texts: Sequence[Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and position of every place where a text's subject ends."""
    ends = [(row, place) for row, text in enumerate(texts) for place in text.keys]
    row, place = torch.tensor(ends, dtype=torch.long, device=device).view(-1, 2).unbind(1)
    return row, place


def adding(vectors: Tensor, texts: Sequence[Text]) -> Hook:
    """A hook that adds each lesson's vector where its subject ends in these texts."""
    row, place = subjects_in(texts, vectors.device)
    lesson = torch.tensor([text.lesson for text in texts], device=vectors.device)[row]

    def add(module: nn.Module, given: Any, output: Any) -> Any:
        states = stream(output)
        states = states.index_put((row, place), vectors[lesson].to(states.dtype), accumulate=True)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    return add


def stream(output: Any) -> Tensor:
    """What a block hands to the next one."""
    return output[0] if isinstance(output, tuple) else output


def blocks_of(model: Any) -> list[nn.Module]:
    return [model.get_submodule(place.name.rpartition(".")[0]) for place in find_places(model, "all")]


def last_linear(ffn: nn.Module) -> nn.Linear:
    found = [part for part in ffn.modules() if isinstance(part, nn.Linear)]
    if not found:
        raise ValueError(f"{type(ffn).__name__} has no nn.Linear to write into")
    return found[-1]


@torch.no_grad()
def covariances(model: Any, matrices: Sequence[nn.Linear], free: Tensor) -> list[Tensor]:
    """The mean of k k^T, in float64, of what each matrix is given on background text."""
    sums = [
        torch.zeros(own.in_features, own.in_features, device=own.weight.device).double() for own in matrices
    ]
    hooks = []
    for total, matrix in zip(sums, matrices, strict=True):

        def add(_: nn.Module, given: tuple[Tensor, ...], total: Tensor = total) -> None:
            keys = given[0].float().flatten(0, -2)
            total += (keys.T @ keys).double()

        hooks.append(matrix.register_forward_pre_hook(add))
    try:
        for batch in sample_batches(model, free):
            model.base_model(batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [total / free.numel() for total in sums]


def silent_directions(covariance: Tensor, share: float) -> Tensor:
    """The projection onto the eigenvectors of the least eigenvalues that hold this share of their sum."""
    values, vectors = torch.linalg.eigh(covariance)
    chosen = vectors[:, values.cumsum(0) <= share * values.sum()]
    return chosen @ chosen.T


def spread(missing: Tensor, keys: Tensor, weighted: Tensor) -> Tensor:
    """MEMIT's update: R K^T (weight C + K K^T)^-1."""
    return torch.linalg.solve(weighted + keys @ keys.T, keys @ missing.T).T


def projected(missing: Tensor, keys: Tensor, silent: Tensor, past: Tensor, weight: float) -> Tensor:
    """AlphaEdit's update: R K^T P (K' K'^T P + K K^T P + weight I)^-1."""
    inner = (past + keys @ keys.T) @ silent + weight * torch.eye(len(silent)).to(silent)
    return torch.linalg.solve(inner.T, silent @ keys @ missing.T).T
