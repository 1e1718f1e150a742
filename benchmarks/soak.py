"""What a server promises, under load and under fire.

    make soak                                   # everything, a quarter of an hour
    python benchmarks/soak.py kills --kills 20

kills        kill -9 at random moments, and at every named point of its work with the disk
overhead     what an acknowledgement takes beyond the update itself
snapshot     the longest pause of a text that is being written, with and without a large snapshot
rollback     a thousand lessons taken back
throughput   tokens per second while learning, over those without
clients      64 streaming clients at once, over HTTP
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attractor.checkpoint import tensors_hash
from attractor.config import APNConfig, GPTConfig
from attractor.continual.config import GuardConfig, LearnConfig, UpdateConfig
from attractor.continual.guarded import GuardedLearner
from attractor.experiments.result import write_result
from attractor.model import GPT
from attractor.serve import journal
from attractor.serve.effects import tensors_of
from attractor.serve.engine import Job
from attractor.serve.errors import Busy
from attractor.serve.files import Files
from attractor.serve.rules import Rules
from attractor.serve.service import Limits, Service
from attractor.serve.teacher import blank
from attractor.tokenizer import ByteTokenizer

TEXT = "It is not the strongest of the species that survives, but the one that keeps learning. "
SOURCES = ("a", "b", "c")


def learner(dim: int = 32, patches: int = 16, rank: int = 8, most: int | None = 4) -> GuardedLearner:
    torch.manual_seed(0)
    shape = GPTConfig(
        vocab_size=256, context=64, num_layers=2, num_heads=2, dim=dim, ffn="apn",
        apn=APNConfig(num_patches=patches, top_k=2, rank=rank),
    )  # fmt: skip
    learn = LearnConfig(update=UpdateConfig(learning_rate=1e-3), max_patches=most)
    return GuardedLearner(GPT(shape).eval(), ByteTokenizer(), GuardConfig(learn=learn))


def serve(folder: Path, model: GuardedLearner | None = None, **options: Any) -> Service:
    settings: dict[str, Any] = {
        "rules": Rules(canary_tokens=64, canary_rise=0.1, drift=None),
        "limits": Limits(drain=1.0, snapshot_every=7, keep_snapshots=10_000),
    }
    return Service.open(model or learner(), folder, **(settings | options))


# --- kill -9

LIVES = 20
"""Of one folder: every life is checked from its first record on."""
POINTS = ("write", "fsync", "sync_data", "truncate", "rename", "unlink", "fsync_folder")


class Mortal(Files):
    """Dies at the n-th time of one of its works, before or after it."""

    def __init__(self, point: str | None = None, when: str = "before", count: int = 1) -> None:
        self.point, self.when, self.count = point, when, count
        for name in POINTS:
            setattr(self, name, self._around(name, getattr(super(), name)))

    def _around(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            mine = name == self.point
            self.count -= mine
            if mine and self.count == 0 and self.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = work(*arguments)
            if mine and self.count == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def hash_of(sources: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    return {name: tensors_hash(own, "") for name, own in sources.items()}


def victim(folder: Path, line: Connection, mortal: dict[str, Any], seed: int, retry: list[list[Any]]) -> None:
    """A server under load that tells what it acknowledged; somebody kills it."""
    torch.set_num_threads(1)
    service = serve(folder, files=Mortal(**mortal))
    live = {
        name: {key: value.detach() for key, value in tensors_of(held).items()}
        for name, held in service.teacher.sources.items()
    }
    lock = threading.Lock()

    def tell(what: str, *about: Any) -> None:
        with lock:
            line.send((what, *about))

    tell("open", service.version, hash_of(live))

    def act(key: str, kind: str, source: str) -> None:
        tell("asked", key, kind, source)
        try:
            if kind == "learn":
                answer = service.learn([TEXT], source, key)
            elif kind == "rollback":
                answer = service.rollback(service.version // 2, key)
            else:
                answer = service.forget(source, key)
        except LookupError:
            tell("refused", key)
        else:
            tell("done", key, answer["version"])

    def client(number: int) -> None:
        chance = random.Random(f"{seed}/{number}")
        for key, kind, source in retry[number::2]:
            act(key, kind, source)
        for count in range(10_000):
            kind = chance.choices(["learn", "rollback", "forget"], [20, 1, 1])[0]
            act(f"{seed}/{number}/{count}", kind, chance.choice(SOURCES))

    def reader() -> None:
        while True:
            for _ in service.submit(Job(prompt=[65, 66], max_tokens=40)):
                pass

    for work in (lambda: client(0), lambda: client(1), reader):
        threading.Thread(target=work, daemon=True).start()
    threading.Event().wait()


def oracle(folder: Path, start: dict[str, torch.Tensor]) -> tuple[dict[str, str], dict[str, list[int]], int]:
    """From the journal's records alone: the state, the versions of every key, the last version."""
    states: list[dict[str, dict[str, torch.Tensor]]] = [{}]
    keys: dict[str, list[int]] = {}
    for record in journal.read(folder / "journal"):
        now = {source: dict(own) for source, own in states[-1].items()}
        told = record.fields
        if record.kind == "rollback":
            now = states[told["to"]]
        elif record.kind == "drop":
            del now[told["source"]]
        else:
            own = now.get(told["source"]) or dict(start)
            for full, value in record.tensors.items():
                kind, _, name = full.partition("/")
                if kind == "whole":
                    own[name] = value
                elif kind == "values":
                    own[name] = own[name].clone()
                    own[name][record.tensors[f"rows/{name}"]] = value
            now[told["source"]] = own
        states.append(now)
        keys.setdefault(told["key"], []).append(record.sequence)
    return hash_of(states[-1]), keys, len(states) - 1


