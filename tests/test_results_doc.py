"""Results become Markdown and figures by one command; damaged ones are refused."""

import copy
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_up_results import (
    EDITS,
    FACTS,
    FORGETTING,
    KNOBS,
    LAYER,
    MATCH,
    RETROFIT,
    ROOT,
    SHIFTS,
    TRIVIA,
    Page,
    put,
    undrawn,
)

from studies import __main__ as cli
from studies.report import charts, page, study_tables
from studies.report import markdown as results_doc
from studies.report.questions import QUESTIONS
from studies.report.readings import Result, read
from studies.report.tables import Cell, Column, Table, markdown, number


@pytest.fixture
def no_charts():
    with undrawn():
        yield


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
        ('{"experiment": "trivia", "methods": {}, "cells": []}', "no whole result of 'trivia'"),
        ('{"experiment": "edits", "cells": [{"settings": {}}]}', "no whole result of 'edits'"),
        ('{"experiment": "knobs", "shift": ["a", "b"], "rows": {"none": {}}}', "no whole result of 'knobs'"),
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


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("results").mkdir()
    put(Path("results"), shifts=SHIFTS, forgetting=FORGETTING, match=MATCH)
    command = [
        "report",
        "results/shifts.json",
        "results/forgetting.json",
        "results/match.json",
        "--out",
        "out/report.html",
        "--docs",
        "docs/results.md",
    ]
    assert cli.main(command) == 0
    assert "docs/results.md" in capsys.readouterr().out
    text = Path("docs/results.md").read_text()
    assert f"generated from the JSON of results by `python -m studies {' '.join(command)}`" in text
    pages = {page: page.read_text() for page in Path("docs").rglob("*.md")}
    assert {page.name for page in pages} == {"results.md", "shifts.md", "forgetting.md", "match.md"}
    for page_, written in pages.items():
        for target in re.findall(r"\]\(([^)#:]+)\)", written):
            assert (page_.parent / target).is_file(), target
    figures = {path: path.read_bytes() for path in Path("docs/figures").iterdir()}
    assert len(figures) == 7
    for drawn in figures.values():
        assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
        assert len(drawn) < 100_000
        assert str(tmp_path) not in drawn.decode()
    assert cli.main(["report"]) != 0

    said = "APN forgets less.\n\n- And that is *all*: `<b>`."
    by_hand = text.replace(results_doc.NOTHING_YET, said)
    Path("docs/results.md").write_text(by_hand)
    Path("docs/results/match.md").write_text(
        pages[Path("docs/results/match.md")].replace(results_doc.NOTHING_YET, "Level.")
    )
    monkeypatch.setattr(page, "render", lambda results: "")  # it has been drawn
    assert cli.main(command) == 0
    assert Path("docs/results.md").read_text() == by_hand  # what was said stays, the rest is the same again
    assert "\nLevel.\n" in Path("docs/results/match.md").read_text()
    assert {path: path.read_bytes() for path in Path("docs/figures").iterdir()} == figures

    for damaged in (by_hand.replace(results_doc.END, ""), by_hand.replace("hand: What", "hand: Why"), said):
        Path("docs/results.md").write_text(damaged)
        with undrawn():
            assert cli.main(command) == 1
        assert Path("docs/results.md").read_text() == damaged


def test_figures_of_two_results_do_not_collide(tmp_path, no_charts):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        put(tmp_path / folder, match=MATCH)
    results = [read(tmp_path / folder / "match.json") for folder in ("a", "b")]
    with pytest.raises(ValueError, match="several are called"):
        results_doc.render(results, tmp_path / "results.md", tmp_path / "report.html")


def test_no_table_stands_twice(tmp_path, no_charts):
    more = copy.deepcopy(SHIFTS)
    (shift, rows), *_ = more["shifts"]["old"].items()
    more["shifts"]["old"]["one more"] = copy.deepcopy(rows)
    paths = put(tmp_path, shifts=SHIFTS, more=more)
    files = results_doc.render([read(path) for path in paths], tmp_path / "r.md", tmp_path / "r.html")
    first, second = (files[tmp_path / "r" / f"{name}.md"] for name in ("shifts", "more"))
    assert f"\nold \u2192 {shift}:" in first
    assert f"\nold \u2192 {shift}:" not in second
    assert "\nold \u2192 one more:" in second
    assert f"old \u2192 {shift} stands on [another page](shifts.md)" in second
    more["shifts"]["old"][shift][next(iter(rows))]["bytes"] += 1  # no longer the same
    put(tmp_path, more=more)
    files = results_doc.render([read(path) for path in paths], tmp_path / "r.md", tmp_path / "r.html")
    assert f"\nold \u2192 {shift}:" in files[tmp_path / "r" / "more.md"]


