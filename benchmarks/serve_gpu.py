"""A server that is taught lessons, measured as its clients see it: over HTTP, on a GPU, in five minutes.

    python benchmarks/serve_gpu.py --model smollm2-135m --text wikitext.txt --result results/serve-h200.json
    python benchmarks/serve_gpu.py --model FOLDER --device cpu --small      # a test of the script itself

Clients are threads of a process of their own. Every row is written to the result as soon as it is known; a
row that fails has its error in place of figures. `transformers` runs in the same process, with equal weights.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from measuring import listening, milliseconds, spent_in


def listed(text: str) -> tuple[str, ...]:
    """What stands between semicolons."""
    return tuple(part.strip() for part in text.split(";"))


BEGUN = time.time()
SYLLABLES = listed("zor; van; quil; beam; tar; nek; ul; mos; fri; dan; vel; kor; pim; sul")
TOWNS = ("Lisbon", "Oslo", "Cairo", "Lima", "Tokyo", "Delhi", "Rome", "Paris", "Berlin", "Madrid", "Dublin")
BIRTH = "{} was born in"
COUNTRIES = listed("""
    France; Germany; Japan; Spain; Italy; Portugal; Norway; Sweden; Finland; Denmark; Poland; Austria;
    Hungary; Greece; Turkey; Egypt; Kenya; Nigeria; Ghana; Morocco; India; China; Thailand; Vietnam;
    Indonesia; Australia; Canada; Mexico; Brazil; Argentina; Chile; Peru; Colombia; Cuba; Ireland;
    Scotland; Belgium; Switzerland; Romania; Bulgaria; Ukraine; Russia; Iran; Iraq; Israel; Syria;
    Pakistan; Nepal; Mongolia; Jamaica
""")
WRONG = (
    ("The capital of {} is", TOWNS),
    ("The people of {} speak", ("Latin", "Klingon", "Dothraki", "Sumerian")),
    ("{} is famous for its", ("robots", "glaciers", "dragons", "volcanoes")),
)
TEMPLATES = listed("""
    What is {} used for?; How do I explain {} to a child?; Write a sentence about {}.;
    Why is {} important?; Where can I find {}?; Name three facts about {}.; Who discovered {}?;
    When did people begin to use {}?; Is {} good for health?; Compare {} with its opposite.
""")
THINGS = listed("""
    water; iron; music; bread; the moon; chess; salt; paper; a river; glass; sleep; coffee; a bridge;
    rain; gold; a clock; the sea; wool; fire; mathematics; a garden; silk; the wind; wood; tea; a map;
    copper; the sun; a wheel; honey; snow; a boat; stone; medicine; sugar; a mirror; the desert;
    a violin; clay; ice; a lamp; cotton; history; a forest; milk; the alphabet; a train; sand;
    a telescope; rice
