"""attractor serve|keys|store"""

import json
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from attractor.cli.common import Device, known_tokens, otherwise, run_folder, validation_text
from attractor.continual.config import AlsoName, AttentionName, GuardConfig, LearnConfig, UpdateConfig
from attractor.continual.guarded import GuardedLearner
from attractor.serve.learning.rules import Rules
from attractor.serve.service import Limits, Service
from attractor.serve.store import SyncName

EXTRA = 'serving needs the extra "serve": pip install "attractor-patch-networks[serve]" ({})'


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


@dataclass(kw_only=True)
class Serve:
    """Answer requests, and learn from texts while doing so: an OpenAI-compatible server with a dashboard."""

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(name="model", metavar="MODEL")]
    """A run, a saved model, a retrofit, or what `attractor adapt --guard` wrote."""
    store: Annotated[Path | None, otherwise("MODEL-served", "PATH")] = None
    """The folder in which the server keeps what it learns, in an SQLite database."""
    learn: bool = False
    """Take lessons. Without it the server answers with what was learned before."""
    name: Annotated[str | None, otherwise("the name of the folder", "TEXT")] = None
    """What clients call the model."""
    host: str = "127.0.0.1"
    """Other than this machine needs --keys."""
    port: int = 8000
    keys: Annotated[Path | None, otherwise("everybody on this machine may do everything", "PATH")] = None
    """Who may do what: a file that `attractor keys` writes."""
    chat: Literal["transcript", "chatml"] = "transcript"
    """How the messages of a chat become a prompt."""
    sync: SyncName = "always"
    """When a lesson is on the disk: before its answer, or when the system gets to it."""
    canary: Annotated[tuple[str, ...], otherwise("the run's validation text", "TEXT")] = ()
    """Texts that must not suffer: names or files."""
    context: int = 512
    """Of a retrofit: the longest sequence, in tokens."""
    prior: float = GuardConfig.prior
    """The weight of the base: a window costs at most log(1 / prior) nats more than the base."""
    attention: AttentionName = GuardConfig.attention
    """What an overlay may change in attention: nothing, low-rank deltas, or whole matrices."""
    also: tuple[AlsoName, ...] = ()
    """What else an overlay may change."""
    max_overlays: int = GuardConfig.max_overlays
    teach: LearnConfig = field(
        default_factory=lambda: LearnConfig(update=UpdateConfig(learning_rate=1e-3), max_patches=4)
    )
    """How lessons are learned."""
    rules: Rules = field(default_factory=Rules)
    limits: Limits = field(default_factory=Limits)
    device: Device = None
    """cpu, cuda, cuda:1, ..."""

    def run(self) -> int:
        try:
            from attractor.serve.http.app import Server, create_app, uvicorn_config
            from attractor.serve.http.settings import ServeSettings
        except ImportError as error:
            raise ValueError(EXTRA.format(error)) from error
        settings = ServeSettings(host=self.host, port=self.port, keys=self.keys, chat=self.chat)
        learner = self._learner()
        folder = self.run_folder.resolve()
        data = self.store or folder.with_name(folder.name + "-served")
        logging.getLogger("attractor.audit").setLevel(logging.INFO)
        if learner.sources:
            store_overlays(learner, data)
        with Service.open(
            learner, data, name=self.name or folder.name, canaries=self._canaries(learner), rules=self.rules,
            limits=self.limits, sync=self.sync, learning=self.learn, stop_tokens=self._ends(learner),
        ) as service:  # fmt: skip
            app = create_app(service, settings)
            if service.store.recovered:
                print(service.store.recovered)

            def announce(port: int) -> None:
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
                where = f"{self.host}, port {self.port}"
                raise ValueError(f"the server cannot start on {where}: see above") from error
        print(f"version {service.version} is in {data}")
        return 0

    def _learner(self) -> GuardedLearner:
        from attractor.front import adapter_folder, load

        is_retrofit = adapter_folder(self.run_folder) is not None
        has_overlays = any(self.run_folder.glob("**/guard.json"))  # and so a context of its own
        context = self.context if is_retrofit and not has_overlays else None
        found = load(self.run_folder, device=self.device, context=context)
        if found.folder is None:
            raise ValueError(
                f"{self.run_folder} has no APN layers that a server could teach: `attractor retrofit` gives "
                "it some, and `attractor chat` talks with it as it is"
            )
        if found.guarded is None:
            return GuardedLearner(found.model, found.tokenizer, self._config())
        if self._config() != Serve(run_folder=self.run_folder)._config():
            raise ValueError(f"{self.run_folder} is a learner with settings of its own; leave yours out")
        return found.guarded

    def _config(self) -> GuardConfig:
        return GuardConfig(
            learn=self.teach,
            prior=self.prior,
            attention=self.attention,
            also=self.also,
            max_overlays=self.max_overlays,
        )

    def _canaries(self, learner: GuardedLearner) -> dict[str, np.ndarray]:
        most = 64 * learner.base.config.context
        assert learner.tokenizer is not None, "a run has one"
        if len({Path(source).stem for source in self.canary}) < len(self.canary):
            raise ValueError(f"two canaries of one name: {', '.join(self.canary)}; rename one")
        if self.canary:
            return {Path(source).stem: known_tokens(source, learner.tokenizer, most)
                    for source in self.canary}  # fmt: skip
        found = validation_text(run_folder(self.run_folder))
        return {} if found is None else {"validation": found[:most]}

    def _ends(self, learner: GuardedLearner) -> list[int]:
        """The tokens with which a pretrained model ends a text."""
        return list(getattr(learner.tokenizer, "ends", ()))


