"""The benchmark's pieces on models that fit a test: every method, every cell, every figure."""

import dataclasses
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from attractor.config import APNConfig, RunConfig
from attractor.continual.overlay import fingerprint
from attractor.model import GPT
from attractor.results import write_result
from studies import adapting, anatomy, forgetting, knobs, match, rates, sensitivity, shifts, streams
from studies.cells import Benchmark, slug
from studies.grid import CellsFailed, GridStopped, cell_file
from studies.methods import METHODS, Situation
from studies.plan import FOLIO, HOME, KINDS, PAPER, PAPER_BYTES, PLANS, domain, load_base, read_domains
from studies.report import study_tables
from studies.report.readings import Result, read


def situation(kind, **changes):
    torch.manual_seed(0)
    plan = PLANS["smoke"]
    base = GPT(plan.config(kind, 0).model).eval()
    rows = torch.randint(0, 256, (64, base.config.context + 1))
    background = rows.flatten()[:500].numpy()
    return Situation(base, [(rows[:, :-1], rows[:, 1:])], background, 1e-2, **changes)


@torch.no_grad()
def loss_of(model, batch):
    return float(F.cross_entropy(model.eval()(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_learns_and_leaves_the_base_alone(name):
    method = METHODS[name]
    given_ = situation(method.model)
    before = fingerprint(given_.base)
    adapter = method.make(given_)
    batch = torch.randint(0, 32, (4, given_.base.config.context + 1))
    first = loss_of(adapter.model, batch)
    rate = 1e-3 if "EWC" in name else 1e-2  # a stiff penalty swings back soon, and from larger steps further
    losses = []
    for _ in range(6):
        adapter.step(batch[:, :-1], batch[:, 1:], rate)
        losses.append(loss_of(adapter.model, batch))
    assert (min(losses) if "EWC" in name else losses[-1]) < first
    assert fingerprint(given_.base) == before
    told = adapting.sizes(adapter, given_.base)
    assert 0 < told["changed"] <= adapter.trained
    assert told["bytes"] >= 4 * told["changed"]  # an overlay also keeps the numbers of its patches
    assert (adapter.extra_bytes > 0) == any(word in name for word in ("EWC", "GEM", "replay"))
    assert adapter.method.learning_rate == rate


def test_a_rate_of_zero_changes_nothing():
    for name in ("dense, full", "APN, overlay + all", "APN, strictly local"):
        adapter = METHODS[name].make(situation(METHODS[name].model))
        before = fingerprint(adapter.model)
        batch = torch.randint(0, 32, (4, 33))
        adapter.step(batch[:, :-1], batch[:, 1:], 0.0)
        assert fingerprint(adapter.model) == before, name


def test_ranked_patches_are_compared_with_the_old_text_to_the_end():
    adapter = METHODS["APN, ranked"].make(situation("apn"))
    usage = {number: habits.usage.clone() for number, habits in adapter.method.allocator.habits.items()}
    batch = torch.zeros(4, 33, dtype=torch.int64)  # unlike anything before
    for _ in range(50):
        adapter.step(batch[:, :-1], batch[:, 1:], 1e-3)
    for number, habits in adapter.method.allocator.habits.items():
        assert torch.allclose(habits.usage, usage[number], atol=1e-6)


def test_the_schedule_rises_and_falls():
    plan = dataclasses.replace(PLANS["full"], steps=100)
    rates = [plan.rate_at(step, 2.0, 100) for step in range(101)]
    assert rates[0] == pytest.approx(2.0 / 8, rel=1e-3)
    assert max(rates) == pytest.approx(2.0, rel=0.02)
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)
    assert all(a >= b for a, b in itertools.pairwise(rates[8:]))
    assert plan.evaluated(100) == [0, 17, 33, 50, 67, 83, 100]


def test_a_small_text_is_not_read_until_it_is_known_by_heart():
    plan = PLANS["full"]
    batch = plan.batch_size * plan.model.context
    assert plan.steps_on(10**7) == plan.steps
    assert plan.steps_on(batch) == plan.passes < plan.steps
    assert plan.steps_on(100) == plan.evaluations  # one look after each step, at least


def made_up_cell(lost, gained, size):
    """Two old texts, of which one is harder to keep by 0.5 nats, and B."""

    def text(*blocks):
        return {"loss": float(np.mean(blocks)), "blocks": list(blocks)}

    before = {"easy": text(1.0, 1.0, 1.0), "hard": text(2.0, 2.0, 2.0), "B": text(3.0, 3.0, 3.0)}
    after = {"easy": text(*[1.0 + lost] * 3), "hard": text(*[2.5 + lost] * 3), "B": text(*[3.0 - gained] * 3)}
    best = {"step": 10, "alone": after, "guarded": before, "changed": size, "bytes": 4 * size}
    way = [{"step": step, "losses": dict.fromkeys(before, 9.0)} for step in (0, 10)]
    return {
        "base": "a",
        "before": before,
        "best": best,
        "trajectory": way,
        "trained": 5,
        "extra_bytes": 0,
        "tokens": 1,
        "seconds": 1.0,
        "base_unchanged": True,
        "bound": 0.1,
        "routing": None,
    }


def test_a_summary_is_of_the_step_that_counts_and_of_all_seeds():
    cells = [made_up_cell(0.25, 1.0, 7), made_up_cell(0.25, 1.0, 9)]
    told = shifts.summary(cells, cells, ["easy", "hard"])
    assert told["alone"]["forgetting"] == 0.5
    assert told["alone"]["forgetting_interval"] == [0.5, 0.5]  # that texts differ is no error
    assert told["alone"]["hypervolume"] == 0.5  # of that point, and of no other on the way
    assert told["guarded"]["hypervolume"] == 0.0
    assert (told["changed"], told["bytes"]) == (9, 36)


def test_domains_are_cut_apart(texts, tmp_path):
    plan = PLANS["smoke"]
    hashes = read_domains(plan, texts, tmp_path)
    assert hashes == read_domains(plan, texts, tmp_path)
    text = domain(plan, tmp_path, "kjv")
    assert [len(part) for part in text] == [plan.train_bytes, plan.val_bytes, plan.test_bytes]
    read_domains(plan, {PAPER: PAPER}, tmp_path)
    assert len(domain(plan, tmp_path, PAPER).train) == PAPER_BYTES
    whole = Path(texts["kjv"]).read_bytes()
    assert text.test.astype(np.uint8).tobytes() == whole[-plan.test_bytes :]
    assert whole.startswith(text.train.astype(np.uint8).tobytes())
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(
        ValueError, match=f"has 9 bytes; a domain needs {2 * (plan.test_bytes + plan.val_bytes):,}"
    ):
        read_domains(plan, {"short": str(short)}, tmp_path)


def test_blocks_are_means():
    losses = np.arange(2049, dtype=np.float64)
    told = adapting.blocks(losses)
    assert told["loss"] == 1024.0
    assert told["blocks"] == [255.5, 767.5, 1279.5, 1791.5]  # four at least, the rest left out


def test_names_of_cells_are_file_names():
    names = {slug(method) for method in METHODS}
    assert len(names) == len(METHODS)
    assert all(name.replace("_", "").isalnum() for name in names)


CHOSEN = ("dense, full", "APN, overlay + all", "MoE, FFN only")


@pytest.fixture(scope="module")
def small_bench(texts, tiny_plan, tmp_path_factory):
    """With less to compute: one text less to adapt to."""
    bench = Benchmark("smoke", tmp_path_factory.mktemp("small"), domains=texts, device="cpu")
    bench.targets.remove(FOLIO)
    for kind, text in itertools.product(("dense", "apn"), (HOME, "mixture")):
        bench.run(bench.pretrain(kind, text, 0))
    return bench


how_much = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])


