"""Quality at equal time: names of shapes, the arithmetic of comparing, and a run of the smallest size."""

import copy
import json
import math

import pytest
import torch

from attractor.layer import LOCAL_ROLES
from attractor.model import GPT
from studies import equal_time, time_cells
from studies.cells import Benchmark
from studies.equal_time import Ask, Curve
from studies.plan import PLANS, domain, read_domains
from studies.report import study_tables
from studies.report.readings import read


def row(time, *losses, way="graphs"):
    return {"times": {way: time}, "val_loss": list(losses)}


def looks(*points):
    return [{"B": b, "A": {"one": 1.0 + lost, "two": 2.0 + 3 * lost}} for b, lost in points]


def test_a_name_is_a_recipe():
    base = PLANS["full"].config("dense", 0)
    dense = time_cells.shape("dense 6d", base).model
    assert (dense.ffn, dense.hidden) == ("mlp", 6 * 384)
    apn = time_cells.shape("apn 4/64 r128", base).model
    assert apn.ffn == "apn"
    assert (apn.apn.top_k, apn.apn.num_patches, apn.apn.rank) == (4, 64, 128)
    assert (apn.apn.prototypes, apn.apn.sparse_gradients, apn.apn.patch_dropout) == ("static", False, 0.0)
    bank = time_cells.shape("apn 16/1048576 r2 product @3", base).model
    assert [bank.ffn_of(layer)[0] for layer in range(6)] == ["mlp", "mlp", "mlp", "apn", "mlp", "mlp"]
    settings = bank.ffn_of(3)[1]
    assert (settings.num_patches, settings.prototypes, settings.sparse_gradients) == (2**20, "product", True)
    some = time_cells.shape("apn 8/256 r128 @1,4", base).model
    assert [some.ffn_of(layer)[0] for layer in range(6)] == ["mlp", "apn", "mlp", "mlp", "apn", "mlp"]
    moe = time_cells.shape("moe 8/32 h192", base).model
    assert (moe.ffn, moe.moe.top_k, moe.moe.num_experts, moe.moe.hidden) == ("moe", 8, 32, 192)
    switch = time_cells.shape("switch 4 h1536", base).model
    assert (switch.ffn, switch.moe.num_experts, switch.moe.hidden) == ("switch", 4, 1536)
    with pytest.raises(ValueError, match="shape 'apn 4-64' is unknown; write 'dense 4d'"):
        time_cells.shape("apn 4-64", base)


def test_models_may_be_wider():
    base = PLANS["full"].config("dense", 0)
    assert equal_time.of_width(base, None) == base
    wide = time_cells.shape("dense 4d", equal_time.of_width(base, 768)).model
    assert (wide.dim, wide.num_heads, wide.hidden) == (768, 12, 3072)
    with pytest.raises(ValueError, match="dim=100 must be a multiple of 64"):
        equal_time.of_width(base, 100)


def test_every_shape_that_is_named_is_one():
    for size, plan in PLANS.items():
        names = [*equal_time.SHAPES[size], *(equal_time.BANKS if size == "full" else ())]
        configs = [time_cells.shape(name, plan.config("dense", 0)) for name in names]
        assert len({config.to_json() for config in configs}) == len(names)
        assert all(equal_time.rate_of(name) > 0 for name in names)
    assert equal_time.rate_of(equal_time.BANKS[0]) == equal_time.RATES["dense"]


def test_the_curve_is_of_the_best_dense_models():
    curve = Curve.of([(4.0, 1.0), (1.0, 1.5), (2.0, 1.75), (16.0, 1.25)])
    assert curve == ((1.0, 4.0), (1.5, 1.0))  # the others are slower than one that predicts better
    assert curve.at(2.0) == pytest.approx(1.25)  # half the way from 1 to 4, by logarithm
    assert (curve.at(0.5), curve.at(8.0)) == (1.5, 1.0)


