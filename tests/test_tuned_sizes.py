"""The sizes of kernels, and what docs/performance.md says of them, follow from what was measured."""

import json
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import roofline
import torch

from attractor.ops.launch import Shape

ROOT = Path(__file__).parents[1]
EARLIER, LATER = (
    json.loads((ROOT / "results" / f"{name}.json").read_text()) for name in ("tune-h200", "tune-many-h200")
)
Tried = dict[str, dict[str, int]]
UNNAMED: Tried = {
    "pair_products": {"BM": 128, "BD": 64, "num_warps": 8, "num_stages": 3},
    "gate_backward": {"BR": 32, "AHEAD": 0, "num_warps": 4},
}
"""Sizes at the commit of the later result, of kernels that were not chosen then."""


def rows_of(result, name: str, kernel: str) -> list[tuple[float, Tried]]:
    rows = result["tuned"].get(name, {"microseconds": {}})["microseconds"].get(kernel, [])
    return [(spent, json.loads(text)) for spent, text in rows]


def is_chosen_of_earlier(shape: Shape, kernel: str, tried: Tried) -> bool:
    """Whether a row of the result has the sizes that we take; it names what differs from the usual ones."""
    with patch.object(Shape, "measured", False):
        usual = Shape._blocks.__wrapped__(shape, kernel, usual=True, little=False)
    others = {"tile": {"BM": shape.tile}, "plan": {"SEGMENT": shape.segment}}
    same = all(tried[name] == sizes for name, sizes in others.items() if name in tried)
    return same and shape.blocks(kernel) == usual | tried.get(kernel, {})


def is_chosen_of_later(shape: Shape, kernel: str, tried: Tried, all_sizes: Tried, usual: bool) -> bool:
    """The same where a row names what differs from `all_sizes`.

    Of patches in parts, `route` had two ways to choose the best then; the one called SKIP is left.
    """
    if kernel == "route" and shape.K > 256:
        if not tried["route"].get("SKIP"):
            return False
        tried = {"route": {name: size for name, size in tried["route"].items() if name != "SKIP"}}
        all_sizes = {"route": {}}
    apart = kernel == "decode_backward" and shape.apart
    kernels = {"pair_products", "gate_backward"} if apart else {kernel}
    return tried.keys() == kernels and all(
        shape.blocks(name, usual) == all_sizes[name] | tried[name] for name in kernels
    )


@pytest.mark.parametrize("name", sorted(LATER["tuned"].keys() | EARLIER["tuned"].keys()))
def test_what_was_best_is_taken(name):
    """Within 2 % of the best of all kernels with tiles of as many pairs as ours have."""
    d, n, K, r, k = map(int, re.findall(r"\d+", name))
    shape = Shape(n, d, K, k, r, torch.bfloat16)
    ours = best = 0.0
    for kernel in (LATER if name in LATER["tuned"] else EARLIER)["tuned"][name]["microseconds"]:
        tries = rows_of(LATER, name, kernel)
        earlier = rows_of(EARLIER, name, kernel)
        if len(tries) > 1 or not earlier:
            reads_tokens = kernel in ("route", "token_backward", "token_products")
            usual = not (reads_tokens and "autocast" in name)
            named = sorted((tried[kernel] for _, tried in tries if kernel in tried), key=len)
            all_sizes = UNNAMED | {kernel: named[-1] if named else {}}
            taken = [
                spent for spent, tried in tries if is_chosen_of_later(shape, kernel, tried, all_sizes, usual)
            ]
        elif kernel == "decode_backward" and shape.apart:
            continue  # which the earlier result did not try
        else:
            tries = [
                (spent, tried)
                for spent, tried in earlier
                if tried.get("tile", {"BM": shape.tile})["BM"] == shape.tile
            ]
            taken = [spent for spent, tried in tries if is_chosen_of_earlier(shape, kernel, tried)]
        ours += min(taken)
        best += min(spent for spent, _ in tries)
    assert ours < 1.02 * best


def test_the_page_shows_the_result():
    page = (ROOT / "docs" / "performance.md").read_text()
    for name in roofline.SHOWN:
        assert "\n".join(roofline.table(LATER, name)) in page
    for name in [*LATER["final"], "d=384 tokens=16384 K=64 r=128 k=16"]:
        result = LATER if name in LATER["final"] else EARLIER
        dense, ours = result["dense"][name], result["final"][name]["best"]
        before = LATER["final"][name]["today"] if name in LATER["final"] else EARLIER["old"][name]
        ways = ("forward", "forward_backward")
        now, then = ([f"{row[way] / dense[way]:.2f}" for way in ways] for row in (ours, before))
        took = f"{dense['forward_backward']:.0f}, {ours['forward_backward']:.0f}"
        shape = ", ".join(re.findall(r"\d+", name)) + ", autocast" * ("autocast" in name)
        assert f"| {shape} | {' | '.join(now)} | {took} | {', '.join(then)} |" in page