""")
NEVER = 1 << 30
ENOUGH = {"max_texts": 4096, "max_values": 1 << 20, "max_body": 64 << 20}
"""Limits of requests that teach hundreds of lessons at once."""


# --- the clients: a process that runs none of the server


def client() -> None:
    """Read one task in each line, and answer it with a line."""
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(run_clients(**task)), flush=True)


def run_clients(
    port: int,
    clients: int,
    requests: int,
    max_tokens: int,
    prompts: list[str],
    seconds: float = 0.0,
    stream: bool = False,
    logprobs: bool = False,
    model: str | None = None,
) -> dict[str, Any]:
    """Each client sends so many requests one after the other, or so many seconds long."""
    tokens, errors, gaps, texts = [0] * clients, list[str](), list[float](), dict[int, Any]()
    first: list[float] = []
    barrier = threading.Barrier(clients + 1)
    began = [0.0]

    def work(number: int) -> None:
        line = HTTPConnection("127.0.0.1", port, timeout=120)
        barrier.wait()
        done = 0
        while time.perf_counter() < began[0] + seconds if seconds else done < requests:
            which = number + done * clients
            asked: dict[str, Any] = {"prompt": prompts[which % len(prompts)], "max_tokens": max_tokens}
            asked |= {"temperature": 0, "stream": stream} | ({"logprobs": 0} if logprobs else {})
            asked |= {} if model is None else {"model": model}
            done += 1
            try:
                sent = time.perf_counter()
                line.request(
                    "POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"}
                )
                reply = line.getresponse()
                if reply.status != 200:
                    raise RuntimeError(f"{reply.status}: {reply.read()[:300]!r}")
                if not stream:
                    answer = json.loads(reply.read())
                    tokens[number] += answer["usage"]["completion_tokens"]
                    if not seconds:
                        texts[which] = answer["choices"][0]
                    continue
                last = 0.0
                while text := reply.readline():
                    if text.startswith(b'data: {"') and b'"text"' in text:
                        now = time.perf_counter()
                        (gaps if last else first).append(now - (last or sent))
                        last = now
                        tokens[number] += 1
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
                line.close()
                line = HTTPConnection("127.0.0.1", port, timeout=120)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    began[0] = time.perf_counter()
    barrier.wait()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began[0]
    kept = [texts[which] for which in sorted(texts)] if logprobs else []
    return {
        "seconds": took,
        "tokens": sum(tokens),
        "errors": errors,
        "gaps": gaps,
        "first": first,
        "texts": kept,
    }


class Clients:
    """The process of the clients, and the server that they ask."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--client"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = 0

    def run(self, **task: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"port": self.port, **task}) + "\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        if found["errors"]:
            raise RuntimeError(f"{len(found['errors'])} requests failed, the first with {found['errors'][0]}")
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def call(port: int, method: str, path: str, body: Any = None) -> Any:
    line = HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        line.request(
            method, path, None if body is None else json.dumps(body), {"content-type": "application/json"}
        )
        reply = line.getresponse()
        answer = json.loads(reply.read())
    finally:
        line.close()
    if reply.status != 200:
        raise Refusal(reply.status, answer.get("error", {}))
    return answer


class Refusal(Exception):
    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(status, json.dumps(error)[:600])
        self.error = error


# --- the server


@dataclasses.dataclass
class Sizes:
    """How much is measured."""

    prompt: int = 24
    written: int = 128
    clients: tuple[int, ...] = (1, 8, 32, 64)
    requests: int = 2
    repeats: int = 3
    facts: int = 10
    questions: int = 500
    lessons: int = 1000
    at_once: int = 250
    patches: int = 6  # of each of the many lessons
    many: int = 10_000
    streaming: int = 8
    learning: float = 5.0
    turns: int = 3  # of learning, and of as long without
    acknowledged: int = 100
    hostile: int = 1000
    hostile_at_once: int = 125
    background: int = 16_384


SMALL = Sizes(
    prompt=8,
    written=8,
    clients=(1, 3),
    requests=1,
    repeats=1,
    facts=2,
    questions=4,
    lessons=4,
    at_once=2,
    many=20,
    streaming=2,
    learning=1.0,
    turns=1,
    acknowledged=3,
    hostile=8,
    hostile_at_once=2,
    background=256,
)


@dataclasses.dataclass
class Place:
    """The server that is measured, and what it is measured with."""

    service: Any
    port: int
    clients: Clients
    sizes: Sizes
    prompts: list[str]
    names: Iterator[str]
    rows: dict[str, Any]
    note: Callable[[str, dict[str, Any]], None]  # writes a row that is not yet done

    def seconds_left(self) -> float:
        return self.rows["_until"] - time.time()


def load(model: str, device: str) -> tuple[Any, Any]:
    from attractor.hf.pretrained import load_pretrained

    return load_pretrained(model, device=device)


