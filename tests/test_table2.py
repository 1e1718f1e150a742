"""Table 2 on models small enough to run in seconds, and what its text says."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from attractor import health, presets
from attractor.checkpoint import find_model
from attractor.data import prepare
from attractor.model import GPT
from studies import table2
from studies.report import study_tables
from studies.report.readings import Result
from studies.table2 import ROWS, Recipe, retention_at, verdict


@pytest.fixture
def small(tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be that is the question\n" * 40)
    other = tmp_path / "b.txt"
    other.write_text("question the is that be to not or be to\n" * 40)

    def config(model, size):
        run = presets.NAMES[f"tiny_{model}"]()
        shape = dataclasses.replace(run.model, context=8, num_layers=2, dim=16)
        train = dataclasses.replace(run.train, max_steps=20, batch_size=4, eval_interval=10)
        return dataclasses.replace(run, model=shape, train=train)

    recipes = {
        "paper": Recipe(800, 8, 4, 1e-2, (0, 4, 8), False),
        "healthy": Recipe(1600, 8, 4, 1e-2, (0, 4, 8), True, 100),
    }
    monkeypatch.setattr(table2, "run_config", config)
    monkeypatch.setattr(table2, "protocols", lambda size: recipes)
    return prepare(text, tmp_path / "data"), str(other), tmp_path


def test_every_row(small):
    dataset, other, folder = small
    records = []
    options = {"domain_b": other, "device": "cpu", "report": records.append}
    result = table2.run("smoke", dataset, folder / "run", folder / "out.json", **options)
    saved = json.loads((folder / "out.json").read_text())
    assert saved["protocols"].keys() == {"paper", "healthy"}
    for part in saved["protocols"].values():
        assert part["rows"].keys() == ROWS.keys()
        assert part["overlap"].keys() == {"0", "1"}
        for name, row in part["rows"].items():
            assert [point["step"] for point in row["trajectory"]] == [0, 4, 8]
            assert 0 < row["changed"] <= row["trainable"] <= row["parameters"], name
            assert (row["usage_entropy"] is None) == name.startswith("dense")
            assert row["best"]["B_validation"] == min(p["B_validation"] for p in row["trajectory"])
    rows = saved["protocols"]["paper"]["rows"]
    assert rows["APN, decoders only"]["trainable"] < rows["APN, paper rule"]["trainable"]
    assert rows["dense, FFN only"]["trainable"] < rows["dense, everything"]["trainable"]
    assert rows["APN, everything"]["trainable"] == rows["APN, everything"]["parameters"]
    assert records[-1]["done"] == table2.work("smoke")
    shown = study_tables.shown(Result(folder / "out.json", saved))
    assert all(name in shown for name in ROWS)
    # a second run finds everything done, and says the same
    again = table2.run("smoke", dataset, folder / "run", folder / "again.json", **options)
    assert again["protocols"] == result["protocols"]
    # each row changed what its name says, and nothing else
    ours = GPT.from_pretrained(find_model(folder / "run" / "apn"))
    for name, part in (
        ("APN, decoders only", "decoder"),
        ("APN, strictly local", "ffn"),
        ("APN, paper rule", "ffn"),
    ):
        model = copy.deepcopy(ours)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        method, _ = ROWS[name].make(model, 1e-2)
        x = torch.randint(0, 5, (2, 8))
        method.step(x, x)
        changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
        assert changed
        assert all(part in key for key in changed), name
    # another text under the same name is another experiment
    Path(other).write_text("not not not that that question\n" * 60)
    renewed = table2.run("smoke", dataset, folder / "run", folder / "d.json", **options)
    assert renewed["protocols"]["paper"]["rows"] != result["protocols"]["paper"]["rows"]
    moved = table2.run(
        "smoke",
        dataset,
        folder / "run",
        folder / "c.json",
        rows=("dense, FFN only",),
        **{**options, "domain_b": str(folder / "a.txt")},
    )
    assert moved["protocols"]["paper"]["rows"] != result["protocols"]["paper"]["rows"]


def test_too_little_text(small):
    dataset, _, folder = small
    (folder / "c.txt").write_text("0123456789")
    with pytest.raises(ValueError, match="too little"):
        table2.run("smoke", dataset, folder / "run", folder / "o.json", domain_b=str(folder / "c.txt"))
    assert not (folder / "run").exists()  # before any training


def row(*points):
    trajectory = [{"step": s, "A": a, "B": b, "B_validation": b} for s, a, b in points]
    best = min(trajectory, key=lambda p: p["B"])
    return {
        "trajectory": trajectory,
        "before": trajectory[0],
        "after": trajectory[-1],
        "best": best,
        "changed": 9,
    }


def test_verdict_says_where_the_paper_is_contradicted():
    rows = {
        "dense, everything": row((0, 4.0, 5.0), (50, 5.0, 4.0), (500, 30.0, 17.0)),
        "dense, FFN only": row((0, 4.0, 5.0), (50, 4.5, 3.9), (500, 20.0, 12.0)),
        "APN, paper rule": row((0, 4.5, 5.5), (50, 5.0, 4.2), (500, 11.0, 6.0)),
        "APN, strictly local": row((0, 4.5, 5.5), (50, 5.0, 4.2), (500, 9.0, 4.8)),
    }
    text = " ".join(verdict({"protocols": {"paper": {"rows": rows}}}))
    assert "3 of 4 rows predict B worse than before" in text
    assert "is 0.37 at the last step and 1.00 at each one's best step" in text
    assert "A 1.11, B 1.08" in text
    assert retention_at(rows["dense, FFN only"], 4.45) == pytest.approx(4.25)
    assert retention_at(rows["dense, FFN only"], 1.0) is None


def test_health(small, tmp_path):
    dataset, _, _ = small
    config = table2.run_config("apn", "smoke").model
    model = GPT(dataclasses.replace(config, vocab_size=dataset.tokenizer.vocab_size))
    values = health.measure(model, {"a": dataset.val, "b": dataset.train[:300]})
    assert values["texts"].keys() == {"a", "b"}
    for layer, shared in values["shared"].items():
        own = values["texts"]["a"][layer]
        assert sum(own["usage"]) == pytest.approx(1)
        assert sum(own["overlap_histogram"]) == pytest.approx(1)
        assert shared["score"] == pytest.approx(shared["omega"] / 2)
        assert 0 <= shared["usage"] <= 1 + 1e-9
    assert "Omega(A,B)" in health.table(values)
    health.plot(values, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="no APN layers"):
        health.measure(GPT(dataclasses.replace(config, ffn="mlp")), {"a": dataset.val})