def test_ahead_is_by_seed_and_in_the_mean():
    rows = {
        "dense 2d": row(1.0, 1.5, 1.25),
        "dense 4d": row(4.0, 1.0, 1.0),
        "apn 4/64 r128": row(2.0, 1.0, 1.25),
        "moe 2/8 h768": row(8.0, 1.25, 1.25),
        "switch 4 h1536": row(2.0, 1.0, None),
        "apn 4/256 r32": row(None, 1.0, 1.0),
    }
    told = equal_time.compared(rows, "graphs")
    assert told.keys() == {"apn 4/64 r128", "moe 2/8 h768"}  # of the others not all is known
    assert told["apn 4/64 r128"]["seeds"] == pytest.approx([0.25, -0.125])
    assert told["apn 4/64 r128"]["ahead"] == pytest.approx(0.0625)
    assert told["apn 4/64 r128"]["inside"]
    assert told["moe 2/8 h768"]["ahead"] == -0.25
    assert not told["moe 2/8 h768"]["inside"]
    assert equal_time.compared(rows, "eager") == {}
    assert equal_time.no_slower(rows, "graphs") == {"dense 4d": {"shape": "apn 4/64 r128", "ahead": -0.125}}


def test_equal_time_is_so_many_steps():
    rows = {"dense 4d": row(2.0, 1.0), "apn": row(1.0, 1.0), "slow": row(6.0, 1.0), "none": row(None, 1.0)}
    steps = equal_time.steps_within(rows, "graphs", "dense 4d", 100)
    assert steps == {"dense 4d": 100, "apn": 200, "slow": 33}
    with pytest.raises(ValueError, match=r"'none' has no time as 'graphs' \(it was not timed\)"):
        equal_time.steps_within(rows, "graphs", "none", 100)


def test_forgetting_is_read_where_b_is_equal():
    way = looks((3.0, 0.0), (2.0, 0.25), (1.0, 0.5), (1.5, 0.75))
    assert equal_time.forgotten(way, 2.0) == 0.5  # the mean of 0.25 and 0.75
    assert equal_time.forgotten(way, 1.5) == 0.75
    assert equal_time.forgotten(way, 3.5) == 0.0
    assert equal_time.forgotten(way, 0.5) is None
    cells = {
        "few": [{"local": {"trajectory": way}}],
        "many": [{"local": {"trajectory": looks((3, 0), (2, 0.5))}}],
    }
    told = equal_time.at_equal_b(cells | {"dense": [{}]})
    assert told == {"B": 2, "forgotten": {"few": [0.5], "many": [1.0]}}
    assert equal_time.at_equal_b({"dense": [{}]}) == {}


def test_what_halves_of_a_text_share():
    indices = torch.tensor([[0, 1], [2, 3], [0, 1], [4, 5]])
    one, other = time_cells.halves(indices, 1)
    assert (one.tolist(), other.tolist()) == ([[0, 1], [0, 1]], [[2, 3], [4, 5]])
    assert time_cells.shared_top(one, other, 6) == 0.0
    assert time_cells.shared_top(one, indices, 6) == 0.5
    assert time_cells.shared_top(indices, indices, 6) == 1.0


@pytest.mark.parametrize("name", ["apn 2/16 r4 product", "apn 2/16 r4 @1"])
def test_local_steps_move_rows_that_were_chosen_and_nothing_else(name, texts, tiny_plan, tmp_path):
    read_domains(tiny_plan, texts, tmp_path)
    home, new = (domain(tiny_plan, tmp_path, text) for text in ("shakespeare", "kjv"))
    torch.manual_seed(0)
    model = GPT(time_cells.shape(name, tiny_plan.config("dense", 0)).model)
    before = copy.deepcopy(model.state_dict())
    told = time_cells.learn_locally(model, tiny_plan, {"home": home}, new, 1e-2, 0)
    assert told["trajectory"][-1]["B"] < told["trajectory"][0]["B"]
    own = {id(p) for layer in model.apn_layers().values() for p in layer.parameters_of(*LOCAL_ROLES)}
    assert told["trained"] == sum(p.numel() for p in model.parameters() if id(p) in own)
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, before[key]) != (id(parameter) in own), key


