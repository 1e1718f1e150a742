"""What a server promises, under load and under fire.

    make soak                                   # everything, a quarter of an hour
    python benchmarks/soak.py kills --kills 20

kills        kill -9 at random moments, and at every named point of its work with the database
overhead     what an acknowledgement takes beyond the update itself
snapshot     the longest pause of a text that is being written, with and without a large snapshot
rollback     a thousand lessons taken back
throughput   tokens per second while learning, over those without
clients      64 streaming clients at once, over HTTP
"""

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from crashes import SOURCES, TEXT, kills, learner, live_hash, serve
from measuring import listening, milliseconds, spent_in

from attractor.results import write_result
from attractor.serve.config import Limits, Rules
from attractor.serve.decode.engine import Job
from attractor.serve.errors import Busy
from attractor.serve.service import Service

# --- times


def overhead(lessons: int = 400) -> dict[str, Any]:
    """All of a lesson's time that is neither scoring, updating nor judging: queue, store, publication."""
    limits = Limits(drain=1.0)
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder), limits=limits) as service:
        service.learn([TEXT * 4], "a")
        teacher = service.teacher
        held = teacher.sources["a"].learner
        parts = ((held, "observe"), (held, "flush"), (teacher, "_guard"), (teacher.canaries, "judge"))
        beyond, whole, sizes = [], [], []
        with spent_in(*parts) as spent:
            for _ in range(lessons):
                spent[0], started = 0.0, time.perf_counter()
                sizes.append(service.learn([TEXT * 4], "a")["bytes"])
                whole.append(time.perf_counter() - started)
                beyond.append(whole[-1] - spent[0])
    return {"beyond": milliseconds(beyond), "whole": milliseconds(whole), "bytes": statistics.median(sizes)}


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


def snapshot(megabytes: int = 120) -> dict[str, Any]:
    """Pauses between tokens while a snapshot of so much is written, and without one."""
    model = learner(dim=128, patches=512, rank=32, most=None)
    with tempfile.TemporaryDirectory() as folder:
        service = serve(Path(folder), model, limits=Limits(drain=1.0, snapshot_every=10**9))
        with service:
            text = [bytes(random.Random(n).randbytes(2000)).hex() for n in range(4)]
            for number in range(3):
                service.learn(text, f"source-{number}")
            size = service.store.state_at().nbytes
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
    return {"bytes": size, "seconds": seconds, "quiet": milliseconds(quiet), "snapshot": milliseconds(busy)}


def rollback(lessons: int = 1000, before: int = 250) -> dict[str, Any]:
    """To a version as far behind a snapshot as may be: all from the start is read again."""
    options = {"limits": Limits(drain=1.0, snapshot_every=256), "sync": "off"}
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder), **options) as service:
        for number in range(before):
            service.learn([TEXT], SOURCES[number % 3])
        known = live_hash(service)
        for number in range(lessons):
            service.learn([TEXT], SOURCES[number % 3])
        started = time.perf_counter()
        service.rollback(before)
        seconds = time.perf_counter() - started
        return {"lessons": lessons, "seconds": seconds, "bit_exact": live_hash(service) == known}


def throughput(seconds: float = 10.0, streams: int = 8) -> dict[str, Any]:
    """Tokens per second of several texts at once: alone, beside lessons, beside lessons without limits."""
    options = {"limits": Limits(drain=1.0), "rules": Rules(canary_tokens=64, canary_rise=0.1, drift=None)}
    shares = {"alone": None, "learning": Limits().share_on("cpu"), "learning all the time": 1.0}
    found: dict[str, list[float]] = {name: [] for name in shares}
    lessons = Counter[str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(Path(folder), learner(dim=128, patches=64, rank=32), **options) as service,
    ):
        service.learn([TEXT * 4], "a")
        for _ in range(3):
            for name, share in shares.items():
                stop = threading.Event()
                teacher = threading.Thread(target=_teach_until, args=(service, stop, lessons, name))
                if share is not None:
                    service.limits = dataclasses.replace(service.limits, learning_share=share)
                    teacher.start()
                found[name].append(_tokens_per_second(service, seconds / 3, streams))
                stop.set()
                if share is not None:
                    teacher.join()
    rates = {name: statistics.mean(each) for name, each in found.items()}
    return {
        "ratio": rates["learning"] / rates["alone"],
        "streams": streams,
        "lessons": dict(lessons),
        "ratio_without_limits": rates["learning all the time"] / rates["alone"],
    }


def _teach_until(service: Service, stop: threading.Event, lessons: Counter[str], name: str) -> None:
    while not stop.is_set():
        service.learn([TEXT * 4], "a")
        lessons[name] += 1


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
        listening(service) as port,
    ):
        base, end = f"http://127.0.0.1:{port}", time.monotonic() + seconds

        async def all_of_them() -> None:
            streams = [_stream(base, end, found) for _ in range(count)]
            await asyncio.gather(_teach(base, end, found), *streams)

        asyncio.run(all_of_them())
    return {"seconds": seconds, "clients": count, **found}


# --- all of it

PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "kills": kills,
    "kills-of-lessons": partial(kills, kind="lessons"),
    "overhead": overhead,
    "snapshot": snapshot,
    "rollback": rollback,
    "throughput": throughput,
    "clients": clients,
}
KILLS = ("kills", "kills-of-lessons")


def shows(found: dict[str, Any]) -> list[tuple[str, Any, bool]]:
    """What must hold, of the parts that ran: what, figure, whether it does."""
    rows: list[tuple[str, Any, bool]] = []
    for name in KILLS:
        if part := found.get(name):
            wrong = sum(part[what] for what in ("lost", "twice", "unasked", "differs_from_oracle"))
            rows.append((f"{name}: lost or applied twice, states that differ", wrong, wrong == 0))
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
            arguments = (options.kills, options.points) if name in KILLS else ()
            found[name] = PARTS[name](*arguments)
        except Busy as busy:
            raise SystemExit(f"{name}: {busy}") from busy
        print(json.dumps(found[name]))
    rows = shows(found)
    for what, figure, holds in rows:
        print(f"{'holds ' if holds else 'MISSED'}  {what}: {figure:.4g}")
    if options.result:
        rows_shown = [{"what": what, "figure": figure, "holds": holds} for what, figure, holds in rows]
        write_result(options.result, {"experiment": "soak", "seed": 0, **found, "shows": rows_shown})
    return 0 if all(holds for _, _, holds in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
