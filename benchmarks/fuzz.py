"""Damage what we save, and read it: every file that this package writes, in many ways.

    python benchmarks/fuzz.py --minutes 30 --result results/fuzz.json
    python benchmarks/fuzz.py --only lessons --seed 81 --cases 1      # one case again, as the result names it

A reader may give back what was saved, or raise a ValueError or what it documents. Any other exception is a
crash, and so are ten seconds of work for one folder and a gigabyte of memory. Half of the damage is an
accident: a reader that takes it and gives back something else has lost something in silence. The other half
is what a person can do who writes hashes that fit: then any content may be read.
"""

import argparse
import atexit
import contextlib
import hashlib
import json
import logging
import math
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from attractor import GPT, APNConfig, GPTConfig, GuardedLearner, OnlineLearner, tokenizer
from attractor.checkpoint import load_model, read_training, tensors_hash, write_training
from attractor.config import RunConfig
from attractor.continual import state as learner_files
from attractor.continual.config import GuardConfig, LearnConfig, LessonConfig, UpdateConfig
from attractor.continual.delta import Delta
from attractor.continual.overlay import Overlay
from attractor.data import Dataset, prepare
from attractor.files import HASHES, digest_of, sha256_of, write_folder
from attractor.hf import teachable
from attractor.hf.gpt import GPTForCausalLM
from attractor.hf.net import load_retrofit, retrofit
from attractor.results import write_result
from attractor.serve.http.auth import KeyRing, add_key
from attractor.serve.learning.catalogue import pack, unpack
from attractor.serve.store import Change, Store

SECONDS = 10
"""Of work for one folder, before it counts as stuck."""
MOST_BYTES = 1 << 30
SHAPE = GPTConfig(
    vocab_size=256, context=32, num_layers=2, num_heads=2, dim=16, ffn="apn",
    apn=APNConfig(num_patches=8, top_k=2, rank=4),
)  # fmt: skip
TEXT = "the quick brown fox jumps over the lazy dog. "
BACKGROUND = [" ".join(f"plain words about nothing in particular, number {n}" for n in range(200))]
AT = "2026-01-01T00:00:00Z"


THEIRS = (RecursionError, TypeError, StrictDataclassError)
"""Of transformers, which reads the JSON of a folder before it asks us."""


class Stuck(BaseException):
    """No reader may catch this."""


# --- what is saved and read


@dataclass(frozen=True)
class Kind:
    """Something of ours that is saved: `read` gives back words that tell its content."""

    save: Callable[[Path], object]
    read: Callable[[Path], str]
    known: tuple[type[Exception], ...] = (ValueError,)
    is_typed: bool = False
    """Written by people: what a change makes of it is as right as what was there."""


def said(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


@cache
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE).eval()


@cache
def base() -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_attention_heads=4, **shape)).eval()


@contextlib.contextmanager
def retrofitted() -> Iterator[Any]:
    net = retrofit(base(), SHAPE.apn, layers=[1, 2])
    try:
        with torch.no_grad():
            for layer in net.apn_layers().values():
                layer.decoder += 0.1
        yield net
    finally:
        net.unload()


def encode(text: str) -> Any:
    return tokenizer.ByteTokenizer().encode(text)


def save_tokenizer(folder: Path, kind: str, size: int | None) -> None:
    tokenizer.train(kind, TEXT * 20, size).save(folder / "tokenizer.json")


def read_tokenizer(folder: Path) -> str:
    return said(tokenizer.load(folder / "tokenizer.json").to_json())


def save_config(folder: Path) -> None:
    (folder / "run.json").write_text(RunConfig(model=SHAPE).to_json())
    (folder / "learn.json").write_text(LearnConfig().to_json())
    (folder / "guard.json").write_text(GuardConfig().to_json())
    (folder / "lessons.json").write_text(LessonConfig().to_json())


def read_config(folder: Path) -> str:
    kinds = {"run": RunConfig, "learn": LearnConfig, "guard": GuardConfig, "lessons": LessonConfig}
    return said({name: kind.from_json((folder / f"{name}.json").read_text()) for name, kind in kinds.items()})


