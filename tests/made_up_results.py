"""Results that were made up, for the pages that show them; and a page, read."""

import json
from contextlib import contextmanager, nullcontext
from html.parser import HTMLParser
from pathlib import Path

import pytest

from studies import forgetting, shifts
from studies.report import charts, page
from studies.report.readings import Result
from studies.statistics import transfer

ROOT = Path(__file__).parent.parent
EVIL = 'dense, <script>alert(1)</script> & "more" | `code`'
ORDER = ["old", "new", "old"]
GUARDED = "APN, guarded, no labels"
PROVENANCE = {
    "commit": "0123456789abcdef",
    "uncommitted_changes": True,
    "versions": {"torch": "2.13.0<b>"},
    "machine": {"gpu": "NVIDIA H200", "cpu_threads": 2},
}


def cell(before: float, gained: float, lost: float, *, routed: bool = False) -> dict:
    """What one method did on one shift, in the words of the benchmark."""

    def text(loss: float) -> dict:
        return {"loss": loss, "blocks": [round(loss + wave, 5) for wave in (-0.02, 0.01, 0.0, 0.01)]}

    layer = {"entropy": [1.0, 1.1], "overlap": 0.25, "usage": [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]}
    routing = {when: {"0": layer, "1": layer} for when in ("before", "after")}
    guarded = {"old": text(1.5 + 0.01 * lost), "B": text(before - 0.98 * gained)}
    return {
        "before": {"old": text(1.5), "B": text(before)},
        "best": {
            "step": 20,
            "validation": 2.0,
            "guarded": guarded,
            "alone": {"old": text(1.5 + lost), "B": text(before - gained)},
            "changed": 123_456,
            "bytes": 493_824,
        },
        "trajectory": [
            {
                "step": step,
                "validation": 2.0,
                "losses": {"old": 1.5 + lost * step / 20, "B": before - gained * step / 20},
            }
            for step in (0, 10, 20)
        ],
        "trained": 234_567,
        "extra_bytes": 16,
        "seconds": 12.34,
        "tokens": 1000,
        "base_unchanged": True,
        "bound": 0.0027,
        "routing": routing if routed else None,
        "rate": 0.003,
    }


CELLS = {
    "dense, full": cell(3.0, 1.0, 0.8),
    "dense, FFN only": cell(3.0, 0.9, 0.6),
    EVIL: cell(3.0, 0.5, -0.1),
    "APN, overlay": cell(3.1, 0.8, 0.4, routed=True),
    "APN, overlay + attention": cell(3.1, 0.9, 0.5, routed=True),
    "APN, overlay + all": cell(3.1, 1.0, 0.7, routed=True),
    "dense, FFN + attention": cell(3.0, 0.95, 0.7),
}


def stream(rise: float, claimed: bool) -> dict:
    matrix = [{"old": 1.5, "new": 3.0}]
    for visit in range(3):
        matrix.append({"old": 1.5 + rise * visit, "new": 3.0 - 0.3 * visit})
    claims = [{"base": 900, "nobody yet": 100}, {"domain <1>": 1000}, {"base": 1000}]
    told = {
        "order": ORDER,
        "matrix": matrix,
        "progressive": [1.4375, 2.8125, 1.5625],
        "seconds": 3.0,
        "claimed": claims if claimed else [{"the model": 1000}] * 3,
        "base_unchanged": True,
    }
    overlays = {"overlays": {"domain <1>": {"tokens": 1000, "bytes": 4096}}} if claimed else {}
    return told | overlays | transfer(matrix, ORDER)


def _shifts() -> dict:
    full = [CELLS["dense, full"]]
    rows = {method: shifts.summary([found], full, ["old"]) for method, found in CELLS.items()}
    streams = {"dense, full": stream(0.375, False), GUARDED: stream(0.001, True)}
    return {
        "experiment": "shifts",
        "size": "full",
        "seeds": 1,
        "provenance": PROVENANCE,
        "recipe": {"steps": 20, "batch_size": 4, "rates": [0.001, 0.003], "tuned_on": "new"},
        "rates": {method: {"rate": 0.003, "validation": {}} for method in CELLS},
        "shifts": {"old": {"new": rows, "<i>other</i>": rows}},
        "streams": {
            "order": ORDER,
            "methods": {method: {"rate": 0.01, "seeds": [found, found]} for method, found in streams.items()},
        },
    }


