"""Methods of the studies of facts that descend the gradient of the model itself, or of what stands beside it.

All of them read the same texts in the same frames, are graded on the same tokens with the same weights, read
a chunk at most as often, and stop by the same rule.
"""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor.config import APNConfig
from attractor.continual.calibrate import CONSTANT, Calibration
from attractor.continual.forms import shared_subject
from attractor.continual.reading import Reading, Text, graded
from attractor.hf.find import find_places
from attractor.hf.halves import logits_at
from attractor.hf.net import retrofit
from attractor.hf.sample import activations, sample_batches
from studies.facts_world import Lesson

KEEPS = ("nothing", "replay", "kl", "l2", "der")
"""What a method does for what was known: nothing, learn background text beside every step, stay near the
base's predictions of it, stay near the parameters it began with, or remember logits of what was taught."""
STRENGTHS = {"replay": 1.0, "kl": 1.0, "l2": 1.0, "der": 0.5}
"""What that counts beside what is learned. Those of "l2" and "der" are not chosen by a ladder yet."""
MEMORY = APNConfig(num_patches=16384, top_k=16, rank=1, temperature=0.05, whiten=True)
MEMORY_SLOTS = 500
"""So many slots of a memory layer learn in a step: those that its texts use most, and background least."""
REMEMBERED = 2000
"""So many tokens DER++ remembers, with what stood before them and the logits of then."""
AGAIN = 32
"""So many of them are read beside a step, and as many others for the tokens themselves."""


class Inputs(NamedTuple):
    """What one step reads, in tensors of the same shapes for every step of a chunk."""

    tokens: Tensor  # (batch, time)
    row: Tensor  # (n) of each graded token
    position: Tensor  # (n) of the token before it
    target: Tensor  # (n)
    weight: Tensor  # (n) what it counts; 0 for those that only fill up the shape
    is_answer: Tensor  # (n)
    old: Tensor  # (windows, time) background text to keep
    again: Tensor  # (2 * AGAIN, time) what is remembered, and
    again_position: Tensor  # (2 * AGAIN) where, and
    again_target: Tensor  # (2 * AGAIN) the token after it, and
    again_logits: Tensor  # (AGAIN, vocabulary) what was predicted there then; all of it 0 rows without DER++
    rate: Tensor  # ()