def read_model(folder: Path) -> str:
    model = GPT.from_pretrained(folder / "model")
    return said(model.config, tensors_hash(model.state_dict()))


def save_checkpoint(folder: Path) -> None:
    model = gpt()

    def fill(partial: Path) -> None:
        model.save_pretrained(partial)
        tokenizer.ByteTokenizer().save(partial / "tokenizer.json")
        progress = {"step": 3, "seconds": 1.5, "best_loss": None, "batches": {"epoch": 0, "position": 3}}
        write_training(partial, {"random.cpu": torch.get_rng_state()[None]}, progress)

    write_folder(folder / "last", fill)


def read_checkpoint(folder: Path) -> str:
    _, model, words = load_model(folder / "last")
    tensors, progress = read_training(folder / "last")
    return said(tensors_hash(model.state_dict()), model.config, repr(words), tensors_hash(tensors), progress)


def save_learner(folder: Path) -> None:
    config = LearnConfig(update=UpdateConfig(learning_rate=1e-2), budget=32)
    learner = OnlineLearner(GPT(SHAPE), tokenizer.ByteTokenizer(), config)
    learner.observe(TEXT * 2, source="fox")
    learner.save(folder / "learner")


def read_learner(folder: Path) -> str:
    learner = OnlineLearner.load(folder / "learner")
    model = tensors_hash(learner.model.state_dict())
    return said(model, tensors_hash(learner_files.tensors_of(learner)), learner_files.fields_of(learner))


def save_guarded(folder: Path) -> None:
    config = GuardConfig(learn=LearnConfig(update=UpdateConfig(learning_rate=1e-2), max_patches=3))
    learner = GuardedLearner(GPT(SHAPE), tokenizer.ByteTokenizer(), config)
    learner.observe(TEXT, source="fox")
    learner.observe(TEXT[::-1], source="law")
    learner.save(folder / "guarded")
    learner.export("fox", folder / "exported")


def read_guarded(folder: Path) -> str:
    learner = GuardedLearner.load(folder / "guarded")
    sources = {}
    for name, held in learner.sources.items():
        overlays = [held.branch.overlay(), *held.versions.values(), Overlay.load(folder / "exported")]
        sources[name] = [
            [(own.base, hashlib.sha256(own.delta.to_bytes()).hexdigest(), own.notes) for own in overlays],
            [held.version, held.tokens, held.last_used, held.usual, held.recent.tolist()],
        ]
    rest = learner.notes, asdict(learner.totals), learner.usual, [x.tolist() for x in learner.unclaimed]
    return said(sources, learner.config, learner.base_hash, *rest, learner.consolidated)


def save_retrofit(folder: Path) -> None:
    with retrofitted() as net:
        net.save_pretrained(folder / "adapter")


def save_trained(folder: Path) -> None:
    with retrofitted() as net:
        save_file(net.state_dict(), folder / "model.safetensors")  # as a Trainer does


def read_retrofit(folder: Path) -> str:
    net = load_retrofit(base(), folder / "adapter" if (folder / "adapter").is_dir() else folder)
    try:
        layers = {str(number): layer for number, layer in net.apn_layers().items()}
        return said({n: [tensors_hash(layer.state_dict()), layer.config] for n, layer in layers.items()})
    finally:
        net.unload()


