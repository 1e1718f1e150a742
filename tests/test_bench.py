"""`attractor bench`: what is right gets a time, beside the dense FFN of the same run."""

import json
import sys

import peers
import pytest
import torch

from attractor import bench
from attractor.bench import Size
from attractor.cli import main

SMALL = Size(16, 24, 8, 4, 2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """What is timed runs once, and kernels not at all."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(bench, "seconds", lambda run, device, graph: (run(), 0.5)[1])


def test_every_module_is_compared_with_the_dense_one():
    lines = []
    (found,) = bench.bench_layer([SMALL], CPU, torch.float32, lines.append, rounds=2)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows.keys() == {"dense", "adapter", "reference", "grouped"}
    assert rows["dense"]["parameters"] == 8 * 16 * 16
    for name, row in rows.items():
        assert row["forward_over_dense"] == row["forward_backward_over_dense"] == 1.0
        assert ("mismatch" in row) == (name in ("reference", "grouped"))
    assert rows["grouped"]["mismatch"] < bench.TOLERANCE[torch.float32]
    assert lines[0] == "d=16 tokens=24 K=8 r=4 k=2"


def test_what_differs_gets_no_time(monkeypatch):
    monkeypatch.setattr(bench, "mismatch", lambda layer, size: 0.1)
    row = bench.measure_layer("grouped", SMALL, CPU, torch.float32)
    assert "forward" not in row
    assert "not timed" in bench._line(row)


def test_only_some_are_timed():
    (found,) = bench.bench_layer([SMALL], CPU, torch.float32, lambda line: None, only=["grouped"])
    assert [row["name"] for row in found["rows"]] == ["dense", "grouped"]
    with pytest.raises(ValueError, match="tritn: not among what is timed, dense, adapter, moe, reference"):
        bench.bench_layer([SMALL], CPU, torch.float32, lambda line: None, only=["tritn"])


def test_what_is_compiled_is_timed_as_such(monkeypatch):
    compiled = []

    def counted(module):
        def call(x):
            compiled.append(type(module).__name__)
            return module(x)

        return call

    monkeypatch.setattr(torch, "compile", counted)
    assert "compiled_forward" not in bench.measure_layer("dense", SMALL, CPU, torch.float32)
    row = bench.measure_layer("grouped", SMALL, CPU, torch.float32, compiled=True)
    assert row["compiled_forward"] == row["compiled_forward_backward"] == 0.5
    assert compiled == ["APN", "APN"]


def test_sizes_are_read_from_the_command_line(tmp_path):
    assert bench.size_of("1536,16384,48,128,8") == Size(1536, 16384, 48, 128, 8)
    assert bench.size_of("384, 16384, 256, 32").top_k == 4
    result = tmp_path / "layer.json"
    assert main(["bench", "layer", "--device", "cpu", "--sizes", "16,24,8,4,2", "--json", str(result)]) == 0
    (found,) = json.loads(result.read_text())["results"]
    assert found["size"] == {"dim": 16, "tokens": 24, "num_patches": 8, "rank": 4, "top_k": 2}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("384", "must be width,tokens,patches,rank"),
        ("384,-1,8,4", "must be width,tokens,patches,rank"),
        ("384,16,8,4,9", "top_k=9 must not exceed num_patches=8"),
        ("0,16,8,4,2", "dim=0 must be a positive integer"),
    ],
)
def test_sizes_that_cannot_be(text, match):
    with pytest.raises(ValueError, match=match):
        bench.size_of(text)


def test_the_sizes_of_a_sweep_are_layers():
    for size in bench.sweep_sizes():
        assert bench.size_of(",".join(map(str, vars(size).values()))) == size


def test_peers_that_are_not_there_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module: module)
    for package in ("PEER_pytorch", "scattermoe"):
        monkeypatch.setitem(sys.modules, package, None)
    result = tmp_path / "peers.json"
    assert peers.main(["--device", "cpu", "--small", "--result", str(result)]) == 0
    rows = json.loads(result.read_text())["rows"]
    assert [name for name, row in rows.items() if "left_out" in row] == [
        "PEER, 8 heads of 16 of 256",
        "ScatterMoE, 2 of 8 experts",
    ]
    assert all(row["eager_over_dense"] == 1.0 for row in rows.values() if "left_out" not in row)
    assert rows["decoders alone, 4 of 256, rank 32"]["parameters"] == 256 * 32 * 32 + 32 * 128
