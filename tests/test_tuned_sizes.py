"""The sizes of kernels follow from what was measured."""

import json
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from attractor.ops.launch import Shape

TUNED = json.loads((Path(__file__).parents[1] / "results" / "tune-h200.json").read_text())["tuned"]


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
