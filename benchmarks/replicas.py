"""Two servers that share a store are taught in turn while either is killed; both must know each lesson, once.

    python benchmarks/replicas.py --result results/replicas.json     # 500 lessons, about five minutes

A client teaches one lesson after the other, each to the next of two processes; where one was killed before
it answered, the other one is sent the same key. Both write texts meanwhile. After a random while, or when a
lesson is durable and not answered yet, `kill -9` meets one of them, and it is started again. At the end an
oracle with nothing of ours reads the records, and both servers are asked about every subject.

`known_elsewhere_s` is the time from the moment at which a lesson was durable to the one at which the readers
of the other server had it, where that one ran all the while and was not taught the next lesson: one that is
to learn something itself looks at once.
"""

import argparse
import json
import math
import multiprocessing
import multiprocessing.connection
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crashes import Taught, hash_of_text, oracle

from attractor.continual.config import LessonConfig
from attractor.results import write_result
from attractor.serve.config import Limits, Rules
from attractor.serve.decode.engine import Job
from attractor.serve.learning import canaries
from attractor.serve.learning.catalogue import Asked
from attractor.serve.service import Service
from attractor.serve.store import verify
from attractor.serve.store.store import Store
from attractor.tokenizer import ByteTokenizer

FIRST = ("Zorvan", "Ilse", "Otto", "Mira", "Yusuf", "Anneke", "Tarn", "Bohdan", "Quill", "Eskil")
LIMITS = Limits(drain=1.0)
PAUSE_AFTER, PAUSE_S = 4, 0.5
"""After so many lessons the client is silent for a while, in which the other server follows by itself."""


def subject(number: int) -> str:
    """A name that no other lesson has."""
    return f"{FIRST[number % len(FIRST)]} {hash_of_text(str(number))[:5]}"


def answer(number: int) -> str:
    return "!?."[number % 3]