def one_life(folder: Path, seed: int, patience: float, mortal: dict[str, Any], known: dict[str, Any]) -> None:
    """Start a victim, kill it after a while unless it kills itself, and see what it left."""
    fork = multiprocessing.get_context("fork")  # nothing here has threads, and importing torch takes seconds
    ours, theirs = fork.Pipe(duplex=False)
    retry = [[key, *about] for key, about in known["asked"].items()]
    process = fork.Process(target=victim, args=(folder, theirs, mortal, seed, retry))
    process.start()
    theirs.close()
    deadline = time.monotonic() + patience
    while True:
        if not ours.poll(max(0.0, deadline - time.monotonic())):
            process.kill()
            deadline = math.inf
        try:
            what, *about = ours.recv()
        except EOFError:
            break
        if what == "open":
            known["opened"] += 1
            known["differs"] += about != [known["last"], known["state"]]
        elif what == "asked":
            known["asked"][about[0]] = about[1:]
        else:
            del known["asked"][about[0]]
            if what == "done":
                known["done"][about[0]] = about[1]
    process.join()
    state, keys, last = oracle(folder, known["blank"])
    known["lost"] |= {key for key, at in known["done"].items() if keys.get(key) != [at]}
    known["twice"] |= {key for key, at in keys.items() if len(at) > 1}
    known["unasked"] |= {key for key in keys if key not in known["done"] and key not in known["asked"]}
    known |= {"state": state, "last": last}


