"""How each method of the study of facts learns: basins, and the controls that a reviewer asks for.

All of them read the same texts in the same frames, are graded on the same tokens with the same weights, read
a chunk at most as often, and stop by the same rule.
"""

import copy
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
from attractor.continual.config import LessonConfig
from attractor.continual.forms import shared_subject
from attractor.continual.reading import Reading, Text, graded
from attractor.hf.find import find_places
from attractor.hf.halves import Undivided, logits_at
from attractor.hf.net import retrofit
from attractor.hf.sample import activations, sample_batches
from attractor.hf.teachable import teachable
from studies.facts_world import Lesson

RATES = {"full": 1e-4, "lora": 1e-3, "apn": 3e-3, "memory": 0.1, "basins": 2.7}
"""The rate of each method that scored best on another grammar (results/facts-rates-h200.json); for basins it
is the length of a step."""
KEEPS = ("nothing", "replay", "kl")
"""What a method does for old text: nothing, learn background text beside every step, or stay near the base's
predictions of it."""
MEMORY = APNConfig(num_patches=16384, top_k=16, rank=1, temperature=0.05, whiten=True)
MEMORY_SLOTS = 500
"""So many slots of a memory layer learn in a step: those that its texts use most, and background least."""
BESIDE = APNConfig(num_patches=16, top_k=8, rank=64)


class Basins:
    """Lessons in patches of their own."""

    def __init__(
        self, model: Any, encode: Any, free: Tensor, rate: float, settings: dict[str, Any], autocast: Any
    ):
        config = LessonConfig(**{"rows": 640, "step": rate, "questions": 0, **settings})
        self.net, self.lessons = teachable(
            model, encode, free, config=config, patches=4096, autocast=autocast
        )

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.net(tokens).logits

    def learn(self, lessons: Sequence[Lesson], seed: int) -> dict[str, Any]:
        curve: list[float] = []
        learned = self.lessons.learn_many(lessons, report=lambda done, known: curve.append(known))
        return {
            "curve": curve,
            "passes": max(lesson.passes for lesson in learned),
            "patches": sum(lesson.patches for lesson in learned),
            "known": sum(lesson.known for lesson in learned) / len(learned),
        }

    def bytes(self) -> int:
        return sum(lesson.bytes for lesson in self.lessons.lessons.values())