@cache
def place_of_base(kind: str) -> Path:
    """Where saved retrofits say that their base is."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-base-", dir=memory()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    base().save_pretrained(folder / kind)
    return folder / kind


def save_adapter(folder: Path, kind: str = "whole") -> None:
    net = retrofit(AutoModelForCausalLM.from_pretrained(place_of_base(kind)), SHAPE.apn, layers=[1, 2])
    with torch.no_grad():
        for layer in net.apn_layers().values():
            layer.decoder += 0.1
    net.save_pretrained(folder / "adapter")


def save_with_base(folder: Path) -> None:
    save_adapter(folder, "damaged")
    shutil.copytree(place_of_base("damaged"), folder / "base")


@torch.no_grad()
def read_auto(folder: Path) -> str:
    """By the Auto classes of transformers: the logits are what counts."""
    if (folder / "base").exists():
        shutil.rmtree(place_of_base("damaged"))
        shutil.copytree(folder / "base", place_of_base("damaged"))
    net = AutoModelForCausalLM.from_pretrained(folder / "adapter")
    return said(net(torch.arange(32)[None]).logits.tolist(), net.training)


@cache
def school() -> Any:
    quick = LessonConfig(passes=2, step=8.0, decay=0.02, prototypes=3, contexts=2, after=0, mention=0)
    net, lessons = teachable.teachable(
        base(), encode, BACKGROUND, window=32, config=quick, patches=16, read_from=2, act_at=2
    )
    lessons.learn_many(
        [[(f"I met {name}", answer), (f"Yesterday we saw {name}", answer)] for name, answer in
         (("Zorvan", " cello"), ("Bramald", " honey"))],
        subjects=["Zorvan", "Bramald"],
    )  # fmt: skip
    return net, lessons


def save_lessons(folder: Path) -> None:
    net, lessons = school()
    teachable.save_lessons(net, lessons, folder / "lessons", more={"base.json": '{"source": "somewhere"}'})
    net.unload()
    school.cache_clear()


def read_lessons(folder: Path) -> str:
    net, lessons = teachable.load_lessons(base(), encode, folder / "lessons")
    try:
        beside = folder / "lessons" / "base.json"
        told = lessons.describe(), beside.read_text() if beside.is_file() else "nothing"
        held = tensors_hash(lessons.layer.state_dict()), tensors_hash(lessons.tensors())
        return said(told, held, tensors_hash(vars(lessons.calibration)))
    finally:
        net.unload()


def save_exchange(folder: Path) -> None:
    from attractor.continual.parts import deltas_of

    net, lessons = school()
    deltas = deltas_of(lessons, sorted(lessons.lessons))
    (folder / "lessons.safetensors").write_bytes(pack(deltas.values(), "base", "calibration"))
    net.unload()
    school.cache_clear()


def read_exchange(folder: Path) -> str:
    calibration, deltas = unpack((folder / "lessons.safetensors").read_bytes(), "base")
    return said(calibration, [hashlib.sha256(delta.to_bytes()).hexdigest() for delta in deltas])


def save_store(folder: Path) -> None:
    with Store.open(folder / "store", identity="base") as store:
        for number in range(3):
            row = torch.tensor([number]), torch.full((1, 2), float(number))
            change = Change(
                kind="lesson", answer={"n": number}, source="wiki", target=number, fields={"n": number},
                delta=Delta({"x": row}, {"about": torch.tensor([7])}), key=f"key {number}", content="c",
            )  # fmt: skip
            store.commit_all([change], at=AT)
        store.snapshot()
        store.commit("rollback", {}, at=AT, target=2)


def read_store(folder: Path) -> str:
    with Store.open(folder / "store", identity="base") as store:
        states = [store.state_at(version) for version in range(store.oldest, store.last + 1)]
        kept = {
            f"{state.version}.{number}": (hashlib.sha256(own.delta.to_bytes()).hexdigest(), own.fields)
            for state in states
            for number, own in state.lessons.items()
        }
        return said(kept, store.last, store.next_lesson)


def save_keys(folder: Path) -> None:
    for note in ("one", "two"):
        add_key(folder / "keys.json", ["generate", "learn"], note)


def save_data(folder: Path) -> None:
    (folder / "my.txt").write_text(TEXT * 40)
    prepare(folder / "my.txt", folder / "data")
    (folder / "my.txt").unlink()


def read_data(folder: Path) -> str:
    data = Dataset.open(folder / "data")
    return said(data.meta, data.tokenizer.to_json(), data.train.tolist(), data.val.tolist())


def read_hub(folder: Path) -> str:
    model = GPTForCausalLM.from_pretrained(folder / "hub")
    return said(model.config.gpt, tensors_hash(model.state_dict()))


KINDS = {
    "tokenizer": Kind(lambda folder: save_tokenizer(folder, "char", None), read_tokenizer),
    "bpe tokenizer": Kind(lambda folder: save_tokenizer(folder, "bpe", 300), read_tokenizer),
    "config": Kind(save_config, read_config, (ValueError, OSError), is_typed=True),
    "model": Kind(
        lambda folder: gpt().save_pretrained(folder / "model"),
        read_model,
    ),
    "checkpoint": Kind(save_checkpoint, read_checkpoint),
    "learner": Kind(save_learner, read_learner),
    "guarded": Kind(save_guarded, read_guarded),
    "retrofit": Kind(save_retrofit, read_retrofit),
    "trained retrofit": Kind(save_trained, read_retrofit),
    "auto retrofit": Kind(save_adapter, read_auto, (ValueError, OSError, *THEIRS)),
    "auto retrofit, base too": Kind(save_with_base, read_auto, (ValueError, OSError, *THEIRS)),
    "hub": Kind(lambda folder: GPTForCausalLM.of(gpt()).save_pretrained(folder / "hub"), read_hub,
                (ValueError, OSError)),
    "lessons": Kind(save_lessons, read_lessons),
    "exported lessons": Kind(save_exchange, read_exchange, (ValueError, OSError)),
    "store": Kind(save_store, read_store, (ValueError, OSError)),
    "keys": Kind(
        save_keys, lambda folder: said([asdict(key) for key in KeyRing.load(folder / "keys.json").keys]),
        is_typed=True,
    ),
    "data": Kind(save_data, read_data, is_typed=True),
}  # fmt: skip
"""The texts of `data` are as large as disks, so they are not read as a whole: no hash is checked."""

# --- damage

NASTY: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 0.5, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf),
    *(2**31, 2**53 + 1, 2**63, -(2**63), 2**64, 10**30, 10**400, 10**9, 10**12),
    *("", "1", "x" * 10_000, "\0", "\u00e9\u2028", "../../etc/passwd", "@deep-list@", "@deep-object@"),
    *([], {}, [[]], [0] * 1000, ["a"], {"a": {}}, {"schema_version": 1}),
)
DEEP = 100_000


def damage(folder: Path, chance: random.Random) -> str:
    """Change one file of a folder, and say how."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md")
    if not files:
        return "nothing is left"
    path = files[chance.randrange(len(files))]
    data = path.read_bytes()
    ways = ["truncate", "flip", "flip", "bytes", "insert", "cut", "repeat", "remove", "other"]
    if path.suffix in (".json", ".safetensors"):
        ways += ["json"] * 9
    way = ways[chance.randrange(len(ways))]
    at, end = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
    end = min(end, at + 64)
    if way == "remove":
        path.unlink()
    elif way == "other":  # the bytes of another file
        path.write_bytes(files[chance.randrange(len(files))].read_bytes())
    elif way == "json":
        path.write_bytes(with_json_changed(path, data, chance))
    elif way == "truncate":
        path.write_bytes(data[:at])
    elif way == "flip" and data:
        at = min(at, len(data) - 1)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
    else:
        new = {
            "bytes": bytes(chance.randrange(256) for _ in range(end - at)),
            "insert": bytes(chance.randrange(256) for _ in range(chance.randrange(16))) + data[at:end],
            "repeat": data[at:end] * 2,
        }.get(way, b"")
        path.write_bytes(data[:at] + new + data[end:])
    return f"{way} {path.relative_to(folder)}"