def test_no_machine_paths(tmp_path, no_charts):
    (path,) = put(tmp_path, shifts=SHIFTS)
    result = read(path)
    files = results_doc.render([result], tmp_path / "docs" / "results.md", tmp_path / "report.html")
    for text in (page.render([result]), *files.values()):
        assert str(tmp_path) not in text


def test_markdown_has_the_numbers_and_no_html(tmp_path, no_charts):
    (path,) = put(tmp_path, shifts=SHIFTS)
    files = results_doc.render([read(path)], tmp_path / "results.md", tmp_path / "report.html")
    text = files[tmp_path / "results" / "shifts.md"]
    for written in files.values():
        assert written == "<svg/>" or not re.search(r"(?<!\\)<(?!!--)", written)
    rows = [line for line in text.splitlines() if line.startswith("| APN, overlay + all |")]
    told = SHIFTS["shifts"]["old"]["new"]["APN, overlay + all"]
    assert any(f"| {told['alone']['B']:.3f} | {told['guarded']['B']:.3f} |" in row for row in rows)
    assert "the model" not in text  # who has one path only has nothing to tell about paths
    assert sum(line.startswith("| dense, \\<script>alert(1)\\</script>") for line in text.splitlines()) == 3


def test_a_cell_cannot_break_its_table():
    table = Table(
        "",
        [Column("a", "group"), Column("b", main=False), Column("c")],
        [[Cell("x | y\nz"), Cell("unseen"), number(-0.0001, ".2f", (-1.0, 1.0))]],
    )
    assert markdown(table) == "| group, a | c |\n| ---: | ---: |\n| x \\| y z | 0.00 (-1.00 to 1.00) |"


def test_the_committed_page_is_what_the_committed_results_say(no_charts, monkeypatch):
    """Byte for byte: a change to a table, to the name of a figure or to a result needs the pages again."""
    monkeypatch.chdir(ROOT)
    docs = Path("docs/results.md")
    words = re.search(r"`python -m studies report (.*?)`", docs.read_text())[1].split()
    results = [read(Path(word)) for word in words if word.startswith("results/")]
    files = results_doc.render(results, docs, Path("report.html"))
    pages = {path: files.pop(path) for path in list(files) if path.suffix == ".md"}
    assert pages == {path: path.read_text() for path in (docs, *Path("docs/results").iterdir())}
    assert {path.name for path in files} == {path.name for path in Path("docs/figures").iterdir()}
    assert results_doc.NOTHING_YET not in "".join(pages.values())
    questions = [line for line in pages[docs].splitlines() if line.startswith("## ")]
    assert len(questions) == len(QUESTIONS) + 1
    assert len(pages[docs].splitlines()) < 35 * len(QUESTIONS)  # a person reads it


def test_links_between_the_committed_pages_lead_somewhere():
    pages = [ROOT / "docs" / "results.md", *(ROOT / "docs" / "results").iterdir()]
    for written in pages:
        for target in re.findall(r"\]\(([^)#:]+)", written.read_text()):
            assert (written.parent / target).exists(), f"{written.name}: {target}"


def test_retrofits(tmp_path):
    text = page.render([Result(tmp_path / "retrofit.json", RETROFIT)])
    (found,) = Page(text).tables
    shown = [cell for cell, _ in found["rows"][-1]]
    assert shown[0] == "APN <beside>"
    assert {"12.345", "+1.25%", "-0.25%", "0.003"} <= set(shown)
    assert "smollm2-135m learns law: perplexity before 45.678; retained news 21.500" in text
    (tmp_path / "retrofit.json").write_text(json.dumps(RETROFIT))
    files = results_doc.render([read(tmp_path / "retrofit.json")], tmp_path / "r.md", tmp_path / "r.html")
    assert "1.0375" in files[tmp_path / "r" / "retrofit.md"]


def _with_namesakes(**shares):
    values = copy.deepcopy(FACTS)
    for method, share in shares.items():
        row = values["methods"].setdefault(method, {"seeds": [0]})
        row["a namesake's question, answered with the fact"] = dict.fromkeys(("mean", "least", "most"), share)
    return values