@how_much
def test_shifts(whole, bench, small_bench, tmp_path, monkeypatch):
    bench = bench if whole else small_bench
    chosen = CHOSEN if whole else CHOSEN[:2]
    few = ("dense, replay 5 % of all so far", streams.GUARDED)
    if whole:
        few += ("dense LoRA on all, guarded, no labels",)
    else:
        monkeypatch.setattr(shifts, "KINDS", ("dense", "apn"))
        monkeypatch.setattr(shifts, "STREAM", (HOME, "kjv", HOME))
    monkeypatch.setattr(shifts, "LEARNERS", {name: streams.LEARNERS[name] for name in few})
    values = shifts.run(bench, tmp_path / "shifts.json", methods=chosen)
    assert json.loads((tmp_path / "shifts.json").read_text())["shifts"] == values["shifts"]
    assert values["shifts"].keys() == {HOME, "mixture"}
    assert values["shifts"]["mixture"].keys() == {"paper-shift", "python"} | ({FOLIO} if whole else set())
    for part in values["shifts"].values():
        for rows in part.values():
            assert rows.keys() == set(chosen)
            for method, row in rows.items():
                assert row["base_unchanged"]
                last_window = bench.plan.test_bytes / (bench.plan.test_bytes - 1)  # is a byte shorter
                assert row["guarded"]["forgetting"] <= row["bound"] * last_window + 1e-6, method
                low, high = row["guarded"]["forgetting_interval"]
                assert low <= high
                assert row["trajectory"][0]["B"] == pytest.approx(math.log(row["B_before"]))
            full = rows["dense, full"]["alone"]
            assert full["gain"] == pytest.approx(1.0)
            assert full["B_over_full"] == pytest.approx(1.0)
    for method, told in values["rates"].items():
        best = min(told["validation"], key=lambda rate: told["validation"][rate])
        assert float(best) == told["rate"] or told["tied"], method
    guarded = values["streams"]["methods"]["APN, guarded, no labels"]["seeds"][0]
    assert len(guarded["matrix"]) == 1 + len(values["streams"]["order"])
    assert guarded["base_unchanged"]
    assert guarded["overlays"]  # whoever never opens one has not been tried
    shown = study_tables.shown(read(tmp_path / "shifts.json"))
    assert all(method in shown for method in chosen)
    assert values["pretrained_twice"] == []
    files = {path: path.stat().st_mtime_ns for path in (bench.folder / "cells").iterdir()}
    assert shifts.run(bench, tmp_path / "again.json", methods=chosen)["shifts"] == values["shifts"]
    assert files == {path: path.stat().st_mtime_ns for path in (bench.folder / "cells").iterdir()}