def with_json_changed(path: Path, data: bytes, chance: random.Random) -> bytes:
    """The file with one value of its JSON replaced, removed, added or renamed."""
    header = path.suffix == ".safetensors"
    size = struct.unpack("<Q", data[:8])[0] if header else 0
    try:
        content = json.loads(data[8 : 8 + size] if header else data)
    except (ValueError, RecursionError):
        return data[: len(data) // 2]  # it was damaged before
    places = list(places_in(content))
    holder, key = places[chance.randrange(len(places))] if places else ([content], 0)
    value = NASTY[chance.randrange(len(NASTY))]
    way = chance.randrange(6)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[str(value)[:50]] = holder.pop(key)
    elif way == 2 and isinstance(holder, dict):
        holder["colour"] = value
    elif way == 3 and isinstance(holder, list):
        holder.insert(chance.randrange(len(holder) + 1), value)
    else:
        holder[key] = value
    text = with_depth(json.dumps(content))
    return struct.pack("<Q", len(text)) + text + data[8 + size :] if header else text


def with_depth(text: str) -> bytes:
    """JSON with lists and objects that are nested more deeply than `json` itself would write."""
    text = text.replace('"@deep-list@"', "[" * DEEP + "]" * DEEP)
    return text.replace('"@deep-object@"', '{"a":' * DEEP + "1" + "}" * DEEP).encode()


def places_in(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every value in JSON, as what holds it and its key; of long lists the first and the last."""
    keys = (
        list(content)
        if isinstance(content, dict)
        else range(len(content))
        if isinstance(content, list)
        else ()
    )
    for key in keys if len(keys) < 50 else [*keys[:5], *keys[-5:]]:
        yield content, key
        yield from places_in(content[key])


def make_fit(folder: Path) -> None:
    """Write the hashes that belong to what is there now, as a person would who wants it to be read."""
    from attractor.hf.files import CONFIG, WEIGHTS

    def rewrite(path: Path, change: Callable[[dict[str, Any], Path], object]) -> None:
        with contextlib.suppress(Exception):  # what cannot be parsed stays as it is
            content = json.loads(path.read_text())
            change(content, path.parent)
            path.write_text(json.dumps(content))

    def of_tokenizer(own: dict[str, Any], place: Path) -> None:
        if {"kind", "digest"} <= own.keys():
            own["digest"] = digest_of({name: own[name] for name in own if name != "digest"})

    def of_overlay(own: dict[str, Any], place: Path) -> None:
        own["sha256"] = sha256_of(place / "overlay.safetensors")

    def of_lessons(own: dict[str, Any], place: Path) -> None:
        for name in ("calibration", "contexts"):
            own[name] = tensors_hash(load_file(place / f"{name}.safetensors"))

    def of_folder(own: dict[str, Any], place: Path) -> None:
        own.update({name: sha256_of(place / name) for name in own})

    for pattern, change in (
        ("*.json", of_tokenizer), ("overlay.json", of_overlay), ("lessons.json", of_lessons)
    ):  # fmt: skip
        for path in [*folder.rglob(pattern)]:
            rewrite(path, change)
    for path in folder.rglob(CONFIG):
        with contextlib.suppress(Exception):
            tensors = load_file(path.with_name(WEIGHTS))
            own = json.loads(path.read_text())
            own.pop("digest", None)
            own["tensors"] = tensors_hash(tensors)
            path.write_text(json.dumps({**own, "digest": digest_of(own)}))
            about = {"format": "pt", "base": str(own["base"]["weights"]), "digest": digest_of(own)}
            save_file(tensors, path.with_name(WEIGHTS), about)
    for path in sorted(folder.rglob(HASHES), key=lambda path: -len(path.parts)):
        rewrite(path, of_folder)


# --- one case


@dataclass(frozen=True)
class Outcome:
    kind: str
    seed: int
    fits: bool
    what: str
    verdict: str
    """same, refused, other (it fits, and says something else), LOST, CRASH, STUCK or LARGE."""
    detail: str = ""

    @property
    def is_bad(self) -> bool:
        return self.verdict.isupper()


@cache
def saved(name: str) -> tuple[Path, str]:
    """A folder of this kind, and what it says."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name.replace(' ', '-')}-", dir=memory()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(0)
    KINDS[name].save(folder)
    copy = Path(shutil.copytree(folder, f"{folder}-read"))
    expected = KINDS[name].read(copy)
    shutil.rmtree(copy)
    return folder, expected


def memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def run(name: str, chance: random.Random, seed: int, *, fits: bool) -> Outcome:
    """Damage a folder of this kind, and read it."""
    template, expected = saved(name)
    with tempfile.TemporaryDirectory(dir=memory()) as scratch:
        folder = Path(shutil.copytree(template, f"{scratch}/it"))
        times = 1 + (fits and chance.randrange(4) == 0)  # hashes and what they are of may not go together
        what = " and ".join(damage(folder, chance) for _ in range(times))
        if fits:
            make_fit(folder)
        outcome = Outcome(name, seed, fits, what, "refused")
        kind = KINDS[name]
        try:
            with limited(SECONDS):
                found = kind.read(folder)
        except kind.known as error:
            return replace(outcome, verdict="LARGE", detail=repr(error)[:500]) if is_large(error) else outcome
        except Stuck:
            return replace(outcome, verdict="STUCK", detail=traceback.format_exc()[-1500:])
        except BaseException as error:  # a panic of a library in Rust is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            verdict = "LARGE" if is_large(error) else "CRASH"
            return replace(outcome, verdict=verdict, detail=traceback.format_exc()[-1500:])
        if found == expected:
            return replace(outcome, verdict="same")
        return replace(outcome, verdict="other" if fits or kind.is_typed else "LOST", detail=found)


def is_large(error: BaseException | None) -> bool:
    """Whether memory was refused, also where a reader called that something else."""
    while error is not None:
        if (
            isinstance(error, MemoryError)
            or "allocate memory" in str(error)
            or "not enough memory" in str(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Stuck

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def limit_memory() -> None:
    """A gigabyte more than there is now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_BYTES, resource.RLIM_INFINITY))


def quiet() -> None:
    disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)


# --- many cases


def fuzz(minutes: float, names: list[str], seed: int, cases: int | None) -> dict[str, Any]:
    quiet()
    for name in names:
        saved(name)
    limit_memory()
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    bad: list[Outcome] = []
    slowest, started, number = 0.0, time.process_time(), 0
    with contextlib.suppress(KeyboardInterrupt):  # what was found so far is told
        while time.process_time() - started < 60 * minutes and (cases is None or number < cases):
            for name in names:
                fits = bool((seed + number) % 2)
                before = time.process_time()
                outcome = run(name, random.Random(f"{name} {seed + number}"), seed + number, fits=fits)
                slowest = max(slowest, time.process_time() - before)
                counts[name][("fitting " if fits else "") + outcome.verdict] += 1
                if outcome.is_bad:
                    bad.append(outcome)
                    print(
                        f"{outcome.verdict} {name} {outcome.seed}: {outcome.what}\n{outcome.detail}",
                        flush=True,
                    )
            number += 1
    accidents = [
        Counter({k: n for k, n in own.items() if not k.startswith("fitting")}) for own in counts.values()
    ]
    autos = [own for name, own in zip(names, accidents, strict=True) if KINDS[name].read is read_auto]
    by_auto = {
        "damaged_by_accident": sum(own.total() for own in autos),
        "lost_in_silence": sum(own["LOST"] for own in autos),
    }
    return {
        "cases": sum(own.total() for own in counts.values()),
        "cpu_minutes": (time.process_time() - started) / 60,
        "first_seed": seed,
        "slowest_case_cpu_seconds": slowest,
        "most_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "damaged_by_accident": sum(own.total() for own in accidents),
        "lost_in_silence": sum(own["LOST"] for own in accidents),
        "by_the_auto_classes": by_auto,
        "crashes": sum(own[f"{fit}{verdict}"] for own in counts.values() for fit in ("", "fitting ")
                       for verdict in ("CRASH", "STUCK", "LARGE")),
        "kinds": {name: dict(sorted(own.items())) for name, own in counts.items()},
        "bad": [asdict(outcome) for outcome in bad],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="of CPU time")
    parser.add_argument("--only", choices=KINDS, help="one kind alone")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; even ones are accidents")
    parser.add_argument("--cases", type=int, help="so many of each kind at most")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    names = [options.only] if options.only else list(KINDS)
    found = fuzz(options.minutes, names, options.seed, options.cases)
    print(json.dumps({name: value for name, value in found.items() if name != "bad"}, indent=1))
    if options.result is not None:
        write_result(options.result, found)
    sys.exit(bool(found["bad"]))


if __name__ == "__main__":
    main()
