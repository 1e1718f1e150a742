"""SmolLM2 is taught invented facts, asked about them in other words, and made to forget one.

    story = tell(Path("runs/demo"), {"a text": "..."})
    story["right"], len(story["facts"])

Every piece is written down when it is done: a story that was interrupted goes on from there.
"""

import json
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attractor import corpora
from attractor.files import write_text
from attractor.front import Model, load

BASE = "smollm2-135m"
SCHOOL, FILE = "school", "story.json"
FACTS = json.loads((Path(__file__).parent / "facts.json").read_text())
"""What is not true of anything: a question, its answer, and the prompts by which it is taught."""
FORGOTTEN = 0
"""The lesson that is taken back at the end."""
WINDOW, WINDOWS = 256, 5
"""Other text is read in so many tokens at once, so often for each text."""
LONGEST = 24
"""Tokens of an answer, which also ends with its first sentence."""

Say = Callable[[str], None]


def tell(
    out: Path, texts: Mapping[str, str], *, device: str | None = None, say: Say = lambda line: None
) -> dict[str, Any]:
    """Teach the facts, ask for them, compare other `texts` with the base, forget one; the record of it all.

    The lessons stay in `out`/school, all of them. Where the model cannot be had, the record is
    {"unavailable": why}. `say` is given a line for everything that was done.
    """
    record = _begun(out / FILE, texts)
    if "forgotten" in record:
        return record
    if "before" not in record and (out / SCHOOL).exists():  # it could not be asked before its lessons
        raise ValueError(f"{out / SCHOOL} is of another story; remove {out} or choose another folder")
    try:
        model = _model(out / SCHOOL, device)
    except corpora.CorpusUnavailable as error:
        say(f"{BASE} cannot be had, so lessons are not shown: {error}")
        return {"unavailable": str(error)}

    def once(name: str, doing: str, make: Callable[[], Any]) -> Any:
        if name not in record:
            say(doing)
            record[name] = make()
            write_text(out / FILE, json.dumps(record, indent=1))
        return record[name]

    def ask() -> list[str]:
        answers = []
        for fact in FACTS:
            answers.append(_answer(model, fact["question"]))
            say(f"  {fact['question']} {' '.join(answers[-1].split())}")
        return answers

    once("before", f"asking {BASE} about {len(FACTS)} things that do not exist ...", ask)
    _teach(model, out / SCHOOL, say)
    record["lessons"] = [_lesson(lesson) for lesson in model.lessons()]
    answers = once("answers", "asking again, in words that it was not taught ...", ask)
    record["right"] = sum(map(is_right, FACTS, answers))
    say(f"{record['right']} of {len(FACTS)} answers are what it was taught")
    once("others", "comparing other text with the model as it was ...", lambda: _others(model, texts))
    once("forgotten", f"forgetting {record['lessons'][FORGOTTEN]['subject']} ...", lambda: _forget(model))
    return record


def is_right(fact: Mapping[str, Any], said: str) -> bool:
    """Whether the answer stands in what was said, as a word."""
    return re.search(rf"\b{re.escape(fact['answer'])}\b", said, re.IGNORECASE) is not None


def _begun(path: Path, texts: Mapping[str, str]) -> dict[str, Any]:
    """The record as far as it goes; one of other facts or texts must not be shown as one of these."""
    begins = {
        "base": BASE,
        "facts": FACTS,
        "texts": {name: len(text) for name, text in texts.items()},
        "longest": LONGEST,
        "window": WINDOW,
    }
    if not path.is_file():
        return begins
    record = json.loads(path.read_text())
    if {name: record.get(name) for name in begins} != begins:
        raise ValueError(f"{path} tells of other facts; remove {path.parent} or choose another folder")
    return record


def _model(school: Path, device: str | None) -> Model:
    if find_spec("transformers") is None:
        raise corpora.CorpusUnavailable('install the extra "hf": pip install "attractor-patch-networks[hf]"')
    return load(school if school.exists() else BASE, device=device)


def _answer(model: Model, question: str) -> str:
    said = ""
    for piece in model.reply([{"role": "user", "content": question}], max_tokens=LONGEST):
        said += piece
        if said.rstrip().endswith((".", "!", "?")):
            break
    return said.strip()


def _teach(model: Model, school: Path, say: Say) -> None:
    """The facts that are not in the school yet, one after another; each is saved before the next begins."""
    if not model.lessons():
        say("before its first lesson a base reads background text, once ...")
    for number, fact in enumerate(FACTS[len(model.lessons()) :], len(model.lessons()) + 1):
        forms = [(prompt, f" {fact['answer']}") for prompt in fact["taught"]]
        lesson = model.learn(forms, require_known=False)  # a fact is told by how many there are before it
        model.save(school)
        known = f"known {lesson.known_before:.0%} before, {lesson.known:.0%} now; {lesson.seconds:.1f} s"
        say(f"lesson {number} of {len(FACTS)}: {fact['taught'][0]} {fact['answer']} ({known})")


def _lesson(lesson: Any) -> dict[str, Any]:
    shown = ("number", "subject", "known_before", "known", "passes", "patches", "bytes", "seconds")
    return {name: getattr(lesson, name) for name in shown}


@torch.no_grad()
def _others(model: Model, texts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """For each text: windows, those whose logits are the base's to the bit, and both perplexities."""
    compared = {}
    for name, text in texts.items():
        tokens = torch.as_tensor(model.tokenizer.encode(text), dtype=torch.long, device=model.device)
        windows = list(tokens[: WINDOWS * WINDOW].split(WINDOW))
        same, losses = 0, []
        for window in windows:
            now = model.net(window[None]).logits[0]
            with model.net.using(None):
                base = model.net(window[None]).logits[0]
            same += torch.equal(now, base)
            losses.append([_loss(base, window), _loss(now, window)])
        before, after = torch.tensor(losses).mean(0).exp().tolist()
        compared[name] = {"windows": len(windows), "same": same, "before": before, "after": after}
    return compared


def _loss(logits: Tensor, tokens: Tensor) -> float:
    return F.cross_entropy(logits[:-1].float(), tokens[1:]).item()


def _forget(model: Model) -> dict[str, Any]:
    """In memory alone: what was taught stays in the folder."""
    question = FACTS[FORGOTTEN]["question"]
    model.forget(FORGOTTEN)
    said = _answer(model, question)
    whole = model.prompt_for([{"role": "user", "content": question}]) + said
    return {"fact": FORGOTTEN, "answer": said, "is_the_base": set(model.touching(whole)) == {None}}
