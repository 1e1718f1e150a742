"""Results become a page: whole, escaped, with the JSON's numbers."""

import base64
import copy
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from made_up_results import (
    CELLS,
    FORGETTING,
    GUARDED,
    KNOBS,
    MATCH,
    ROOT,
    SENSITIVITY,
    SHIFTS,
    Page,
    rendered,
)

from studies.report import bench_tables, charts, study_tables
from studies.report.readings import Result
from studies.statistics import gain_fraction


@pytest.fixture(scope="module")
def whole() -> str:
    paper = [json.loads((ROOT / "results" / f"table{n}-paper.json").read_text()) for n in (1, 2)]
    return rendered(SHIFTS, FORGETTING, *paper, SENSITIVITY, KNOBS, MATCH, drawn=True)


@pytest.fixture
def figures(monkeypatch):
    """Charts return the figure that they would have written."""
    monkeypatch.setattr(charts, "svg", lambda figure: figure)
    monkeypatch.setattr(charts, "png", lambda figure: figure)


def points_of(axes, marked=True):
    """Every point of a chart that has a mark (or of lines that have none)."""
    lines = [line for line in axes.lines if (line.get_marker() not in ("None", "", None)) == marked]
    return {(float(x), float(y)) for line in lines for x, y in zip(*line.get_data(), strict=True)}


