"""Attractor Patch Networks: a routed, low-rank replacement for the Transformer FFN that can keep learning."""

from typing import Any

from attractor import analysis, monitor
from attractor.config import APNConfig
from attractor.layer import APN, RoutingStats, load_resized, warmup_factor
from attractor.version import __version__

__all__ = [
    "APN",
    "APNConfig",
    "RoutingStats",
    "__version__",
    "analysis",
    "load_resized",
    "load_retrofit",
    "monitor",
    "retrofit",
    "warmup_factor",
]


def __getattr__(name: str) -> Any:
    if name in ("retrofit", "load_retrofit"):  # only now: most users of the layer have no Hugging Face model
        from attractor import hf

        return getattr(hf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
