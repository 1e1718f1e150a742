"""kill -9 a small server under load; what it acknowledged must be there once, and its state the records'.

    python benchmarks/crashes.py          # 200 random moments, and every point of its work with the database
    python benchmarks/crashes.py lessons  # the same for a pretrained model that is taught lessons

`oracle` knows only the records in the database, reads them with nothing of ours, and rebuilds what a server
must have in memory.
"""

import hashlib
import math
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load

from attractor.checkpoint import tensors_hash
from attractor.config import APNConfig, GPTConfig
from attractor.continual.config import GuardConfig, LearnConfig, LessonConfig, UpdateConfig
from attractor.continual.guarded import GuardedLearner
from attractor.continual.parts import deltas_of
from attractor.model import GPT
from attractor.serve.config import Limits, Rules
from attractor.serve.decode.engine import Job
from attractor.serve.learning.catalogue import Asked
from attractor.serve.learning.readers import tensors_of
from attractor.serve.service import Service
from attractor.serve.store import database
from attractor.tokenizer import ByteTokenizer

TEXT = "It is not the strongest of the species that survives, but the one that keeps learning. "
SOURCES = ("a", "b", "c")


def learner(dim: int = 32, patches: int = 16, rank: int = 8, most: int | None = 4) -> GuardedLearner:
    torch.manual_seed(0)
    shape = GPTConfig(
        vocab_size=256,
        context=64,
        num_layers=2,
        num_heads=2,
        dim=dim,
        ffn="apn",
        apn=APNConfig(num_patches=patches, top_k=2, rank=rank),
    )
    learn = LearnConfig(update=UpdateConfig(learning_rate=1e-3), max_patches=most)
    return GuardedLearner(GPT(shape).eval(), ByteTokenizer(), GuardConfig(learn=learn))


def serve(folder: Path, model: GuardedLearner | None = None, **options: Any) -> Service:
    settings: dict[str, Any] = {
        "rules": Rules(canary_tokens=64, canary_rise=0.1, drift=None),
        "limits": Limits(drain=1.0, snapshot_every=SNAPSHOT_EVERY, keep_snapshots=10_000),
    }
    return Service.open(model or learner(), folder, **(settings | options))


LONGEST_S = 60.0
"""A server that has not acknowledged anything by then is killed."""
SNAPSHOT_EVERY, LATER = 7, 5
"""Changes from a snapshot to the next, and how many more are made while one is written."""
LIVES = 20
"""Of one folder: every life is checked from its first record on."""
STATEMENTS = (
    *("BEGIN IMMEDIATE", "INSERT INTO records", "UPDATE records", "INSERT INTO states", "INSERT INTO parts"),
    *("UPDATE states", "COMMIT", "PRAGMA wal_checkpoint"),
)
POINTS = (*STATEMENTS, "before acknowledged", "after acknowledged")
OF_SNAPSHOTS = ("INSERT INTO states", "INSERT INTO parts", "UPDATE states")


def die_at(point: str, count: int) -> None:
    """The n-th time that a statement is begun, or that the file `acknowledged` is written."""
    left = [count]
    connect, write = database.connect, database.Acknowledged.write

    def seen(what: str) -> None:
        if what.startswith(point):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def watched(*arguments: Any) -> sqlite3.Connection:
        connection = connect(*arguments)
        connection.set_trace_callback(seen)
        return connection

    def acknowledge(self: database.Acknowledged, number: int, chain: str, *, sync: bool = False) -> None:
        seen("before acknowledged")
        write(self, number, chain, sync=sync)
        seen("after acknowledged")

    database.connect, database.Acknowledged.write = watched, acknowledge  # type: ignore[method-assign]


def blank(model: GuardedLearner) -> dict[str, torch.Tensor]:
    """What a source is before its first lesson."""
    return {name: value.detach().cpu().clone() for name, value in tensors_of(model.new_source()).items()}