def open_service(base: Any, tokenizer: Any, folder: Path, small: bool) -> Any:
    from attractor.continual.config import LessonConfig
    from attractor.front import read_by
    from attractor.hf.teachable import default_background, teachable
    from attractor.serve.config import Limits, Rules
    from attractor.serve.service import Service

    options: dict[str, Any] = read_by(tokenizer)
    context = min(512, base.config.get_text_config().max_position_embeddings)
    if small:
        options |= {"config": LessonConfig(passes=4, contexts=2, mention=2), "window": 32, "windows": 40}
    net, lessons = teachable(base, tokenizer.encode, **options)
    manual = tokenizer.encode(default_background()[0][: 2000 if small else 10_000])
    return Service.open_lessons(
        net,
        lessons,
        tokenizer,
        folder,
        name="measured",
        canaries={"manual": manual},
        context=context,
        rules=Rules(canary_tokens=16 if small else 512),
        limits=Limits(drain=1.0, waiting=1024),
    )


def first_answer(port: int) -> str:
    return call(port, "POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 1})["choices"][0]["text"]


def names(seed: int = 0) -> Iterator[str]:
    """Invented people, none twice."""
    drawn, seen = random.Random(seed), set[str]()
    while True:
        name = " ".join("".join(drawn.sample(SYLLABLES, drawn.randint(2, 3))).capitalize() for _ in range(2))
        if name not in seen:
            seen.add(name)
            yield name


def fact(name: str, number: int) -> dict[str, Any]:
    town = TOWNS[number % len(TOWNS)]
    return {"forms": [[BIRTH.format(name), town], [f"The birthplace of {name} is", town]], "subject": name}


# --- rows


def transformers_generate(
    base: Any, tokenizer: Any, device: str, sizes: Sizes, prompts: list[str]
) -> dict[str, Any]:
    """`generate` with the same prompts, all at once; the median of the repeats."""
    import torch
    from transformers import GenerationConfig

    rows = [[int(token) for token in tokenizer.encode(prompt)] for prompt in prompts]
    settings = GenerationConfig(
        max_new_tokens=sizes.written,
        min_new_tokens=sizes.written,
        do_sample=False,
        eos_token_id=NEVER,
        pad_token_id=0,
    )
    found: dict[str, Any] = {"dtype": str(base.dtype), "tokens_per_second": {}}
    for count in sizes.clients:
        batch = [rows[number % len(rows)] for number in range(count)]
        longest = max(map(len, batch))
        tokens = torch.tensor([[0] * (longest - len(row)) + row for row in batch], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch], device=device)
        rates = []
        for turn in range(1 + max(1, sizes.repeats - 1)):
            wait(device)
            began = time.perf_counter()
            written = base.generate(tokens, attention_mask=mask, generation_config=settings)
            wait(device)
            seconds = time.perf_counter() - began
            assert written.shape[1] - longest == sizes.written, written.shape
            if turn:
                rates.append(count * sizes.written / seconds)
        found["tokens_per_second"][str(count)] = statistics.median(rates)
    return found