@pytest.mark.parametrize(("kind", "method"), [("moe", "MoE, FFN only"), ("switch", "Switch, FFN only")])
def test_experts_have_cells_too(kind, method, small_bench):
    assert METHODS[method].model == kind
    cells = small_bench.adapt(method, HOME, "kjv", 0, 1e-2)
    small_bench.run(small_bench.pretrain(kind, HOME, 0))
    (told,) = small_bench.run(cells).values()
    assert told["base_unchanged"]
    assert told["trajectory"][-1]["losses"]["B"] < told["before"]["B"]["loss"]


def drive(inquiry, compute):
    """Give an inquiry what it asks for; returns what it returns, and all that it asked for."""
    asked, answer = {}, None
    try:
        while True:
            cells = inquiry.send(answer)
            assert not asked.keys() & cells.keys()
            asked |= cells
            answer = {name: compute(name, cell) for name, cell in cells.items()}
    except StopIteration as end:
        return end.value, asked


def climbed(ladder, best):
    """The loss of a rate is its distance from the best one; without one every rate diverges."""

    def compute(name, rate):
        return {"best": {"validation": None if best is None else abs(math.log(rate / best))}}

    return drive(rates.climb(ladder, lambda rate: {f"{rate:g}": rate}), compute)[0]


LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