def legend_of(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_the_page_stands_alone(whole):
    found = Page(whole)
    assert len(found.ids) == len(set(found.ids))
    words = re.sub(r'src="data:image/(svg\+xml|png);base64,[^"]*"', "", whole)
    assert not re.search(r"https?:", words)
    assert not {tag for tag, _ in found.tags} & {"link", "iframe", "object", "base", "form"}
    assert not [own for _, own in found.tags if {"srcset", "background", "onclick"} & set(own)]
    assert "src=" not in words
    assert "url(" not in words
    assert "@import" not in words
    places = [own["href"] for tag, own in found.tags if tag == "a"]
    assert places == [f"#r{number}" for number in range(7)]
    assert {place[1:] for place in places} <= set(found.ids)


def test_what_comes_from_json_is_escaped(whole):
    assert whole.count("<script") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in whole
    for raw in ("<i>other", "domain <1>", "<top 2>", "<apn>", "2.13.0<b>"):
        assert raw not in whole


def test_pictures_have_words(whole):
    pictures = [own for tag, own in Page(whole).tags if tag == "img"]
    assert pictures
    assert all(own["alt"] for own in pictures)
    drawings = [own["src"].partition(",")[2] for own in pictures if "svg" in own["src"]]
    for drawing in map(base64.b64decode, drawings):
        root = ElementTree.fromstring(drawing)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        fetched = [value for mark in root.iter() for name, value in mark.attrib.items() if "href" in name]
        assert all(value.startswith("#") for value in fetched)


def test_every_method_is_in_every_table_and_chart(whole, figures):
    found = Page(whole)
    for shift in SHIFTS["shifts"]["old"]:
        names = [row[0][0] for row in found.table(f"old \u2192 {shift}")[2:]]
        assert names == list(CELLS)
    rows = SHIFTS["shifts"]["old"]["new"]
    chosen = charts.important(rows)
    figure = charts.pareto({"one": rows, "two": rows})
    assert legend_of(figure)[: len(CELLS)] == list(CELLS)
    for axes in figure.axes:
        for row in rows.values():
            spots = {(row[way]["forgetting"], row[way]["gain"]) for way in ("alone", "guarded")}
            assert spots <= points_of(axes)
    figure = charts.trajectories({"one": rows, "two": rows})
    assert set(legend_of(figure)) == chosen
    for axes in figure.axes:
        for method in chosen:
            assert {(p["B"], p["A"]) for p in rows[method]["trajectory"]} <= points_of(axes)
    assert len({charts.looks(rows)[method].marker for method in chosen}) == len(chosen)  # also in grey


def test_numbers_are_those_of_the_json(whole):
    rows = {row[0][0]: row for row in Page(whole).table("old \u2192 new")}
    for method, told in SHIFTS["shifts"]["old"]["new"].items():
        alone, guarded = told["alone"], told["guarded"]
        expected = [
            told["A_before"],
            alone["A"],
            guarded["A"],
            told["B_before"],
            alone["B"],
            guarded["B"],
            alone["gain"],
            guarded["gain"],
            alone["forgetting"],
            guarded["forgetting"],
            alone["B_over_full"],
            guarded["B_over_full"],
            alone["hypervolume"],
            guarded["hypervolume"],
            told["trained"],
            told["changed"],
            told["bytes"],
            told["extra_bytes"],
            told["seconds"],
            0.003,
            20,
        ]
        cells = rows[method][1:]
        assert [float(own["data-value"]) for _, own in cells] == expected
        low, high = alone["forgetting_interval"]
        assert cells[8][0] == f"{alone['forgetting']:.4f} {low:.4f} to {high:.4f}"
        assert cells[0][0] == f"{told['A_before']:.3f}"
        assert [text for text, _ in cells[14:18]] == ["0.23M", "0.12M", "493.8 kB", "16 B"]


def test_tables_can_be_sorted(whole):
    for table in Page(whole).tables:
        if table["class"] != "sortable":
            continue
        heads = max(table["rows"][:2], key=lambda row: sum("data-sort" in own for _, own in row))
        assert all(own["data-sort"] in ("words", "numbers") for _, own in heads)
        assert all(own["scope"] == "col" for _, own in heads)
        start = table["rows"].index(heads) + 1
        for row in table["rows"][start:]:
            assert len(row) == len(heads)
            assert row[0][1]["scope"] == "row"
            for (_, head), (text, own) in zip(heads, row, strict=True):
                if head["data-sort"] == "numbers" and "data-value" in own:
                    assert math.isfinite(float(own["data-value"]))
                elif head["data-sort"] == "numbers":
                    assert text in ("\u2013", "not finite") or row[0][0] == "start"


def test_paper_tables(whole):
    found, values = Page(whole), json.loads((ROOT / "results" / "table1-paper.json").read_text())["rows"]
    rows = {row[0][0]: [text for text, _ in row] for row in found.table("Random batches")}
    assert rows["apn"][1] == f"{values['apn']['val_ppl']:.3f}"
    assert rows["apn, in the paper"][2] == "4.57"
    healthy = json.loads((ROOT / "results" / "table2-paper.json").read_text())["protocols"]["healthy"]["rows"]
    rows = {row[0][0]: [text for text, _ in row] for row in found.table("The healthy protocol")}
    for method, told in healthy.items():
        assert rows[method][3] == f"{told['after']['A']:.2f}"


def test_sensitivity_says_what_an_option_does(whole, figures):
    _, plain, other = ([text for text, _ in row] for row in Page(whole).table("One option changed"))
    assert plain == ["as planned", "4.500", "2.500", "0.250", "0.125", "1.500", "1,000", "2.00M"]
    assert other[:2] == ["<top_k=2>", "4.500 4.250 to 4.750"]
    drawn = study_tables.sensitivity_charts(Result(Path("s.json"), SENSITIVITY))
    overlaps, _ = drawn.values()
    assert points_of(overlaps.axes[0]) == {(0.25, 0.125), (0.5, 0.125)}
    assert legend_of(overlaps) == ["as planned", "<top_k"]
    assert [text.get_text() for text in overlaps.axes[0].texts] == ["2>"]


def test_knobs_say_what_was_lost_and_won(whole):
    _, plain, other = ([text for text, _ in row] for row in Page(whole).table("One knob of a learner"))
    assert plain == ["none", "+0.2500 +0.1250 to +0.3750", "-0.5000", "+0.0000", "0.50", "2"]
    assert other[:2] == ["<rule>", "+0.5000 +0.1250 to +0.3750"]
    (guarded,) = ([text for text, _ in row] for row in Page(whole).table("The same for a guarded")[2:])
    assert guarded[0] == "guard"
    assert guarded[-2:] == ["+0.7500", "-0.6250"]


def test_means_leave_out_shifts_of_another_kind():
    rows = SHIFTS["shifts"]["old"]["new"]
    table = bench_tables.overview("old", {"kjv": rows, "first-folio": rows, "paper-shift": rows})
    assert table.caption == "Pretrained on old, 1 seed: mean over kjv"
    assert bench_tables.overview("old", {"first-folio": rows}).caption.endswith("mean over first-folio")


def test_match_says_how_each_model_did(whole):
    rows = [[text for text, _ in row] for row in Page(whole).table("Mean over seeds, and")[1:]]
    rows = [row for row in rows if row[0] == "kjv"]
    assert rows[0][2:] == [
        "1.5000 1.2500 to 1.7500",
        f"{math.exp(1.5):.3f}",
        "2",
        "10",
        "20",
        "rate 0.001",
        "500, 750",
    ]
    assert rows[1][1] == "<apn>"


def test_who_diverged_is_named_and_not_drawn(figures):
    rows = MATCH["datasets"]["kjv"] | {"<apn>": {"val_loss": [None], "multiply_adds_per_token": None}}
    (chart,) = study_tables.match_charts(Result(Path("m.json"), {"datasets": {"kjv": rows}})).values()
    (axes,) = chart.axes
    assert points_of(axes) == {(20 / 1e6, 1.5)}
    assert [text.get_text() for text in axes.texts] == ["not drawn, not finite: <apn>"]
    assert points_of(axes, marked=False) == {(20 / 1e6, 1.25), (20 / 1e6, 1.75)}  # from seed to seed


def test_promises_are_judged_only_at_full_size():
    def verdicts(values):
        rows = Page(rendered(values)).table("What the guard promises")[1:]
        return {row[0][0]: (row[1][0], row[2][0], row[3][0], row[3][1].get("class", "")) for row in rows}

    told = {row["what"]: row for row in FORGETTING["shows"]}
    found = verdicts(FORGETTING)
    assert list(found) == list(told)
    for what, (_, _, verdict, kind) in found.items():
        assert (verdict, kind) == (
            ("holds", "good words") if told[what]["holds"] else ("missed", "bad words")
        )
    assert {verdict for _, _, verdict, _ in found.values()} == {"holds", "missed"}
    assert found["tokens per second guarded, settled / overlay alone"][:2] == ("0.5000", "\u2265 0.85")
    small = verdicts({**FORGETTING, "size": "small"})
    assert {(verdict, kind) for _, _, verdict, kind in small.values()} == {
        ("not judged at this size", "words")
    }
    rows = [{**row, "worst": math.nan, "holds": False} for row in FORGETTING["shows"]]
    assert {row[2] for row in verdicts({**FORGETTING, "shows": rows}).values()} == {"not measured"}
    near = [{**row, "worst": 0.9999956, "must": 1.0} for row in FORGETTING["shows"][:1]]
    (shown,) = verdicts({**FORGETTING, "shows": near}).values()
    assert shown[:2] == ("0.9999956", "\u2264 1")  # not 1.0000


def test_smoke_says_that_it_means_nothing():
    assert "mean nothing" not in rendered(SHIFTS)
    text = rendered(SHIFTS, {**FORGETTING, "size": "smoke"})
    assert text.count("These numbers mean nothing") == 2  # above everything, and where they are


def test_models_that_were_made_again_are_named():
    """Cells of one name that started from different models are not quite comparable."""
    assert "Pretrained twice" not in rendered(SHIFTS)
    assert "<dt>Pretrained twice</dt><dd>dense-old-1</dd>" in rendered(
        SHIFTS | {"pretrained_twice": ["dense-old-1"]}
    )


def test_provenance_is_shown(whole):
    for fact in ("0123456789ab with uncommitted changes", "NVIDIA H200", "torch 2.13.0", "number 7"):
        assert fact in whole


def test_heat_map_and_claims(whole):
    found = Page(whole)
    head, start, first, second, third = found.table("dense, full")
    assert [text for text, _ in head] == ["after visit", "old", "new"]
    assert [text for text, _ in start] == ["start", "1.500", "3.000"]
    assert [text for text, _ in third] == ["3 old", "+0.750", "-0.600"]
    assert third[1][1]["class"] == "visited warm"
    assert third[1][1]["style"] == "--heat: 50%"  # the hottest of all
    assert "cool" in second[2][1]["class"]
    assert [text for text, _ in first] == ["1 old", "+0.000", "+0.000"]
    claims = found.table(f"{GUARDED}, seed 1")
    assert [text for text, _ in claims[0]] == ["visit", "base", "nobody yet", "domain <1>"]
    assert [text for text, _ in claims[1]] == ["1 old", "90.0%", "10.0%", "\u2013"]
    progressive = found.table("Progressive loss")
    assert [text for text, _ in progressive[2]][1:] == ["1.4375", "2.8125", "1.5625"]


def test_patch_maps_are_of_the_rows_that_have_them(whole, figures):
    rows = SHIFTS["shifts"]["old"]["new"]
    routed = {method: row["routing"] for method, row in rows.items() if row["routing"]}
    assert list(routed) == [method for method in CELLS if method.startswith("APN")]
    maps = [table for table in Page(whole).tables if "overlap of A's and B's patches" in table["caption"]]
    assert len(maps) == 3  # two shifts, and that of forgetting
    for table in maps:
        assert [row[0][0] for row in table["rows"][1:]] == list(routed)
        assert [text for text, _ in table["rows"][0]] == ["method", "layer 0", "layer 1"]
        assert table["rows"][1][1][0] == "0.250 \u2192 0.250"
    (axes,) = charts.usage(routed).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(routed)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["layer 0", "layer 1"]
    assert len(axes.patches) == len(routed) * 2 * 4  # layers; A and B, before and after
    heights = axes.patches[0].get_data()  # of A, in the order in which A prefers them
    assert heights.values == pytest.approx([0.45 * share / 0.7 for share in (0.5, 0.3, 0.2)])


def test_what_is_not_finite_is_said_and_not_drawn(figures):
    values = json.loads(json.dumps(SHIFTS))
    row = values["shifts"]["old"]["new"]["dense, FFN only"]
    row["alone"]["forgetting"] = math.nan
    row["trajectory"] = [{"step": 0, "A": math.nan, "B": math.inf}]
    text = rendered(values)
    for chart in (charts.pareto, charts.trajectories):
        figure = chart({"new": values["shifts"]["old"]["new"]})
        assert [note.get_text() for note in figure.axes[0].texts] == [
            "not drawn, not finite: dense, FFN only"
        ]
    (shown,) = [r for r in Page(text).table("old \u2192 new") if r[0][0] == "dense, FFN only"]
    assert shown[9][0] == "not finite"
    assert "nan" not in text.lower()


def test_where_dense_full_gained_nothing_there_is_no_share_of_it(figures):
    values = json.loads(json.dumps(SHIFTS))
    for row in values["shifts"]["old"]["new"].values():
        row["full_gained"] = 0.0
        for way in ("alone", "guarded"):
            row[way] |= {"gain": None, "hypervolume": None}
    text = rendered(values)
    (note,) = charts.pareto({"new": values["shifts"]["old"]["new"]}).axes[0].texts
    assert note.get_text() == "not drawn, not finite: dense, full; dense, FFN only and 5 more"
    (shown,) = [r for r in Page(text).table("old \u2192 new") if r[0][0] == "dense, FFN only"]
    assert "\u2013" in [cell[0] for cell in shown]
    assert "nan" not in text.lower()
    assert "mean over &lt;i&gt;other&lt;/i&gt;<" in text  # without the shift that has no gains


def test_a_stream_that_diverged_is_shown():
    """Python at a rate that only suited the Bible: what came afterwards is null in JSON."""
    values = copy.deepcopy(SHIFTS)
    (method, part), *_ = values["streams"]["methods"].items()
    seed = part["seeds"][0]
    seed["progressive"][-1] = None
    seed["matrix"][-1] = dict.fromkeys(seed["matrix"][-1])
    page = Page(rendered(values))
    for caption in ("The stream", "Progressive loss"):
        (shown,) = [row for row in page.table(caption) if row[0][0] == method]
        assert "not finite" in [cell[0] for cell in shown], caption


def test_intervals_of_gains_are_those_of_b():
    row = SHIFTS["shifts"]["old"]["new"]["APN, overlay"]
    before, full = 3.0, 2.0  # of dense full
    low, high = row["alone"]["B_over_full_interval"]
    expected = sorted(gain_fraction(before, full + math.log(bound), full) for bound in (low, high))
    assert charts.gain_interval(row, "alone") == pytest.approx(expected, abs=1e-9)
    assert charts.gain_interval({**row, "full_gained": 0.0}, "alone") is None


def test_labels_keep_apart(figures):
    """In a crowd some points have no label, and no label covers another one or a point."""
    places = np.random.default_rng(0).random((60, 2)).tolist()
    crowd = {f"rank={number}": tuple(place) for number, place in enumerate(places)}
    figure = charts.scatter(crowd | {"rank=far away": (3.0, 3.0)}, "x", "y", "a crowd")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = {text.get_text(): text.get_tightbbox() for text in axes.texts}
    assert "far away" in labels
    assert 10 < len(labels) < 61
    boxes = list(labels.values())
    assert not [1 for at, box in enumerate(boxes) for other in boxes[:at] if box.overlaps(other)]
    assert not [1 for box in boxes for x, y in axes.transData.transform(places) if box.contains(x, y)]