class Inputs(NamedTuple):
    """What one step reads, in tensors of the same shapes for every step of a chunk."""

    tokens: Tensor  # (batch, time)
    row: Tensor  # (n) of each graded token
    position: Tensor  # (n) of the token before it
    target: Tensor  # (n)
    weight: Tensor  # (n) what it counts; 0 for those that only fill up the shape
    is_answer: Tensor  # (n)
    old: Tensor  # (windows, time) background text to keep
    rate: Tensor  # ()


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
        batch: int = 100,
        windows: int = 4,
        compiled: bool = False,
    ) -> None:
        self.base, self.tuned, self.parameters = base, tuned, parameters
        self.old, self.rate, self.keep, self.batch, self.windows = old, rate, keep, batch, windows
        self.texts, self.config, self.autocast = reading.texts, reading.config, reading.autocast
        self.device = torch.device(reading.device)
        self.graph: Any = None
        self.inputs: Inputs | None = None  # what the graph reads, and
        self.found: Any = None  # where it writes
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

    def bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    def learn(self, lessons: Sequence[Lesson], seed: int) -> dict[str, Any]:
        subjects = [shared_subject(forms) for forms in lessons]
        turns, draw = self.texts(lessons, subjects), random.Random(seed)
        for state in self.optimizer.state.values():  # every chunk starts afresh
            for value in state.values():
                value.zero_()
        every = [text for turn in turns for text in turn]
        length = -(-max(len(text.tokens) for text in every) // 8) * 8  # few shapes to compile for
        batch = min(self.batch, len(turns[0]))
        most = batch * max(len(graded([text])) for text in every)
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
                total += self._run(self._read(part, (batch, length), most, rate))
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
        return Inputs(tokens, row, position, target, weight, is_answer, old, torch.tensor(rate))

    def _run(self, given: Inputs) -> Tensor:
        """One step; the sum of nats over the tokens of answers, their number, and how many are predicted."""
        if self.device.type != "cuda":
            return self._step(given)
        if self.inputs is None or any(a.shape != b.shape for a, b in zip(self.inputs, given, strict=True)):
            self.graph, self.inputs = None, Inputs(*(value.to(self.device) for value in given))
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # outside of the graph: compilers and libraries set themselves up
                self._loss(self.inputs)[0].backward()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=side):
                self.found = self._step(self.inputs)
        for mine, value in zip(self.inputs, given, strict=True):
            mine.copy_(value)
        self.graph.replay()
        return self.found

    def _step(self, given: Inputs) -> Tensor:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        loss, found = self._loss(given)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.param_groups[0]["lr"].copy_(given.rate)
        self._update()
        return found

    def _loss(self, given: Inputs) -> tuple[Tensor, Tensor]:
        with self.autocast(), without_masks():
            predicted = logits_at(self.tuned, given.tokens, given.row, given.position).float()
        nats = F.cross_entropy(predicted, given.target, reduction="none")
        loss = (nats * given.weight).sum() / given.is_answer.sum()
        if self.keep != "nothing":
            loss = loss + self._kept(given.old)
        hits = (predicted.argmax(-1) == given.target) & given.is_answer
        answers = torch.stack([(nats.detach() * given.is_answer).sum(), given.is_answer.sum(), hits.sum()])
        return loss, answers

    def _kept(self, old: Tensor) -> Tensor:
        with self.autocast(), without_masks():
            logits = self.tuned(old, use_cache=False).logits[:, :-1].float().flatten(0, 1)
        if self.keep == "replay":
            return F.cross_entropy(logits, old[:, 1:].flatten())
        with torch.no_grad(), self.autocast(), without_masks():
            wanted = self.base(old, use_cache=False).logits[:, :-1].float().flatten(0, 1).log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean", log_target=True)

    def _update(self) -> None:
        self.optimizer.step()


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

    def _loss(self, given: Inputs) -> tuple[Tensor, Tensor]:
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


class Retrieval:
    """Nothing is learned: the right lesson is always found and stands before what is asked."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits

    def learn(self, lessons: Sequence[Lesson], seed: int) -> dict[str, Any]:
        return {"passes": 0}

    def bytes(self) -> int:
        return 0


def method(
    name: str,
    model: Any,
    encode: Any,
    free: Tensor,
    old: Tensor,
    *,
    rate: float,
    keep: str,
    settings: dict[str, Any],
    autocast: Any,
) -> Any:
    """A method by its name, on a copy of the model where it changes it.

    It may calibrate by the windows `free`, and replay the windows `old`.
    """
    if name == "retrieval":
        return Retrieval(model)
    if name == "basins":
        return Basins(model, encode, free, rate, settings, autocast)
    tuned = copy.deepcopy(model)
    config = LessonConfig(**{"rows": 640, **settings})
    reading = Reading(encode, Undivided(model), config, device=model.device, autocast=autocast)
    options: dict[str, Any] = {"rate": rate, "keep": keep}
    if name == "memory":
        return Memory(model, reading, tuned, free, old, **options)
    options["compiled"] = name in ("full", "lora")
    if name == "full":
        return FineTune(model, reading, tuned, list(tuned.parameters()), old, **options)
    if name == "lora":
        from peft import LoraConfig, get_peft_model

        tuned = get_peft_model(tuned, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    else:
        tuned = retrofit(tuned, BESIDE, dtype=torch.float32)
    parameters = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    return FineTune(model, reading, tuned, parameters, old, **options)