def test_every_method_climbs_to_the_rate_that_suits_it():
    bests = (1e-4, 3e-4, 1e-3, 3e-3, 3e-2, 1.0)
    tried = {best: climbed(LADDER, best) for best in bests}
    for best in bests[:-1]:
        chosen = forgetting.best_of(tried[best])
        assert chosen["rate"] == best
        place = LADDER.index(best)
        assert set(LADDER[max(0, place - 1) : place + 2]) <= tried[best].keys()
        assert chosen["at_edge"] == (best in (1e-4, 3e-2))
    assert forgetting.best_of(tried[1.0])["rate"] == 3e-2  # the ladder ends
    assert sorted(tried[1e-3]) == [3e-4, 1e-3, 3e-3]  # and nobody tries more than it needs
    assert sorted(tried[3e-3]) == [1e-3, 3e-3, 1e-2]


def test_who_diverges_goes_down_the_whole_ladder():
    assert sorted(climbed(LADDER, None)) == [1e-4, 3e-4, 1e-3, 3e-3]


@how_much
def test_forgetting(whole, bench, small_bench, tmp_path, monkeypatch):
    if not whole:
        bench = small_bench
        monkeypatch.setattr(bench, "plan", dataclasses.replace(bench.plan, rates=(1e-2,)))
    values = forgetting.run(bench, tmp_path / "forgetting.json")
    rows = {row["what"]: row for row in values["shows"]}
    assert next(row for what, row in rows.items() if "computed bound" in what)["worst"] <= 1 + 1e-3
    assert values["stream"]["order"] == [HOME, "kjv", "python", HOME]
    assert set(values["harm"]["overlays"]) <= set(rows[next(iter(rows))]["figures"])
    for harmful in values["harm"]["overlays"].values():
        assert harmful["alone"] > values["harm"]["before"]  # they are harmful
    assert rows["base bit for bit as it was"]["holds"]
    assert "patches only" in study_tables.shown(read(tmp_path / "forgetting.json"))


@pytest.mark.parametrize("size", ["smoke", "small", "full"])
def test_equal_parameters_and_no_more_work(size, texts, tmp_path):
    bench = Benchmark("smoke", tmp_path, domains=texts)
    bench.plan = PLANS[size]
    d = bench.plan.model.dim

    def cost(a):
        return d * a.num_patches + d * a.rank + a.top_k * d * a.rank

    def parameters(a):
        return a.num_patches * (d + 2 * a.rank + a.rank * d) + d * a.rank

    found = {name: run.model.apn for name, run in match.models(bench).items() if run.model.ffn == "apn"}
    limit = 0.03 if size == "full" else 0.1  # a patch is a larger part of a smaller FFN
    for name in ("APN, equal parameters", "APN, equal parameters, three patches"):
        assert parameters(found[name]) == pytest.approx(8 * d * d, rel=limit)
    if size == "full":  # the paper's has 256 patches at any width
        assert all(cost(apn) <= 8 * d * d for apn in found.values()), found
    assert len(set(map(repr, found.values()))) == len(found)
    large = match.models(bench)["MoE, as large as the largest"].model.moe.num_experts * 4 * d * d
    assert large == pytest.approx(
        parameters(found["APN, four times the patches"]), rel=0.03 if size == "full" else 0.2
    )


def test_a_text_is_read_three_times_at_most(texts, tmp_path):
    bench = Benchmark("smoke", tmp_path, domains=texts)
    config = bench.plan.config("dense", 0)
    long = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=10**6))
    ((_, cell),) = bench.train("long", long, [HOME], "byte", 0, passes=3).items()
    held_out = bench.plan.test_bytes + bench.plan.val_bytes
    domain_text = np.tile(np.arange(50, dtype=np.uint8), 10_000)
    (tmp_path / "texts" / f"{HOME}.bin").write_bytes(domain_text.tobytes()[: held_out + 512 * 5])
    values = adapting.train(cell, tmp_path)
    assert values["config"]["train"]["max_steps"] == 3 * 5  # five batches of 512 bytes, three times
    assert not list((tmp_path / "pretrained").iterdir())  # and nobody needs the model any more