def test_a_dense_gradient_becomes_rows():
    parameter = torch.nn.Parameter(torch.ones(4, 2))
    parameter.grad = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [2.0, 0.0]])
    optimizer = torch.optim.AdamW([parameter])
    dense = parameter.grad.clone()
    time_cells.only_rows(optimizer)
    assert parameter.grad.coalesce().indices().tolist() == [[1, 3]]
    assert torch.equal(parameter.grad.to_dense(), dense)


def test_a_way_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(time_cells, "step_time", lambda trainer, way, steps: 1 / 0 if way == "pass" else 1.0)
    config = time_cells.shape("dense 2d", PLANS["smoke"].config("dense", 0)).to_dict()
    cell = {"device": "cpu", "config": config, "steps": 1}
    assert time_cells.clock(cell | {"way": "eager"}, tmp_path) == {"seconds": 1.0, "error": None}
    told = time_cells.clock(cell | {"way": "pass"}, tmp_path)
    assert told == {"seconds": None, "error": "ZeroDivisionError: division by zero"}


@pytest.mark.parametrize("name", ["dense 2d", "apn 2/16 r4 product", "moe 2/4 h16"])
def test_forward_and_backward_are_timed_without_a_step(name, tmp_path, monkeypatch):
    """Which a graph could not hold, where gradients have rows."""
    ran = []
    monkeypatch.setattr(time_cells.bench, "seconds", lambda run, device, graph: ran.append(run()) or 0.25)
    config = time_cells.shape(name, PLANS["smoke"].config("dense", 0)).to_dict()
    cell = {"device": "cpu", "config": config, "steps": 1, "way": "pass"}
    assert time_cells.clock(cell, tmp_path) == {"seconds": 0.25, "error": None}
    (gradients,) = ran
    assert None not in gradients
    assert any(gradient.is_sparse for gradient in gradients) == ("product" in name)


def test_the_study(texts, tiny_plan, tmp_path, monkeypatch):
    monkeypatch.setattr(time_cells.bench, "seconds", lambda run, device, graph: 0.25)
    bench = Benchmark("smoke", tmp_path / "out", domains=texts, device="cpu", mixture=("shakespeare", "kjv"))
    shapes = ("dense 2d", "dense 4d", "apn 2/16 r16", "apn 2/16 r4 product")
    ask = Ask(shapes, again=("dense 4d", "apn 2/16 r16"), rates=(1e-2, 1e-3), shift="python")
    values = equal_time.run(bench, tmp_path / "time.json", ask)
    assert json.loads((tmp_path / "time.json").read_text())["rows"] == values["rows"]
    assert (values["ways"], values["by"], values["steps"]) == (["eager"], "eager", 20)
    for name, told in values["rows"].items():
        assert told["times"]["eager"] > 0
        assert told["times"]["graphs"] is None
        assert told["decode"] == {streams: {"eager": 0.25} for streams in ("1", "64")}
        assert told["errors"] == {}
        assert told["first_seed"].keys() == {"0.001", "0.01"}
        assert told["val_loss"] == [told["first_seed"][str(told["rate"])]]
        assert told["test"][0].keys() == {"shakespeare", "kjv"}
        assert told["val_loss"][0] < math.log(256)
        assert not told["capped"]
        assert bool(told["patches"]) == name.startswith("apn")
    bank = values["rows"]["apn 2/16 r4 product"]
    (layers,) = bank["patches"]
    for layer in layers.values():
        assert layer["patches"] == 16
        assert 0 <= layer["dead"] < 16
        assert layer["used"] == 1 - layer["dead"] / 16
        assert 0 <= layer["overlap"] <= 1
        assert 0 < layer["overlap_self"] <= 1
        assert layer["texts"] == ["shakespeare", "kjv"]
    assert values["local"]["forgotten"].keys() == {"apn 2/16 r4 product"}
    assert values["equal_steps"]["eager"].keys() == set(shapes[2:])
    again = values["equal_time"]["rows"]
    assert again["dense 4d"]["val_loss"] == values["rows"]["dense 4d"]["val_loss"]
    assert again.keys() == {"dense 4d", "apn 2/16 r16"}
    shown = study_tables.shown(read(tmp_path / "time.json"))
    assert all(name in shown for name in shapes)
    assert "strictly local steps on python" in shown
    assert "<svg" in study_tables.CHARTS["time"](read(tmp_path / "time.json"))["time"]
    files = {path: path.stat().st_mtime_ns for path in (bench.folder / "cells").iterdir()}
    assert equal_time.run(bench, tmp_path / "again.json", ask)["rows"] == values["rows"]
    assert files == {path: path.stat().st_mtime_ns for path in (bench.folder / "cells").iterdir()}


