"""The study of facts: a pretrained model learns invented people, towns and companies, chunk after chunk.

    python -m studies.facts --model smollm2-135m --texts FOLDER --method basins --seed 0 --result facts.json

Every method reads the same forms behind the same lead-ins as often, is graded on the same answers, sees each
chunk once and never again, and is evaluated after all chunks, against the original model. FOLDER holds the
four background texts; the part that calibration (or replay) may use is not the part that is measured.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor.continual.lessons import LessonConfig, lead_in
from attractor.experiments.result import write_result
from attractor.hf.pretrained import load_pretrained
from attractor.hf.teachable import cut, teachable

WINDOW = 256
BACKGROUNDS = ("wikitext2_test", "austen", "python_stdlib", "german_law")

WORDS = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Syllables of names, and the relations of each kind of thing: possible answers, three forms that are taught,
two sentence forms and two question forms that never are."""

Item = tuple[str, str, str]  # subject, prompt, answer


class World:
    """Chunks of 30 people, 10 towns and 10 companies that do not exist, four facts each."""

    def __init__(self, seed: int, chunks: int) -> None:
        draw, taken = random.Random(seed), set()
        parts = WORDS["syllables"]

        def word(*names: str) -> str:
            return "".join(draw.choice(parts[name]) for name in names)

        def name_of(kind: str) -> str:
            if kind == "person":
                return f"{word('first', 'second')} {word('third', 'fourth')}"
            if kind == "town":
                return word("third", "second", "fourth")
            return f"{word('third', 'second')} {draw.choice(WORDS['branches'])}"

        self.chunks: list[list[tuple[str, str, dict[str, str]]]] = []
        for _ in range(chunks):
            chunk = []
            for kind in ["person"] * 30 + ["town"] * 10 + ["company"] * 10:
                while (name := name_of(kind)) in taken:
                    pass
                taken.add(name)
                facts = {
                    relation: draw.choice(WORDS["answers"][row["answers"]])
                    for relation, row in WORDS[kind].items()
                }
                chunk.append((name, kind, facts))
            self.chunks.append(chunk)

    def items(self, chunk: int, form: str, number: int = 0) -> list[Item]:
        return [
            (name, WORDS[kind][relation][form][number].format(n=name), f" {answer}")
            for name, kind, facts in self.chunks[chunk]
            for relation, answer in facts.items()
        ]

    def lessons(self, chunk: int) -> list[list[tuple[str, str]]]:
        """Each entity is one lesson: every fact in three forms."""
        return [
            [
                (form.format(n=name), f" {answer}")
                for relation, answer in facts.items()
                for form in WORDS[kind][relation]["taught"]
            ]
            for name, kind, facts in self.chunks[chunk]
        ]


class Reader:
    """Grades a model: answers to prompts, and background text."""

    def __init__(self, encode: Callable[[str], Any], device: str, autocast: Callable[[], Any]) -> None:
        self.encode, self.device, self.autocast = encode, device, autocast

    @torch.no_grad()
    def recall(self, call: Callable[[Tensor], Tensor], items: Sequence[Item], rows: int = 400) -> float:
        """The share of answers that greedy decoding gives."""
        right = 0
        for start in range(0, len(items), rows):
            part = [
                ([int(t) for t in self.encode(prompt)], [int(t) for t in self.encode(prompt + answer)])
                for _, prompt, answer in items[start : start + rows]
            ]
            longest = max(len(whole) for _, whole in part)
            tokens = torch.tensor(
                [whole + [0] * (longest - len(whole)) for _, whole in part], device=self.device
            )
            with self.autocast():
                choice = call(tokens).argmax(-1)
            for row, (prompt, whole) in enumerate(part):
                span = slice(len(prompt), len(whole))
                right += bool((choice[row, len(prompt) - 1 : len(whole) - 1] == tokens[row, span]).all())
        return right / len(items)

    @torch.no_grad()
    def background(
        self, call: Callable[[Tensor], Tensor], windows: Tensor, rows: int = 8
    ) -> Iterator[tuple[float, Tensor]]:
        """The loss of each window in nats, and its logits as they are, to compare bits."""
        for part in windows.split(rows):
            tokens = part.to(self.device)
            with self.autocast():
                logits = call(tokens)
            loss = F.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            ).view(len(part), -1)
            for row in range(len(part)):
                yield loss[row].mean().item(), logits[row]


