"""Attractor Patch Networks: a routed, low-rank replacement for the Transformer FFN that can keep learning."""

from typing import Any

from attractor import analysis, monitor
from attractor.config import APNConfig
from attractor.layer import APN, RoutingStats, load_resized, warmup_factor
from attractor.version import __version__

_LATER = {
    "load": "attractor.front",
    "Model": "attractor.front",
    "retrofit": "attractor.hf",
    "load_retrofit": "attractor.hf",
    "load_pretrained": "attractor.hf.pretrained",
    "teachable": "attractor.hf.teachable",
    "GPT": "attractor.model",
    "GPTConfig": "attractor.config",
    "Trainer": "attractor.trainer",
    "OnlineLearner": "attractor.continual.learner",
    "GuardedLearner": "attractor.continual.guarded",
    "Guard": "attractor.continual.guard",
    "Lessons": "attractor.continual.lessons",
    "LessonConfig": "attractor.continual.config",
}
"""Names that are imported when they are first used: most users of the layer need none of them."""

__all__ = [
    "APN",
    "GPT",
    "APNConfig",
    "GPTConfig",
    "Guard",
    "GuardedLearner",
    "LessonConfig",
    "Lessons",
    "Model",
    "OnlineLearner",
    "RoutingStats",
    "Trainer",
    "__version__",
    "analysis",
    "load",
    "load_pretrained",
    "load_resized",
    "load_retrofit",
    "monitor",
    "retrofit",
    "teachable",
    "warmup_factor",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
