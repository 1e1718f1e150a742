"""Figures for Prometheus: what passed through the app, and what the service says of itself when asked.

Labels are routes as they are declared, never as they are asked for, and no names of sources: both would let
whoever asks make as many time series as they like.
"""

from collections.abc import Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily

from attractor.serve.http.monitor import Monitor
from attractor.serve.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """In a registry of their own, so that two apps in a process do not meet."""

    def __init__(self, service: Service) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "attractor_requests", "Requests answered.", ["route", "method", "status"], registry=registry
        )
        self.seconds = Histogram(
            "attractor_request_seconds", "From the first byte of a request to the last of its answer.",
            ["route"], buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "attractor_first_token_seconds", "Until the first token was written.", buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge("attractor_requests_in_flight", "Requests being answered.", registry=registry)
        self.prompt_tokens = Counter("attractor_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.written_tokens = Counter("attractor_written_tokens", "Tokens written.", registry=registry)
        self.finished = Counter(
            "attractor_generations", "Texts written, by how they ended.", ["reason"], registry=registry
        )
        self.lessons = Counter(
            "attractor_lessons", "Lessons, by what became of them.", ["outcome"], registry=registry
        )
        registry.register(Asked(service))

    def text(self) -> bytes:
        """Asks the service: not for the event loop."""
        return generate_latest(self.registry)


class Asked:
    """Asked anew at every scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[GaugeMetricFamily]:
        return []  # otherwise registering would collect, before the service is ready

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (help_text, value) in gauges(self._service.monitor()).items():
            if value is not None:
                yield GaugeMetricFamily(f"attractor_{name}", help_text, value=value)


def gauges(now: Monitor) -> dict[str, tuple[str, float | None]]:
    queue, overlays = now["queue"], now["overlays"].values()
    last = now["progressive"][-1]["loss"] if now["progressive"] else None
    drift = [each["used"] / each["budget"] for each in now["drift"].values() if each["budget"] > 0]
    return {
        "version": ("Version of the weights.", now["version"]),
        "uptime_seconds": ("Since the server started.", now["uptime"]),
        "learning": ("1 where lessons are taken.", float(now["learning"])),
        "generating": ("Texts being written.", queue["generating"]),
        "waiting": ("Texts that wait to be written.", queue["waiting"]),
        "lessons_waiting": ("Lessons that wait or are being learned.", queue["learning"]),
        "lessons_limit": ("Lessons that may.", queue["limit"]),
        "tokens_per_second": ("Tokens written per second, lately.", now["tokens_per_second"]),
        "journal_bytes": ("Size of the journal.", now["journal"]["bytes"]),
        "overlays": ("Sources that taught something.", len(overlays)),
        "overlay_bytes": ("Size of all they taught.", sum(each["bytes"] for each in overlays)),
        "last_lesson_loss": ("Of the newest lesson before it was learned, nats per token.", last),
        "drift_used": ("The most that any source used of its budget, as a share.", max(drift, default=None)),
    }