def store_overlays(learner: GuardedLearner, folder: Path) -> None:
    """Give a new store the overlays that a learner came with, each as a source with one lesson."""
    from attractor.continual.delta import Delta
    from attractor.serve.learning.effects import fields_of, tensors_of
    from attractor.serve.learning.guarded import identity
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


@dataclass(kw_only=True)
class Keys:
    """Make a key for a server; it is shown once, and the file keeps only its hash."""

    file: tyro.conf.Positional[Path]
    """Where the hashes of keys are; it is made if it is not there."""
    scopes: tuple[Literal["generate", "learn", "monitor", "admin"], ...]
    """What the key is for: to ask, to teach, to watch, to take lessons back."""
    note: str = ""
    """Whose key it is."""

    def run(self) -> int:
        try:
            from attractor.serve.http.auth import add_key
        except ImportError as error:
            raise ValueError(EXTRA.format(error)) from error
        print(add_key(self.file, self.scopes, self.note))
        return 0


@dataclass(kw_only=True)
class StoreCommand:
    """Look at what a server keeps, also while it is running; nothing is changed.

    verify checks every byte, show lists what was learned as lines of JSON, backup copies it to a new folder.
    """

    action: tyro.conf.Positional[Literal["verify", "show", "backup"]]
    data_dir: tyro.conf.Positional[Path]
    """The --store of a server."""
    to: Path | None = None
    """For a backup: a new folder, which can be a --store itself."""

    def run(self) -> int:
        from attractor.serve import store

        if (self.to is None) == (self.action == "backup"):
            raise ValueError("--to names the new folder of a backup, and is for nothing else")
        if self.action == "show":
            for line in store.show(self.data_dir):
                print(json.dumps(line))
            return 0
        if self.to is not None:
            print(f"version {store.backup(self.data_dir, self.to).last} is in {self.to}, and was verified")
            return 0
        report = store.verify(self.data_dir)
        print(f"versions {report.oldest} to {report.last} can be had")
        print(f"snapshots: {', '.join(map(str, report.snapshots)) or 'none'}")
        if report.erased:
            print(f"erased: {', '.join(report.erased)}")
        for damage in report.damage:
            print(f"damaged: {damage}")
        if not report.damage:
            print("everything is as it was written")
        return 1 if report.damage else 0