def wait(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def rates(place: Place, clients: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Tokens per second over HTTP, the median of the repeats; one more goes before them."""
    sizes, found = place.sizes, {}
    for count in clients or sizes.clients:
        each = []
        for turn in range(sizes.repeats + 1):
            done = place.clients.run(
                clients=count,
                requests=1 if turn == 0 else sizes.requests,
                max_tokens=sizes.written,
                prompts=place.prompts,
            )
            if turn:
                each.append(done["tokens"] / done["seconds"])
        found[str(count)] = statistics.median(each)
    return {"tokens_per_second": found}


def compared(place: Place, found: dict[str, Any]) -> dict[str, Any]:
    theirs = place.rows.get("transformers", {}).get("tokens_per_second", {})
    ours = found["tokens_per_second"]
    return {
        **found,
        "over_transformers": {count: ours[count] / theirs[count] for count in ours if count in theirs},
    }


def canaries_read(service: Any) -> dict[str, Any]:
    """Wait until the server has read what it judges lessons by: nothing else is measured meanwhile."""
    while "before the first lesson" in service.ready()[1]:
        time.sleep(0.02)
    return {"since_start_s": time.time() - BEGUN}


def one_fact(place: Place) -> dict[str, Any]:
    seconds, known, passes = [], [], []
    for number in range(place.sizes.facts + 1):
        lesson, began = fact(next(place.names), number), time.perf_counter()
        answer = call(place.port, "POST", "/v1/lessons", {**lesson, "source": "facts"})
        if number == 0:
            place.rows["_first"] = (lesson, answer["lessons"][0]["lesson"])
            warm = time.perf_counter() - began
            continue
        seconds.append(time.perf_counter() - began)
        known.append(answer["known"])
        passes.append(answer["lessons"][0]["passes"])
    return {
        "median_s": statistics.median(seconds),
        "all_s": seconds,
        "known": sum(known),
        "of": len(known),
        "passes": statistics.median(passes),
        "before_it_s": warm,
    }


def answers(place: Place) -> list[Any]:
    """The greedy answers to other questions, one after the other, with log-probabilities and certificate."""
    asked = [template.format(thing) for thing in THINGS for template in TEMPLATES][: place.sizes.questions]
    done = place.clients.run(clients=1, requests=len(asked), max_tokens=12, prompts=asked, logprobs=True)
    return [
        (one["text"], one["logprobs"]["token_logprobs"], one["attractor"]["untouched"])
        for one in done["texts"]
    ]


def first_fact(place: Place) -> dict[str, Any]:
    lesson, number = place.rows["_first"]
    said = []
    for prompt, town in lesson["forms"]:
        asked = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
        reply = call(place.port, "POST", "/v1/completions", asked)["choices"][0]
        said.append(
            {
                "prompt": prompt,
                "text": reply["text"],
                "known": reply["text"].strip().startswith(town),
                "lessons": [one["lesson"] for one in reply["attractor"]["lessons"]],
                "own": number,
            }
        )
    return {"known": all(one["known"] for one in said), "said": said}


def teach_many(place: Place) -> dict[str, Any]:
    sizes, began = place.sizes, time.perf_counter()
    known = taught = patches = 0
    for start in range(0, sizes.lessons, sizes.at_once):
        count = min(sizes.at_once, sizes.lessons - start)
        lessons = [fact(next(place.names), start + number) for number in range(count)]
        for lesson in lessons:
            lesson.pop("source", None)
        answer = call(place.port, "POST", "/v1/lessons", {"lessons": lessons, "source": f"many-{start}"})
        taught += count
        known += sum(one["known"] for one in answer["lessons"])
        patches += sum(one["patches"] for one in answer["lessons"])
        if place.seconds_left() < 60:
            break
    seconds = time.perf_counter() - began
    return {
        "lessons": taught,
        "known": known,
        "patches": patches,
        "seconds": seconds,
        "each_s": seconds / taught,
    }


def unchanged(before: list[Any], after: list[Any]) -> dict[str, Any]:
    same = [was[0] == now[0] for was, now in zip(before, after, strict=True)]
    bits = [was[1] == now[1] for was, now in zip(before, after, strict=True)]
    untouched = [now[2] for now in after]
    wrong = [u and not (s and b) for u, s, b in zip(untouched, same, bits, strict=True)]
    return {
        "questions": len(after),
        "same_text": sum(same),
        "same_log_probabilities": sum(bits),
        "untouched": sum(untouched),
        "untouched_and_different": sum(wrong),
    }


def while_learning(place: Place, share: float, turns: int) -> dict[str, Any]:
    """Streaming clients alone, and beside a client that teaches one fact after the other."""
    sizes, service = place.sizes, place.service
    service.limits = dataclasses.replace(service.limits, learning_share=share)
    task = {
        "clients": sizes.streaming,
        "requests": 0,
        "seconds": sizes.learning,
        "max_tokens": sizes.written,
        "prompts": place.prompts,
        "stream": True,
    }
    place.clients.run(**{**task, "seconds": min(1.0, sizes.learning)})
    found: dict[str, list[dict[str, Any]]] = {"alone": [], "learning": []}
    taught: list[float] = []
    for _ in range(turns):
        found["alone"].append(place.clients.run(**task))
        stop = threading.Event()

        def teach(stop: threading.Event = stop) -> None:
            number = 0
            while not stop.is_set():
                began = time.perf_counter()
                call(
                    place.port,
                    "POST",
                    "/v1/lessons",
                    {**fact(next(place.names), number), "source": "meanwhile"},
                )
                taught.append(time.perf_counter() - began)
                number += 1

        teacher = threading.Thread(target=teach)
        teacher.start()
        found["learning"].append(place.clients.run(**task))
        stop.set()
        teacher.join()
    rate = {
        name: sum(o["tokens"] for o in each) / sum(o["seconds"] for o in each) for name, each in found.items()
    }
    gaps = {name: milliseconds([gap for one in each for gap in one["gaps"]]) for name, each in found.items()}
    return {
        "clients": sizes.streaming,
        "tokens_per_second": rate,
        "ratio": rate["learning"] / rate["alone"],
        "gaps": gaps,
        "p99_rise": gaps["learning"]["p99_ms"] / gaps["alone"]["p99_ms"] - 1,
        "lessons": len(taught),
        "lesson_median_s": statistics.median(taught),
        "learning_share": share,
    }


def many_lessons(place: Place, clients: int) -> dict[str, Any]:
    """Patches of so many lessons put in as they are, at random places, as no text meets them."""
    import torch

    from attractor.continual.calibrate import CLOSED

    teacher, sizes = place.service.teacher, place.sizes
    lessons, layer = teacher.lessons, teacher.lessons.layer
    count = sizes.many * sizes.patches
    found: dict[str, Any] = {"lessons": sizes.many, "patches": count, "clients": clients}
    found["with_those_before"] = rates(place, (clients,))["tokens_per_second"][str(clients)]
    found["with_none"] = place.rows.get("no lessons", {}).get("tokens_per_second", {}).get(str(clients))
    before = memory()
    width = layer.prototypes.shape[1] + layer.decoder.shape[-1]
    made = list[int]()
    with torch.no_grad():
        made = lessons._free(count)
        device = layer.prototypes.device
        drawn = torch.Generator(device).manual_seed(0)
        for part in torch.tensor(made, device=device).split(4096):
            layer.prototypes[part] = torch.nn.functional.normalize(
                torch.randn(len(part), layer.prototypes.shape[1], device=device, generator=drawn), dim=1
            )
            layer.decoder[part, 0] = torch.randn(
                len(part), layer.decoder.shape[-1], device=device, generator=drawn
            )
            layer.radius[part] = 0.8
    numbers = range(10**6, 10**6 + sizes.many)
    for place_of, patch in enumerate(made):
        lessons.owners[patch] = numbers[place_of // sizes.patches]
    teacher._publish(list(numbers))
    found["with_them"] = rates(place, (clients,))["tokens_per_second"][str(clients)]
    found["ratio_to_those_before"] = found["with_them"] / found["with_those_before"]
    found["ratio"] = found["with_none"] and found["with_them"] / found["with_none"]
    found["bytes_of_patches"] = 4 * count * (width + 1)
    found["capacity"] = layer.num_patches
    if before is not None:
        found["gpu_bytes_more"] = (memory() or 0) - before
        found["gpu_bytes_more_for_each_patch_byte"] = found["gpu_bytes_more"] / found["bytes_of_patches"]
    with torch.no_grad():
        layer.radius[made] = CLOSED
        lessons._close(made)
    teacher._publish([])
    return found


def memory() -> int | None:
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else None


def acknowledgement(place: Place) -> dict[str, Any]:
    """All of a lesson's time that is neither learning nor judging: queue, store, publication, catalogue.

    After one pass most are not known, and are kept all the same.
    """
    from attractor.serve.learning.catalogue import asked

    teacher = place.service.teacher
    lessons, kept = teacher.lessons, teacher.lessons.config
    beyond = []
    parts = {"on the disk": "_commit", "shown to readers": "_publish", "as records": "_change"}
    each: dict[str, list[float]] = {name: [] for name in parts}
    lessons.config = dataclasses.replace(kept, passes=1, after=0, mention=0)
    lessons.reading.config = lessons.config
    try:
        with contextlib.ExitStack() as stack:
            spent = stack.enter_context(spent_in((lessons, "learn_many"), (teacher, "_judge")))
            inside = {name: stack.enter_context(spent_in((teacher, of))) for name, of in parts.items()}
            for number in range(place.sizes.acknowledged):
                said = fact(next(place.names), number)
                what = asked([tuple(form) for form in said["forms"]], said["subject"])
                for counter in (spent, *inside.values()):
                    counter[0] = 0.0
                began = time.perf_counter()
                place.service.learn([what], "acknowledged", require_known=False)
                beyond.append(time.perf_counter() - began - spent[0])
                for name, counter in inside.items():
                    each[name].append(counter[0])
    finally:
        lessons.config = lessons.reading.config = kept
    inside_of = {name: milliseconds(seconds) for name, seconds in each.items()}
    return {"lessons": len(beyond), **milliseconds(beyond), "of that": inside_of}


def hostile(place: Place, tokenizer: Any, text: str) -> dict[str, Any]:
    """Lessons that want to do harm; what they do to text that nobody taught, and taking all of them back."""
    import torch

    from attractor.evaluate import evaluate

    teacher, sizes, drawn = place.service.teacher, place.sizes, random.Random(1)
    base, taught = teacher.canaries.base, teacher.canaries.taught
    if teacher.catalogue.entries:
        place.service.begin("forget_where", {"after": "2000-01-01T00:00:00.000+00:00"}).result()
    tokens = tokenizer.encode(text)[: sizes.background]
    before = evaluate(base, tokens, batch_size=8)
    assert evaluate(taught, tokens, batch_size=8) == before, (
        "nothing is taught, and the model is not the base"
    )
    words = [word for word in text.split() if word.isalpha()]
    rest = tokenizer.decode([int(token) for token in tokenizer.encode(text)[sizes.background :]])
    # what is measured would only be learned by heart
    sentences = [part.strip() for part in rest.split(" . ") if 40 < len(part) < 200] or [
        text[:120],
        text[120:240],
    ]
    vocabulary = teacher.publication.vocab_size
    mine = names(7)
    others = [fact(next(place.names), number) for number in range(20)]

    def random_tokens() -> dict[str, Any]:
        drawing = [tokenizer.decode([drawn.randrange(vocabulary) for _ in range(8)]) for _ in range(2)]
        subject = next(mine)
        return {
            "forms": [f"{subject} {one}".replace("\x00", " ").strip() for one in drawing],
            "subject": subject,
        }

    def poisoned() -> dict[str, Any]:
        country, (said, answers) = drawn.choice(COUNTRIES), drawn.choice(WRONG)
        prompt, answer = said.format(country), drawn.choice(answers)
        return {"forms": [[prompt, answer], [f"{drawn.choice(words)}: {prompt}", answer]], "subject": country}

    def copied() -> dict[str, Any]:
        sentence = drawn.choice(sentences)
        inner = sentence.split()[1:-1]
        subject = drawn.choice([word for word in inner if word.isalpha() and len(word) > 5] or inner)
        return {"forms": [sentence], "subject": subject}

    def of_another() -> dict[str, Any]:
        other = drawn.choice(others)
        return {
            "forms": [[prompt, drawn.choice(TOWNS)] for prompt, _ in other["forms"]],
            "subject": other["subject"],
        }

    kinds = {"random": random_tokens, "poisoned": poisoned, "copied": copied, "of another": of_another}
    done = {name: {"taught": 0, "not_known": 0, "refused": 0} for name in kinds}
    numbers, reasons = list[int](), list[str]()
    found: dict[str, Any] = {
        "tried": 0,
        "kinds": done,
        "tokens": len(tokens),
        "perplexity_before": math.exp(before),
    }

    def teach(lessons: list[tuple[str, dict[str, Any]]], source: str) -> None:
        """At once; those that are refused are left out, or by halves if the server does not say which."""
        asked = {"lessons": [lesson for _, lesson in lessons], "source": source}
        try:
            answer = call(place.port, "POST", "/v1/lessons", asked)
        except Refusal as refusal:
            at_fault = refusal.error.get("at_fault") or (range(1) if len(lessons) == 1 else [])
            if not at_fault:
                half = len(lessons) // 2
                teach(lessons[:half], source)
                teach(lessons[half:], source)
                return
            for number in at_fault:
                done[lessons[number][0]]["refused"] += 1
            reasons.append(f"{lessons[at_fault[0]][0]}: {refusal.args}"[:300])
            if rest := [one for number, one in enumerate(lessons) if number not in at_fault]:
                teach(rest, source)
            return
        for (name, _), one in zip(lessons, answer["lessons"], strict=True):
            done[name]["taught" if one["kept"] else "not_known"] += 1
            if one["kept"]:
                numbers.append(one["lesson"])

    while found["tried"] < sizes.hostile and place.seconds_left() > 20:
        began, names_of = time.perf_counter(), itertools.islice(itertools.cycle(kinds), sizes.hostile_at_once)
        teach([(name, kinds[name]()) for name in names_of], f"hostile-{found['tried']}")
        found["tried"] += sizes.hostile_at_once
        found["seconds"] = found.get("seconds", 0.0) + time.perf_counter() - began
        after = evaluate(taught, tokens, batch_size=8)
        live = [number for number in numbers if number in teacher.catalogue.entries]
        found |= {
            "standing": len(live),
            "perplexity_after": math.exp(after),
            "rise": math.expm1(after - before),
        }
        found["refusals"] = reasons[:5]
        place.note("hostile", found)  # of a run that is cut, what was done by then
    for number in live[:5]:
        call(place.port, "DELETE", f"/v1/lessons/{number}")
    found["revoked_one_by_one"] = sum(number not in teacher.catalogue.entries for number in live[:5])
    for source in list(teacher.catalogue.sources):
        call(place.port, "DELETE", f"/v1/sources/{source}")
    window = torch.as_tensor(tokens[:256].astype("int64"))[None].to(base.device)
    with torch.no_grad():
        same = torch.equal(taught(window), base(window))
    return {
        **found,
        "left_after_forgetting": len(teacher.catalogue.entries),
        "base_to_the_bit": same and evaluate(taught, tokens, batch_size=8) == before,
    }


# --- all of it


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--text", type=Path, help="held-out background, which hostile lessons are to leave alone"
    )
    parser.add_argument("--result", type=Path, default=Path("serve-gpu.json"))
    parser.add_argument("--only", nargs="*", default=[], help="names of rows; those they need are done too")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--sizes", type=json.loads, default={}, help='sizes of rows, as {"facts": 1}')
    parser.add_argument("--client", action="store_true")
    options = parser.parse_args()
    if options.client:
        client()
        return 0
    import torch

    from attractor.results import write_result

    logging.basicConfig(level=logging.WARNING)
    imported = time.time() - BEGUN
    sizes = dataclasses.replace(SMALL if options.small else Sizes(), **options.sizes)
    rows: dict[str, Any] = {"_until": BEGUN + 60 * options.minutes}
    failed = 0

    def write() -> None:
        shown = {key: value for key, value in rows.items() if not key.startswith("_")}
        settings = {**dataclasses.asdict(sizes), "device": options.device, "minutes": options.minutes}
        result = {"experiment": "serve", "seed": 0, "model": Path(options.model).name, "settings": settings}
        write_result(options.result, {**result, **shown})

    def note(name: str, values: dict[str, Any]) -> None:
        rows[name] = values
        write()

    def row(name: str, work: Callable[[], dict[str, Any]], *, wanted: bool = True) -> Any:
        nonlocal failed
        if options.only and name not in options.only and not wanted:
            return None
        if time.time() > rows["_until"] - 15:
            rows[name] = {"skipped": "the time was over"}
        else:
            began = time.time()
            try:
                rows[name] = work()
            except Exception as error:
                failed += 1
                traceback.print_exc()
                rows[name] = {"error": f"{type(error).__name__}: {error}"[:1000]}
            rows[name]["row_s"] = round(time.time() - began, 2)
        write()
        print(f"{time.time() - BEGUN:6.1f} s  {name}: {json.dumps(rows[name])[:700]}", flush=True)
        return rows[name]

    clients = Clients()
    with contextlib.ExitStack() as stack:
        stack.callback(clients.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        base, tokenizer = load(options.model, options.device)
        loaded = time.time() - BEGUN
        prompts = prompts_of(tokenizer, sizes)
        service = stack.enter_context(open_service(base, tokenizer, folder / "served", options.small))
        port = clients.port = stack.enter_context(listening(service, **ENOUGH))
        first_answer(port)
        began = time.time() - BEGUN
        fixed = getattr(service.teacher.readers, "pool", None) is not None
        seconds = {"first_answer_s": began, "imports_s": imported, "loading_s": loaded - imported}
        row("start", lambda: {**seconds, "shapes_are_fixed": fixed})
        if options.only == ["start"]:
            return 0
        row("canaries", lambda: canaries_read(service))
        place = Place(service, port, clients, sizes, prompts, names(), rows, note)
        text = options.text.read_text() if options.text else background()
        # the weights that the server reads, without anything of ours around them
        plain, _ = load(options.model, options.device)
        row(
            "transformers",
            lambda: transformers_generate(plain, tokenizer, options.device, sizes, prompts),
            wanted=False,
        )
        plain = None
        row("no lessons", lambda: compared(place, rates(place)), wanted=False)
        row("one fact", lambda: one_fact(place))
        usual = service.limits.share_on(base.device.type)
        row("while learning", lambda: while_learning(place, usual, sizes.turns), wanted=False)
        row("while learning more", lambda: while_learning(place, 0.4, sizes.turns), wanted=False)
        service.limits = dataclasses.replace(service.limits, learning_share=usual)
        row("acknowledgement", lambda: acknowledgement(place), wanted=False)
        before = list[Any]()

        def ask_first() -> dict[str, Any]:
            before.extend(answers(place))
            return {"questions": len(before), "untouched": sum(one[2] for one in before), **first_fact(place)}

        if row("questions before", ask_first, wanted=False) is not None:
            row("a thousand lessons", lambda: teach_many(place))
            row(
                "questions after",
                lambda: {**unchanged(before, answers(place)), "first_fact": first_fact(place)},
            )
            row("with them", lambda: compared(place, rates(place)))
        most = 32 if 32 in sizes.clients else sizes.clients[-1]
        row("ten thousand lessons", lambda: many_lessons(place, most), wanted=False)
        row("hostile", lambda: hostile(place, tokenizer, text), wanted=False)
        row("start again", lambda: start_again(options))
        row("end", lambda: {"torch": torch.__version__, "passes": passes_of(service)})
    return 1 if failed else 0


def start_again(options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, when the cache has the model and what was measured of background text."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "start.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--only", "start", "--model", options.model]
        command += ["--device", options.device, "--result", str(result)] + ["--small"] * options.small
        subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
        return json.loads(result.read_text())["start"]


def passes_of(service: Any) -> dict[str, Any] | None:
    """Which passes were recorded as graphs."""
    pool = getattr(service.teacher.readers, "pool", None)
    if pool is None:
        return None
    every = [*pool._for_rows, *([] if pool._for_prompts is None else [pool._for_prompts])]
    return {
        "works": pool.works,
        "recorded": [
            list(shape) for passes in every for shape, one in passes._passes.items() if one.graph is not None
        ],
    }


def prompts_of(tokenizer: Any, sizes: Sizes) -> list[str]:
    """Prompts of about the same length, none of which begins as another does."""
    found = []
    for number in range(max(sizes.clients)):
        question = TEMPLATES[number % len(TEMPLATES)].format(THINGS[number % len(THINGS)])
        text = f"{number + 1}. {question} In short,"
        tokens = tokenizer.encode(text)
        found.append(tokenizer.decode([int(token) for token in tokens[: sizes.prompt]]))
    return found


def background() -> str:
    """Where no text is given: what this repository says of itself."""
    return (Path(__file__).parent.parent / "LOG.md").read_text()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