def test_each_model_is_trained_the_way_that_suits_it(texts, tmp_path, monkeypatch):
    """The first seed tries; the others take the best one, and who diverges has not won."""
    ran = []

    def pretend(name, cell):
        train = cell["config"]["train"]
        height = 2 * train["weight_decay"] / 0.1 if "-char-" in name else train["learning_rate"] / 5e-4
        loss = None if height > 2 and "moe" in name else (-height if "apn" in name else height)
        return {
            "val_loss": loss,
            "best_step": 1,
            "parameters": 2,
            "multiply_adds_per_token": 3,
            "training_seconds": 4.0,
            "config": cell["config"],
        }

    def answer(bench, inquiries):
        driven = {key: drive(inquiry, pretend) for key, inquiry in inquiries.items()}
        ran.append([name for _, asked in driven.values() for name in asked])
        return {key: value for key, (value, _) in driven.items()}

    monkeypatch.setattr(Benchmark, "answer", answer)
    values = match.run(Benchmark("smoke", tmp_path, domains=texts, seeds=3), tmp_path / "match.json")
    assert len(ran[-1]) == 3 * sum(map(len, values["datasets"].values()))  # three seeds, in one way
    for dataset, rows in values["datasets"].items():
        for name, row in rows.items():
            small, high = "characters" in dataset, "APN" in name
            rates = (0.001, 0.002, 0.004, 0.008) if high else (0.0005, 0.001, 0.002)
            tried = (0.1, 1.0) if small else rates
            assert [float(rung) for rung in row["first_seed"]] == list(tried)
            assert float(row["way"].split()[-1]) == (tried[-1] if high else tried[0]), (dataset, name)
            assert row["at_edge"] == (not small)  # of two, one is always at an edge
            assert len(row["val_loss"]) == 3
            kept = row["config"]["train"]
            assert (kept["weight_decay"] if small else kept["learning_rate"]) == float(row["way"].split()[-1])
    shown = study_tables.shown(read(tmp_path / "match.json")).splitlines()
    lines = {tuple(cells[:2]): cells for cells in (re.split(r"\s{2,}", line) for line in shown)}
    for dataset, rows in values["datasets"].items():
        assert all(row["way"] in lines[dataset, name] for name, row in rows.items())


def test_a_model_that_diverges_has_lost_and_the_others_go_on(texts, tiny_plan, tmp_path, monkeypatch):
    monkeypatch.setattr(match, "RATES", (1e-3, 1e25))
    configs = match.models

    def one(bench):
        return {"dense": configs(bench)["dense"]}

    monkeypatch.setattr(match, "models", one)
    values = match.run(Benchmark("smoke", tmp_path, domains=texts), tmp_path / "match.json")
    row = values["datasets"]["mixture, bytes"]["dense"]
    assert row["first_seed"] == {"0.001": row["val_loss"][0], "1e+25": None}
    row["val_loss"].append(None)
    shown = study_tables.shown(Result(tmp_path / "match.json", values)).splitlines()
    (line,) = [line for line in shown if line.startswith("mixture, bytes ")]
    assert "not finite" in line


def test_a_model_of_other_settings_is_not_gone_on_with(texts, tmp_path):
    """Without its cell, the same name with other settings is trained as in a folder where nothing was."""

    def losses(folder, *steps):
        for number in steps:
            bench = Benchmark("smoke", folder, domains=texts)
            config = bench.plan.config("dense", 0)
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=number))
            ((name, cell),) = bench.train("one", config, [HOME], "byte", 0).items()
            cell_file(folder, name).unlink(missing_ok=True)
            (told,) = bench.run({name: cell | {"kind": "pretrain"}}).values()  # which leaves the model there
        return told["val_loss"], told["best_step"]

    assert losses(tmp_path / "both", 30, 10) == losses(tmp_path / "fresh", 10)
    assert losses(tmp_path / "both", 20) == losses(tmp_path / "other", 20)


def test_a_result_says_where_its_cells_come_from(bench):
    cells = bench.pretrain("dense", HOME, 0)
    bench.origins()  # those of other tests
    for _ in range(2):
        bench.run(cells)
        (told,) = bench.origins()["cells"]
        assert told["cells"] == 1
        assert "cpu_threads" not in told["machine"]