def _forgetting() -> dict:
    overlays = {"random": {"alone": 9.0, "guarded": 1.502, "rise": 0.0020020}}
    values = {
        "experiment": "forgetting",
        "size": "full",
        "seed": 7,
        "provenance": PROVENANCE,
        "shifts": {"new": CELLS},
        "harm": {"before": 1.5, "overlays": overlays, "bound": 0.0027, "window": 256, "base_unchanged": True},
        "stream": stream(0.001, True) | {"rate": 0.01},
        "speed": {"ratio": 0.5, "all_paths_ratio": 0.25},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forgetting, "HOME", "old")
        return values | {"shows": forgetting.shows(values)}


SHIFTS, FORGETTING = _shifts(), _forgetting()
OPTION = {
    "val_ppl": 4.5,
    "val_ppl_seeds": [4.5],
    "usage_entropy": 2.5,
    "overlap": 0.25,
    "forgetting": 0.125,
    "B": 1.5,
    "parameters": 1000,
    "multiply_adds_per_token": 2_000_000,
}
SENSITIVITY = {
    "experiment": "sensitivity",
    "shift": ["old", "new"],
    "method": "APN, paper rule",
    "rate": 0.003,
    "rows": {"as planned": OPTION, "<top_k=2>": OPTION | {"val_ppl_seeds": [4.25, 4.75], "overlap": 0.5}},
}
KNOB = {
    "old": 0.25,
    "new": -0.5,
    "mixed": 0.0,
    "by_seed": {"old": [0.125, 0.375], "new": [-0.5], "mixed": [0.0]},
    "path_old": 0.75,
    "path_new": -0.625,
    "moved": 0.5,
    "allocated": 2.0,
}
KNOBS = {
    "experiment": "knobs",
    "shift": ["old", "new"],
    "rate": 0.003,
    "tokens": 4096,
    "rows": {"none": KNOB, "<rule>": KNOB | {"old": 0.5}, "guard": KNOB},
}
MATCH = {
    "experiment": "match",
    "datasets": {
        "kjv": {
            "dense": {
                "val_loss": [1.25, 1.75],
                "parameters": 10,
                "multiply_adds_per_token": 20,
                "way": "rate 0.001",
                "best_step": [500, 750],
            },
            "<apn>": {"val_loss": [1.5], "multiply_adds_per_token": 30},
        },
    },
}


def _fact(mean: float) -> dict:
    return {"mean": mean, "least": mean - 0.01, "most": mean + 0.01}


FACTS = {
    "experiment": "facts",
    "methods": {
        "basins": {
            "seeds": [0, 1],
            "first chunk": _fact(0.975),
            "last chunk": _fact(0.985),
            "taught form": _fact(0.98),
            "second sentence never taught": _fact(0.5),
            "worst background text": _fact(0.00025),
            "other capitals, question": _fact(0.6),
            "bytes per fact": _fact(12500.0),
        },
        "full, <kl>": {"seeds": [0], "first chunk": _fact(0.05), "worst background text": _fact(4.25)},
    },
    "cells": [
        {
            "settings": {"method": "basins", "keep": "nothing"},
            "chunks": [{"name": "chunk 0"}, {"name": "chunk 1"}, {"name": "revised"}],
            "original": {"capitals": {"kept, question 0": 0.875}},
            "provenance": PROVENANCE,
        }
    ],
    "provenance": PROVENANCE,
}


def _examined(share: float) -> dict:
    """What a cell of TriviaQA says after teaching, or of a point between full fine-tuning and the base."""
    ways = ("as taught", "another frame", "as typed", "turned")
    marks = {way: {"contains": share - 0.125 * at, "exact": 0.25, "f1": 0.375} for at, way in enumerate(ways)}
    return {
        "after": {"trivia": marks, "nq": {"f1": 0.0625, "nats": 3.5}, "lambada": 0.25, "hellaswag": 0.375},
        "lost": {"nq f1": 0.5, "nq nats": 0.75, "lambada": 0.0, "hellaswag": -0.25},
        "rise": {"news": 0.0625, "law": 0.00125},
    }


def _trivia(method: str, share: float, **more: object) -> dict:
    costs = {"bytes per fact": 60_000.0, "facts per second": 6.5}
    settings = {"method": method, "keep": "nothing"}
    own = {"settings": settings, "original": _examined(0.5)["after"], "provenance": PROVENANCE}
    return own | _examined(share) | costs | more


