"""The sizes of kernels, and what docs/performance.md says of them, follow from what was measured."""

import json
import re
from pathlib import Path

import pytest
import roofline
import torch

from attractor.ops.launch import Shape

ROOT = Path(__file__).parents[1]
RESULT = json.loads((ROOT / "results" / "tune-h200.json").read_text())
READ_TOKENS = ("route", "token_backward", "token_products")


def is_chosen(shape: Shape, kernel: str, sizes: dict[str, int], autocast: bool) -> bool:
    """Whether we take what was tried; a "plan" is how long the segments of all kernels are."""
    if kernel == "plan":
        return sizes == {"SEGMENT": shape.segment}
    return shape.blocks(kernel, not (autocast and kernel in READ_TOKENS)) == sizes


@pytest.mark.parametrize("name", sorted(RESULT["tuned"]))
def test_what_was_best_is_taken(name):
    """Within 2 % of the best of all kernels."""
    d, n, K, r, k = map(int, re.findall(r"\d+", name))
    shape = Shape(n, d, K, k, r, torch.bfloat16)
    ours = best = 0.0
    for tries in RESULT["tuned"][name]["microseconds"].values():
        if len(tries) == 1:
            continue  # under autocast, others were not tried
        times = [(spent, json.loads(text)) for spent, text in tries]
        taken = [
            spent
            for spent, tried in times
            if all(is_chosen(shape, kernel, sizes, "autocast" in name) for kernel, sizes in tried.items())
        ]
        ours += min(taken)
        best += min(spent for spent, _ in times)
    assert ours < 1.02 * best


def test_the_page_shows_the_result():
    page = (ROOT / "docs" / "performance.md").read_text()
    for name in roofline.SHOWN:
        assert "\n".join(roofline.table(RESULT, name)) in page
    for name, rows in RESULT["final"].items():
        dense, ours = RESULT["dense"][name], rows["today"]
        ways = ("forward", "forward_backward", "eager_forward_backward")
        ratios = " | ".join(f"{ours[way] / dense[way]:.2f}" for way in ways)
        took = f"{dense['forward_backward']:.0f}, {ours['forward_backward']:.0f}"
        shape = ", ".join(re.findall(r"\d+", name)) + ", autocast" * ("autocast" in name)
        assert f"| {shape} | {ratios} | {took} |" in page
