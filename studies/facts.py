"""The study of facts: a pretrained model learns invented things, chunk by chunk, and is asked after all.

    python -m studies facts run --texts FOLDER --method basins --seed 0 --result cells/basins-0.json
    python -m studies facts rates cells/rate-*.json
    python -m studies facts sum cells/*.json --result results/facts.json

FOLDER holds four background texts (wikitext2_test.txt, austen.txt, python_stdlib.txt, german_law.txt). The
part that calibration, replay and KL may use is not the part that is measured. After the chunks come revisions
of chunk 1 and capitals that the model knows differently; everything is measured after all of that, against
the original model.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor.continual.guard import Guard
from attractor.hf.pretrained import load_pretrained
from attractor.hf.teachable import cut
from attractor.results import write_result
from studies.facts_methods import KEEPS, RATES, Basins, method
from studies.facts_world import FORMS, Item, World

WINDOW = 256
GRAMMARS = ("facts", "facts_confirm", "facts_third")
"""In the order in which they were written: the last is the one that no setting was chosen by."""
BACKGROUNDS = ("wikitext2_test", "austen", "python_stdlib", "german_law")
CHARACTERS = 1_200_000
"""So much of each text is read. The windows that are measured come first, then those to calibrate by; replay
and KL draw from all that are not measured. Few of them would be learned by heart."""
TAIL = ". The weather was fine that day, and many people went to the market to buy fruit and bread."
"""What may follow a fact: text that the model should go on to predict as before."""

Call = Callable[[Tensor], Tensor]


class Reader:
    """Grades a model: answers to prompts, what follows them, and background text."""

    def __init__(self, encode: Callable[[str], Any], device: str, autocast: Callable[[], Any]) -> None:
        self.encode, self.device, self.autocast = encode, device, autocast

    @torch.no_grad()
    def recall(self, call: Call, items: Sequence[Item]) -> float:
        """The share of answers that greedy decoding gives."""
        right = 0
        for predicted, target in self._ends(call, items):
            right += bool((predicted.argmax(-1) == target).all())
        return right / len(items)

    @torch.no_grad()
    def loss(self, call: Call, items: Sequence[Item]) -> float:
        """Nats per token of the ends of texts."""
        parts = [F.cross_entropy(*end, reduction="none") for end in self._ends(call, items)]
        return torch.cat(parts).mean().item()

    def _ends(self, call: Call, items: Sequence[Item], rows: int = 200) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and tokens of the second part of each item."""
        for start in range(0, len(items), rows):
            part = [
                ([int(t) for t in self.encode(prompt)], [int(t) for t in self.encode(prompt + answer)])
                for prompt, answer in items[start : start + rows]
            ]
            longest = max(len(whole) for _, whole in part)
            padded = [whole + [0] * (longest - len(whole)) for _, whole in part]
            tokens = torch.tensor(padded, device=self.device)
            with self.autocast():
                logits = call(tokens)
            for row, (prompt, whole) in enumerate(part):
                span = slice(len(prompt), len(whole))
                yield logits[row, span.start - 1 : span.stop - 1].float(), tokens[row, span]

    @torch.no_grad()
    def background(self, call: Call, windows: Tensor, rows: int = 8) -> Iterator[tuple[float, Tensor]]:
        """The loss of each window in nats, and its logits as they are, to compare bits."""
        for part in windows.split(rows):
            tokens = part.to(self.device)
            with self.autocast():
                logits = call(tokens)
            targets = tokens[:, 1:].flatten()
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets, reduction="none")
            yield from zip(loss.view(len(part), -1).mean(1).tolist(), logits, strict=True)


class GuardPath(nn.Module):
    """A path of the guard."""

    def __init__(self, call: Call, vocabulary: int) -> None:
        super().__init__()
        self.call, self.config = call, SimpleNamespace(vocab_size=vocabulary, context=WINDOW)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.call(tokens)


