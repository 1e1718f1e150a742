"""OnlineLearner: a model that keeps learning from a stream, and reports what it did.

    learner = OnlineLearner.load("runs/tiny_apn")
    seen = learner.observe("Enter CELESTINE, with a letter.")
    print(seen.loss, seen.taught, seen.held_back, seen.patches)     # the loss is from before learning
    print(learner.generate("CELESTINE:", max_tokens=80), learner.perplexity(held_out))
    learner.save("runs/adapted")

Every token is scored when it arrives, with what came before it as context. Once in `budget` tokens the
patches that admitted tokens selected learn from them, in the APN layers and nowhere else. Memory does not
depend on the length of the stream. A step that fails leaves model, optimizer and counters as they were.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, cast, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attractor import monitor
from attractor.checkpoint import load_model
from attractor.config import PrecisionName, check_choice, check_config, check_number
from attractor.continual import state as states
from attractor.continual.allocate import Allocator, Habits
from attractor.continual.baselines.baseline import check_batch
from attractor.continual.config import LearnConfig, rate_factor
from attractor.continual.gates import Surprise, admit
from attractor.continual.observation import Gathered, Observation, Text, Totals, contiguous_windows, tokens_of
from attractor.continual.prototypes import pull, turn
from attractor.continual.update import (
    NO_PATCHES,
    LocalUpdate,
    NotFiniteUpdate,
    Undo,
    all_or_nothing,
    most_specific,
    precise,
    used_patches,
)
from attractor.data import IGNORED
from attractor.evaluate import autocast, evaluate, perplexity, routing
from attractor.files import check_hashes, write_folder
from attractor.generate import continued
from attractor.layer import APN
from attractor.lm import TrainableModel, inputs_of, mode
from attractor.tokenizer import Tokenizer

TOKENS_PER_PASS = 16_384
"""Longer blocks are scored in several passes: memory stays constant."""


class OnlineLearner:
    """Let a model with APN layers keep learning from a stream of text, patch by patch.

    `model` is changed in place; its parameters that do not learn are frozen. `tokenizer` is needed for texts
    given as strings; token numbers do without. `config` says what learns and when. `others` are parameters
    outside of APN layers that learn too, as a whole; they are not saved here.

    >>> from attractor import GPT, GPTConfig, LearnConfig, OnlineLearner
    >>> model = GPT(GPTConfig(vocab_size=256, context=16, num_layers=1, num_heads=1, dim=16, ffn="apn"))
    >>> learner = OnlineLearner(model, config=LearnConfig(budget=32))
    >>> text = list(b"Enter CELESTINE, with a letter. ")
    >>> before = learner.perplexity(text)
    >>> seen = learner.observe(text * 4)
    >>> seen.tokens, seen.taught, seen.updates  # the first token is not predicted
    (128, 127, 4)
    >>> learner.perplexity(text) < before
    True

    A model without APN layers is a ValueError. An update that would not be finite is a NotFiniteUpdate, and
    changes nothing.
    """

    def __init__(
        self,
        model: TrainableModel,
        tokenizer: Tokenizer | None = None,
        config: LearnConfig | None = None,
        *,
        others: Mapping[str, Tensor] | None = None,
        precision: str = "auto",
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config or LearnConfig()
        check_config("config", self.config, LearnConfig, ": GuardConfig is for GuardedLearner")
        check_choice("precision", precision, get_args(PrecisionName))
        self.precision = precision
        layers: dict[Any, APN] = dict(model.apn_layers())
        if not layers:
            raise ValueError(NO_PATCHES)
        self.update = LocalUpdate(layers, self.config.update, others)
        self.allocator = Allocator(layers, self.config.allocation)
        self.layers = layers
        self._found = {parameter: parameter.requires_grad for parameter in model.parameters()}
        model.requires_grad_(False)
        for _, _, parameter in self.update.parameters():
            parameter.requires_grad_(True)
        for layer in layers.values():
            if self.config.scale_factor != 1 or layer.scale_factor is not None:
                layer.set_scale_factor(self.config.scale_factor)
        self.history = np.zeros(0, dtype=np.int64)
        self.gathered = Gathered()
        self.totals = Totals()
        self.source: str | None = None
        self.notes: dict[str, Any] = {}  # the caller may keep its place in the stream here
        self._undo: Undo | None = None  # of an attempt

    @property
    def device(self) -> torch.device:
        return next(iter(self.layers.values())).encoder.device

    @property
    def budget(self) -> int:
        return self.config.budget

    @property
    def learning_rate(self) -> float:
        """The rate before `rate_horizon` makes it smaller. A schedule may set it; it is not saved."""
        return self.update.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        check_number("learning_rate", rate, "a number, 0 or more", lambda r: r >= 0)
        self.update.learning_rate = rate

    def usage_entropy(self) -> float:
        """The entropy of the moving average of usage, in the mean over layers."""
        entropies = [monitor.usage_entropy(own.usage) for own in self.allocator.habits.values()]
        return sum(entropies) / len(entropies)

    def _autocast(self) -> AbstractContextManager:
        return autocast(self.device, self.precision)

    def release(self) -> TrainableModel:
        """Return the model, with every `requires_grad` as it was found and without our scale factor."""
        for parameter, flag in self._found.items():
            parameter.requires_grad_(flag)
        for layer in self.layers.values():
            layer.set_scale_factor(1.0)
        return self.model

    # --- learning

    def observe(self, text: Text, source: str | None = None) -> Observation:
        """Score `text` as the stream's continuation, and learn from it once in `budget` tokens.

        Text of another `source` starts without the context of the one before, whose tokens are learned from
        first. If something fails, the pieces before it stay learned: the exception's `observed` has them.
        """
        tokens = self._tokens(text)
        done = Observation(source=source)
        try:
            history = self.history
            if source != self.source and self.totals.tokens:
                done, history = done.then(self.flush()), history[:0]
            most = max(1, TOKENS_PER_PASS // self.model.config.context) * self.model.config.context
            while len(tokens):
                piece = min(len(tokens), self.config.budget - self.gathered.tokens, most)
                done = done.then(self._observe_piece(tokens[:piece], history, source))
                tokens, history = tokens[piece:], self.history
        except Exception as error:
            error.observed = done  # type: ignore[attr-defined]
            raise
        return done

    def flush(self) -> Observation:
        """Learn from the tokens that wait for the next update."""
        if not self.gathered.tokens:
            return Observation(source=self.source)
        with all_or_nothing(self._undo) as undo:
            seen, habits = self._learn(self.gathered, self.totals.tokens, undo)
        self._commit(seen, Gathered(), self.totals.surprise, habits)
        return seen

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Learn from one batch (B, T) at once, as training loops do; returns its loss before.

        Tokens that wait for an update are learned from first. Targets may be data.IGNORED.
        """
        batch = check_batch(self.model, (inputs, targets))
        if not (targets != IGNORED).any():
            raise ValueError("every target is ignored; there is nothing to learn from")
        self.flush()
        inputs, targets = batch
        with all_or_nothing(self._undo) as undo:
            gathered, seen, surprise = self._score(inputs, targets, targets != IGNORED)
            result, habits = self._learn(gathered, self.totals.tokens + inputs.numel(), undo)
        seen = dataclasses.replace(seen, tokens=inputs.numel()).then(result)
        self._commit(seen, Gathered(), surprise, habits)
        return seen.loss

    @contextmanager
    def attempt(self) -> Iterator[Undo]:
        """Keep what is learned inside only if nothing is raised; yields what was overwritten so far.

        So several observations are one, and the caller can still refuse them by raising.
        """
        if self._undo is not None:
            raise ValueError("an attempt is going on already")
        kept = self.totals, self.gathered, self.allocator.habits, self.history, self.source
        try:
            with all_or_nothing() as self._undo:
                yield self._undo
        except BaseException:
            self.totals, self.gathered, self.allocator.habits, self.history, self.source = kept
            raise
        finally:
            self._undo = None

    def set_background(self, text: Text) -> None:
        """Take the usage on this text for the usual one, for `max_patches` and for recycling."""
        habits = {}
        for number, indices in self._routing(self._tokens(text)).items():
            known = self.allocator.habits[number]
            usage = monitor.usage(indices, self.layers[number].num_patches).to(known.usage)
            habits[number] = dataclasses.replace(known, usage=usage)
        self.allocator.habits = self.allocator.habits | habits

    def _observe_piece(self, tokens: np.ndarray, history: np.ndarray, source: str | None) -> Observation:
        """All or nothing: nothing of ours changes before everything has succeeded."""
        context = self.model.config.context
        batch = contiguous_windows(history, tokens, context)
        gathered, seen, surprise = Gathered(), Observation(), self.totals.surprise
        with all_or_nothing(self._undo) as undo:
            if batch is not None:
                gathered, seen, surprise = self._score(*batch)
            gathered = self.gathered.plus(dataclasses.replace(gathered, tokens=len(tokens)))
            seen = dataclasses.replace(seen, tokens=len(tokens), source=source)
            habits: dict[Any, Habits] = {}
            if gathered.tokens >= self.config.budget:
                learned, habits = self._learn(gathered, self.totals.tokens + len(tokens), undo)
                seen, gathered = seen.then(learned), Gathered()
            elif not all(gradient.isfinite().all() for gradient in gathered.gradients.values()):
                raise NotFiniteUpdate("a gradient of this text is not finite; nothing was changed")
        seen = dataclasses.replace(seen, pending=gathered.tokens, source=source)
        self._commit(seen, gathered, surprise, habits)
        self.source, self.history = source, np.concatenate([history, tokens])[-context:]
        return seen

    def _commit(
        self, seen: Observation, gathered: Gathered, surprise: Surprise, habits: dict[Any, Habits]
    ) -> None:
        self.totals = self.totals.after(seen, surprise)
        self.gathered = gathered
        self.allocator.habits = self.allocator.habits | habits

    def _score(
        self, inputs: Tensor, targets: Tensor, counted: Tensor
    ) -> tuple[Gathered, Observation, Surprise]:
        """Losses, gates and gradients of the `counted` tokens. Changes nothing."""
        inputs, targets, counted = (x.to(self.device) for x in (inputs, targets, counted))
        keep_inputs = self.config.allocation.mode != "off" or self.config.prototype_rate > 0
        watched = self.layers if keep_inputs else {}
        with mode(self.model, training=self.config.dropout), torch.enable_grad():
            with ExitStack() as stack, self._autocast():
                given = {number: stack.enter_context(inputs_of(layer)) for number, layer in watched.items()}
                logits, stats = self.model(inputs, return_stats=True)
            captured = {number: seen for number, (seen,) in given.items()}
            stats = {number: stats[number] for number in self.layers}
            logits = precise(logits)
            losses = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED
            ).view_as(targets)
            confidence = torch.stack([s.confidence.detach() for s in stats.values()]).amin(0)
            admission = admit(self.config.gates, counted, losses, logits, confidence, self.totals.surprise)
            plain = losses.detach().double().masked_fill(~counted, 0)
            figures = [plain.sum(), plain.square().sum(), counted.sum(), admission.admitted.sum()]
            # one transfer: each waits for the GPU
            sums = torch.stack([x.double() for x in [*figures, *admission.held_back.values()]]).tolist()
            loss_sum, square_sum, scored, taught = sums[0], sums[1], int(sums[2]), int(sums[3])
            if not math.isfinite(loss_sum):
                raise NotFiniteUpdate("the loss of this text is not finite; nothing was changed")
            names = [(key, parameter) for key, _, parameter in self.update.parameters()]
            gradients: dict[str, Tensor] = {}
            if taught:
                total = (losses * admission.admitted).sum()
                found = torch.autograd.grad(total, [p for _, p in names], allow_unused=True)
                gradients = {
                    key: torch.zeros_like(p) if gradient is None else gradient
                    for (key, p), gradient in zip(names, found, strict=True)
                }
        chosen, counts = used_patches(stats, counted, admission.admitted)
        gathered = Gathered(inputs.numel(), taught, gradients, chosen, counts)
        if self.config.prototype_rate:
            pulls = {n: pull(self.layers[n], stats[n], x, admission.admitted) for n, x in captured.items()}
            toward, amount = ({number: pair[part] for number, pair in pulls.items()} for part in (0, 1))
            gathered = dataclasses.replace(gathered, toward=toward, amount=amount)
        if self.config.allocation.mode != "off":
            outlook = {
                number: self.allocator.outlook(
                    number, x[counted], stats[number].indices[counted], stats[number].confidence[counted]
                )
                for number, x in captured.items()
            }
            gathered = dataclasses.replace(gathered, outlook=outlook)
        held_back = {
            name: int(count) for name, count in zip(admission.held_back, sums[4:], strict=True) if count
        }
        seen = Observation(loss_sum=loss_sum, scored=scored, taught=taught, held_back=held_back)
        return gathered, seen, self.totals.surprise.after_sums(scored, loss_sum, square_sum)

    def _learn(self, gathered: Gathered, token: int, undo: Undo) -> tuple[Observation, dict[Any, Habits]]:
        """One update from what was gathered. `undo` takes its changes back; counters are the caller's."""
        habits = {
            n: self.allocator.with_usage(n, gathered.counts[n], gathered.tokens) for n in gathered.counts
        }
        taught: dict[Any, Tensor] = {}
        changes: dict[Any, float] = {}
        if gathered.taught:
            sizes = [len(chosen) for chosen in gathered.chosen.values()]
            masks = torch.cat(list(gathered.chosen.values())).cpu().split(sizes)
            for number, chosen in zip(gathered.chosen, masks, strict=True):
                patches = chosen.nonzero().flatten()
                if self.config.max_patches is not None:
                    usual = self.allocator.habits[number].usage * self.config.allocation.usage_horizon
                    used = gathered.counts[number].cpu(), usual.cpu()
                    patches = most_specific(patches, *used, self.config.max_patches)
                taught[number] = patches
            smaller = rate_factor(token - gathered.tokens, self.config.rate_horizon)
            with self._gradients(gathered.gradients):
                changes = self.update.step(
                    taught, gradient_scale=1 / gathered.taught, rate_scale=smaller, undo=undo
                )
            if self.config.prototype_rate:
                rate = self.config.prototype_rate * smaller
                for number, patches in taught.items():
                    toward, amount = gathered.toward[number], gathered.amount[number]
                    patches = patches.to(self.device)
                    turn(self.layers[number], patches, toward, amount, rate, undo)
        events = []
        for number, outlook in gathered.outlook.items():
            habits[number], event = self.allocator.allocate(
                number, habits[number], outlook, token, self.update, undo
            )
            events += [event] if event is not None else []
        return Observation(
            updates=int(gathered.taught > 0),
            patches={n: len(patches) for n, patches in taught.items()},
            largest_change=changes,
            allocations=tuple(events),
            source=self.source,
        ), habits

    @contextmanager
    def _gradients(self, gradients: Mapping[str, Tensor]) -> Iterator[None]:
        theirs = [(key, parameter, parameter.grad) for key, _, parameter in self.update.parameters()]
        try:
            for key, parameter, _ in theirs:
                parameter.grad = gradients[key]
            yield
        finally:
            for _, parameter, gradient in theirs:
                parameter.grad = gradient

    # --- asking

    def predict(self, text: Text) -> Tensor:
        """Return the probabilities of the next token after `text`: (V)."""
        tokens = torch.from_numpy(self._tokens(text)[-self.model.config.context :])[None].to(self.device)
        with torch.no_grad(), self._autocast(), mode(self.model, training=False):
            logits = self.model(tokens)[0, -1]
        return logits.float().softmax(-1)

    def generate(self, prompt: str, **options: Any) -> str:
        """Return the prompt and what the model writes; options as in `attractor.generate.generate`."""
        tokens = self._tokens(prompt)
        return continued(self.model, cast(Tokenizer, self.tokenizer), tokens, **options)

    def perplexity(self, text: Text) -> float:
        """Return the perplexity of a text of two tokens or more; nothing is learned from it."""
        tokens = self._tokens(text)
        if len(tokens) < 2:
            raise ValueError("perplexity needs at least two tokens: the first is not predicted")
        return perplexity(evaluate(self.model, tokens, autocast=self._autocast))

    def monitor(self, text: Text | None = None, reference: Text | None = None) -> dict[str, float]:
        """Return numbers for a log: counters and usage; with `text` its routing; with both Omega(A, B)."""
        values = self.totals.counters() | {"loss": self.totals.surprise.mean}
        for number, habits in self.allocator.habits.items():
            values[f"apn/{number}/usage_entropy"] = monitor.usage_entropy(habits.usage)
            values[f"apn/{number}/patches"] = self.layers[number].num_patches
        here = {} if text is None else self._routing(self._tokens(text))
        there = {} if text is None or reference is None else self._routing(self._tokens(reference))
        for number, indices in here.items():
            count = self.layers[number].num_patches
            usage = monitor.usage(indices, count)
            values[f"apn/{number}/text_usage_entropy"] = monitor.usage_entropy(usage)
            values[f"apn/{number}/text_dead_patches"] = len(monitor.dead_patches(usage))
            if number in there:
                values[f"apn/{number}/omega"] = monitor.expected_overlap(indices, there[number], count)
        return values

    def _routing(self, tokens: np.ndarray) -> dict[Any, Tensor]:
        """Layer -> active sets (n, k) of the text's tokens."""
        found = routing(self.model, tokens)
        return {number: found[number].indices for number in self.layers}

    # --- files

    def save(self, folder: str | Path) -> None:
        """Write the model and everything learning needs to go on; learns from waiting tokens first."""
        self.flush()
        write_folder(Path(folder), lambda partial: states.write(self, partial))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        config: LearnConfig | None = None,
        *,
        model: TrainableModel | None = None,
        device: torch.device | str = "cpu",
        precision: str = "auto",
    ) -> Self:
        """Load a saved learner as it was; or a run or a model, to start learning with `config`.

        A learner of another model than a GPT is given that `model`, as it was when it was saved.
        """
        found, model, tokenizer = load_model(folder, device=device, model=model)
        make = functools.partial(cls, model, tokenizer, precision=precision)
        if not (found / states.STATE).is_file():
            check_hashes(found, states.STATE)  # one that was lost is not one that never was
            return make(config)
        return states.read(found, device, lambda saved: make(config or LearnConfig.from_dict(saved)))

    def _tokens(self, text: Text) -> np.ndarray:
        return tokens_of(text, self.tokenizer, self.model.config.vocab_size, self.config.max_observation)
