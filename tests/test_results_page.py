"""Results become a page and Markdown: whole, escaped, with the JSON's numbers; damaged ones are refused."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from attractor import cli
from attractor.experiments import accounts, forgetting, page, plots, results_doc, shifts
from attractor.experiments.charts import Box, keep_apart
from attractor.experiments.readings import Result, read
from attractor.experiments.statistics import gain_fraction, transfer
from attractor.experiments.tables import Cell, Column, Table, markdown, number

ROOT = Path(__file__).parent.parent
EVIL = 'dense, <script>alert(1)</script> & "more" | `code`'
ORDER = ["old", "new", "old"]
GUARDED = "APN, guarded, no labels"
PROVENANCE = {
    "commit": "0123456789abcdef", "uncommitted_changes": True, "versions": {"torch": "2.13.0<b>"},
    "machine": {"gpu": "NVIDIA H200", "cpu_threads": 2},
}  # fmt: skip


def cell(before: float, gained: float, lost: float, *, routed: bool = False) -> dict:
    """What one method did on one shift, in the words of the benchmark."""

    def text(loss: float) -> dict:
        return {"loss": loss, "blocks": [round(loss + wave, 5) for wave in (-0.02, 0.01, 0.0, 0.01)]}

    layer = {"entropy": [1.0, 1.1], "overlap": 0.25, "usage": [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]}
    routing = {when: {"0": layer, "1": layer} for when in ("before", "after")}
    guarded = {"old": text(1.5 + 0.01 * lost), "B": text(before - 0.98 * gained)}
    return {
        "before": {"old": text(1.5), "B": text(before)},
        "best": {"step": 20, "validation": 2.0, "guarded": guarded,
                 "alone": {"old": text(1.5 + lost), "B": text(before - gained)},
                 "changed": 123_456, "bytes": 493_824},
        "trajectory": [{"step": step, "validation": 2.0, "losses": {
            "old": 1.5 + lost * step / 20, "B": before - gained * step / 20}} for step in (0, 10, 20)],
        "trained": 234_567, "extra_bytes": 16, "seconds": 12.34, "tokens": 1000, "base_unchanged": True,
        "bound": 0.0027, "routing": routing if routed else None, "rate": 0.003,
    }  # fmt: skip


CELLS = {
    "dense, full": cell(3.0, 1.0, 0.8), "dense, FFN only": cell(3.0, 0.9, 0.6), EVIL: cell(3.0, 0.5, -0.1),
    "APN, overlay": cell(3.1, 0.8, 0.4, routed=True),
    "APN, overlay + attention": cell(3.1, 0.9, 0.5, routed=True),
    "APN, overlay + all": cell(3.1, 1.0, 0.7, routed=True),
    "dense, FFN + attention": cell(3.0, 0.95, 0.7),
}  # fmt: skip


def stream(rise: float, claimed: bool) -> dict:
    matrix = [{"old": 1.5, "new": 3.0}]
    for visit in range(3):
        matrix.append({"old": 1.5 + rise * visit, "new": 3.0 - 0.3 * visit})
    claims = [{"base": 900, "nobody yet": 100}, {"domain <1>": 1000}, {"base": 1000}]
    told = {"order": ORDER, "matrix": matrix, "progressive": [1.4375, 2.8125, 1.5625], "seconds": 3.0,
            "claimed": claims if claimed else [{}] * 3, "base_unchanged": True}  # fmt: skip
    overlays = {"overlays": {"domain <1>": {"tokens": 1000, "bytes": 4096}}} if claimed else {}
    return told | overlays | transfer(matrix, ORDER)


@pytest.fixture(scope="module")
def shifts_values() -> dict:
    full = [CELLS["dense, full"]]
    rows = {method: shifts.summary([found], full, ["old"]) for method, found in CELLS.items()}
    streams = {"dense, full": stream(0.375, False), GUARDED: stream(0.001, True)}
    return {
        "experiment": "shifts", "size": "full", "seeds": 1, "provenance": PROVENANCE,
        "recipe": {"steps": 20, "batch_size": 4, "rates": [0.001, 0.003], "tuned_on": "new"},
        "rates": {method: {"rate": 0.003, "validation": {}} for method in CELLS},
        "shifts": {"old": {"new": rows, "<i>other</i>": rows}},
        "streams": {"order": ORDER, "methods": {
            method: {"rate": 0.01, "seeds": [found, found]} for method, found in streams.items()}},
    }  # fmt: skip


@pytest.fixture(scope="module")
def forgetting_values() -> dict:
    overlays = {"random": {"alone": 9.0, "guarded": 1.502, "rise": 0.0020020}}
    values = {
        "experiment": "forgetting", "size": "full", "seed": 7, "provenance": PROVENANCE,
        "shifts": {"new": CELLS},
        "harm": {"before": 1.5, "overlays": overlays, "bound": 0.0027, "window": 256, "base_unchanged": True},
        "stream": stream(0.001, True) | {"rate": 0.01},
        "speed": {"ratio": 0.5, "all_paths_ratio": 0.25},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forgetting, "HOME", "old")
        return values | {"shows": forgetting.shows(values)}


OPTION = {"val_ppl": 4.5, "val_ppl_seeds": [4.5], "usage_entropy": 2.5, "overlap": 0.25, "forgetting": 0.125,
          "B": 1.5, "parameters": 1000, "multiply_adds_per_token": 2_000_000}  # fmt: skip
SENSITIVITY = {
    "experiment": "sensitivity", "shift": ["old", "new"], "method": "APN, paper rule", "rate": 0.003,
    "rows": {"as planned": OPTION, "<top_k=2>": OPTION | {"val_ppl_seeds": [4.25, 4.75], "overlap": 0.5}},
}  # fmt: skip
MATCH = {
    "experiment": "match", "datasets": {
        "kjv": {"dense": {"val_loss": [1.25, 1.75], "parameters": 10, "multiply_adds_per_token": 20,
                          "way": "rate 0.001"},
                "<apn>": {"val_loss": [1.5], "multiply_adds_per_token": 30}},
    },
}  # fmt: skip


RETROFIT_WAY = {"B": 12.345, "rises": {"news": 0.0125}, "worst_rise": 0.0125, "B_over_lora": 1.0375,
                "B_over_lora_interval": [1.03125, 1.0625]}  # fmt: skip
RETROFIT = {
    "experiment": "retrofit", "size": "full", "model": "smollm2-135m", "rates": {"APN <beside>": 0.003},
    "domains": {"law": {"APN <beside>": {
        "trained": 5_000_000, "parameters": 135_000_000, "seconds": 61.5, "tokens": 1000, "best_step": 225,
        "before": {"B": 45.678, "news": 21.5}, "alone": RETROFIT_WAY,
        "guarded": RETROFIT_WAY | {"worst_rise": -0.0025}}}},
}  # fmt: skip


class Page(HTMLParser):
    """Tables as rows of (text, attributes), and what else is to be looked at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables, self.tags, self.ids, self.open = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        own = dict(attributes)
        self.tags.append((tag, own))
        self.ids += [own["id"]] if "id" in own else []
        if tag == "table":
            self.tables.append({"class": own.get("class"), "caption": "", "rows": []})
        elif tag == "tr":
            self.tables[-1]["rows"].append([])
        elif tag in ("td", "th"):
            self.tables[-1]["rows"][-1].append(["", own])
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "caption" in self.open:
            self.tables[-1]["caption"] += data
        elif {"td", "th"} & set(self.open):
            self.tables[-1]["rows"][-1][-1][0] += data

    def table(self, caption: str) -> list:
        return next(table["rows"] for table in self.tables if caption in table["caption"])