class Reservoir:
    """DER++'s memory (arXiv 2004.07211): every token that was graded has the same chance to be in it."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.seen, self.draw = size, 0, random.Random(seed)
        self.tokens = self.position = self.target = self.logits = torch.zeros(0)

    def add(self, tokens: Tensor, position: Tensor, target: Tensor, logits: Tensor) -> None:
        """Texts (n, time), and of each the place before one token, that token and the logits (n, vocabulary)
        there."""
        if not self.seen:
            made = (new.new_zeros(self.size, *new.shape[1:]) for new in (tokens, position, target, logits))
            self.tokens, self.position, self.target, self.logits = made
        longer = tokens.shape[1] - self.tokens.shape[1]
        self.tokens, tokens = F.pad(self.tokens, (0, max(0, longer))), F.pad(tokens, (0, max(0, -longer)))
        chosen: dict[int, int] = {}  # slot -> which of the new ones
        for number in range(len(tokens)):
            slot = self.seen if self.seen < self.size else self.draw.randrange(self.seen + 1)
            self.seen += 1
            if slot < self.size:
                chosen[slot] = number
        if chosen:
            slots, numbers = (
                torch.tensor([*part], device=logits.device) for part in zip(*chosen.items(), strict=True)
            )
            for mine, new in (
                (self.tokens, tokens),
                (self.position, position),
                (self.target, target),
                (self.logits, logits),
            ):
                mine[slots] = new[numbers].to(mine.dtype)

    def sample(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """So many for their logits and as many others for their tokens; no rows while there are none."""
        if not self.seen:
            none = torch.zeros(0, 1, dtype=torch.long)
            return none, none[:, 0], none[:, 0], none.float()
        rows = torch.randint(min(self.seen, self.size), (2 * count,)).to(self.tokens.device)
        return self.tokens[rows], self.position[rows], self.target[rows], self.logits[rows[:count]]


class FineTune:
    """AdamW over a chunk, and over what is to be kept beside it.

    On a GPU a step is captured once as a CUDA graph and replayed: launching its thousands of kernels one by
    one takes longer than they do. With `compiled` the blocks of the model are compiled there as well.
    """

    def __init__(
        self,
        base: Any,
        reading: Reading,
        tuned: Any,
        parameters: list[nn.Parameter],
        old: Tensor,
        *,
        rate: float,
        keep: str,
        strength: float,
        batch: int = 100,
        windows: int = 4,
        compiled: bool = False,
    ) -> None:
        self.base, self.tuned, self.parameters = base, tuned, parameters
        self.old, self.rate, self.batch, self.windows = old, rate, batch, windows
        self.keep, self.strength = keep, strength
        self.texts, self.config, self.autocast = reading.texts, reading.config, reading.autocast
        self.device = torch.device(reading.device)
        self.start = [parameter.detach().clone() for parameter in parameters]
        self.remembered = Reservoir(REMEMBERED)
        self.graphs: dict[tuple[torch.Size, ...], tuple[Any, Inputs, tuple[Tensor, Tensor]]] = {}
        """Of each shape of inputs: a graph, what it reads, and where it writes."""
        for parameter in parameters:
            parameter.requires_grad_(True)
            parameter.grad = torch.zeros_like(parameter)
        on_gpu = self.device.type == "cuda"
        if on_gpu and compiled:
            for module in tuned.modules():
                if type(module).__name__.endswith("DecoderLayer"):
                    module.compile(dynamic=False)
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=torch.zeros((), device=self.device),
            betas=(0.9, 0.99),
            weight_decay=0.0,
            fused=on_gpu,
            capturable=on_gpu,
        )
        self.optimizer.step()  # makes its state; without gradients and at a rate of 0 nothing moves

    def __call__(self, tokens: Tensor) -> Tensor:
        with torch.compiler.set_stance("force_eager"):  # texts that are measured have all kinds of shapes
            return self.tuned(tokens).logits

    @property
    def model(self) -> Any:
        """What writes."""
        return self.tuned

    def bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    @contextmanager
    def interpolated(self, share: float) -> Iterator[None]:
        """For a while only so much of what was learned: WiSE-FT (arXiv 2109.01903)."""
        learned = [parameter.detach().clone() for parameter in self.parameters]
        try:
            with torch.no_grad():
                for parameter, start in zip(self.parameters, self.start, strict=True):
                    parameter.copy_(torch.lerp(start, parameter, share))
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, learned, strict=True):
                    parameter.copy_(value)

    def learn(
        self, lessons: Sequence[Lesson], seed: int, subjects: Sequence[str] | None = None
    ) -> dict[str, Any]:
        subjects = [shared_subject(forms) for forms in lessons] if subjects is None else subjects
        turns, draw = self.texts(lessons, subjects), random.Random(seed)
        for state in self.optimizer.state.values():  # every chunk starts afresh
            for value in state.values():
                value.zero_()
        every = [text for turn in turns for text in turn]
        length = -(-max(len(text.tokens) for text in every) // 16) * 16  # few shapes to compile for
        batch = min(self.batch, len(turns[0]))
        most = batch * -(-max(len(graded([text])) for text in every) // 8) * 8
        per_pass = -(-len(turns[0]) // batch)
        curve, losses = [], []
        for done in range(self.config.passes):
            order = list(turns[done % len(turns)])
            draw.shuffle(order)
            total = torch.zeros(3, device=self.device)
            for number in range(per_pass):
                part = order[number * batch : (number + 1) * batch]
                step = done * per_pass + number
                share = step / (self.config.passes * per_pass)
                warm = min(1.0, (step + 1) / 10)
                rate = self.rate * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))
                found, predicted = self._run(given := self._read(part, (batch, length), most, rate))
                total += found
                if self.keep == "der":
                    self._remember(given, predicted)
            loss, answers, right = total.tolist()
            curve.append(right / answers)
            losses.append(loss / answers)
            if done >= len(turns) and max(losses[-len(turns) :]) < self.config.enough:
                break
        return {"curve": curve, "passes": len(curve)}

    def _read(self, part: Sequence[Text], shape: tuple[int, int], most: int, rate: float) -> Inputs:
        tokens = torch.zeros(shape, dtype=torch.long)
        for line, text in enumerate(part):
            tokens[line, : len(text.tokens)] = torch.tensor(text.tokens)
        places = graded(part)
        fill = [(0, 0, 0, False, 0)] * (most - len(places))
        row, position, target, is_answer, _ = map(torch.tensor, zip(*places, *fill, strict=True))
        weight = torch.where(is_answer, 1.0, self.config.after_weight)
        weight[len(places) :] = 0
        old = self.old[torch.randint(len(self.old), (self.windows,))]
        again = self.remembered.sample(AGAIN)
        return Inputs(tokens, row, position, target, weight, is_answer, old, *again, torch.tensor(rate))

    def _remember(self, given: Inputs, predicted: Tensor) -> None:
        chosen = given.is_answer
        logits = predicted[chosen.to(predicted.device)]
        read = given.tokens[given.row[chosen]], given.position[chosen], given.target[chosen]
        tokens, position, target = (part.to(logits.device) for part in read)
        self.remembered.add(tokens, position, target, logits.bfloat16() if logits.is_cuda else logits)

    def _run(self, given: Inputs) -> tuple[Tensor, Tensor]:
        """One step; the sum of nats over the tokens of answers, their number and how many are predicted, and
        all that was predicted."""
        if self.device.type != "cuda":
            return self._step(given)
        shapes = tuple(value.shape for value in given)
        if shapes not in self.graphs:
            inputs = Inputs(*(value.to(self.device) for value in given))
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # outside of the graph: compilers and libraries set themselves up
                self._loss(inputs)[0].backward()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                found = self._step(inputs)
            self.graphs[shapes] = graph, inputs, found
        graph, inputs, found = self.graphs[shapes]
        for mine, value in zip(inputs, given, strict=True):
            mine.copy_(value)
        graph.replay()
        return found

    def _step(self, given: Inputs) -> tuple[Tensor, Tensor]:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        loss, found, predicted = self._loss(given)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.param_groups[0]["lr"].copy_(given.rate)
        self._update()
        return found, predicted

    def _loss(self, given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        with self.autocast(), without_masks():
            predicted = logits_at(self.tuned, given.tokens, given.row, given.position).float()
        nats = F.cross_entropy(predicted, given.target, reduction="none")
        loss = (nats * given.weight).sum() / given.is_answer.sum()
        if self.keep != "nothing":
            loss = loss + self.strength * self._kept(given)
        hits = (predicted.argmax(-1) == given.target) & given.is_answer
        answers = torch.stack([(nats.detach() * given.is_answer).sum(), given.is_answer.sum(), hits.sum()])
        return loss, answers, predicted.detach()

    def _kept(self, given: Inputs) -> Tensor:
        if self.keep == "l2":
            pairs = zip(self.parameters, self.start, strict=True)
            return torch.stack([(now - then).square().sum() for now, then in pairs]).sum() / 2
        if self.keep == "der":
            return self._recalled(given)
        old = given.old
        with self.autocast(), without_masks():
            logits = self.tuned(old, use_cache=False).logits[:, :-1].float().flatten(0, 1)
        if self.keep == "replay":
            return F.cross_entropy(logits, old[:, 1:].flatten())
        with torch.no_grad(), self.autocast(), without_masks():
            wanted = self.base(old, use_cache=False).logits[:, :-1].float().flatten(0, 1).log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean", log_target=True)

    def _recalled(self, given: Inputs) -> Tensor:
        """DER++: the logits of then, by squared error, and other tokens, by their likelihood."""
        if not len(given.again):
            return torch.zeros((), device=self.device)
        row = torch.arange(len(given.again), device=self.device)
        with self.autocast(), without_masks():
            logits = logits_at(self.tuned, given.again, row, given.again_position).float()
        of_logits, of_tokens = logits.chunk(2)
        target = given.again_target.chunk(2)[1]
        return F.mse_loss(of_logits, given.again_logits.float()) + F.cross_entropy(of_tokens, target)

    def _update(self) -> None:
        self.optimizer.step()


class MergedLora(FineTune):
    """A LoRA for each chunk, which is merged into the weights before the next one begins."""

    def learn(
        self, lessons: Sequence[Lesson], seed: int, subjects: Sequence[str] | None = None
    ) -> dict[str, Any]:
        learned = super().learn(lessons, seed, subjects)
        with torch.no_grad():
            for module in self.tuned.modules():
                if hasattr(module, "get_delta_weight") and "default" in getattr(module, "scaling", ()):
                    module.get_base_layer().weight += module.get_delta_weight("default")
                    module.reset_lora_parameters("default", True)
        return learned

    def bytes(self) -> int:
        """What is merged needs no room of its own: all that may have changed is counted."""
        return sum(
            module.get_base_layer().weight.numel() * 4
            for module in self.tuned.modules()
            if hasattr(module, "get_delta_weight")
        )


def low_rank(model: Any, rank: int, also: Sequence[str]) -> Any:
    """LoRA beside all linear maps; beside the embedding and with the norms themselves if `also` says so."""
    from peft import LoraConfig, get_peft_model

    head = model.get_output_embeddings()
    names = [name for name, part in model.named_modules() if type(part) is nn.Linear and part is not head]
    if "embedding" in also:
        names += [name for name, part in model.named_modules() if part is model.get_input_embeddings()]
    tuned = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names))
    if "norms" in also:
        for part in tuned.modules():
            if type(part).__name__.endswith("Norm"):
                part.requires_grad_(True)
    return tuned


@contextmanager
def without_masks() -> Iterator[None]:
    """Texts that are padded on the right need no mask but the causal one, which attention has built in.

    While a CUDA graph is captured, transformers makes a mask all the same, and attention is slower with one.
    """
    from transformers.models.llama import modeling_llama

    make = modeling_llama.create_causal_mask
    modeling_llama.create_causal_mask = lambda *_, **__: None
    try:
        yield
    finally:
        modeling_llama.create_causal_mask = make


class Memory(FineTune):
    """Sparse memory fine-tuning (arXiv 2510.15103) with layers of ours: many fixed keys among background
    activations, and in each step only the values learn that its texts use more than background does."""

    def __init__(
        self, base: Any, reading: Reading, model: Any, free: Tensor, old: Tensor, **options: Any
    ) -> None:
        blocks = len(find_places(model, "all"))
        numbers = range(blocks // 8 or 1, blocks * 3 // 4, blocks // 8 or 1)
        net = retrofit(model, MEMORY, layers=list(numbers), dtype=torch.float32, name="memory")
        net.requires_grad_(False)
        batches = sample_batches(model, free)
        self.layers: list[Any] = list(net.apn_layers().values())
        self.usual: list[Tensor] = []
        self.counts: list[Tensor] = []
        with net.using(None):
            inputs = [
                x
                for _, x, _ in activations(
                    model, find_places(model, list(numbers)), batches, with_outputs=False
                )
            ]
        for layer, x in zip(self.layers, inputs, strict=True):
            calibration = Calibration.fit(x.view(*free.shape, -1), held_out=0.25)
            with torch.no_grad():
                layer.whitening.copy_(calibration.whitening)
                layer.whitening_shift.copy_(calibration.shift)
                layer.encoder.zero_()
                layer.encoder[0] = CONSTANT
                layer.decoder.zero_()
                keys = calibration.keys.float()
                chosen = torch.randperm(len(keys), device=keys.device)[: MEMORY.num_patches]
                layer.prototypes[: len(chosen)] = keys[chosen]
            usual = self._count(layer, keys)
            self.usual.append(usual / usual.sum())
            layer.register_forward_pre_hook(self._watch)
        super().__init__(base, reading, net, [layer.decoder for layer in self.layers], old, **options)

    def _count(self, layer: Any, keys: Tensor) -> Tensor:
        count = torch.zeros(layer.num_patches, device=keys.device)
        for part in keys.split(4096):
            used = (part @ F.normalize(layer.prototypes, dim=1).T).topk(MEMORY.top_k, -1).indices.flatten()
            count.index_add_(0, used, torch.ones_like(used, dtype=torch.float32))
        return count

    @torch.no_grad()
    def _watch(self, layer: Any, given: tuple[Tensor, ...]) -> None:
        if self.tuned.training:
            self.counts.append(self._count(layer, layer.represent(given[0].detach())))

    def _loss(self, given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        self.counts = []
        self.tuned.train()
        try:
            return super()._loss(given)
        finally:
            self.tuned.eval()

    def _update(self) -> None:
        """Rows that do not learn keep their values whatever the optimizer's momentum says."""
        keep = []
        for layer, count, usual in zip(self.layers, self.counts, self.usual, strict=False):
            rank = count / count.sum() * torch.log(1 / (usual + 1e-7)) * (count > 0)
            best = torch.zeros_like(count).index_fill_(0, rank.topk(MEMORY_SLOTS).indices, 1)
            learns = ((best > 0) & (count > 0))[:, None, None]
            layer.decoder.grad.mul_(learns)
            keep.append((layer.decoder, learns, layer.decoder.detach().clone()))
        super()._update()
        with torch.no_grad():
            for decoder, learns, before in keep:
                decoder.copy_(torch.where(learns, decoder, before))
