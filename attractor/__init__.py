"""Attractor Patch Networks: a routed, low-rank replacement for the Transformer FFN that can keep learning."""

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
    "monitor",
    "warmup_factor",
]