def put(folder: Path, **results: dict) -> list[Path]:
    for name, values in results.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return [folder / f"{name}.json" for name in results]


def rendered(*values: dict) -> str:
    return page.render(
        [Result(Path(f"{number}.json"), json.loads(json.dumps(v))) for number, v in enumerate(values)]
    )


@pytest.fixture(scope="module")
def whole(shifts_values, forgetting_values) -> str:
    paper = [json.loads((ROOT / "results" / f"table{n}-paper.json").read_text()) for n in (1, 2)]
    return rendered(shifts_values, forgetting_values, *paper, SENSITIVITY, MATCH)


def test_the_page_stands_alone(whole):
    found = Page(whole)
    assert len(found.ids) == len(set(found.ids))
    assert not re.search(r"https?:", whole)
    assert not {tag for tag, _ in found.tags} & {"link", "img", "iframe", "object", "base", "form"}
    assert not [own for _, own in found.tags if {"src", "srcset", "background", "onclick"} & set(own)]
    assert "url(" not in whole
    assert "@import" not in whole
    places = [own["href"] for tag, own in found.tags if tag == "a"]
    assert places == [f"#r{number}" for number in range(6)]
    assert {place[1:] for place in places} <= set(found.ids)


def test_what_comes_from_json_is_escaped(whole):
    assert whole.count("<script") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in whole
    for raw in ("<i>other", "domain <1>", "<top 2>", "<apn>", "2.13.0<b>"):
        assert raw not in whole