TRIVIA = {
    "experiment": "trivia",
    "cells": [
        _trivia("basins", 0.875, touched={"nq": 0.125, "lambada": 0.25, "hellaswag": 0.5}),
        _trivia("basins", 0.625, touched={"nq": 0.125, "lambada": 0.25, "hellaswag": 0.5}),
        _trivia("full", 1.0, interpolated={"<0.5>": _examined(0.625)}),
    ],
    "provenance": PROVENANCE,
}
EDITS = {
    "experiment": "edits",
    "cells": [
        {
            "settings": {"method": "basins", "keep": "nothing", "edits": 1000, "at_once": 50},
            "after": {
                "reliability": 0.96875,
                "by tenth": [1.0, 0.9375],
                "paraphrase": 0.8125,
                "by paraphrase": {
                    "sentence 0": 0.75,
                    "sentence 1": 0.7,
                    "question 0": 0.95,
                    "question 1": 0.85,
                },
                "locality": 0.875,
                "by prompts": {"background": 1.0, "capitals": 0.9375, "namesakes": 0.6875},
            },
            "rise": {"news": 0.0, "law": 0.00125},
            "identical windows": {"news": 1.0, "law": 0.5},
            "bytes per edit": 70_000.0,
            "edits per second": 5.5,
            "provenance": PROVENANCE,
        }
    ],
    "provenance": PROVENANCE,
}
LAYER = {
    "experiment": "bench layer",
    "config": {"dtype": "bfloat16"},
    "seed": 0,
    "results": [
        {
            "size": {"dim": 8, "tokens": 512, "num_patches": 16, "rank": 2, "top_k": 4},
            "rows": [
                {"name": "dense", "parameters": 100, "forward_backward_over_dense": 1.0},
                {"name": "triton", "parameters": 200, "forward_backward_over_dense": 1.25},
            ],
        }
    ],
    "provenance": PROVENANCE,
}

RETROFIT_WAY = {
    "B": 12.345,
    "rises": {"news": 0.0125},
    "worst_rise": 0.0125,
    "B_over_lora": 1.0375,
    "B_over_lora_interval": [1.03125, 1.0625],
}
RETROFIT = {
    "experiment": "retrofit",
    "size": "full",
    "model": "smollm2-135m",
    "rates": {"APN <beside>": 0.003},
    "domains": {
        "law": {
            "APN <beside>": {
                "trained": 5_000_000,
                "parameters": 135_000_000,
                "seconds": 61.5,
                "tokens": 1000,
                "best_step": 225,
                "before": {"B": 45.678, "news": 21.5},
                "alone": RETROFIT_WAY,
                "guarded": RETROFIT_WAY | {"worst_rise": -0.0025},
            }
        }
    },
}


class Page(HTMLParser):
    """Tables as rows of (text, attributes), and what else is to be looked at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables, self.tags, self.ids, self.open = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        own = dict(attributes)
        self.tags.append((tag, own))
        self.ids += [own["id"]] if "id" in own else []
        if tag == "table":
            self.tables.append({"class": own.get("class"), "caption": "", "rows": []})
        elif tag == "tr":
            self.tables[-1]["rows"].append([])
        elif tag in ("td", "th"):
            self.tables[-1]["rows"][-1].append(["", own])
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "caption" in self.open:
            self.tables[-1]["caption"] += data
        elif {"td", "th"} & set(self.open):
            self.tables[-1]["rows"][-1][-1][0] += data

    def table(self, caption: str) -> list:
        return next(table["rows"] for table in self.tables if caption in table["caption"])


def put(folder: Path, **results: dict) -> list[Path]:
    for name, values in results.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return [folder / f"{name}.json" for name in results]


@contextmanager
def undrawn():
    """Charts take their time: without them."""
    with pytest.MonkeyPatch.context() as patch:
        for chart in ("pareto", "trajectories", "scatter", "usage", "heat"):
            patch.setattr(charts, chart, lambda *given, **options: "<svg/>")
        yield


def rendered(*values: dict, drawn: bool = False) -> str:
    """The page of these results."""
    results = [Result(Path(f"{number}.json"), json.loads(json.dumps(v))) for number, v in enumerate(values)]
    with nullcontext() if drawn else undrawn():
        return page.render(results)
