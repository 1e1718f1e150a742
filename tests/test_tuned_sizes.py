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
    """Within 2 % of the best of every kernel, where those that share a tile are looked at together."""
    d, n, K, r, k = map(int, re.findall(r"\d+", name))
    shape = Shape(n, d, K, k, r, torch.bfloat16)
    found = TUNED[name]
    ours, best = 0.0, min(spent for spent, _ in found["by_tile"])
    for kernel, rows in found["microseconds"].items():
        wanted = [json.loads(text) for _, text in rows]
        ours += min(
            row[0] for row, tried in zip(rows, wanted, strict=True) if is_chosen(shape, kernel, tried)
        )
        best += 0 if "decode" in kernel else rows[0][0]
    assert ours < 1.02 * best