def test_pictures_have_words(whole):
    pictures = [own for tag, own in Page(whole).tags if tag == "svg" and own.get("role") == "img"]
    assert pictures
    assert all(own["aria-label"] for own in pictures)


def test_every_method_is_in_every_table_and_chart(whole, shifts_values):
    found = Page(whole)
    for shift in shifts_values["shifts"]["old"]:
        names = [row[0][0] for row in found.table(f"old \u2192 {shift}")[2:]]
        assert names == list(CELLS)
    titles = re.findall(r"<title>(.*?)</title>", whole)
    for method in ("dense, full", "dense, &lt;script&gt;", "APN, overlay + all"):
        for shown in (", alone: gain", ", guarded: gain", ", step 10: A"):
            assert any(title.startswith(method) and shown in title for title in titles), (method, shown)


def test_numbers_are_those_of_the_json(whole, shifts_values):
    rows = {row[0][0]: row for row in Page(whole).table("old \u2192 new")}
    for method, told in shifts_values["shifts"]["old"]["new"].items():
        alone, guarded = told["alone"], told["guarded"]
        expected = [
            told["A_before"], alone["A"], guarded["A"], told["B_before"], alone["B"], guarded["B"],
            alone["gain"], guarded["gain"], alone["forgetting"], guarded["forgetting"], alone["B_over_full"],
            guarded["B_over_full"], alone["hypervolume"], guarded["hypervolume"], told["trained"],
            told["changed"], told["bytes"], told["extra_bytes"], told["seconds"], 0.003, 20,
        ]  # fmt: skip
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


def test_sensitivity_says_what_an_option_does(whole):
    _, plain, other = ([text for text, _ in row] for row in Page(whole).table("One option changed"))
    assert plain == ["as planned", "4.500", "2.500", "0.250", "0.125", "1.500", "1,000", "2.00M"]
    assert other[:2] == ["<top_k=2>", "4.500 4.250 to 4.750"]
    drawn = accounts.sensitivity_plots(Result(Path("s.json"), SENSITIVITY))
    assert [chart.count("<circle") for chart in drawn.values()] == [2, 2]
    assert "&lt;top_k=2&gt;: overlap of A" in next(iter(drawn.values()))


def test_match_says_how_each_model_did(whole):
    rows = [[text for text, _ in row] for row in Page(whole).table("Mean over seeds, and")[1:]]
    rows = [row for row in rows if row[0] == "kjv"]
    assert rows[0][2:] == ["1.5000 1.2500 to 1.7500", f"{math.exp(1.5):.3f}", "2", "10", "20", "rate 0.001"]
    assert rows[1][1] == "<apn>"


def test_who_diverged_is_named_and_not_drawn():
    rows = MATCH["datasets"]["kjv"] | {"<apn>": {"val_loss": [None], "multiply_adds_per_token": None}}
    (chart,) = accounts.match_plots(Result(Path("m.json"), {"datasets": {"kjv": rows}})).values()
    assert chart.count("<circle") == 1
    assert "not drawn, not finite: &lt;apn&gt;" in chart


def test_promises_are_judged_only_at_full_size(forgetting_values):
    def verdicts(values):
        rows = Page(rendered(values)).table("What the guard promises")[1:]
        return {row[0][0]: (row[1][0], row[2][0], row[3][0], row[3][1].get("class", "")) for row in rows}

    told = {row["what"]: row for row in forgetting_values["shows"]}
    found = verdicts(forgetting_values)
    assert list(found) == list(told)
    for what, (_, _, verdict, kind) in found.items():
        assert (verdict, kind) == (
            ("holds", "good words") if told[what]["holds"] else ("missed", "bad words")
        )
    assert {verdict for _, _, verdict, _ in found.values()} == {"holds", "missed"}
    assert found["tokens per second guarded, settled / overlay alone"][:2] == ("0.5000", "\u2265 0.85")
    small = verdicts({**forgetting_values, "size": "small"})
    assert {(verdict, kind) for _, _, verdict, kind in small.values()} == {
        ("not judged at this size", "words")
    }
    rows = [{**row, "worst": math.nan, "holds": False} for row in forgetting_values["shows"]]
    assert {row[2] for row in verdicts({**forgetting_values, "shows": rows}).values()} == {"not measured"}
    near = [{**row, "worst": 0.9999956, "must": 1.0} for row in forgetting_values["shows"][:1]]
    (shown,) = verdicts({**forgetting_values, "shows": near}).values()
    assert shown[:2] == ("0.9999956", "\u2264 1")  # not 1.0000


