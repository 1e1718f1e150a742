"""Every method of the studies of facts by its name: basins, and the controls that a reviewer asks for.

What they read is the same, and so are the tokens and weights by which they are graded, how often they read a
chunk at most, and the rule by which they stop.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attractor.config import APNConfig
from attractor.continual.config import LessonConfig
from attractor.continual.forms import FRAMES
from attractor.continual.reading import Reading
from attractor.hf.find import find_places
from attractor.hf.halves import Undivided
from attractor.hf.net import retrofit
from attractor.hf.teachable import teachable
from studies.facts_editors import ClosedForm, Grace
from studies.facts_tuning import KEEPS, STRENGTHS, FineTune, Memory, MergedLora, low_rank
from studies.facts_world import Lesson

__all__ = ["ALSO", "KEEPS", "RATES", "STRENGTHS", "Basins", "Retrieval", "method"]

RATES = {
    "full": 1e-4,
    "lora": 1e-3,
    "apn": 3e-3,
    "memory": 0.1,
    "basins": 2.7,
    "lora-chunks": 1e-3,
    "grace": 0.1,
    "memit": 0.1,
    "alphaedit": 0.1,
}
"""The rate of each method. Those of the first five scored best on another grammar
(results/facts-rates-h200.json); the others wait for the same ladder. For basins it is the length of a step,
for "grace" its epsilon, for "memit" the weight of background keys, for "alphaedit" how much of them it may
touch."""
ALSO = ("embedding", "norms")
"""What LoRA may change besides linear maps."""
GRACE_AT = 0.75
"""So far up is the FFN beside which the codebook stands."""
WRITTEN = 1 / 7, 5
"""So far up is the first matrix that closed-form editors write into, and so many there are."""
BESIDE = APNConfig(num_patches=16, top_k=8, rank=64)


class Basins:
    """Lessons in patches of their own."""

    def __init__(
        self,
        model: Any,
        encode: Any,
        free: Tensor,
        config: LessonConfig,
        autocast: Any,
        frames: Sequence[str],
    ):
        self.net, self.lessons = teachable(
            model, encode, free, config=config, patches=4096, autocast=autocast, frames=frames
        )
        self.model = self.net
        halves: Any = self.lessons.reading.halves
        halves.most_rows, halves.most_tokens = 256, 8192  # whole chunks are recorded: here is memory enough

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.net(tokens).logits

    def learn(
        self, lessons: Sequence[Lesson], seed: int, subjects: Sequence[str] | None = None
    ) -> dict[str, Any]:
        curve: list[float] = []
        learned = self.lessons.learn_many(
            lessons, subjects=subjects, report=lambda done, known: curve.append(known)
        )
        return {
            "curve": curve,
            "passes": max(lesson.passes for lesson in learned),
            "patches": sum(lesson.patches for lesson in learned),
            "known": sum(lesson.known for lesson in learned) / len(learned),
        }

    def bytes(self) -> int:
        return sum(lesson.bytes for lesson in self.lessons.lessons.values())


class Retrieval:
    """Nothing is learned: the right lesson is always found and stands before what is asked."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits

    def learn(
        self, lessons: Sequence[Lesson], seed: int, subjects: Sequence[str] | None = None
    ) -> dict[str, Any]:
        return {"passes": 0}

    def bytes(self) -> int:
        return 0


def method(
    given: Any,
    model: Any,
    encode: Any,
    free: Tensor,
    old: Tensor,
    autocast: Any,
    frames: Sequence[str] = FRAMES,
    *,
    compiled: bool = False,
) -> Any:
    """The method that was given on the command line, on a copy of the model where it changes it.

    It may calibrate by the windows `free`, and replay the windows `old`; `frames` are what stands around
    prompts while they are learned. Compiling the blocks pays where many steps read texts of one length.
    """
    name, rate = given.method, given.rate
    if given.keep != "nothing" and name not in ("full", "lora", "lora-chunks", "apn", "memory"):
        raise ValueError(f'--keep {given.keep} is for methods that fine-tune, not for {name}: give "nothing"')
    if given.also and name != "lora":
        raise ValueError(f"--also {' '.join(given.also)} is for lora, not for {name}: leave it out")
    if name == "retrieval":
        return Retrieval(model)
    alike = {"least_forms": 0, "questions": 0}  # what all methods read; the study asks by itself
    step = {"step": rate} if name == "basins" else {}
    config = LessonConfig(**{"rows": 640, **alike, **step, **given.lesson})
    if name == "basins":
        return Basins(model, encode, free, config, autocast, frames)
    tuned = copy.deepcopy(model)
    reading = Reading(encode, Undivided(model), config, device=model.device, frames=frames, autocast=autocast)
    blocks = len(find_places(model, "all"))
    if name == "grace":
        return Grace(tuned, reading, free, rate, int(GRACE_AT * blocks))
    if name in ("memit", "alphaedit"):
        first = int(WRITTEN[0] * blocks)
        last = min(first + WRITTEN[1], blocks - 1)  # after the last block nothing reads it any more
        return ClosedForm(tuned, reading, free, name, rate, range(first, last), given.clamp)
    options: dict[str, Any] = {"rate": rate, "keep": given.keep, "strength": given.strength}
    if name == "memory":
        return Memory(model, reading, tuned, free, old, **options)
    options["compiled"] = compiled and name != "apn"
    if name == "full":
        return FineTune(model, reading, tuned, list(tuned.parameters()), old, **options)
    if name == "apn":
        tuned = retrofit(tuned, BESIDE, dtype=torch.float32)
    else:
        tuned = low_rank(tuned, given.rank, given.also)
    parameters = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    kind = MergedLora if name == "lora-chunks" else FineTune
    return kind(model, reading, tuned, parameters, old, **options)
