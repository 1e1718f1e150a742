"""Figures for Prometheus: what passed through the app, and the figures of the service at each scrape.

Labels are routes as they are declared, never as they are asked for, and never names of sources. Otherwise
clients could make as many time series as they like.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily

from attractor.serve.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The figures of one app, in a registry of their own, so that several apps fit into one process."""

    def __init__(self, service: Service) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "attractor_requests",
            "Requests that were answered, by route, method and status.",
            ["route", "method", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "attractor_request_seconds",
            "Seconds from the head of a request to the end of its reply.",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "attractor_first_token_seconds",
            "Seconds from a request to its first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "attractor_requests_in_flight", "Requests that are being answered now.", registry=registry
        )
        self.prompt_tokens = Counter("attractor_prompt_tokens", "Tokens of all prompts.", registry=registry)
        self.written_tokens = Counter(
            "attractor_written_tokens", "Tokens that were generated.", registry=registry
        )
        self.finished = Counter(
            "attractor_generations",
            "Texts that were generated, by the reason of their end.",
            ["reason"],
            registry=registry,
        )
        self.lessons = Counter(
            "attractor_lessons", "Requests to learn, by their outcome.", ["outcome"], registry=registry
        )
        registry.register(ServiceFigures(service))

    def text(self) -> bytes:
        """All figures as text. This asks the service, and so does not belong on the event loop."""
        return generate_latest(self.registry)


class ServiceFigures:
    """The figures of the service, which is asked at every scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[GaugeMetricFamily]:
        return []  # otherwise registering would collect, before the service is ready

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (help_text, value) in gauges(self._service.monitor()).items():
            if value is not None:
                yield GaugeMetricFamily(f"attractor_{name}", help_text, value=value)


def gauges(now: Mapping[str, Any]) -> dict[str, tuple[str, float | None]]:
    queue, overlays = now["queue"], now["overlays"].values()
    last = now["progressive"][-1]["loss"] if now["progressive"] else None
    drift = [each["used"] / each["budget"] for each in now["drift"].values() if each["budget"] > 0]
    return {
        "version": ("The version of the weights.", now["version"]),
        "uptime_seconds": ("Seconds since the server started.", now["uptime"]),
        "learning": (
            "This is 1 where the server learns, and 0 where it does not.",
            float(now["learning"]),
        ),
        "generating": ("Texts that are being generated.", queue["generating"]),
        "waiting": ("Texts that wait to be generated.", queue["waiting"]),
        "lessons_waiting": ("Requests to learn that wait or are carried out.", queue["learning"]),
        "lessons_limit": ("The number of requests to learn that may wait.", queue["limit"]),
        "tokens_per_second": ("Tokens per second that were generated lately.", now["tokens_per_second"]),
        "journal_bytes": ("The size of the journal in bytes.", now["journal"]["bytes"]),
        "overlays": ("The number of sources that taught something.", len(overlays)),
        "overlay_bytes": (
            "The size of what all sources taught, in bytes.",
            sum(each["bytes"] for each in overlays),
        ),
        "last_lesson_loss": ("The loss of the newest text before it was learned, in nats per token.", last),
        "drift_used": (
            "The largest share of its drift budget that any source has used.",
            max(drift, default=None),
        ),
    }