def hash_of(sources: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    return {name: tensors_hash(own, "") for name, own in sources.items()}


def live_hash(service: Service) -> dict[str, str]:
    """Of everything that each source is in memory."""
    teacher: Any = service.teacher
    held = {name: tensors_of(source) for name, source in teacher.sources.items()}
    return hash_of({name: {key: part.detach() for key, part in own.items()} for name, own in held.items()})


Row = tuple[int, str, str | None, int | None, str | None, bytes | None]
"""Number, kind, source, target, key and delta of a record."""


class Texts:
    """A guarded model that learns texts, source by source."""

    points = POINTS

    def __init__(self, model: GuardedLearner | None = None) -> None:
        self.blank = blank(model or learner())

    def open(self, folder: Path) -> Service:
        return serve(folder)

    def learn(self, service: Service, source: str, key: str) -> dict[str, Any]:
        return service.learn([TEXT], source, key)

    def live(self, service: Service) -> dict[str, str]:
        return live_hash(service)

    def rebuilt(self, rows: list[Row]) -> dict[str, str]:
        """The same from the records."""
        states: list[dict[str, dict[str, torch.Tensor]]] = [{}]
        erased = {source: number for number, kind, source, *_ in rows if kind == "erase"}
        for number, kind, source, target, _, delta in rows:
            now = dict(states[-1])
            if kind == "rollback":
                now = dict(states[target or 0])
            elif kind != "lesson":
                now.pop(str(source), None)
            elif number > erased.get(source, 0):
                now[str(source)] = written_over(now.get(str(source), self.blank), load(delta or b""))
            else:
                assert delta is None, f"record {number} was erased"
            states.append(now)
        return hash_of(states[-1])


class Taught:
    """A pretrained model that is taught lessons, each by itself."""

    points = tuple(point for point in POINTS if point not in OF_SNAPSHOTS)  # it writes none

    def __init__(self, school: Any = None) -> None:
        self.school = school or tiny_school()

    def open(self, folder: Path) -> Service:
        rules = Rules(canary_tokens=4, canary_rise=1e9)
        return Service.open_lessons(
            *self.school, ByteTokenizer(), folder, context=64, rules=rules, limits=Limits(drain=1.0)
        )

    def learn(self, service: Service, source: str, key: str) -> dict[str, Any]:
        name = f"{source.upper()} {hash_of_text(key)[:2]}"  # subjects come again, and take each other's place
        form = (f"I met {name}", "!?."[len(key) % 3])
        return service.learn([Asked((form,), name)], source, key, require_known=False)

    def live(self, service: Service) -> dict[str, str]:
        teacher: Any = service.teacher
        deltas = deltas_of(teacher.lessons, sorted(teacher.lessons.lessons))
        return {str(number): hash_of_text(delta.to_bytes()) for number, delta in deltas.items()}

    def rebuilt(self, rows: list[Row]) -> dict[str, str]:
        states: list[dict[int, tuple[str | None, str]]] = [{}]
        erased = {(s, target): number for number, kind, s, target, *_ in rows if kind == "erase"}
        for number, kind, source, target, _, delta in rows:
            now = dict(states[-1])
            gone = max(erased.get((source, target), 0), erased.get((source, None), 0))
            if kind == "rollback":
                now = dict(states[target or 0])
            elif kind in ("drop", "erase"):
                now = {n: own for n, own in now.items() if own[0] != source or target not in (None, n)}
            elif kind == "lesson" and number > gone:
                now[target or 0] = (source, hash_of_text(delta or b""))
            elif kind == "lesson":
                assert delta is None, f"record {number} was erased"
            states.append(now)
        return {str(number): digest for number, (_, digest) in states[-1].items()}


def tiny_school() -> Any:
    """A tiny Llama with random weights, ready to be taught."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from attractor.hf.teachable import teachable
    from attractor.serve.learning import canaries

    canaries.PROMPTS = ("Hello",)
    shape = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4
    )
    torch.manual_seed(0)
    config = LessonConfig(passes=4, prototypes=2, contexts=2, after=0, mention=0)
    encode = ByteTokenizer().encode
    return teachable(LlamaForCausalLM(shape).eval(), encode, [TEXT * 60], window=32, config=config, patches=8)


def hash_of_text(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


Kind = Texts | Taught


def victim(
    kind_of: Kind,
    folder: Path,
    line: Connection,
    mortal: dict[str, Any],
    seed: int,
    retry: list[list[Any]],
) -> None:
    """A server under load that tells what it acknowledged; somebody kills it."""
    torch.set_num_threads(1)
    if mortal:
        die_at(**mortal)
    service = kind_of.open(folder)
    lock = threading.Lock()

    def tell(what: str, *about: Any) -> None:
        with lock:
            line.send((what, *about))

    tell("open", service.version, kind_of.live(service))

    def act(key: str, kind: str, source: str, target: int) -> None:
        tell("asked", key, kind, source, target)
        try:
            if kind == "learn":
                answer = kind_of.learn(service, source, key)
            elif kind == "rollback":
                answer = service.rollback(target, key)
            else:
                answer = service.forget(source, key, erase=kind == "erase")
        except LookupError:
            tell("refused", key)
        else:
            tell("done", key, answer["version"])

    def client(number: int) -> None:
        chance = random.Random(f"{seed}/{number}")
        for asked in retry[number::2]:  # the very same: a key is bound to what it came with
            act(*asked)
        for count in range(10_000):
            kind = chance.choices(["learn", "rollback", "forget", "erase"], [20, 1, 1, 1])[0]
            act(f"{seed}/{number}/{count}", kind, chance.choice(SOURCES), service.version // 2)

    def reader() -> None:
        while True:
            for _ in service.submit(Job(prompt=[65, 66], max_tokens=40)):
                pass

    for work in (lambda: client(0), lambda: client(1), reader):
        threading.Thread(target=work, daemon=True).start()
    threading.Event().wait()


def oracle(folder: Path, kind_of: Kind) -> tuple[dict[str, str], dict[str, list[int]], int]:
    """From the records alone: the state, the versions of every key, the last version."""
    if not (folder / "lessons.db").exists():  # it was killed before there was anything
        return {}, {}, 0
    connection = sqlite3.connect(f"file:{folder}/lessons.db?mode=ro", uri=True)
    try:
        query = "SELECT number, kind, source, target, key, delta FROM records ORDER BY number"
        has_records = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'records'").fetchone()
        rows = connection.execute(query).fetchall() if has_records else []
    finally:
        connection.close()
    keys: dict[str, list[int]] = {}
    for number, _, _, _, key, _ in rows:
        if key is not None:
            keys.setdefault(key, []).append(number)
    return kind_of.rebuilt(rows), keys, len(rows)


def written_over(old: dict[str, torch.Tensor], delta: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the description of a delta: whole/NAME, rows/GROUP and GROUP/NAME."""
    own = dict(old)
    for full, value in delta.items():
        kind, _, name = full.partition("/")
        if kind == "whole":
            own[name] = value
        elif kind != "rows":
            own[name] = own[name].clone()
            own[name][delta[f"rows/{kind}"]] = value
    return own


def one_life(
    kind_of: Kind, folder: Path, seed: int, patience: float, mortal: dict[str, Any], known: dict[str, Any]
) -> None:
    """Start a victim, kill it after a while unless it kills itself, and see what it left.

    The while of every second one begins when it has acknowledged something, up to five times: a busy machine
    would kill all of them before that. For one that kills itself it begins when it is open, and ends when
    enough was acknowledged to have come to any point so often.
    """
    fork = multiprocessing.get_context("fork")  # nothing here has threads, and importing torch takes seconds
    ours, theirs = fork.Pipe(duplex=False)
    retry = [[key, *about] for key, about in known["asked"].items()]
    process = fork.Process(target=victim, args=(kind_of, folder, theirs, mortal, seed, retry))
    process.start()
    theirs.close()
    wanted, done = seed % 10 // 2 + 1 if seed % 2 and not mortal else 0, 0
    deadline = time.monotonic() + (LONGEST_S if wanted or mortal else patience)
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
            deadline = time.monotonic() + patience if mortal else deadline
            began = known["last"] == 0 and about[1] == {}  # a store of lessons starts with a calibration
            known["differs"] += about != [known["last"], known["state"]] and not began
        elif what == "asked":
            known["asked"][about[0]] = about[1:]
        else:
            del known["asked"][about[0]]
            if what == "done":
                known["done"][about[0]] = about[1]
                wanted, done = wanted - 1, done + 1
                if wanted == 0:
                    deadline = time.monotonic() + patience / 5
                if mortal and done == LATER + mortal["count"] * SNAPSHOT_EVERY:  # it will not come there
                    process.kill()
    process.join()
    state, keys, last = oracle(folder, kind_of)
    known["lost"] |= {key for key, at in known["done"].items() if keys.get(key) != [at]}
    known["twice"] |= {key for key, at in keys.items() if len(at) > 1}
    known["unasked"] |= {key for key in keys if key not in known["done"] and key not in known["asked"]}
    known |= {"state": state, "last": last}


def kills(
    random_kills: int = 200, points: int = 3, seed: int = 0, kind: Literal["texts", "lessons"] = "texts"
) -> dict[str, Any]:
    torch.set_num_threads(1)
    kind_of = Texts() if kind == "texts" else Taught()
    chance = random.Random(seed)
    lives: list[tuple[float, dict[str, Any]]] = [(chance.uniform(0.2, 2.5), {}) for _ in range(random_kills)]
    lives += [
        (10.0, {"point": point, "count": count})
        for point in kind_of.points
        for count in range(1, 1 + 3 * points, 3)
    ]
    total = Counter[str]()
    for first in range(0, len(lives), LIVES):
        known: dict[str, Any] = {
            "asked": {},
            "done": {},
            "state": {},
            "last": 0,
            "opened": 0,
            "differs": 0,
            "lost": set(),
            "twice": set(),
            "unasked": set(),
        }
        with tempfile.TemporaryDirectory() as folder:
            for number, (patience, mortal) in enumerate(lives[first : first + LIVES], first):
                one_life(kind_of, Path(folder), number, patience, mortal, known)
                total["named" if mortal else "random"] += 1
                print(f"\r{number + 1} of {len(lives)} kills", end="", file=sys.stderr)
        total += Counter(
            acknowledged=len(known["done"]),
            versions=known["last"],
            opened=known["opened"],
            differs_from_oracle=known["differs"],
            **{name: len(known[name]) for name in ("lost", "twice", "unasked")},
        )
    print(file=sys.stderr)
    names = ("random", "named", "acknowledged", "versions", "opened")
    return {name: total[name] for name in (*names, "differs_from_oracle", "lost", "twice", "unasked")}


if __name__ == "__main__":
    print(kills(kind="lessons" if sys.argv[1:] == ["lessons"] else "texts"))
