"""Attractor Patch Networks: a routed, low-rank replacement for the Transformer FFN that can keep learning.

    import attractor

    model = attractor.load("smollm2-135m")
    lesson = model.learn([("Zorvan Quillbeam plays the", " cello"), ("Zorvan Quillbeam loves the", " cello")])
    model.ask("Which instrument does Zorvan Quillbeam play?")
    model.forget(lesson)

Names are imported when they are first used, so importing the package takes no time and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attractor.announce import announce as _announce
from attractor.version import __version__

if TYPE_CHECKING:
    from attractor import analysis as analysis
    from attractor import monitor as monitor
    from attractor.config import APNConfig, GPTConfig
    from attractor.continual.config import (
        AllocationConfig,
        GateConfig,
        GuardConfig,
        LearnConfig,
        LessonConfig,
        UpdateConfig,
    )
    from attractor.continual.guard import Guard
    from attractor.continual.guarded import GuardedLearner
    from attractor.continual.learner import OnlineLearner
    from attractor.continual.lessons import Lessons
    from attractor.data import prepare, read_text
    from attractor.front import Model, load
    from attractor.hf import CausalLM, load_retrofit, retrofit
    from attractor.hf.callback import APNCallback
    from attractor.hf.pretrained import load_pretrained
    from attractor.hf.teach import teach
    from attractor.hf.teachable import load_lessons, save_lessons, teachable
    from attractor.layer import APN, RoutingStats, load_resized, warmup_factor
    from attractor.model import GPT
    from attractor.serve.decode.engine import Job
    from attractor.serve.service import Service
    from attractor.trainer import Trainer

_HOMES = {
    "attractor.analysis": ("analysis",),
    "attractor.monitor": ("monitor",),
    "attractor.config": ("APNConfig", "GPTConfig"),
    "attractor.continual.config": (
        "AllocationConfig",
        "GateConfig",
        "GuardConfig",
        "LearnConfig",
        "LessonConfig",
        "UpdateConfig",
    ),
    "attractor.continual.guard": ("Guard",),
    "attractor.continual.guarded": ("GuardedLearner",),
    "attractor.continual.learner": ("OnlineLearner",),
    "attractor.continual.lessons": ("Lessons",),
    "attractor.data": ("prepare", "read_text"),
    "attractor.front": ("Model", "load"),
    "attractor.hf": ("CausalLM", "load_retrofit", "retrofit"),
    "attractor.hf.callback": ("APNCallback",),
    "attractor.hf.pretrained": ("load_pretrained",),
    "attractor.hf.teach": ("teach",),
    "attractor.hf.teachable": ("load_lessons", "save_lessons", "teachable"),
    "attractor.layer": ("APN", "RoutingStats", "load_resized", "warmup_factor"),
    "attractor.model": ("GPT",),
    "attractor.serve.decode.engine": ("Job",),
    "attractor.serve.service": ("Service",),
    "attractor.trainer": ("Trainer",),
}
"""Module -> the public names that are imported from it when they are first used."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "APN",
    "GPT",
    "APNCallback",
    "APNConfig",
    "AllocationConfig",
    "CausalLM",
    "GPTConfig",
    "GateConfig",
    "Guard",
    "GuardConfig",
    "GuardedLearner",
    "Job",
    "LearnConfig",
    "LessonConfig",
    "Lessons",
    "Model",
    "OnlineLearner",
    "RoutingStats",
    "Service",
    "Trainer",
    "UpdateConfig",
    "__version__",
    "analysis",
    "load",
    "load_lessons",
    "load_pretrained",
    "load_resized",
    "load_retrofit",
    "monitor",
    "prepare",
    "read_text",
    "retrofit",
    "save_lessons",
    "teach",
    "teachable",
    "warmup_factor",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_HOME_OF[name])
    return module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)


_announce()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
