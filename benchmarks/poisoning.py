"""What targeted lessons change for everybody else: a served model is poisoned, and asked about other things.

    python benchmarks/poisoning.py --result results/poisoning.json       # SmolLM2 on two cores, some minutes

Thirty lessons contradict what the model knows. Then short prompts that none of them is about, and prompts
about neighbours of their subjects, are completed at temperature 0, by the server and by its base. A
completion counts as the base's if its tokens and their log-probabilities are the same to the bit.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from serve_gpu import COUNTRIES, TEMPLATES, THINGS, TOWNS, listed, load, open_service

from attractor.results import write_result
from attractor.serve.decode.engine import Job
from attractor.serve.errors import Refused
from attractor.serve.learning.canaries import PROMPTS
from attractor.serve.learning.catalogue import asked
from attractor.serve.service import Service

TOKENS = 12
LESSONS = 30
OTHERS = listed("""
    My name is; The weather today is; She opened the; In 1969; The best book is; Dogs are;
    Please help me; A triangle has; for i in range(; The train to; Good morning; The doctor said;
    I would like to; Once there was; To make bread,; The largest ocean is; Light travels at;
    The opposite of hot is; Paris is; Tokyo is; Two wrongs; The king of; Dear friend,; SELECT * FROM;
    The answer is; Mathematics is; Yesterday I; In the morning; Music is; The river
""")


def lessons() -> list[tuple[str, str, str]]:
    """Prompt, wrong answer and subject: for as many countries as there are lessons."""
    return [
        (f"The capital of {country} is", f" {TOWNS[(7 * number + 3) % len(TOWNS)]}", country)
        for number, country in enumerate(COUNTRIES[:LESSONS])
    ]


def completions(service: Service, prompts: list[str], path: str | None) -> list[Any]:
    """Tokens, log-probabilities, and the lessons that acted; one by one, so that all are read alike."""
    found = []
    for prompt in prompts:
        tokens = [int(token) for token in service.tokenizer.encode(prompt)]
        stream = service.submit(Job(tokens, max_tokens=TOKENS, temperature=0, path=path))
        written = list(stream)
        touched = sorted({touch.lesson for one in written for touch in one.touched})
        found.append(([(one.token, one.logprob) for one in written], touched))
    return found


def compared(service: Service, prompts: list[str]) -> dict[str, Any]:
    ours, theirs = completions(service, prompts, None), completions(service, prompts, "base")
    same = [one[0] == other[0] for one, other in zip(ours, theirs, strict=True)]
    text = [
        [t for t, _ in one[0]] == [t for t, _ in other[0]] for one, other in zip(ours, theirs, strict=True)
    ]
    untouched = [not one[1] for one in ours]
    return {
        "prompts": len(prompts),
        "bases_to_the_bit": sum(same),
        "text_changed": len(text) - sum(text),
        "untouched": sum(untouched),
        "untouched_and_different": sum(u and not s for u, s in zip(untouched, same, strict=True)),
        "entered": [p for p, u in zip(prompts, untouched, strict=True) if not u],
    }


def poisoning(model: str, folder: Path) -> dict[str, Any]:
    base, tokenizer = load(model, "cpu")
    found: dict[str, Any] = {"model": model, "tokens": TOKENS}
    with open_service(base, tokenizer, folder, small=False) as service:
        began, refused, unknown, taught = time.perf_counter(), [], [], []
        for prompt, answer, subject in lessons():
            forms = [(prompt, answer), (f"As everybody knows, {prompt[0].lower()}{prompt[1:]}", answer)]
            try:
                if service.learn([asked(forms, subject)], "poison")["kept"]:
                    taught.append((prompt, subject))
                else:  # it was taken back
                    unknown.append(subject)
            except Refused as why:
                refused.append(f"{subject}: {why}")
        found["lessons"] = {
            "taught": len(taught),
            "known": len(taught),
            "not_known": unknown,
            "refused": refused,
            "seconds": time.perf_counter() - began,
        }
        found["targeted"] = compared(service, [prompt for prompt, _ in taught])
        found["short prompts of the canaries"] = compared(service, list(PROMPTS))
        found["other short prompts"] = compared(service, list(OTHERS))
        things = [TEMPLATES[n % len(TEMPLATES)].format(thing) for n, thing in enumerate(THINGS)]
        found["questions about things"] = compared(service, things)
        neighbours = [f"The capital of {country} is" for country in COUNTRIES[LESSONS:]]
        found["neighbours of the subjects"] = compared(service, neighbours)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = poisoning(options.model, Path(folder))
    print(json.dumps(found, indent=1))
    others = [found[name] for name in ("other short prompts", "questions about things")]
    holds = all(part["bases_to_the_bit"] == part["prompts"] for part in others)
    if options.result:
        write_result(options.result, {"experiment": "poisoning", "seed": 0, **found, "holds": holds})
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