def fine_tune(
    model: nn.Module,
    parameters: list[nn.Parameter],
    rows: Sequence[Sequence[tuple[list[int], range]]],
    *,
    passes: int,
    rate: float,
    batch: int,
    device: str,
    autocast: Callable[[], Any],
    replay: Tensor | None,
    seed: int,
) -> None:
    """AdamW over one chunk, with half a cosine and, if wanted, background text beside every step."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    draw = random.Random(seed)
    steps = passes * -(-len(rows[0]) // batch)
    step = 0
    for done in range(passes):
        order = list(rows[done % len(rows)])
        draw.shuffle(order)
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            longest = max(len(tokens) for tokens, _ in part)
            tokens = torch.tensor([t + [0] * (longest - len(t)) for t, _ in part], device=device)
            places = torch.tensor(
                [(r, p) for r, (_, graded) in enumerate(part) for p in graded], device=device
            ).T
            for group in optimizer.param_groups:
                group["lr"] = (
                    rate * min(1.0, (step + 1) / 10) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
                )
            with autocast():
                logits = model(tokens).logits
            loss = F.cross_entropy(logits[places[0], places[1] - 1].float(), tokens[places[0], places[1]])
            if replay is not None:
                old = replay[torch.randint(len(replay), (8,))].to(device)
                with autocast():
                    logits = model(old).logits
                loss = loss + F.cross_entropy(logits[:, :-1].float().flatten(0, 1), old[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            step += 1


def control_rows(
    encode: Callable[[str], Any], lessons: Sequence[Sequence[tuple[str, str]]], contexts: int
) -> Any:
    """What basins read, for the others: every form behind the same lead-ins."""
    variants = []
    for turn in range(contexts):
        rows = []
        for forms in lessons:
            for place, (prompt, answer) in enumerate(forms):
                asked = lead_in(turn, place) + prompt
                whole = [int(t) for t in encode(asked + answer)]
                rows.append((whole, range(len(encode(asked)), len(whole))))
        variants.append(rows)
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--method", choices=["basins", "full", "lora"], default="basins")
    parser.add_argument("--rate", type=float, default=3e-5)
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--read-from", type=int, default=None)
    parser.add_argument("--act-at", type=int, default=None)
    parser.add_argument("--lesson", type=json.loads, default={}, help="settings of LessonConfig, as JSON")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="teach no new chunk after so long")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()

    def autocast() -> Any:
        return torch.autocast("cuda", torch.bfloat16) if given.device == "cuda" else nullcontext()

    begun = time.perf_counter()
    torch.manual_seed(given.seed)
    model, tokenizer = load_pretrained(given.model, device=given.device)
    encode = tokenizer.encode
    world = World(given.seed, given.chunks)
    texts = {name: (given.texts / f"{name}.txt").read_text()[: given.windows * 3000] for name in BACKGROUNDS}
    windows = {name: cut([text], encode, WINDOW) for name, text in texts.items()}
    measured = {name: rows[: given.windows] for name, rows in windows.items()}
    free = torch.cat([rows[given.windows : given.windows + given.windows // 2] for rows in windows.values()])
    free = free[torch.randperm(len(free), generator=torch.Generator().manual_seed(0))]
    reader = Reader(encode, given.device, autocast)

    def base_call(tokens: Tensor) -> Tensor:
        return model(tokens).logits

    before = {
        name: [loss for loss, _ in reader.background(base_call, rows)] for name, rows in measured.items()
    }
    known_before = {
        form: reader.recall(base_call, [item for c in range(given.chunks) for item in world.items(c, form)])
        for form in ("taught", "sentence", "question")
    }
    lessons = net = None
    parameters: list[nn.Parameter] = []
    started = time.perf_counter()
    if given.method == "basins":
        config = LessonConfig(**{"passes": given.passes, "rows": 640, **given.lesson})
        net, lessons = teachable(
            model,
            encode,
            free,
            read_from=given.read_from,
            act_at=given.act_at,
            config=config,
            patches=4096,
            autocast=autocast,
        )
        call: Callable[[Tensor], Tensor] = lambda tokens: net(tokens).logits  # noqa: E731
    elif given.method == "full":
        import copy

        tuned = copy.deepcopy(model)
        parameters = list(tuned.parameters())
        call = lambda tokens: tuned(tokens).logits  # noqa: E731
    else:
        import copy

        from peft import LoraConfig, get_peft_model

        tuned = get_peft_model(
            copy.deepcopy(model), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        )
        parameters = [p for p in tuned.parameters() if p.requires_grad]
        call = lambda tokens: tuned(tokens).logits  # noqa: E731
    prepared = time.perf_counter() - started
    history, seconds = [], 0.0
    for chunk in range(given.chunks):
        started = time.perf_counter()
        if chunk and started - begun > 60 * given.minutes:
            print(f"the time is over after {chunk} chunks: they are evaluated now", flush=True)
            break
        row: dict[str, Any] = {"chunk": chunk}
        if lessons is not None:
            curve: list[float] = []
            learned = lessons.learn_many(
                world.lessons(chunk), report=lambda done, known, curve=curve: curve.append(known)
            )
            row |= {
                "curve": curve,
                "patches": sum(lesson.patches for lesson in learned),
                "bytes": sum(lesson.bytes for lesson in learned),
                "subjects found": sum(
                    lesson.subject == name
                    for lesson, (name, _, _) in zip(learned, world.chunks[chunk], strict=True)
                ),
            }
        else:
            fine_tune(
                tuned, parameters, control_rows(encode, world.lessons(chunk), 3), passes=given.passes,
                rate=given.rate, batch=given.batch, device=given.device, autocast=autocast,
                replay=free if given.replay else None, seed=given.seed * 1000 + chunk,
            )  # fmt: skip
        if given.device == "cuda":
            torch.cuda.synchronize()
        row["seconds"] = time.perf_counter() - started
        seconds += row["seconds"]
        row["now"] = reader.recall(call, world.items(chunk, "taught"))
        history.append(row)
        print(json.dumps(row), flush=True)
    everything = {
        f"{form} {number}": [reader.recall(call, world.items(c, form, number)) for c in range(len(history))]
        for form, number in (
            ("taught", 0),
            ("taught", 2),
            ("sentence", 0),
            ("sentence", 1),
            ("question", 0),
            ("question", 1),
        )
    }
    after, identical = {}, {}
    for name, rows in measured.items():
        pairs = list(reader.background(call, rows))
        after[name] = [loss for loss, _ in pairs]
        if net is not None:
            with net.using(None):
                same = [
                    torch.equal(a, b)
                    for (_, a), (_, b) in zip(pairs, reader.background(base_call, rows), strict=True)
                ]
            identical[name] = sum(same) / len(same)
        del pairs
    rise = {
        name: math.exp(sum(after[name]) / len(after[name]) - sum(before[name]) / len(before[name])) - 1
        for name in after
    }
    summary = {
        "chunks": len(history),
        "first chunk": everything["taught 0"][0], "last chunk": everything["taught 0"][-1],
        **{name: sum(values) / len(values) for name, values in everything.items()},
        "known before": known_before, "rise of perplexity": rise, "identical windows": identical,
        "facts per second": 200 * len(history) / seconds, "seconds": seconds, "prepared in": prepared,
    }  # fmt: skip
    if lessons is not None:
        touched = lessons.calibration.touched(lessons.layer)
        summary |= {
            "bytes per fact": sum(row["bytes"] for row in history) / (200 * len(history)),
            "held out": {
                "tokens": touched.tokens,
                "windows": touched.windows,
                "at most": touched.windows_at_most,
            },
            "radius": lessons.layer.radius[lessons.layer.radius < 1]
            .float()
            .quantile(torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], device=lessons.layer.radius.device))
            .tolist(),
        }
    settings = {name: value for name, value in vars(given).items() if name not in ("result", "texts")}
    settings["lesson"] = None if lessons is None else lessons.config.to_dict()
    found = {"settings": settings, "summary": summary, "chunks": history, "by chunk": everything}
    write_result(given.result, {"experiment": "facts", **found})
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