def test_smoke_says_that_it_means_nothing(shifts_values, forgetting_values):
    assert "mean nothing" not in rendered(shifts_values)
    text = rendered(shifts_values, {**forgetting_values, "size": "smoke"})
    assert text.count("These numbers mean nothing") == 2  # above everything, and where they are


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


def test_patch_maps_are_of_the_rows_that_have_them(shifts_values):
    maps = [table for table in Page(rendered(shifts_values)).tables if table["class"] == "maps"]
    assert len(maps) == 2  # shifts
    for table in maps:
        assert [row[0][0] for row in table["rows"][1:]] == [m for m in CELLS if m.startswith("APN")]
        assert [text for text, _ in table["rows"][0]] == ["method", "layer 0", "layer 1"]
        assert "overlap 0.250" in table["rows"][1][1][0]


def test_picks_need_no_script(whole):
    boxes = [own for tag, own in Page(whole).tags if tag == "input"]
    checked = [own["id"] for own in boxes if "checked" in own]
    assert checked == ["r0-m0", "r0-m1", "r0-m3", "r0-m5", "r1-m0", "r1-m1", "r1-m3", "r1-m5"]
    for own in boxes:
        assert f":has(#{own['id']}:not(:checked))" in whole


def test_what_is_not_finite_is_said_and_not_drawn(shifts_values):
    values = json.loads(json.dumps(shifts_values))
    row = values["shifts"]["old"]["new"]["dense, FFN only"]
    row["alone"]["forgetting"] = math.nan
    row["trajectory"] = [{"step": 0, "A": math.nan, "B": math.inf}]
    text = rendered(values)
    assert text.count("not drawn, not finite: dense, FFN only") == 2
    (shown,) = [r for r in Page(text).table("old \u2192 new") if r[0][0] == "dense, FFN only"]
    assert shown[9][0] == "not finite"
    assert "nan" not in text.lower()


def test_where_dense_full_gained_nothing_nobody_has_a_share_of_it(shifts_values):
    values = json.loads(json.dumps(shifts_values))
    for row in values["shifts"]["old"]["new"].values():
        row["full_gained"] = 0.0
        for way in ("alone", "guarded"):
            row[way] |= {"gain": None, "hypervolume": None}
    text = rendered(values)
    assert "not drawn, not finite: dense, full; dense, FFN only and 5 more" in text
    (shown,) = [r for r in Page(text).table("old \u2192 new") if r[0][0] == "dense, FFN only"]
    assert "\u2013" in [cell[0] for cell in shown]
    assert "nan" not in text.lower()
    assert "mean over &lt;i&gt;other&lt;/i&gt;<" in text  # without the shift that has no gains


def test_intervals_of_gains_are_those_of_b(shifts_values):
    row = shifts_values["shifts"]["old"]["new"]["APN, overlay"]
    before, full = 3.0, 2.0  # of dense full
    low, high = row["alone"]["B_over_full_interval"]
    expected = sorted(gain_fraction(before, full + math.log(bound), full) for bound in (low, high))
    assert plots.gain_interval(row, "alone") == pytest.approx(expected, abs=1e-9)
    assert plots.gain_interval({**row, "full_gained": 0.0}, "alone") is None


def test_labels_keep_apart():
    chance = np.random.default_rng(0)
    wanted = [(x, y, "a label") for x, y in chance.uniform(60, 300, (12, 2))]
    labels = keep_apart(wanted, [Box(x - 4, y - 4, x + 4, y + 4) for x, y, _ in wanted], Box(0, 0, 500, 380))
    places = [
        tuple(map(float, re.search(r'text class="label" x="(.*?)" y="(.*?)"', t).groups())) for t in labels
    ]
    boxes = [Box(x, y - 10, x + 6.9 * 7, y + 3) for x, y in places]
    assert not [1 for i, a in enumerate(boxes) for b in boxes[:i] if a.shared(b) > 0.5]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "not a result that a report can show"),
        ('{"experiment": "demo"}', "'demo'"),
        ('{"experiment": ["shifts"]}', "not a result"),
        ('{"experiment": "shifts"}', "no whole result of 'shifts'"),
        (
            '{"experiment": "match", "datasets": {"a": {"b": {"val_loss": "<b>"}}}}',
            "no whole result of 'match'",
        ),
        ('{"experiment": "table1", "rows": 3}', "no whole result of 'table1'"),
    ],
)
def test_damaged_results_are_named(tmp_path, monkeypatch, capsys, damage, said):
    monkeypatch.chdir(tmp_path)
    Path("good.json").write_text(json.dumps(MATCH))
    Path("bad.json").write_text(damage)
    Path("report.html").write_text("yesterday's")
    assert cli.main(["report", "good.json", "bad.json"]) == 1
    error = capsys.readouterr().err
    assert "bad.json" in error
    assert said in error
    assert Path("report.html").read_text() == "yesterday's"


