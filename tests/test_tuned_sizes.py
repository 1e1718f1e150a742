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
RESULT = json.loads((ROOT / "results" / "tune-h200.json").read_text())
TUNED = RESULT["tuned"]


def is_chosen(shape: Shape, kernel: str, tried: dict[str, dict[str, int]]) -> bool:
    """Whether a row of the result has the sizes that we take; it names what differs from the usual ones."""
    with patch.object(Shape, "_measured_blocks", lambda *_: {}):
        usual = Shape._blocks.__wrapped__(shape, kernel, usual=True, little=False)
    others = {"tile": {"BM": shape.tile}, "plan": {"SEGMENT": shape.segment}}
    same = all(tried[name] == sizes for name, sizes in others.items() if name in tried)
    return same and shape.blocks(kernel) == usual | tried.get(kernel, {})


@pytest.mark.parametrize("name", TUNED)
def test_what_was_best_is_taken(name):
    """Within 2 % of the best of all kernels with tiles of as many pairs as ours have."""
    d, n, K, r, k = map(int, re.findall(r"\d+", name))
    shape = Shape(n, d, K, k, r, torch.bfloat16)
    ours = best = 0.0
    for kernel, rows in TUNED[name]["microseconds"].items():
        tries = [(spent, json.loads(text)) for spent, text in rows]
        ours += min(spent for spent, tried in tries if is_chosen(shape, kernel, tried))
        best += min(
            spent for spent, tried in tries if tried.get("tile", {"BM": shape.tile})["BM"] == shape.tile
        )
    assert ours < 1.02 * best


def test_the_page_shows_the_result():
    page = (ROOT / "docs" / "performance.md").read_text()
    for name in roofline.SHOWN:
        assert "\n".join(roofline.table(RESULT, name)) in page
    for name, dense in RESULT["dense"].items():
        ours, before = RESULT["final"][name]["best"], RESULT["old"][name]
        ways = ("forward", "forward_backward")
        now, then = ([f"{row[way] / dense[way]:.2f}" for way in ways] for row in (ours, before))
        took = f"{dense['forward_backward']:.0f}, {ours['forward_backward']:.0f}"
        shape = ", ".join(re.findall(r"\d+", name))
        assert f"| {shape} | {' | '.join(now)} | {took} | {', '.join(then)} |" in page
