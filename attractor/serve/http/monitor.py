"""The reply of `/v1/monitor`, which is the contract between a server and its dashboard.

Lists are oldest first and bounded by the service (some hundred entries are plenty, because every poll carries
them all). A figure that is not known is None, and a list or a mapping of which nothing is known is empty: the
dashboard says so instead of drawing a zero. `pydantic.TypeAdapter(Monitor).validate_python(...)` checks one.
"""

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12


class LearnedText(TypedDict):
    """The loss of texts before they were learned, in nats per token."""

    version: int
    loss: float | None
    source: str


class Canary(TypedDict):
    version: int
    perplexity: float | None


class Usage(TypedDict):
    """How often each patch of a layer was chosen lately, and the entropy of that in nats."""

    entropy: float | None
    counts: list[float]


class OverlayFigures(TypedDict):
    """What is kept of one source."""

    version: int  # the newest that changed it
    tokens: int  # how many it saw
    bytes: int
    patches: dict[str, int]  # layer -> how many patches differ from the base


class Posterior(TypedDict):
    """How much each path counted at the end of a request."""

    at: float  # seconds since 1970
    version: int
    shares: dict[str, float]


class Queue(TypedDict):
    generating: int
    waiting: int  # to be generated
    learning: int  # requests to learn that wait or are carried out
    limit: int  # requests to learn that may wait


class JournalFigures(TypedDict):
    last: int  # number of the newest record
    bytes: int
    recovered: str | None  # what opening it had to cut off, without any path of the server


class Drift(TypedDict):
    used: float
    budget: float


class LessonCanary(TypedDict):
    """A text that lessons must leave alone."""

    rise: float  # of its perplexity, as a share
    windows: int
    windows_entered: int  # those that differ from the base's at all


class LessonFigures(TypedDict):
    """Of all lessons together, where lessons are taught."""

    count: int
    known: int  # so many of them
    sources: int
    patches: int
    bytes: int
    canaries: dict[str, LessonCanary]


class Monitor(TypedDict):
    version: int
    uptime: float  # seconds
    learning: bool
    progressive: list[LearnedText]
    canaries: dict[str, list[Canary]]
    usage: dict[str, Usage]  # layer ->
    overlays: dict[str, OverlayFigures]  # source ->
    posteriors: list[Posterior]
    queue: Queue
    tokens_per_second: float | None
    journal: JournalFigures
    drift: dict[str, Drift]  # source ->
    lessons: LessonFigures | None  # None where texts are learned
