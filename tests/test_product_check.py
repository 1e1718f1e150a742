"""The check of the kernels for a GPU, at a size that the interpreter can do."""

import dataclasses
import json

import product_check
import pytest
import torch
from test_fused import FEW_TOKENS, ON_GPU, few_are_fewer  # noqa: F401
from test_layer import needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(ON_GPU, reason="a GPU runs the check itself"),
    pytest.mark.filterwarnings("ignore:.*Triton.*:UserWarning"),
]
SIZES = product_check.Sizes(dim=12, tokens=FEW_TOKENS + 10, rank=2, runs=1, device="cpu")


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    monkeypatch.setattr(product_check, "seconds", lambda run, device, graph: (run(), 1e-3)[1])


def test_rows_are_right_and_written(tmp_path, capsys):
    path = tmp_path / "check.json"
    result = product_check.run_all(dataclasses.replace(SIZES, tokens=9), [5], path)
    (row,) = json.loads(path.read_text())["checks"]
    assert row["right"] is True
    assert row["wrong_choices"] == row["differing_runs"] == 0
    assert set(row["over_dense"].values()) == {1.0}
    product_check.table(result)
    assert "5 rows float32" in capsys.readouterr().out


def test_flat_prototypes():
    dense = dict.fromkeys(("forward", "forward_backward", "eager_forward", "eager_forward_backward"), 2e3)
    row = product_check.check_flat(SIZES, 6, 2, 2, dense, torch.float32)
    assert row["wrong_choices"] == row["differing_runs"] == 0
    assert set(row["over_dense"].values()) == {0.5}


def test_a_decoder_is_counted_once():
    """At 4.3 TB/s, 4.3 MB take a microsecond."""
    sizes = product_check.Sizes(dim=500, tokens=1000, rank=4)
    kernels = {"lengths": 1.0, "route_pairs": 2.0, "gather_decode": 2.0}
    row = product_check.share_of_memory(sizes, kernels, 1000)
    gathered = 1000 * 4 * 500 * 2 + 1000 * 500 * 2 + 1000 * (4 * 8 + 4 * 4)
    assert row["share_of_gathering"] == pytest.approx(gathered / 8.6e6)
    assert row["share_with_choosing"] == pytest.approx((gathered + 1e6) / 21.5e6)


def test_wrong_choices_are_counted():
    layer = product_check.product_layer(SIZES, 5, torch.float32)
    x = product_check.tokens_of(SIZES, torch.float32, 1)
    indices = layer(x, return_stats=True)[1].indices
    assert product_check.wrong_choices(layer, x, indices) == 0
    indices[3, 0] = indices[3, 1]  # twice
    indices[4] = indices[4].flip(0)  # not in the order of their scores
    indices[5, 0] = -1
    assert product_check.wrong_choices(layer, x, indices) == 3


def test_a_run_that_differs_is_counted():
    layer = product_check.product_layer(SIZES, 5, torch.float32)
    x, other, upstream = (product_check.tokens_of(SIZES, torch.float32, seed) for seed in (1, 2, 3))
    outputs = iter([[x], [other], [x], [other], [x + 1], [other], [x]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_check, "step", lambda *_: next(outputs))
        assert product_check.differing_runs(layer, x, other, upstream, 3) == 1