def test_the_command(tmp_path, monkeypatch, capsys, shifts_values, forgetting_values):
    monkeypatch.chdir(tmp_path)
    Path("results").mkdir()
    put(Path("results"), shifts=shifts_values, forgetting=forgetting_values, match=MATCH)
    command = ["report", "results/shifts.json", "results/forgetting.json", "results/match.json",
               "--out", "out/report.html", "--docs", "docs/results.md"]  # fmt: skip
    assert cli.main(command) == 0
    assert "docs/results.md" in capsys.readouterr().out
    text = Path("docs/results.md").read_text()
    assert text.split("\n\n")[1].startswith(
        "This page is generated from the JSON of results by `attractor report "
    )
    assert " ".join(command) in text
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (Path("docs") / target).is_file(), target
    figures = {path: path.read_bytes() for path in Path("docs/figures").iterdir()}
    assert len(figures) == 7
    for drawn in figures.values():
        assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
        assert len(drawn) < 100_000
    assert cli.main(["report"]) != 0

    said = "APN forgets less.\n\n- And that is *all*: `<b>`."
    by_hand = text.replace(results_doc.NOTHING_YET, said)
    Path("docs/results.md").write_text(by_hand)
    assert cli.main(command) == 0
    assert Path("docs/results.md").read_text() == by_hand  # what was said stays, the rest is the same again
    assert {path: path.read_bytes() for path in Path("docs/figures").iterdir()} == figures

    Path("docs/results.md").write_text(by_hand.replace(results_doc.END, ""))
    assert cli.main(command) == 1
    assert said in Path("docs/results.md").read_text()


def test_figures_of_two_results_do_not_collide(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        put(tmp_path / folder, match=MATCH)
    results = [read(tmp_path / folder / "match.json") for folder in ("a", "b")]
    with pytest.raises(ValueError, match="several are called"):
        results_doc.render(results, tmp_path / "results.md", tmp_path / "report.html")


def test_no_machine_paths(tmp_path, shifts_values):
    (path,) = put(tmp_path, shifts=shifts_values)
    result = read(path)
    files = results_doc.render([result], tmp_path / "docs" / "results.md", tmp_path / "report.html")
    for text in (page.render([result]), *files.values()):
        assert str(tmp_path) not in text


def test_markdown_has_the_numbers_and_no_html(tmp_path, shifts_values):
    (path,) = put(tmp_path, shifts=shifts_values)
    files = results_doc.render([read(path)], tmp_path / "results.md", tmp_path / "report.html")
    text = files[tmp_path / "results.md"]
    assert not re.search(r"(?<!\\)<(?!!--)", text)
    rows = [line for line in text.splitlines() if line.startswith("| APN, overlay + all |")]
    told = shifts_values["shifts"]["old"]["new"]["APN, overlay + all"]
    assert any(f"| {told['alone']['B']:.3f} | {told['guarded']['B']:.3f} |" in row for row in rows)
    assert sum(line.startswith("| dense, \\<script>alert(1)\\</script>") for line in text.splitlines()) == 3


def test_a_cell_cannot_break_its_table():
    table = Table("", [Column("a", "group"), Column("b", main=False), Column("c")],
                  [[Cell("x | y\nz"), Cell("unseen"), number(-0.0001, ".2f", (-1.0, 1.0))]])  # fmt: skip
    assert markdown(table) == "| group, a | c |\n| ---: | ---: |\n| x \\| y z | 0.00 (-1.00 to 1.00) |"


def test_retrofits(tmp_path):
    text = page.render([Result(tmp_path / "retrofit.json", RETROFIT)])
    (found,) = Page(text).tables
    shown = [cell for cell, _ in found["rows"][-1]]
    assert shown[0] == "APN <beside>"
    assert {"12.345", "+1.25%", "-0.25%", "0.003"} <= set(shown)
    assert "smollm2-135m learns law: perplexity before 45.678; retained news 21.500" in text
    (tmp_path / "retrofit.json").write_text(json.dumps(RETROFIT))
    files = results_doc.render([read(tmp_path / "retrofit.json")], tmp_path / "r.md", tmp_path / "r.html")
    assert "1.0375" in files[tmp_path / "r.md"]