def kills(random_kills: int = 200, points: int = 3, seed: int = 0) -> dict[str, Any]:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    lives: list[tuple[float, dict[str, Any]]] = [(chance.uniform(0.2, 2.5), {}) for _ in range(random_kills)]
    lives += [
        (10.0, {"point": point, "when": when, "count": count})
        for point in POINTS for when in ("before", "after") for count in range(1, 1 + points)
        if point not in ("truncate", "unlink")  # which happen only when something went wrong before
    ]  # fmt: skip
    start, total = blank(learner()), Counter[str]()
    for first in range(0, len(lives), LIVES):
        known: dict[str, Any] = {
            "asked": {}, "done": {}, "state": {}, "last": 0, "blank": start, "opened": 0, "differs": 0,
            "lost": set(), "twice": set(), "unasked": set(),
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            for number, (patience, mortal) in enumerate(lives[first : first + LIVES], first):
                one_life(Path(folder), number, patience, mortal, known)
                total["named" if mortal else "random"] += 1
                print(f"\r{number + 1} of {len(lives)} kills", end="", file=sys.stderr)
        total += Counter(
            acknowledged=len(known["done"]), versions=known["last"], opened=known["opened"],
            differs_from_oracle=known["differs"],
            **{name: len(known[name]) for name in ("lost", "twice", "unasked")},
        )  # fmt: skip
    print(file=sys.stderr)
    names = ("random", "named", "acknowledged", "versions", "opened")
    return {name: total[name] for name in (*names, "differs_from_oracle", "lost", "twice", "unasked")}


# --- times


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = np.sort(seconds) * 1e3
    return {"p50_ms": float(np.median(ordered)), "p99_ms": float(np.percentile(ordered, 99)),
            "worst_ms": float(ordered[-1])}  # fmt: skip


def overhead(lessons: int = 400) -> dict[str, Any]:
    """All of a lesson's time that is neither scoring, updating nor judging: queue, journal, publication."""
    limits = Limits(drain=1.0)
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder), limits=limits) as service:
        service.learn([TEXT * 4], "a")
        spent = [0.0]

        def timed(work: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                started = time.perf_counter()
                try:
                    return work(*arguments, **options)
                finally:
                    spent[0] += time.perf_counter() - started

            return call

        teacher = service.teacher
        held = teacher.sources["a"].learner
        parts = ((held, "observe"), (held, "flush"), (teacher, "_guard"), (teacher.canaries, "judge"))
        for owner, name in parts:
            setattr(owner, name, timed(getattr(owner, name)))
        beyond, whole, sizes = [], [], []
        for _ in range(lessons):
            spent[0], started = 0.0, time.perf_counter()
            sizes.append(service.learn([TEXT * 4], "a")["bytes"])
            whole.append(time.perf_counter() - started)
            beyond.append(whole[-1] - spent[0])
    return {"beyond": percentiles(beyond), "whole": percentiles(whole), "bytes": statistics.median(sizes)}


def gaps(service: Service, until: Callable[[], bool]) -> list[float]:
    """Seconds from one token to the next, of one text after the other."""
    found = []
    while not until():
        last = None
        for _ in service.submit(Job(prompt=[65, 66, 67], max_tokens=400)):
            now = time.perf_counter()
            if last is not None:
                found.append(now - last)
            last = now
    return found


def _written(service: Service) -> bool:
    writing = service._snapshots
    return writing is not None and not writing.is_alive()


def snapshot(megabytes: int = 128) -> dict[str, Any]:
    """Pauses between tokens while a snapshot of so much is written, and without one."""
    model = learner(dim=128, patches=512, rank=32, most=None)
    with tempfile.TemporaryDirectory() as folder:
        service = serve(Path(folder), model, limits=Limits(drain=1.0, snapshot_every=10**9))
        with service:
            text = [bytes(random.Random(n).randbytes(2000)).hex() for n in range(4)]
            for number in range(3):
                service.learn(text, f"source-{number}")
            state = service.store.state_at()
            size = sum(t.nbytes for own in state.sources.values() for t in own.tensors.values())
            del state
            end = time.monotonic() + 5
            quiet = gaps(service, lambda: time.monotonic() > end)
            started = time.monotonic()
            service._since_snapshot = 10**9  # the next lesson begins one
            teaching = threading.Thread(target=lambda: service.learn([TEXT], "source-0"))
            teaching.start()
            busy = gaps(service, lambda: _written(service))
            teaching.join()
            seconds = time.monotonic() - started
    assert size >= megabytes << 20, f"{size:,} bytes are not {megabytes} MB"
    return {"bytes": size, "seconds": seconds, "quiet": percentiles(quiet), "snapshot": percentiles(busy)}


def rollback(lessons: int = 1000, before: int = 250) -> dict[str, Any]:
    """To a version as far behind a snapshot as may be: all from the start is read again."""
    options = {"limits": Limits(drain=1.0, snapshot_every=256), "sync": "off"}
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder), **options) as service:

        def state() -> dict[str, str]:
            return hash_of({name: {k: v.detach() for k, v in tensors_of(held).items()}
                            for name, held in service.teacher.sources.items()})  # fmt: skip

        for number in range(before):
            service.learn([TEXT], SOURCES[number % 3])
        known = state()
        for number in range(lessons):
            service.learn([TEXT], SOURCES[number % 3])
        started = time.perf_counter()
        service.rollback(before)
        seconds = time.perf_counter() - started
        return {"lessons": lessons, "seconds": seconds, "bit_exact": state() == known}