def school() -> Any:
    """A tiny Llama with random weights, which learns most of what it is taught."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from attractor.hf.teachable import teachable

    shape = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    torch.manual_seed(0)
    config = LessonConfig(passes=10, step=8.0, decay=0.02, prototypes=2, contexts=2, after=0, mention=0)
    plain = " ".join(f"plain words about nothing in particular, number {n}" for n in range(200))
    options: dict[str, Any] = {"config": config, "patches": 32, "read_from": 2, "act_at": 2}
    return teachable(LlamaForCausalLM(shape).eval(), ByteTokenizer().encode, [plain], window=32, **options)


class Shared(Taught):
    """A server that shares its folder."""

    def __init__(self) -> None:
        super().__init__(school())

    def open(self, folder: Path) -> Service:
        canaries.PROMPTS = ("Hello",)
        rules = Rules(canary_tokens=4, canary_rise=1e9)
        return Service.open_lessons(
            *self.school, ByteTokenizer(), folder, context=128, rules=rules, limits=LIMITS, shared=True
        )


def server(kind: Shared, folder: Path, line: Connection) -> None:
    """Teach what is sent, and tell when anything is durable, in use, or answered."""
    torch.set_num_threads(1)
    lock, commit_all = threading.Lock(), Store.commit_all

    def tell(what: str, *about: Any) -> None:
        with lock:
            line.send((what, *about))

    def commit(self: Store, *given: Any, **options: Any) -> int:
        version = commit_all(self, *given, **options)
        tell("durable", version, time.monotonic())
        return version

    Store.commit_all = commit  # type: ignore[method-assign]
    service = kind.open(folder)
    publish = service.teacher.publish

    def show(publication: Any) -> None:
        publish(publication)
        tell("in use", publication.version, time.monotonic())

    service.teacher.publish = show
    tell("in use", service.version, time.monotonic())
    tell("open")

    ending = threading.Event()

    def write() -> None:
        while not ending.wait(0.1):
            for _ in service.submit(Job(prompt=[65, 66], max_tokens=40)):
                pass

    writing = threading.Thread(target=write)
    writing.start()
    while (asking := line.recv())[0] == "teach":
        _, number, key = asking
        forms = tuple(
            (f"{words} {subject(number)}", answer(number)) for words in ("I met", "Yesterday we saw")
        )
        told = service.learn([Asked(forms, subject(number))], "people", key, require_known=False)
        tell("answered", key, told["version"], told["repeated"])
    says = {}
    for number in range(asking[1]):
        job = Job(prompt=list(f"I met {subject(number)}".encode()), max_tokens=1, temperature=0)
        says[number] = chr(next(iter(service.submit(job))).token)
    ending.set()
    writing.join()
    tell("knows", service.version, kind.live(service), says)
    service.close()


class Replica:
    """A process with a server, which can be killed and is then started again."""

    def __init__(self, kind: Shared, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.lives: list[dict[int, float]] = []  # in each, the versions that came into use, and when
        self.starts: list[float] = []
        self.start()

    def start(self) -> None:
        fork = multiprocessing.get_context(
            "fork"
        )  # nothing here has threads, and importing torch takes seconds
        self.line, theirs = fork.Pipe()
        self.process = fork.Process(target=server, args=(self.kind, self.folder, theirs))
        self.process.start()
        theirs.close()
        self.lives.append({})
        self.is_open, self.since = False, time.monotonic()

    def kill(self) -> None:
        """What it told and nobody has read yet is lost, as with a connection that breaks."""
        self.process.kill()
        self.process.join()
        self.line.close()

    def hear(self) -> tuple[Any, ...]:
        what, *about = self.line.recv()
        if what == "open":
            self.is_open = True
            self.starts.append(time.monotonic() - self.since)
        elif what == "in use":
            self.lives[-1].setdefault(*about)
        return what, *about

    def seconds_until(self, version: int, since: float) -> float | None:
        """From a time at which it ran until it had a version; None if it was killed first, or did not run."""
        life = next((life for life in reversed(self.lives) if life and min(life.values()) <= since), {})
        had = [at for number, at in life.items() if number >= version]
        return max(0.0, min(had) - since) if had else None


class Client:
    """Teaches each lesson to the next one of two, and kills one of them about every so many seconds."""

    def __init__(self, replicas: list[Replica], every: float, chance: random.Random) -> None:
        self.replicas, self.every, self.chance = replicas, every, chance
        self.done: dict[str, int] = {}
        self.durable: dict[int, tuple[Replica, float]] = {}
        self.followed: list[int] = []  # versions after which it was silent
        self.seconds: list[float] = []
        self.kills = Counter[str]()
        self.repeated = 0
        self.asked_of: Replica | None = None
        self.asked_at = self.silent_until = time.monotonic()
        self._plan()

    def _plan(self) -> None:
        """The next kill: at any time, soon after this one, or between a commit and its answer."""
        kind, now = self.chance.random(), time.monotonic()
        self.kill_durable = kind < 0.2
        most = math.inf if kind < 0.2 else 0.3 if kind < 0.4 else 2 * self.every
        self.kill_at = math.inf if self.kill_durable else now + self.chance.uniform(0, most)

    def _kill(self, victim: Replica, doing: str | None = None) -> None:
        at_work = "learning" if victim is self.asked_of else "following" if victim.is_open else "starting"
        self.kills[doing or at_work] += 1
        victim.kill()
        if victim is self.asked_of:
            self.asked_of = None
        victim.start()
        self._plan()

    def teach(self, lessons: int) -> None:
        while len(self.done) < lessons:
            self._ask()
            until = self.kill_at if self.asked_of else min(self.kill_at, self.silent_until)
            left = max(0.0, min(until - time.monotonic(), 1.0))
            lines = {replica.line: replica for replica in self.replicas}
            for line in multiprocessing.connection.wait(list(lines), left):
                self._hear(lines[line])  # type: ignore[index]
            if time.monotonic() >= self.kill_at:
                self._kill(self.chance.choice(self.replicas))
            print(f"\r{len(self.done)} lessons, {self.kills.total()} kills", end="", file=sys.stderr)
        print(file=sys.stderr)

    def _ask(self) -> None:
        number = len(self.done)
        ready = [each for each in (self.replicas[number % 2], *self.replicas) if each.is_open]
        if self.asked_of is None and ready and time.monotonic() >= self.silent_until:
            self.asked_of, self.asked_at = ready[0], time.monotonic()
            self.asked_of.line.send(("teach", number, str(number)))

    def _hear(self, replica: Replica) -> None:
        what, *about = replica.hear()
        if what == "durable":
            self.durable[about[0]] = (replica, about[1])
            if self.kill_durable and replica is self.asked_of:
                self._kill(replica, "durable, not answered")
        elif what == "answered":
            key, version, repeated = about
            self.done[key], self.asked_of = version, None
            self.repeated += repeated
            self.seconds.append(time.monotonic() - self.asked_at)
            if len(self.done) % PAUSE_AFTER == 0:
                self.silent_until = time.monotonic() + PAUSE_S
                if version in self.durable:  # else who told was killed meanwhile
                    self.followed.append(version)

    def waited(self) -> list[float]:
        """How long it took the other server to know a lesson, where the client was silent."""
        found = [
            other.seconds_until(version, self.durable[version][1])
            for version in self.followed
            for other in self.replicas
            if other is not self.durable[version][0]
        ]
        return [seconds for seconds in found if seconds is not None]


def known_by(replica: Replica, lessons: int, last: int) -> tuple[Any, ...]:
    """What it knows in the end, once it has the newest version: its live lessons, and what it says."""
    while not (replica.is_open and last in replica.lives[-1]):
        replica.hear()
    replica.line.send(("tell", lessons))
    while (told := replica.hear())[0] != "knows":
        pass
    replica.process.join()
    return told


def replicas(lessons: int = 500, every: float = 4.0, seed: int = 0) -> dict[str, Any]:
    torch.set_num_threads(1)
    kind, began = Shared(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        both = [Replica(kind, Path(folder)), Replica(kind, Path(folder))]
        client = Client(both, every, random.Random(seed))
        client.teach(lessons)
        last = oracle(Path(folder), kind)[2]
        told = [known_by(each, lessons, last) for each in both]
        state, keys, _ = oracle(Path(folder), kind)
        damage = verify(folder).damage
    said = [says for *_, says in told]
    return {
        "lessons": lessons,
        "kills": dict(sorted(client.kills.items())),
        "answered_again_to_a_key": client.repeated,
        "lost": sum(keys.get(key) != [version] for key, version in client.done.items()),
        "twice": sum(len(versions) > 1 for versions in keys.values()),
        "lessons_in_the_end": len(state),
        "replicas_that_differ_from_oracle": sum(live != state for _, _, live, _ in told),
        "damage": len(damage),
        "answers_that_differ": sum(
            one != other for one, other in zip(*(s.values() for s in said), strict=True)
        ),
        "answers_as_taught": [sum(says[n] == answer(n) for n in range(lessons)) for says in said],
        "known_elsewhere_s": spread(client.waited()),
        "lesson_s": spread(client.seconds),
        "start_s": spread([seconds for each in both for seconds in each.starts]),
        "follow_s": LIMITS.follow,
        "seconds": time.monotonic() - began,
    }


def spread(seconds: list[float]) -> dict[str, float]:
    return {
        "count": len(seconds),
        "median": float(np.median(seconds)),
        "p99": float(np.percentile(seconds, 99)),
        "most": max(seconds),
    }


def holds(found: dict[str, Any]) -> bool:
    wrong = ("lost", "twice", "replicas_that_differ_from_oracle", "damage", "answers_that_differ")
    return found["lessons_in_the_end"] == found["lessons"] and not any(found[name] for name in wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lessons", type=int, default=500)
    parser.add_argument("--every", type=float, default=4.0, help="seconds from a kill to the next, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    found = replicas(options.lessons, options.every, options.seed)
    print(json.dumps(found))
    if options.result:
        write_result(options.result, {"experiment": "replicas", "seed": options.seed, **found})
    return 0 if holds(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