def test_cells_without_their_models_say_what_to_do(bench, tmp_path, texts):
    """A model that is trained again may be another one; then the result says so."""
    cells = {**bench.pretrain("dense", HOME, 0), **bench.adapt("dense, full", HOME, "kjv", 0, 1e-2)}
    bench.run(bench.pretrain("dense", HOME, 0))
    away = Benchmark("smoke", tmp_path, domains=texts, device="cpu")
    told = bench.run(cells)
    shutil.copytree(bench.folder / "cells", tmp_path / "cells")
    assert away.run(cells) == told
    more = away.adapt("dense, full", HOME, "python", 0, 0.0123)  # which no test has computed
    with pytest.raises(CellsFailed, match=r"the model that cells/pretrain-dense-shakespeare-0\.json"):
        away.run(more)
    (name,) = away.pretrain("dense", HOME, 0)
    made = json.loads(cell_file(tmp_path, name).read_text())
    made["values"]["base"] = "another"
    cell_file(tmp_path, name).write_text(json.dumps(made))
    again = Benchmark("smoke", tmp_path, domains=texts, device="cpu")
    again.run(cells)
    assert again.origins()["pretrained_twice"] == ["dense-shakespeare-0"]


def test_cells_of_another_machine_are_summed_up_without_its_device(texts, tmp_path):
    with pytest.raises(ValueError, match="cuda:99"):
        Benchmark("smoke", tmp_path, domains=texts, device="cuda:99", minutes=1)
    away = Benchmark("smoke", tmp_path, domains=texts, device="cuda:99", minutes=0)
    cells = away.pretrain("dense", HOME, 0)
    ((name, settings),) = cells.items()
    write_result(cell_file(tmp_path, name), {"settings": settings, "values": {"val_loss": 1.0}})
    assert away.run(cells) == {name: {"val_loss": 1.0}}
    with pytest.raises(GridStopped, match="1 of 1 cells known so far wait"):
        away.run(away.pretrain("dense", HOME, 1))


def test_variants_change_one_thing(bench):
    found = sensitivity.variants(bench)
    assert len({variant.name for variant in found}) == len(found)
    plain = bench.plan.config("apn", 0)
    assert found[0].of(plain) == plain
    for variant in found[1:]:
        changed = variant.of(plain)
        assert isinstance(changed, RunConfig)
        assert changed != plain, variant.name


def test_fewer_seeds_share_their_cells(texts, tmp_path):
    two, usual = (Benchmark("smoke", tmp_path, domains=texts, seeds=seeds) for seeds in (2, None))
    assert (two.plan.seeds, usual.plan.seeds) == (2, 1)
    assert two.pretrain("apn", HOME, 0) == usual.pretrain("apn", HOME, 0)
    assert two.adapt("APN, full", HOME, "kjv", 0, 1e-3) == usual.adapt("APN, full", HOME, "kjv", 0, 1e-3)
    with pytest.raises(ValueError, match="seeds=0"):
        Benchmark("smoke", tmp_path, domains=texts, seeds=0)


def test_mistakes(texts, tmp_path):
    with pytest.raises(ValueError, match=r"the mixture names \['greek'\]; domains: shakespeare, kjv"):
        Benchmark("smoke", tmp_path, domains=texts, mixture=("greek",), device="cpu")
    bench = Benchmark("smoke", tmp_path, domains=texts, device="cpu")
    with pytest.raises(ValueError, match=r"unknown methods \['dense'\]; there are: dense, full"):
        shifts.run(bench, tmp_path / "result.json", methods=("dense",))
    assert {METHODS[name].model for name in METHODS} == set(KINDS)


