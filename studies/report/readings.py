"""What results say, read from their JSON files: the one source of every page."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from studies.shifts import BEST_FULL, summary
from studies.streams import GUARDED

STUDIES = {
    "shifts": "Adapting to new domains, alone and behind the guard",
    "forgetting": "Bounded forgetting",
    "table1": "Dense against APN: the paper's Table 1",
    "table2": "Adapting to a second domain: the paper's Table 2",
    "sensitivity": "What the options of a layer do",
    "knobs": "What the knobs of learning from a stream do",
    "anatomy": "What patches are for",
    "capacity": "What patches hold",
    "locality": "A stream without labels, guard or replay",
    "gaps": "What the guard's bound does not cover",
    "match": "Models of like size on several texts",
    "time": "Models at equal time",
    "retrofit": "A pretrained model learns a domain",
    "facts": "A pretrained model is taught facts",
    "trivia": "A pretrained model is taught questions of TriviaQA",
    "edits": "Edits, one batch after the other",
    "guarded streams at a rate that falls": "Streams without labels, at rates that fall",
    "bench layer": "The time of a layer",
    "bench layer --sweep": "The time of a layer, over many sizes",
}
FACT_METHODS = {
    "basins": "lessons in basins",
    "basins, lower case 2": "lessons in basins, two of eight frames in small letters",
    "basins, subjects name": "lessons in basins, about any name",
    "full": "full fine-tuning",
    "full, kl": "full fine-tuning with KL to the base",
    "full, replay": "full fine-tuning with background text replayed",
    "lora": "LoRA of rank 16",
    "lora, kl": "LoRA with KL to the base",
    "lora, replay": "LoRA with background text replayed",
    "memory": "fixed patches, ranked updates",
    "apn": "APN beside the FFNs",
    "retrieval": "the right lesson in the prompt",
}
"""What the methods of the study of facts are, in words."""


class Result(NamedTuple):
    path: Path
    values: dict[str, Any]

    @property
    def study(self) -> str:
        return self.values["experiment"]

    @property
    def title(self) -> str:
        return STUDIES[self.study]

    @property
    def smoke(self) -> bool:
        """Tiny models and a few steps, to see that everything runs."""
        return self.values.get("size") == "smoke"

    @property
    def judged(self) -> bool:
        """Promises are about the full size; smaller ones only show that everything runs."""
        return self.values.get("size") == "full"

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around whatever reads the values: where one is missing or of another kind, name the file."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise ValueError(
                f"{self.path} is no whole result of {self.study!r} ({type(error).__name__}: {error}); "
                f"run the study again, or leave the file out"
            ) from error


def read(path: Path) -> Result:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); give a file that a study wrote") from error
    study = values.get("experiment") if isinstance(values, dict) else None
    if not isinstance(study, str) or study not in STUDIES:
        raise ValueError(
            f'{path} is not a result that a report can show: its "experiment" is {study!r}; '
            f"there are {', '.join(STUDIES)}"
        )
    return Result(path, values)


class Bench(NamedTuple):
    """What `shifts` and `forgetting` have in common."""

    shifts: Mapping[str, Mapping[str, Mapping[str, dict[str, Any]]]]  # source -> shift -> method -> row
    streams: Mapping[str, Any]


def bench_of(values: Mapping[str, Any]) -> Bench | None:
    """None for the other studies."""
    if values["experiment"] == "shifts":
        rates = {method: tuned["rate"] for method, tuned in values["rates"].items()}
        shifts = {
            source: {
                shift: {method: row | {"rate": rates[method]} for method, row in rows.items()}
                for shift, rows in part.items()
            }
            for source, part in values["shifts"].items()
        }
        return Bench(shifts, values["streams"])
    if values["experiment"] != "forgetting":
        return None
    found: dict[str, dict[str, Any]] = {}
    for shift, cells in values["shifts"].items():
        old = [domain for domain in cells[BEST_FULL]["before"] if domain != "B"]
        found.setdefault(" + ".join(old), {})[shift] = {
            method: summary([cell], [cells[BEST_FULL]], old) | {"rate": cell["rate"]}
            for method, cell in cells.items()
        }
    stream = values["stream"]
    only = {"rate": stream["rate"], "seeds": [stream]}
    return Bench(found, {"order": stream["order"], "methods": {GUARDED: only}})


def provenance(values: Mapping[str, Any]) -> dict[str, str]:
    """Size, seeds, code, versions and machine, in words."""
    made = values.get("provenance") or {}
    parts = values.get("cells") or [made]  # of a grid each cell says by itself where it comes from
    parts = [part.get("provenance", part) for part in parts]
    machine = made.get("machine") or {}
    threads = f"CPU, {machine['cpu_threads']} threads" if machine else "unknown"
    devices = dict.fromkeys((part.get("machine") or {}).get("gpu") or threads for part in parts)
    facts = {"Size": str(values["size"])} if "size" in values else {}
    facts |= {
        "Seeds": _seeds(values),
        "Code": ", ".join(dict.fromkeys(map(_code, parts))),
        "Versions": "; ".join(dict.fromkeys(map(_versions, parts))),
        "Machine": ", ".join(devices),
    }
    if twice := values.get("pretrained_twice"):
        facts["Pretrained twice"] = ", ".join(twice)
    return facts


def _code(made: Mapping[str, Any]) -> str:
    changed = " with uncommitted changes" if made.get("uncommitted_changes") else ""
    return (made.get("commit") or "unknown")[:12] + changed


def _versions(made: Mapping[str, Any]) -> str:
    return ", ".join(f"{part} {v}" for part, v in made.get("versions", {}).items()) or "unknown"


def _seeds(values: Mapping[str, Any]) -> str:
    if "seeds" in values:
        return str(values["seeds"])
    rows = values.get("rows") or {}
    several = rows.values() if isinstance(rows, Mapping) else rows
    used = [values["seed"]] if "seed" in values else [row["seed"] for row in several if "seed" in row]
    return ", ".join(f"number {seed}" for seed in dict.fromkeys(used)) or "see the table"
