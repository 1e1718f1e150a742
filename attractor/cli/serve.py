"""attractor serve"""

import gc
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attractor.cli.common import (
    AnyModel,
    Device,
    has_overlays,
    known_tokens,
    otherwise,
    run_folder,
    validation_text,
)
from attractor.continual.config import AlsoName, AttentionName, GuardConfig, LearnConfig, UpdateConfig
from attractor.serve.config import ChatName, Limits, Rules, ServeSettings, SyncName

if TYPE_CHECKING:
    import numpy as np

    from attractor.continual.guarded import GuardedLearner
    from attractor.front import Model
    from attractor.serve.service import Service

WINDOW = 256
"""Tokens of background text that a model reads at once, if it can read so many."""
EXTRA = 'serving needs the extra "serve": pip install -c constraints.txt ".[serve]" in the checkout ({})'


@contextmanager
def no_signal_twice() -> Iterator[None]:
    """When uvicorn has ended by a signal it sends the signal again, which would end us before we are done."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def told(what: str) -> Iterator[None]:
    """An OSError inside says what it is that cannot be done."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{what}: {error.strerror or error}") from error


@dataclass(kw_only=True)
class Serve:
    """Answer requests, and learn while doing so: an OpenAI-compatible server with a dashboard.

    A pretrained model is taught lessons, each of which can be taken back by itself. A model with APN layers
    of its own, or a retrofit, learns texts, in an overlay for each source.
    """

    model: AnyModel
    store: Annotated[Path | None, otherwise("MODEL-served", "PATH")] = None
    """The folder in which the server keeps what it learns, in an SQLite database."""
    learn: bool = False
    """Learn what clients teach. Without it the server answers with what was learned before."""
    name: Annotated[str | None, otherwise("the name of the folder", "TEXT")] = None
    """The name by which clients call the model."""
    host: str = "127.0.0.1"
    """The address to listen on; one that other machines can reach needs --keys."""
    port: int = 8000
    """The port to listen on; 0 takes a free one."""
    keys: Annotated[Path | None, otherwise("all on this machine may do everything", "PATH")] = None
    """The file that says who may do what; `attractor keys` writes it."""
    chat: Annotated[
        ChatName | None,
        otherwise("the model's own, else questions for lessons, transcript for texts", "NAME"),
    ] = None
    """How the messages of a chat become a prompt."""
    sync: SyncName = "always"
    """Whether a change is on the disk before its answer, or when the system writes it."""
    shared: bool = False
    """Share the store with other servers of this model on this machine: what one is taught, all know. Each is
    started with --shared, and is taught lessons."""
    canary: Annotated[
        tuple[str, ...], otherwise("the run's validation text; for lessons, Python's manual", "TEXT")
    ] = ()
    """Texts that must not suffer: names of `attractor data list` or files."""
    context: Annotated[int | None, otherwise("512 for a retrofit, else at most 2048", "INT")] = None
    """The longest sequence that a Hugging Face model is given, in tokens."""
    prior: float = GuardConfig.prior
    """The weight of the base: a window costs at most log(1 / prior) nats more than the base."""
    attention: AttentionName = GuardConfig.attention
    """What an overlay may change in attention: nothing, low-rank deltas, or whole matrices."""
    also: Annotated[tuple[AlsoName, ...], otherwise("nothing", "{embedding,norms}")] = ()
    """What else an overlay may change."""
    max_overlays: int = GuardConfig.max_overlays
    """The most sources that the server keeps."""
    teach: LearnConfig = field(
        default_factory=lambda: LearnConfig(update=UpdateConfig(learning_rate=1e-3), max_patches=4)
    )
    """How texts are learned."""
    rules: Rules = field(default_factory=Rules)
    limits: Limits = field(default_factory=Limits)
    device: Device = None

    def run(self) -> int:
        try:
            from attractor.serve.http.app import Server, check_address, create_app, uvicorn_config
            from attractor.serve.http.auth import KeyRing
            from attractor.serve.store import check_folder
        except ImportError as error:
            raise ValueError(EXTRA.format(error)) from error
        settings = ServeSettings(host=self.host, port=self.port, keys=self.keys, chat=self.chat)
        logging.getLogger("attractor.audit").setLevel(logging.INFO)
        data = self.store or self._beside()
        where = f"{self.host}, port {self.port}"
        if settings.keys is not None:
            KeyRing.load(settings.keys)
        with told(f"the server cannot start on {where}"):
            check_address(settings)
        with told(f"--store {data} cannot be used"):
            check_folder(data, shared=self.shared)
        with self.open(data) as service:
            app = create_app(service, settings)
            if service.store.recovered:
                print(service.store.recovered)

            def announce(port: int) -> None:
                # what is loaded stays: to look through all of it again would hold up every text
                gc.collect()
                gc.freeze()
                print(f"{service.name}, version {service.version}, paths: {', '.join(service.paths())}")
                host = f"[{self.host}]" if ":" in self.host else self.host
                print(
                    f"http://{host}:{port}/ is the dashboard, /v1 the API. Ctrl-C ends politely.", flush=True
                )

            server = Server(uvicorn_config(app, settings, self.limits.drain + 30), service, announce)
            try:
                with no_signal_twice():
                    server.run()
            except SystemExit as error:  # of uvicorn, which has said why
                raise ValueError(f"the server cannot start on {where}: see above") from error
        print(f"version {service.version} is in {data}")
        return 0

    def open(self, data: Path) -> "Service":
        """The service of this model; what it learns is in the folder `data`."""
        from attractor.serve.service import Service

        found = self._load()
        settings: dict[str, Any] = {
            "name": self.name or Path(self.model).resolve().name,
            "rules": self.rules,
            "limits": self.limits,
            "sync": self.sync,
            "learning": self.learn,
            "stop_tokens": list(getattr(found.tokenizer, "ends", ())),
        }
        if found.source is not None:
            return self._open_lessons(found, data, {**settings, "shared": self.shared})
        if self.shared:
            raise ValueError(
                f"--shared is for servers that are taught lessons, and {self.model} learns texts, which one "
                "server at a time can do: leave --shared out, or serve a pretrained model"
            )
        learner = self._learner(found)
        if learner.sources:
            store_overlays(learner, data)
        context = learner.base.config.context
        canaries = self._canaries(found.tokenizer, context) or self._validation(context)
        return Service.open(learner, data, canaries=canaries, **settings)

    def _beside(self) -> Path:
        """The folder of what is learned: beside a model that lies here, or else in this one."""
        place = Path(self.model)
        if place.exists():
            return place.resolve().with_name(f"{place.resolve().name}-served")
        return Path(f"{self.model.replace('/', '-')}-served")

    def _load(self) -> "Model":
        from attractor.front import adapter_folder, load

        place = Path(self.model)
        is_retrofit = adapter_folder(place) is not None
        # overlays have a context of their own
        context = (self.context or 512) if is_retrofit and not has_overlays(place) else None
        return load(self.model, device=self.device, context=context)

    def _open_lessons(self, found: "Model", data: Path, settings: dict[str, Any]) -> "Service":
        from attractor.front import read_by
        from attractor.hf.teachable import default_background, teachable
        from attractor.serve.service import Service

        net, lessons = found.net, found.school
        context = min(self.context or 2048, found.model.config.context)
        canaries = self._canaries(found.tokenizer, context)
        if lessons is None:
            print("measuring what ordinary text looks like to the model ...", flush=True)
            encode = found.tokenizer.encode
            options: dict[str, Any] = read_by(found.tokenizer)
            if found.model.config.context < WINDOW:
                options["window"] = found.model.config.context
            net, lessons = teachable(net.unload(), encode, **options)
        if not canaries:
            canaries = {"manual": found.tokenizer.encode(default_background()[0][:10_000])}
        return Service.open_lessons(
            net, lessons, found.tokenizer, data, canaries=canaries, context=context, **settings
        )

    def _learner(self, found: "Model") -> "GuardedLearner":
        from attractor.continual.guarded import GuardedLearner

        if found.guarded is None and not found.model.apn_layers():
            raise ValueError(
                f"{self.model} has no APN layers, and a server keeps what it learns in patches: serve one "
                "that has some, or a pretrained model (`attractor serve smollm2-135m`). `attractor ask` and "
                "`attractor sample` write with this one"
            )
        if found.guarded is None:
            return GuardedLearner(found.model, found.tokenizer, self._config())
        if self._config() != Serve(model=self.model)._config():
            raise ValueError(f"{self.model} is a learner with settings of its own; leave yours out")
        return found.guarded

    def _config(self) -> GuardConfig:
        return GuardConfig(
            learn=self.teach,
            prior=self.prior,
            attention=self.attention,
            also=self.also,
            max_overlays=self.max_overlays,
        )

    def _canaries(self, tokenizer: Any, context: int) -> "dict[str, np.ndarray]":
        """Those that were asked for."""
        if len({Path(source).stem for source in self.canary}) < len(self.canary):
            raise ValueError(f"two canaries of one name: {', '.join(self.canary)}; rename one")
        return {Path(source).stem: known_tokens(source, tokenizer, 64 * context) for source in self.canary}

    def _validation(self, context: int) -> "dict[str, np.ndarray]":
        """The canary of a run."""
        found = validation_text(run_folder(self.model))
        return {} if found is None else {"validation": found[: 64 * context]}


def store_overlays(learner: "GuardedLearner", folder: Path) -> None:
    """Give a new store the overlays that a learner came with, each as a source that learned once."""
    from attractor.continual.delta import Delta
    from attractor.serve.learning.guarded import identity
    from attractor.serve.learning.readers import fields_of, tensors_of
    from attractor.serve.learning.teacher import now
    from attractor.serve.store import Store

    start = tensors_of(learner.new_source())
    with Store.open(folder, identity=identity(learner)) as store:
        for name, held in learner.sources.items() if store.last == 0 else ():
            now_has = tensors_of(held)
            if grown := [key for key, value in now_has.items() if value.shape != start[key].shape]:
                raise ValueError(
                    f"overlay {name!r} has grown ({grown[0]}), and a server keeps the size of layers"
                )
            fields = {**fields_of(held), "lessons": 1}
            delta = Delta.between(start, now_has)
            store.commit("lesson", {"tokens": held.tokens}, at=now(), source=name, fields=fields, delta=delta)
    learner.sources = {}