class Study:
    """A model, a world and background text; `measure` says what a method made of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.device = given, given.device
        if absent := [name for name in BACKGROUNDS if not (given.texts / f"{name}.txt").is_file()]:
            raise ValueError(f"--texts {given.texts} has no {absent[0]}.txt; it must hold {BACKGROUNDS}")
        torch.manual_seed(given.seed)
        self.model, tokenizer = load_pretrained(given.model, device=given.device)
        self.encode = tokenizer.encode
        self.world = World(given.seed, given.chunks, given.grammar)
        self.reader = Reader(self.encode, given.device, self.autocast)
        count = given.windows
        texts = {name: (given.texts / f"{name}.txt").read_text()[:CHARACTERS] for name in BACKGROUNDS}
        windows = {name: cut([text], self.encode, WINDOW) for name, text in texts.items()}
        if short := [name for name, rows in windows.items() if len(rows) < count + count // 2]:
            raise ValueError(
                f"{short[0]}.txt is too short for {count} windows and half as many to calibrate by"
            )
        self.sha256 = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
        self.measured = {name: rows[:count] for name, rows in windows.items()}
        self.free = shuffled([rows[count : count + count // 2] for rows in windows.values()])
        most = min(len(rows) for rows in windows.values())  # of every kind as many
        self.old = shuffled([rows[count:most] for rows in windows.values()])

    def autocast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext()

    def base(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits

    def original(self) -> dict[str, Any]:
        """What the model knows and predicts before anything is taught."""
        chunks = range(self.given.chunks)
        return {
            "recall": {
                f"{form} {n}": self._share(self.base, [self.world.items(c, form, n) for c in chunks])
                for form, n in FORMS
            },
            "tail": self.reader.loss(self.base, self._tails()),
            "background": {
                name: [nats for nats, _ in self.reader.background(self.base, rows)]
                for name, rows in self.measured.items()
            },
            "capitals": self.capitals(self.base),
        }

    def measure(
        self, call: Call, chunks: int, before: dict[str, Any], *, told: bool = False
    ) -> dict[str, Any]:
        """All figures of a model after its lessons, beside the original's."""
        by_chunk = {
            f"{form} {n}": [
                self.reader.recall(call, self.world.items(c, form, n, told=told)) for c in range(chunks)
            ]
            for form, n in FORMS
        }
        return {
            "first chunk": by_chunk["taught 0"][0],
            "last chunk": by_chunk["taught 0"][-1],
            **{name: sum(shares) / chunks for name, shares in by_chunk.items()},
            "by chunk": by_chunk,
            "namesakes": {
                f"{form} 0": self._share(call, [self.world.namesakes(c, form) for c in range(min(chunks, 5))])
                for form in ("taught", "question")
            },
            "tail": self.reader.loss(call, self._tails(chunks)) - before["tail"],
            "rise": self.rises(call, before),
            "revised": {
                **{
                    f"{form} {n}": self.reader.recall(call, self.world.revised_items(form, n, told=told))
                    for form, n in (("taught", 0), ("sentence", 0), ("question", 0))
                },
                "the old answer": self.reader.recall(call, self.world.revised_items("taught", 0, old=True)),
            },
        }

    def rises(self, call: Call, before: dict[str, Any]) -> dict[str, float]:
        """By what share the perplexity of each background text rose."""
        return {
            name: rise([nats for nats, _ in self.reader.background(call, rows)], before["background"][name])
            for name, rows in self.measured.items()
        }

    def untaught(self, learner: Any) -> Call:
        """The original model, also where the learner stands beside its blocks."""
        if not isinstance(learner, Basins):
            return self.base

        def base(tokens: Tensor) -> Tensor:
            with learner.net.using(None):
                return self.base(tokens)

        return base

    def namesakes_untouched(self, basins: Basins, chunks: int) -> dict[str, float]:
        """The share of prompts about somebody never taught, of a taught one's last name, that are the base's
        to the bit."""
        found = {}
        for form in ("taught", "question"):
            items = [item for c in range(min(chunks, 5)) for item in self.world.namesakes(c, form)]
            now, was = (
                [logits[-1] for logits, _ in self.reader._ends(call, items)]
                for call in (basins, self.untaught(basins))
            )
            same = sum(torch.equal(a, b) for a, b in zip(now, was, strict=True))
            found[f"{form} 0"] = same / len(items)
        return found

    def identical(self, basins: Basins) -> dict[str, float]:
        """The share of background windows that are the base's to the bit."""
        found = {}
        for name, rows in self.measured.items():
            same = 0
            for part in rows.split(8):
                now, was = (
                    [logits for _, logits in self.reader.background(call, part)]
                    for call in (basins, self.untaught(basins))
                )
                same += sum(torch.equal(a, b) for a, b in zip(now, was, strict=True))
            found[name] = same / len(rows)
        return found

    def _tails(self, chunks: int | None = None) -> list[Item]:
        return [
            (prompt + answer, TAIL)
            for c in range(chunks or self.given.chunks)
            for prompt, answer in self.world.items(c, "taught", 0)
        ]

    def capitals(self, call: Call, *, told: bool = False) -> dict[str, float]:
        asked = (("taught", 0), ("sentence", 0), ("question", 0))
        return {
            f"{which}, {form} {n}": self.reader.recall(call, self.world.capitals(which, form, n, told=told))
            for which in ("moved", "kept")
            for form, n in asked
        }

    def _share(self, call: Call, items: Sequence[Sequence[Item]]) -> float:
        return self.reader.recall(call, [item for part in items for item in part])