def test_questions_are_answered_from_their_studies_alone(tmp_path, no_charts):
    def asked(**results):
        files = results_doc.render(
            [read(path) for path in put(tmp_path, **results)], tmp_path / "r.md", Path("x")
        )
        return files[tmp_path / "r.md"]

    text = asked(facts=FACTS)
    assert "| lessons in basins | 2 | 97.5% | 98.5% | +0.025% |" in text
    assert "| full, \\<kl> | 1 | 5.0% | \u2013 | +425% |" in text
    assert (
        "| capitals of other countries, after 15 wrong ones were taught | 60.0% | 87.5% | the base |" in text
    )
    assert "Is it fast?" not in text
    text = asked(facts=_with_namesakes(basins=0.25, full=0.125))
    assert "| a namesake's question, answered with the fact | 25.0% | 12.5% | full fine-tuning |" in text
    kept = copy.deepcopy(FACTS)
    kept["methods"]["basins"]["other capitals, question"]["mean"] = 0.875
    assert "capitals of other countries" not in asked(facts=kept)  # as many as before
    assert "namesake" not in asked(facts=_with_namesakes(basins=0.125, full=0.25))
    text = asked(trivia=TRIVIA)
    assert "| the base | 2 | 50.0% | 37.5% | 25.0% | 12.5% | \u2013 | \u2013 | \u2013 | \u2013 |" in text
    measured = "50.0% | 0.0% | -25.0% | +6.2% |"
    assert f"| lessons in basins | 2 | 75.0% | 62.5% | 50.0% | 37.5% | {measured}" in text
    assert f"| full fine-tuning, WiSE-FT at \\<0.5> | 1 | 62.5% | 50.0% | 37.5% | 25.0% | {measured}" in text
    assert "without a question mark | 50.0% | 75.0% | full fine-tuning |" in text
    text = asked(edits=EDITS)
    assert "After 1,000 edits, 50 at once:" in text
    assert "| lessons in basins | 1 | 96.9% | 81.2% | 100.0% | 93.8% | 68.8% | +0.125% |" in text
    text = asked(knobs=KNOBS)
    assert "After 4,096 tokens, old to new, at a rate of 0.003; less than zero was gained:" in text
    assert "| \\<rule> | +0.500 | -0.500 | +0.000 | 50.0% |" in text
    text = asked(layer=LAYER, match=MATCH)
    assert "| d = 8, 512 tokens, 4 of 16, rank 2 | \u2013 | 1.25 |" in text
    assert "| \\<apn> | \u2013 | 1.50 | +0.000 |" in text
    assert "taught facts" not in text


def test_facts_in_full(tmp_path):
    (found,) = Page(page.render([Result(tmp_path / "facts.json", FACTS)])).tables
    rows = {row[0][0]: [cell for cell, _ in row[1:]] for row in found["rows"]}
    assert rows["chunks taught"] == ["2", "\u2013"]
    assert rows["first chunk"] == ["0.9750 0.9650 to 0.9850", "0.0500"]
    assert rows["bytes per fact"][1] == "\u2013"


def test_questions_of_trivia_in_full(tmp_path):
    (found,) = Page(page.render([Result(tmp_path / "trivia.json", TRIVIA)])).tables
    head, *rows = ([text for text, _ in row] for row in found["rows"])
    assert head[1:] == [
        "the base",
        "lessons in basins",
        "full fine-tuning",
        "full fine-tuning, WiSE-FT at <0.5>",
    ]
    rows = {row[0]: row[1:] for row in rows}
    base, lessons, *others = rows["as taught, contains the answer"]
    assert (base, lessons) == ("0.5000 0.5000 to 0.5000", "0.7500 0.6250 to 0.8750")
    assert others == ["1.0000", "0.6250"]
    assert rows["law, rise of perplexity"][1:] == ["0.00125 0.00125 to 0.00125", "0.00125", "0.00125"]
    assert rows["nq, prompts a lesson acts on"] == ["\u2013", "0.1250 0.1250 to 0.1250", "\u2013", "\u2013"]
    assert rows["bytes per fact"][2:] == ["60,000", "\u2013"]


def test_edits_in_full(tmp_path):
    figures, tenths = Page(page.render([Result(tmp_path / "edits.json", EDITS)])).tables
    rows = {row[0][0]: [cell for cell, _ in row[1:]] for row in figures["rows"]}
    assert rows["reliability"] == ["0.9688"]
    assert rows["paraphrase, question 1"] == ["0.8500"]
    assert rows["law, windows the same to the bit"] == ["0.5000"]
    assert [cell for cell, _ in tenths["rows"][1]] == ["lessons in basins", "1.000", "0.938"]


@pytest.mark.parametrize("values", [TRIVIA, EDITS, KNOBS])
def test_a_study_that_was_stopped_is_named(tmp_path, values):
    """Its last cell has no figures yet, or a row has not all of them."""
    damaged = copy.deepcopy(values)
    if "cells" in damaged:
        del damaged["cells"][-1]["after"]
    else:
        del damaged["rows"]["guard"]["path_new"]
    with pytest.raises(ValueError, match=rf"half.json is no whole result of '{values['experiment']}'"):
        page.render([Result(tmp_path / "half.json", damaged)])


def test_the_chart_of_knobs_has_no_settings_of_the_guard(tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "scatter", lambda points, *titles: points)
    rows = dict.fromkeys(("none", "train: also encoder", "guard", "guard, prior=0.9"), KNOBS["rows"]["none"])
    (points,) = study_tables.knobs_charts(Result(tmp_path / "k.json", KNOBS | {"rows": rows})).values()
    assert points == dict.fromkeys(("none", "train=also encoder", "guard"), (0.25, 0.5))