def throughput(seconds: float = 10.0, streams: int = 8) -> dict[str, Any]:
    """Tokens per second of several texts at once, in turns with and without lessons."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"limits": Limits(drain=1.0), "rules": Rules(canary_tokens=64, canary_rise=0.1, drift=None)}
        with serve(Path(folder), learner(dim=128, patches=64, rank=32), **options) as service:
            service.learn([TEXT * 4], "a")
            found: dict[str, list[float]] = {"alone": [], "learning": []}
            lessons = 0
            for _ in range(3):
                for name in found:
                    stop = threading.Event()

                    def teach(stop: threading.Event = stop) -> None:
                        nonlocal lessons
                        while not stop.is_set():
                            service.learn([TEXT * 4], "a")
                            lessons += 1

                    teacher = threading.Thread(target=teach)
                    if name == "learning":
                        teacher.start()
                    found[name].append(_tokens_per_second(service, seconds / 3, streams))
                    stop.set()
                    if name == "learning":
                        teacher.join()
    rates = {name: statistics.mean(each) for name, each in found.items()}
    return {"ratio": rates["learning"] / rates["alone"], "streams": streams, "lessons": lessons}


def _tokens_per_second(service: Service, seconds: float, streams: int) -> float:
    end, counts = time.monotonic() + seconds, [0] * streams

    def write(number: int) -> None:
        while time.monotonic() < end:
            for _ in service.submit(Job(prompt=[65, 66, 67], max_tokens=50)):
                counts[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(streams)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - started)


# --- over HTTP


@contextmanager
def listening(service: Service) -> Iterator[str]:
    import uvicorn

    from attractor.serve.app import create_app, uvicorn_config
    from attractor.serve.settings import ServeSettings

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = ServeSettings(port=port)
    server = uvicorn.Server(uvicorn_config(create_app(service, settings), settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


async def _stream(base: str, end: float, found: dict[str, int]) -> None:
    import httpx2 as httpx

    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        while time.monotonic() < end:
            asked = {"model": "attractor", "prompt": "It is ", "max_tokens": 40, "stream": True}
            versions = set()
            async with client.stream("POST", "/v1/completions", json=asked) as reply:
                if reply.status_code != 200:
                    found["errors"] += 1
                    continue
                async for text in reply.aiter_lines():
                    if text.startswith("data: {"):
                        chunk = json.loads(text[6:])
                        versions.add(chunk["system_fingerprint"])
                        found["errors"] += "error" in chunk
            found["texts"] += 1
            found["mixed"] += len(versions) != 1


async def _teach(base: str, end: float, found: dict[str, int]) -> None:
    import httpx2 as httpx

    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        while time.monotonic() < end:
            reply = await client.post("/v1/learn", json={"text": TEXT, "source": "a"})
            found["lessons" if reply.status_code == 200 else "errors"] += 1


def clients(seconds: float = 60.0, count: int = 64) -> dict[str, Any]:
    found = {"texts": 0, "mixed": 0, "errors": 0, "lessons": 0}
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(Path(folder), limits=Limits()) as service,
        listening(service) as base,
    ):
        end = time.monotonic() + seconds

        async def everybody() -> None:
            streams = [_stream(base, end, found) for _ in range(count)]
            await asyncio.gather(_teach(base, end, found), *streams)

        asyncio.run(everybody())
    return {"seconds": seconds, "clients": count, **found}


# --- all of it

PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "kills": kills, "overhead": overhead, "snapshot": snapshot, "rollback": rollback,
    "throughput": throughput, "clients": clients,
}  # fmt: skip


def shows(found: dict[str, Any]) -> list[tuple[str, Any, bool]]:
    """What must hold, of the parts that ran: what, figure, whether it does."""
    rows: list[tuple[str, Any, bool]] = []
    if part := found.get("kills"):
        wrong = sum(part[name] for name in ("lost", "twice", "unasked", "differs_from_oracle"))
        rows.append(("lessons lost or applied twice, states that differ", wrong, wrong == 0))
    if part := found.get("overhead"):
        figure = part["beyond"]["p99_ms"]
        rows.append(("acknowledgement beyond the update, p99 ms <= 5", figure, figure <= 5))
    if part := found.get("snapshot"):
        figure = part["snapshot"]["worst_ms"]
        rows.append(("longest pause during a snapshot, ms <= 50", figure, figure <= 50))
    if part := found.get("rollback"):
        holds = part["seconds"] <= 1 and part["bit_exact"]
        rows.append(("rollback of 1000 lessons, s <= 1, bit-exact", part["seconds"], holds))
    if part := found.get("throughput"):
        rows.append(("tokens/s while learning over without >= 0.6", part["ratio"], part["ratio"] >= 0.6))
    if part := found.get("clients"):
        figure = part["errors"] + part["mixed"]
        rows.append(("errors and mixed versions of 64 clients", figure, figure == 0 and part["texts"] > 0))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--points", type=int, default=3, help="times that it dies at each named point")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name in options.parts or PARTS:
        print(f"{name} ...", file=sys.stderr)
        try:
            found[name] = kills(options.kills, options.points) if name == "kills" else PARTS[name]()
        except Busy as busy:
            raise SystemExit(f"{name}: {busy}") from busy
        print(json.dumps(found[name]))
    rows = shows(found)
    for what, figure, holds in rows:
        print(f"{'holds ' if holds else 'MISSED'}  {what}: {figure:.4g}")
    if options.result:
        told = [{"what": what, "figure": figure, "holds": holds} for what, figure, holds in rows]
        write_result(options.result, {"experiment": "soak", "seed": 0, **found, "shows": told})
    return 0 if all(holds for _, _, holds in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