def shuffled(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts in an order that is always the same."""
    rows = torch.cat(list(parts))
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def rise(after: Sequence[float], before: Sequence[float]) -> float:
    """By what share perplexity rose."""
    return math.exp(sum(after) / len(after) - sum(before) / len(before)) - 1


def run(given: argparse.Namespace) -> None:
    """One method with one seed; the result is written after every measurement."""
    begun = time.perf_counter()
    study = Study(given)
    before = study.original()
    started = time.perf_counter()
    told = given.method == "retrieval"
    learner = method(
        given.method,
        study.model,
        study.encode,
        study.free,
        study.old,
        rate=given.rate,
        keep=given.keep,
        settings=given.lesson,
        autocast=study.autocast,
    )
    prepared = time.perf_counter() - started
    history: list[dict[str, Any]] = []
    named = {name: value for name, value in vars(given).items() if name not in ("result", "texts", "verb")}
    result: dict[str, Any] = {
        "experiment": "facts",
        "settings": named,
        "sha256 of the texts": study.sha256,
        "windows to replay": len(study.old),
        "original": before,
        "chunks": history,
    }

    def learn(name: str, lessons: Any) -> None:
        start = time.perf_counter()
        row = {"name": name, **learner.learn(lessons, given.seed * 1000 + len(history))}
        if given.device == "cuda":
            torch.cuda.synchronize()
        history.append(row | {"seconds": time.perf_counter() - start, "facts": sum(map(len, lessons)) / 3})
        print(json.dumps(history[-1]), flush=True)

    chunks = 0
    for chunk in range(given.chunks):
        if chunk > 1 and time.perf_counter() - begun > 60 * given.minutes:
            print(f"the time is over after {chunk} chunks: they are measured now", flush=True)
            break
        learn(f"chunk {chunk}", study.world.lessons(chunk))
        chunks += 1
    learn("revisions", study.world.revisions())
    taught = sum(row["facts"] for row in history)
    result |= {
        "prepared in": prepared,
        "facts": taught,
        "bytes per fact": learner.bytes() / taught,
        "facts per second": taught / sum(row["seconds"] for row in history),
        "passes to 95 %": [passes_to(row, 0.95) for row in history],
        "after": study.measure(learner, chunks, before, told=told),
    }
    write_result(given.result, result)
    if isinstance(learner, Basins):
        touched = learner.lessons.calibration.touched(learner.lessons.layer)
        result |= {
            "identical windows": study.identical(learner),
            "untouched namesakes": study.namesakes_untouched(learner, chunks),
            "held out": vars(touched),
            "lesson": learner.lessons.config.to_dict(),
        }
    if given.guard:
        vocabulary = study.model.config.vocab_size
        calls = {"base": study.untaught(learner), "new": learner}
        paths: Any = {name: GuardPath(call, vocabulary) for name, call in calls.items()}
        guard = Guard(paths).to(given.device)
        result["behind the guard"] = study.measure(guard, chunks, before, told=told)
    write_result(given.result, result)
    learn("capitals", study.world.moves())
    result["capitals"] = study.capitals(learner, told=told) | {"rise": study.rises(learner, before)}
    write_result(given.result, result)
    print(json.dumps({k: v for k, v in result["after"].items() if k != "by chunk"}, indent=1))
    print(f"{time.perf_counter() - begun:.0f} s in all")


def passes_to(row: dict[str, Any], share: float) -> int | None:
    return next((done for done, known in enumerate(row.get("curve", ())) if known >= share), None)


def score(cell: dict[str, Any]) -> float:
    """What rates are chosen by: answers in forms that were and were not taught, after all chunks."""
    after = cell["after"]
    forms = ("taught 0", "sentence 0", "sentence 1", "question 0", "question 1")
    return sum(after[form] for form in forms) / len(forms)


def label(cell: dict[str, Any]) -> str:
    settings = cell["settings"]
    return settings["method"] + ("" if settings["keep"] == "nothing" else f", {settings['keep']}")


def read_cells(paths: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    cells: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(paths):
        cell = json.loads(path.read_text())
        cells.setdefault(label(cell), []).append(cell)
    return cells


def rates(given: argparse.Namespace) -> None:
    """The rate of each method that scored best, one a line, as `run` takes it."""
    for found in read_cells(given.cells).values():
        best = max(found, key=score)
        settings = best["settings"]
        print(settings["method"], settings["keep"], settings["rate"])


FIGURES = {
    "first chunk": ("after", "first chunk"),
    "last chunk": ("after", "last chunk"),
    "taught form": ("after", "taught 0"),
    "first sentence never taught": ("after", "sentence 0"),
    "second sentence never taught": ("after", "sentence 1"),
    "first question never taught": ("after", "question 0"),
    "second question never taught": ("after", "question 1"),
    "revised": ("after", "revised", "taught 0"),
    "worst background text": ("after", "rise"),
    "nats per token after a fact": ("after", "tail"),
    "a namesake's question, answered with the fact": ("after", "namesakes", "question 0"),
    "taught form, behind the guard": ("behind the guard", "taught 0"),
    "worst background text, behind the guard": ("behind the guard", "rise"),
    "moved capitals, question": ("capitals", "moved, question 0"),
    "other capitals, question": ("capitals", "kept, question 0"),
    "worst background text with capitals": ("capitals", "rise"),
    "bytes per fact": ("bytes per fact",),
}
"""What is summed up: where each figure stands in a cell; of several texts the worst counts."""


def figure(cell: dict[str, Any], path: Sequence[str]) -> float | None:
    found: Any = cell
    for name in path:
        if name not in found:
            return None
        found = found[name]
    return max(found.values()) if isinstance(found, dict) else found


def sum_up(given: argparse.Namespace) -> None:
    """Mean, least and most over seeds of each method's figures, and the cells themselves."""
    rows: dict[str, dict[str, Any]] = {}
    cells = []
    for name, found in read_cells(given.cells).items():
        rows[name] = {"seeds": [cell["settings"]["seed"] for cell in found]}
        for title, path in FIGURES.items():
            own = [value for cell in found if (value := figure(cell, path)) is not None]
            if own:
                rows[name][title] = {"mean": sum(own) / len(own), "least": min(own), "most": max(own)}
        for cell in found:
            nats = cell["original"]["background"]
            cell["original"]["background"] = {text: sum(own) / len(own) for text, own in nats.items()}
            cells.append(cell)
        print(f"{name} ({len(found)} seeds)")
        for title, row in rows[name].items():
            if title != "seeds":
                print(f"  {title:42s} {row['mean']:.4f}  ({row['least']:.4f} to {row['most']:.4f})")
    made = {json.dumps(cell["provenance"], sort_keys=True): cell["provenance"] for cell in cells}
    write_result(
        given.result,
        {"experiment": "facts", "methods": rows, "cells": cells, "cells_made_by": list(made.values())},
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies facts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("run", help="teach one method and measure it")
    one.add_argument("--model", default="smollm2-135m")
    one.add_argument("--texts", type=Path, required=True, help="the folder of background texts")
    one.add_argument("--grammar", choices=GRAMMARS, default=GRAMMARS[-1])
    one.add_argument("--method", choices=[*RATES, "retrieval"], default="basins")
    one.add_argument("--keep", choices=KEEPS, default="nothing", help="what is done for background text")
    one.add_argument(
        "--rate", type=float, default=None, help="default: the one that the ladder of rates chose"
    )
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--chunks", type=int, default=20)
    one.add_argument("--lesson", type=json.loads, default={}, help="settings of LessonConfig, as JSON")
    one.add_argument("--windows", type=int, default=128, help="of each background text that are measured")
    one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    one.add_argument("--minutes", type=float, default=math.inf, help="teach no new chunk after so long")
    one.add_argument("--no-guard", dest="guard", action="store_false", help="do not measure behind the guard")
    one.add_argument("--result", type=Path, required=True)
    best = verbs.add_parser("rates", help="choose each method's rate")
    best.add_argument("cells", type=Path, nargs="+")
    total = verbs.add_parser("sum", help="sum up the cells of several seeds and methods")
    total.add_argument("cells", type=Path, nargs="+")
    total.add_argument("--result", type=Path, required=True)
    given = parser.parse_args(arguments)
    if given.verb != "run":
        return (rates if given.verb == "rates" else sum_up)(given)
    if given.rate is None:
        given.rate = RATES.get(given.method, 0.0)
    run(given)
