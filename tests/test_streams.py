"""The controls of streams: copies of a model under the rules of the guarded learner."""

import copy
import dataclasses
import itertools
import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from test_domains import domain
from torch.nn import functional as F

from attractor.config import GPTConfig
from attractor.continual.baselines import FineTune, LoRA
from attractor.continual.overlay import fingerprint
from attractor.continual.update import NotFiniteUpdate
from attractor.data import Batches
from attractor.evaluate import evaluate
from attractor.model import GPT
from studies import shifts
from studies.adapting import Meter
from studies.methods import Situation
from studies.plan import HOME, PLANS
from studies.streams import COPIES, GUARDED, LEARNERS, GuardedCopies, Online

PLAN = dataclasses.replace(PLANS["smoke"], batch_size=16)


@pytest.fixture(scope="module")
def home():
    """A small dense model that has learned domain 0."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=10, context=8, num_layers=2, num_heads=2, dim=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in itertools.islice(Batches(domain(0, 4000), 16, 8, 0), 150):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("name", COPIES)
def test_copies_find_domains_and_cost_no_more_than_the_bound(home, name):
    base = copy.deepcopy(home)
    unchanged = fingerprint(base)

    begun = []

    def start():
        begun.append(name)
        return Online(COPIES[name].make(Situation(base, (), domain(0, 10), 1e-2)), PLAN, 1e-2)

    learner = GuardedCopies(base, PLAN, domain(0, 2000, seed=9), start, Meter(base, {}).cast)
    texts = {number: domain(number, 60 * 8 + 1, seed=5) for number in (0, 1, 2)}
    before = {number: evaluate(learner.predictor(), text) for number, text in texts.items()}
    owners = []
    for visit, number in enumerate((0, 1, 2, 0, 1)):
        for part in range(12):
            found = learner.learn(domain(number, 16 * 8 + 1, seed=20 * visit + part + 30))
        owners.append(found)
    assert owners == ["base", "domain-1", "domain-2", "base", "domain-1"]
    assert len(begun) == 2  # and not one for every piece
    overlays = learner.described()["overlays"]
    assert overlays.keys() == {"domain-1", "domain-2"}
    assert overlays["domain-1"]["tokens"] > overlays["domain-2"]["tokens"] > 9 * 128
    adapter = learner.sources["domain-1"].online.adapter
    assert overlays["domain-1"]["bytes"] == pytest.approx(4 * adapter.trained, rel=0.05)
    assert isinstance(adapter.method, LoRA if "LoRA" in name else FineTune)
    after = {number: evaluate(learner.predictor(), text) for number, text in texts.items()}
    assert after[0] <= before[0] + math.log(2) / 8
    assert after[1] < before[1] - 0.3
    assert after[2] < before[2] - 0.3
    assert fingerprint(base) == unchanged


def test_a_copy_that_fails_is_not_kept(home):
    def start():
        raise NotFiniteUpdate("no")

    learner = GuardedCopies(home, PLAN, domain(0, 2000, seed=9), start, Meter(home, {}).cast)
    with pytest.raises(NotFiniteUpdate):
        learner.observe(domain(1, 129), "domain-1")
    assert not learner.sources


@pytest.mark.parametrize("horizon", [None, 256])
def test_with_a_horizon_every_step_is_smaller_than_the_last(home, horizon):
    adapter = COPIES["dense, guarded, no labels"].make(Situation(home, (), domain(0, 10), 1e-2))
    rates = []
    adapter.step = lambda inputs, targets, rate: rates.append(rate)
    online = Online(adapter, PLAN, 1e-2, horizon)
    for seed, batches in enumerate((2, 1, 3)):  # of 128 tokens
        online.learn(domain(1, 128 * batches + 1, seed=seed))
    assert rates == pytest.approx([1e-2 * (1 + (step / 2 if horizon else 0)) ** -0.5 for step in range(6)])


def test_a_stream_whose_rate_falls_is_a_cell_of_its_own(bench):
    ((name, constant),) = bench.stream(GUARDED, [HOME, "kjv"], 0, 1e-3).items()
    ((other, falling),) = bench.stream(GUARDED, [HOME, "kjv"], 0, 1e-3, 4096).items()
    assert name == f"stream-{HOME}-kjv-apn_guarded_no_labels-0.001-0"  # as files of earlier runs are called
    assert "horizon" not in constant
    assert other == f"stream-{HOME}-kjv-apn_guarded_no_labels-0.001-4096-0"
    assert falling == {**constant, "horizon": 4096}
    with pytest.raises(ValueError, match="horizon=0 must be a positive integer"):
        bench.stream(GUARDED, [HOME, "kjv"], 0, 1e-3, 0)


@pytest.mark.parametrize("method", [GUARDED, "dense, guarded, no labels", "dense, full"])
def test_a_stream_follows_its_horizon(bench, method):
    bench.run(bench.pretrain(LEARNERS[method], HOME, 0))
    cells = [bench.stream(method, [HOME, "python"], 0, 1e-2, horizon) for horizon in (None, 1, 10**12)]
    constant, falling, hardly = (next(iter(bench.run(cell).values())) for cell in cells)
    assert constant["matrix"][1] == falling["matrix"][1] or method == "dense, full"  # the base learns nothing
    assert constant["matrix"][-1]["python"] < falling["matrix"][-1]["python"] - 1e-3
    for row, same in zip(constant["matrix"], hardly["matrix"], strict=True):
        assert row == pytest.approx(same, abs=1e-4)


SCRIPT = Path(__file__).parent.parent / "benchmarks" / "stream_rates.py"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--horizons", "0"], "horizon=0 must be a positive integer"),
        (["--rates", "-1"], "rate=-1.0 must be a positive number"),
        (["--domain", "kjv"], "--domain 'kjv' must be NAME=FILE"),
        (["--domain", "../up=text"], "must be NAME=FILE"),
        (["--domain", "kjv=nowhere.txt"], "nowhere.txt"),
        (["--seeds", "0"], "seeds=0 must be a positive integer"),
    ],
)
def test_the_script_about_rates_refuses(tmp_path, wrong, told):
    main = runpy.run_path(str(SCRIPT))["main"]
    with pytest.raises(SystemExit) as refused:
        main([f"--out={tmp_path / 'out'}", f"--result={tmp_path / 'result.json'}", "--device=cpu", *wrong])
    assert told in str(refused.value.code)
    assert not (tmp_path / "result.json").exists()


def test_the_script_about_rates_compares_them_and_tells_who_diverged(
    texts, tiny_plan, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(shifts, "STREAM", (HOME, "kjv", "python"))
    domains = [f"{name}={file}" for name, file in texts.items()]
    main = runpy.run_path(str(SCRIPT))["main"]
    asked = ["--rates", "0.01", "1e30", "--horizons", "256", "256", "--methods", "dense, guarded, no labels"]
    main([f"--out={tmp_path}", f"--result={tmp_path}/r.json", "--device=cpu", "--domain", *domains, *asked])
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["rate"], row["rate_horizon"]) for row in rows] == [
        (0.01, None),
        (0.01, 256),
        (1e30, None),
        (1e30, 256),
    ]
    assert rows[0]["new_texts"] < rows[1]["new_texts"]  # so little text wants large steps
    assert rows[0]["seeds"][0]["overlays"] >= 1
    assert rows[2]["new_texts"] is None
    assert rows[2]["seeds"][0]["diverged"] is not None
    assert capsys.readouterr().out.count("new texts") == 4
