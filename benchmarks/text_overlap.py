"""How much of one text is in another: the share of its sequences of five words, spelling made alike.

python benchmarks/text_overlap.py results/text-overlap.json [NAME=FILE ...]

The benchmark's A is tiny Shakespeare, and the First Folio holds the same plays in another spelling. With the
splits of the full size: A's test text in the training text of every domain to adapt to.
"""

import re
import sys
import tempfile
from pathlib import Path

import numpy as np

from attractor.results import write_result
from studies.plan import HOME, PAPER, PLANS, TARGETS, domain, read_domains

WORDS = 5


def alike(text: str) -> list[str]:
    """Words as 1623 and 1864 would both have them: u and v, i, j and y, doubled letters and a last e."""
    words = re.findall(r"[a-z]+", text.lower().replace("vv", "w").translate(str.maketrans("vjy", "uii")))
    return [re.sub(r"(.)\1", r"\1", word).removesuffix("e") or word for word in words]


def sequences(tokens: np.ndarray) -> list[tuple[str, ...]]:
    words = alike(tokens.astype(np.uint8).tobytes().decode(errors="replace"))
    return list(zip(*(words[start:] for start in range(WORDS)), strict=False))


def main(result: str, *given: str) -> None:
    plan, folder = PLANS["full"], Path(tempfile.mkdtemp())
    sources = {name: name for name in (HOME, *TARGETS) if name != PAPER} | dict(g.split("=") for g in given)
    hashes = read_domains(plan, sources, folder)
    test = sequences(domain(plan, folder, HOME).test)
    shares = {}
    for name in sources:
        known = set(sequences(domain(plan, folder, name).train))
        shares[name] = sum(sequence in known for sequence in test) / len(test)
        print(f"{name:12s} {shares[name]:.2%}")
    write_result(
        Path(result),
        {
            "experiment": "text overlap",
            "config": {"words": WORDS, "of": f"{HOME}, test", "in": "train"},
            "seed": None,
            "texts": hashes,
            "shares": shares,
        },
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