def test_training_and_taking_times_can_follow_each_other(texts, tiny_plan, tmp_path):
    bench = Benchmark("smoke", tmp_path / "out", domains=texts, device="cpu")
    shapes = ("dense 2d", "apn 2/16 r16")
    first = equal_time.run(bench, tmp_path / "one.json", Ask(shapes, times=False))
    assert first["equal_steps"] == {"eager": {}}
    shown = study_tables.shown(read(tmp_path / "one.json"))
    assert "apn 2/16 r16" in shown
    assert study_tables.CHARTS["time"](read(tmp_path / "one.json")) == {}
    second = equal_time.run(bench, tmp_path / "two.json", Ask(shapes, trains=False))
    assert second["rows"]["dense 2d"]["val_loss"] == []
    assert second["rows"]["dense 2d"]["times"]["eager"] > 0
    study_tables.shown(read(tmp_path / "two.json"))
    assert second["rows"]["dense 2d"]["decode"].keys() == {"1", "64"}
    less = equal_time.run(bench, tmp_path / "less.json", Ask(shapes, trains=False, decode=False))
    assert less["rows"]["dense 2d"]["decode"] == {}
    both = equal_time.run(bench, tmp_path / "both.json", Ask(shapes))
    assert both["rows"]["dense 2d"]["val_loss"] == first["rows"]["dense 2d"]["val_loss"]
    assert both["rows"]["dense 2d"]["times"] == second["rows"]["dense 2d"]["times"]


def test_a_shape_that_diverges_has_lost(texts, tiny_plan, tmp_path):
    bench = Benchmark("smoke", tmp_path / "out", domains=texts, device="cpu")
    ask = Ask(("dense 2d", "dense 4d"), rates=(1e25,), times=False)
    values = equal_time.run(bench, tmp_path / "time.json", ask)
    assert values["rows"]["dense 2d"]["val_loss"] == [None]
    assert "not finite" in study_tables.shown(read(tmp_path / "time.json"))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (Ask(("dense 4d",), again=("dense 8d",)), r"asked for \['dense 8d'\], which --shapes does not name"),
        (Ask(("dense 2d",), again=("dense 2d",)), "within that of 'dense 4d', which --shapes does not name"),
        (Ask(("dense 4d",), by="graphs"), "'graphs', which is not among those taken: eager"),
        (Ask(("dense 4d",), shift="kjv"), "shift 'kjv' must be a domain that is not in the mixture"),
    ],
)
def test_what_cannot_be_is_said_at_once(ask, message, texts, tmp_path):
    bench = Benchmark("smoke", tmp_path, domains=texts, device="cpu", mixture=("shakespeare", "kjv"))
    with pytest.raises(ValueError, match=message):
        equal_time.run(bench, tmp_path / "time.json", ask)