def test_the_rate_is_chosen_and_written_down():
    def of(losses):
        return rates.best_rate({rate: {"best": {"validation": loss}} for rate, loss in losses.items()})

    chosen = of({1e-1: math.inf, 1e-3: 2.0, 1e-2: 1.0})  # in whatever order they were tried
    assert (chosen["rate"], chosen["at_edge"], chosen["tied"]) == (1e-2, False, False)
    assert of({1e-3: 1.0, 1e-2: 2.0})["at_edge"]
    tied = of({1e-3: 2.0, 1e-2: 2.0, 1e-1: 2.0})
    assert (tied["rate"], tied["tied"], tied["at_edge"]) == (1e-2, True, False)
    streams_ = {rate: {"progressive": [9.0, loss]} for rate, loss in {1e-3: None, 1e-2: 3.0}.items()}
    assert rates.best_rate(streams_)["rate"] == 1e-2


def adapt_once(bench, monkeypatch=None, **changes):
    """One cell, computed here and now."""
    bench.run(bench.pretrain("dense", HOME, 0))
    (cell,) = bench.adapt("dense, full", HOME, "kjv", 0, 1e-2).values()
    return adapting.adapt({**cell, **changes}, bench.folder)


def test_the_best_step_is_chosen_by_validation_and_not_by_test(bench, monkeypatch):
    """Validation says that the first step is best, the test text that the last one is."""
    losses = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(adapting, "evaluate", lambda *given, **options: next(losses))
    told = adapt_once(bench)
    assert [point["validation"] for point in told["trajectory"]] == [1.0, 2.0, 3.0]
    assert told["best"]["step"] == 0
    assert told["best"]["alone"] == told["before"]
    assert told["best"]["guarded"]["B"]["loss"] == pytest.approx(told["before"]["B"]["loss"], abs=1e-5)
    assert told["trajectory"][-1]["losses"]["B"] < told["before"]["B"]["loss"]


def test_a_rate_that_diverges_is_a_result(bench):
    told = adapt_once(bench, rate=1e30)
    assert told["diverged"] is not None
    assert told["best"]["step"] == 0


def test_other_plans_are_other_cells(bench, monkeypatch):
    (before,) = bench.adapt("dense, full", HOME, "kjv", 0, 1e-2).values()
    for change in ({"steps": 7}, {"memory": 5}, {"apn": APNConfig(num_patches=17, top_k=1)}):
        monkeypatch.setattr(bench, "plan", dataclasses.replace(PLANS["smoke"], **change))
        (after,) = bench.adapt("dense, full", HOME, "kjv", 0, 1e-2).values()
        assert after != before, change


class TestKnobs:
    """The study that turns one knob of a learner at a time."""

    def learned(self, bench, names):
        bench.run(bench.pretrain("apn", HOME, 0))
        found = {}
        for name in names:
            (cell,) = bench.knob(name, dataclasses.asdict(knobs.KNOBS[name]), HOME, "kjv", 0, 1e-2).values()
            found[name] = knobs.learn(json.loads(json.dumps(cell)), bench.folder)
        return found

    def test_what_is_learned_helps_and_moves_patches(self, bench):
        names = ("none", "max_entropy=2", "allocation: grow", "guard", "guard, consolidated")
        found = self.learned(bench, names)
        for name in ("none", "allocation: grow", "guard"):
            assert found[name]["path"]["new"] < found[name]["before"]["new"], name
            assert 0 < found[name]["moved"] <= 1, name
        held_back = found["max_entropy=2"]  # nothing is so certain yet
        assert held_back["moved"] == 0
        assert held_back["after"] == held_back["before"]
        assert found["allocation: grow"]["allocated"] > 0
        bound = math.log(2) / bench.plan.model.context
        assert found["guard"]["after"]["old"] <= found["guard"]["before"]["old"] + bound
        assert found["guard"]["path"] == pytest.approx(found["none"]["after"], abs=1e-4)
        done = found["guard, consolidated"]
        assert done["refused"] or done["after"] == pytest.approx(done["path"])

    def test_settings_are_in_units_of_the_base(self, bench):
        bench.run(bench.pretrain("apn", HOME, 0))
        base = load_base(bench.folder, f"apn-{HOME}-0", torch.device("cpu"))
        old = domain(bench.plan, bench.folder, HOME)
        measured = knobs.Measured.of(base, bench.plan, 1e-2, old.validation)
        assert measured.resolve(("patches", 0.25)) == bench.plan.apn.num_patches // 4
        assert measured.resolve(("times", 0.5)) == 5e-3
        assert measured.resolve(["stream", 0.25]) == bench.plan.stream_tokens // 4
        assert measured.resolve(("decoders", "gates")) == ("decoders", "gates")
        low, high = (measured.resolve(("confidence", share)) for share in (0.1, 0.9))
        assert low < high
        numbers = [p[0].numel() for p in next(iter(base.apn_layers().values())).patch_parameters()]
        assert measured.change == pytest.approx(1e-2 * sum(numbers) ** 0.5)

    def test_every_knob_is_a_setting_of_its_own(self, bench):
        bench.run(bench.pretrain("apn", HOME, 0))
        base = load_base(bench.folder, f"apn-{HOME}-0", torch.device("cpu"))
        measured = knobs.Measured.of(
            base, bench.plan, 1e-2, domain(bench.plan, bench.folder, HOME).validation
        )
        online = {n: knobs.config_of(k, measured) for n, k in knobs.KNOBS.items() if k.guard is None}
        assert len({config.to_json() for config in online.values()}) == len(online)

    def test_mixed_windows_hold_both_domains(self):
        old, new = (knobs.Text(*[np.full(100, value)] * 3) for value in (1, 2))
        mixture = knobs.mixed(old, new, 9)
        assert all(set(mixture[start : start + 9]) == {1, 2} for start in range(0, len(mixture) - 9, 9))


