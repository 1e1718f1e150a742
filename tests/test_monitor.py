"""Monitoring of real batches; the formulas themselves are checked in test_paper.py."""

import json
import math

import numpy as np
import pytest
import torch

from attractor import APN, RoutingStats, monitor


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return APN(16, num_patches=20, top_k=3, rank=4)


def test_summary_is_a_flat_dict_of_finite_numbers(layer):
    x = torch.randn(4, 25, 16)
    _, stats = layer(x, return_stats=True)
    report = monitor.summary(stats, prefix="apn/0/")
    assert json.loads(json.dumps(report)) == report
    assert all(name.startswith("apn/0/") and math.isfinite(value) for name, value in report.items())
    assert report["apn/0/tokens"] == 100
    assert report["apn/0/unrouted_tokens"] == 0
    assert report["apn/0/effective_patches"] == pytest.approx(math.exp(report["apn/0/usage_entropy"]))
    ordered = [report[f"apn/0/confidence_{part}"] for part in ("p05", "p50", "p95", "max")]
    assert ordered == sorted(ordered)
    assert ordered[-1] == float(stats.confidence.detach().max())


def test_ratio_to_the_residual_stream(layer):
    x = torch.randn(50, 16)
    _, stats = layer(x, return_stats=True)
    ratios = stats.update_norm / (10 * stats.input_norm)
    report = monitor.summary(stats._replace(input_norm=10 * stats.input_norm))
    assert report["update_ratio_max"] == pytest.approx(float(ratios.max().detach()))


def test_unrouted_tokens_are_counted_and_left_out(layer):
    x = torch.randn(10, 16)
    _, clean = layer(x, return_stats=True)
    _, stats = layer(torch.cat([x, torch.full((3, 16), torch.nan)]), return_stats=True)
    report, expected = monitor.summary(stats), monitor.summary(clean)
    assert report.pop("tokens") == 13
    assert report.pop("unrouted_tokens") == 3
    assert report == pytest.approx({name: expected[name] for name in report})


def test_nothing_routed(layer):
    _, stats = layer(torch.full((3, 16), torch.nan), return_stats=True)
    report = monitor.summary(stats)
    assert report["unrouted_tokens"] == 3
    assert report["usage_entropy"] == 0
    assert report["dead_patches"] == 20
    assert math.isnan(report["mean_overlap"])
    assert math.isnan(report["confidence_mean"])
    assert math.isnan(monitor.expected_overlap(stats.indices, stats.indices, 20))
    assert not monitor.overlap_histogram(stats.indices, 20).any()


def test_collapse_and_even_use():
    collapsed = torch.zeros(50, 1, dtype=torch.long)
    assert monitor.usage_entropy(monitor.usage(collapsed, 8)) == pytest.approx(0, abs=1e-9)
    assert monitor.dead_patches(monitor.usage(collapsed, 8)).tolist() == list(range(1, 8))
    assert monitor.mean_overlap(collapsed, 8) == 1
    even = torch.arange(8).reshape(8, 1)
    assert monitor.usage_entropy(monitor.usage(even, 8)) == pytest.approx(math.log(8))
    assert monitor.mean_overlap(even, 8) == 0


def test_histogram_thins_long_batches_evenly():
    first, second = torch.tensor([[0, 1]]), torch.tensor([[1, 2]])
    indices = torch.cat([first.expand(3000, 2), second.expand(3000, 2)])
    exact = monitor.overlap_histogram(indices, 3, max_tokens=6000)
    thin = monitor.overlap_histogram(indices, 3, max_tokens=500)
    torch.testing.assert_close(thin, exact, rtol=0, atol=2e-3)


def test_indices_of_another_layer_are_an_error():
    with pytest.raises(ValueError, match="indices name patch 9, but num_patches=4"):
        monitor.usage(torch.tensor([[9]]), 4)


def test_summary_by_hand():
    """Every number of the summary, from statistics made by hand."""
    rows = torch.arange(101.0)
    stats = RoutingStats(
        indices=torch.tensor([[0, 1]] * 60 + [[1, 3]] * 41),
        weights=torch.full((101, 2), 0.5),
        confidence=rows,
        balance=torch.tensor(0.25),
        entropy=torch.tensor(0.7),
        update_norm=2 * rows,
        input_norm=torch.full((101,), 4.0),
        num_patches=5,
    )
    q = np.array([60, 101, 0, 41, 0]) / 202
    entropy = -(q[q > 0] * np.log(q[q > 0])).sum()
    expected = {
        "tokens": 101,
        "unrouted_tokens": 0,
        "usage_entropy": entropy,
        "effective_patches": np.exp(entropy),
        "dead_patches": 2,
        "max_usage": 0.5,
        "balance_loss": 0.25,
        "weight_entropy": 0.7,
        "mean_overlap": (60 * 59 + 101 * 100 + 41 * 40) / (101 * 100),
    }
    for name, factor in (("confidence", 1), ("update_norm", 2), ("update_ratio", 0.5)):
        for part, value in (("mean", 50), ("p05", 5), ("p50", 50), ("p95", 95), ("max", 100)):
            expected[f"{name}_{part}"] = factor * value
    assert monitor.summary(stats) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="max_tokens=0"):
        monitor.overlap_histogram(stats.indices, 5, max_tokens=0)