class TestAnatomy:
    """What patches are for: numbers that are known beforehand."""

    def test_the_parts_of_the_loss_add_up_to_it(self):
        chance = np.random.default_rng(0)
        patch, loss = chance.integers(0, 5, 4000), chance.random(4000)
        found = anatomy.by_patch(loss, patch, patch)
        assert sum(p * nats for p, nats in found["parts"]) == pytest.approx(loss.mean(), abs=1e-4)
        assert found["explained"] == pytest.approx(found["by the answer"])
        assert found["explained"] < 10 * found["by chance"]  # these patches mean nothing
        assert anatomy.by_patch(1.0 * patch, patch, patch)["explained"] == pytest.approx(1)

    def test_a_set_is_the_same_in_any_order(self):
        indices = torch.tensor([[0, 1], [1, 0], [2, 3], [1, 2]])
        found = anatomy.active_sets(indices, 5)
        assert (found["tokens"], found["possible"], found["occur"], found["once"]) == (4, 10, 3, 2)
        assert found["effective"] == pytest.approx(math.exp(-(0.5 * math.log(0.5) + 0.5 * math.log(0.25))))
        assert found["covered"]["10"] == pytest.approx(1)

    def test_the_effective_rank_of_matrices_that_are_known(self):
        assert anatomy.effective_rank(torch.eye(7).double()) == pytest.approx(7)
        assert anatomy.effective_rank(
            torch.outer(torch.ones(5), torch.arange(5.0)).double()
        ) == pytest.approx(1)

    def test_a_map_is_how_the_update_changes_with_the_token(self):
        matrix = torch.randn(6, 6)
        assert torch.allclose(anatomy.jacobian(lambda x: x @ matrix, torch.randn(6)), matrix.T.double())

    def test_a_model_is_examined(self, bench, tmp_path):
        found = anatomy.run(bench, tmp_path / "anatomy.json")
        apn, dense = (found["ranks"][kind] for kind in ("apn", "dense"))
        assert all(row["bound"] is None and 1 <= row["map"] <= bench.plan.model.dim for row in dense.values())
        assert all(row["bound"] == bench.plan.apn.top_k * bench.plan.apn.rank for row in apn.values())
        for row in found["layers"].values():
            assert 0 <= row["explained"] <= 1
            assert row["once"] <= row["occur"] <= min(row["tokens"], row["possible"])
            assert row["effective"] <= row["occur"]
        tables = study_tables.TABLES["anatomy"](read(tmp_path / "anatomy.json"))
        assert [len(table.rows) for table in tables] == [len(apn), 2 * len(apn)]
