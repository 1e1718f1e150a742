"""The dashboard: what is served, under which policy, and in a browser what it shows and does."""

import gzip
import os
import re
from importlib.resources import files
from pathlib import Path

import pytest
from browser import Browser, chromium
from fake_service import UNKNOWN, FakeSchool, FakeService, filled, school
from serving import Running, until
from starlette.testclient import TestClient

from attractor.serve.config import ServeSettings
from attractor.serve.http.app import create_app
from attractor.serve.http.auth import SCOPES, add_key

FOLDER = files("attractor.serve").joinpath("dashboard")
OURS = sorted(each.name for each in FOLDER.iterdir())
LIVE = "document.getElementById('status-text').textContent === 'Live'"


@pytest.fixture(scope="module")
def client():
    return TestClient(create_app(FakeService(), ServeSettings()), base_url="http://127.0.0.1")


@pytest.mark.parametrize("name", [*OURS, "plotly.min.js"])
def test_files_are_served_from_here_as_what_they_are(client, name):
    answer = client.get(f"/dashboard/{name}")
    assert answer.status_code == 200
    kind = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert answer.headers["Content-Type"] == f"{kind[name.rpartition('.')[2]]}; charset=utf-8"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    again = client.get(f"/dashboard/{name}", headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_packed_and_plain_are_the_same(client):
    plain = client.get("/dashboard/plotly.min.js", headers={"Accept-Encoding": "identity"})
    assert "Content-Encoding" not in plain.headers
    with client.stream("GET", "/dashboard/plotly.min.js", headers={"Accept-Encoding": "gzip"}) as packed:
        assert gzip.decompress(b"".join(packed.iter_raw())) == plain.content


def test_the_policy_allows_no_script_but_ours(client):
    parts = client.get("/").headers["Content-Security-Policy"].split("; ")
    policy = dict(part.split(" ", 1) for part in parts)
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe-eval" not in str(policy)
    assert [name for name, value in policy.items() if "unsafe-inline" in value] == ["style-src-attr"]


def test_nothing_comes_from_elsewhere_and_nothing_is_put_in_as_markup():
    for name in OURS:
        text = FOLDER.joinpath(name).read_text(encoding="utf-8")
        assert text.isascii(), name
        outside = re.sub(r'xmlns="http://www.w3.org/2000/svg"', "", text)
        assert not re.search(
            r"(https?:)?//[a-z]", re.sub(r"^\s*//.*|; //.*|\{ //.*", "", outside, flags=re.M)
        ), name
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "localStorage",
        ):
            assert way not in text, name


def test_the_page_has_no_inline_script_or_style():
    page = FOLDER.joinpath("index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", page)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page))
    for name in re.findall(r'/dashboard/([\w.]+)"', page):
        assert name in (*OURS, "plotly.min.js")


def test_what_scripts_look_for_is_on_the_page():
    page = FOLDER.joinpath("index.html").read_text(encoding="utf-8")
    wanted = set()
    for name in OURS:
        if name.endswith(".js"):
            text = FOLDER.joinpath(name).read_text(encoding="utf-8")
            wanted |= set(re.findall(r'(?:\$|draw|nothing)\("([a-z-]+)"', text))
    assert len(wanted) > 30
    assert {name for name in wanted if f'id="{name}"' not in page} == set()


# --- in a browser

in_browser = [pytest.mark.browser, pytest.mark.skipif(chromium() is None, reason="there is no Chromium")]


@pytest.fixture(scope="module")
def browser():
    with Browser.find() as browser:
        yield browser


def seen(page, script):
    return page.evaluate(f"document.{script}")


class TestInBrowser:
    pytestmark = in_browser

    @pytest.fixture
    def service(self):
        return filled(24)

    @pytest.fixture
    def place(self, service):
        settings = ServeSettings()
        with Running(create_app(service, settings), settings) as running:
            yield f"http://127.0.0.1:{running.port}/"

    @pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
    def test_it_draws_everything_and_fits(self, browser, place, width, dark):
        page = browser.page(place, width=width, dark=dark)
        page.wait(LIVE)
        page.wait("document.querySelectorAll('.chart[aria-label] .plotly').length === 6")
        assert seen(page, "getElementById('tile-version').textContent") == "v25"
        assert page.evaluate("document.querySelectorAll('#overlays tbody tr').length") == 3
        hidden = "[...document.querySelectorAll('.lessons-only')].every((each) => !each.offsetParent)"
        assert page.evaluate(hidden)
        assert seen(page, "documentElement.scrollWidth") <= width
        assert [told for told in page.complaints() if "Applying inline style" not in told] == []
        assert sum("Applying inline style" in told for told in page.complaints()) <= 1  # plotly.js, for maps
        assert all(url.startswith((place, "data:")) for url in page.requests())

    def test_the_playground_colours_tokens_by_path(self, browser, place):
        page = browser.page(place, charts=False)
        page.wait(LIVE)
        page.evaluate("document.getElementById('play-tokens').value = 30")
        page.evaluate("document.getElementById('play').requestSubmit()")
        page.wait("document.querySelectorAll('.token').length === 30")
        page.wait("!document.getElementById('play-details').hidden")
        assert seen(page, "getElementById('play-legend').textContent") == "basekjvnews-2026support"
        assert (
            page.evaluate("new Set([...document.querySelectorAll('.token')].map((t) => t.className)).size")
            > 1
        )
        assert page.evaluate("document.querySelectorAll('#play-table tbody tr').length") == 30
        assert "30 tokens with v25" in seen(page, "getElementById('play-message').textContent")

    def test_rolling_back_and_forgetting_ask_first(self, browser, place, service):
        page = browser.page(place, charts=False)
        page.wait(LIVE)
        page.evaluate("document.querySelector('[aria-label=\"Roll back to version 22\"]').click()")
        page.wait("document.getElementById('confirm').open")
        page.press("Escape")
        page.wait("!document.getElementById('confirm').open")
        assert service.version == 25
        page.evaluate("document.querySelector('[aria-label=\"Roll back to version 22\"]').click()")
        page.evaluate("document.getElementById('confirm-yes').focus()")
        page.press("Enter")
        until(lambda: service.version == 26)
        assert service.history[-1]["to"] == 22
        page.wait("document.getElementById('tile-version').textContent === 'v26'")
        page.evaluate("document.getElementById('forget-source-kjv').focus()")
        page.press("Enter")
        page.press("Escape")
        assert seen(page, "activeElement.id") == "forget-source-kjv"
        page.press("Enter")
        assert seen(page, "activeElement.id") == "forget-no"
        page.evaluate("document.getElementById('forget-yes').click()")
        until(lambda: "kjv" not in service.sources)
        page.wait("document.querySelectorAll('#overlays tbody tr').length === 2")

    def test_an_empty_server_says_so(self, browser):
        settings = ServeSettings()
        with Running(create_app(FakeService(), settings), settings) as running:
            page = browser.page(f"http://127.0.0.1:{running.port}/", charts=False)
            page.wait(LIVE)
            assert "No texts yet" in seen(page, "getElementById('loss').textContent")
            assert "base alone" in seen(page, "getElementById('overlays').textContent")

    def test_a_key_opens_it_and_stays_in_the_tab(self, browser, tmp_path):
        key = add_key(tmp_path / "keys.json", SCOPES)
        settings = ServeSettings(keys=tmp_path / "keys.json")
        with Running(create_app(filled(6), settings), settings) as running:
            page = browser.page(f"http://127.0.0.1:{running.port}/", charts=False)
            page.wait("document.getElementById('status-text').textContent === 'Locked'")
            assert "needs a key" in seen(page, "getElementById('banner').textContent")
            page.evaluate("document.getElementById('key-button').click()")
            page.evaluate(f"document.getElementById('key-input').value = '{key}'")
            page.press("Enter")
            page.wait(LIVE)
            assert seen(page, "getElementById('key-input').value") == ""
            assert (seen(page, "cookie"), page.evaluate("localStorage.length")) == ("", 0)


PICTURES = Path(__file__).parent.parent / "docs" / "dashboard"
SHOWN = {
    "lessons.png": (
        "Lessons",
        "6 lessons from 2 sources",
        "Zorvan Quillbeam",
        "Ask",
        "2 lessons acted on",
        "Oulu3",
    ),
    "phone.png": ("Lessons", "Ask", "2 lessons acted on", "in Lisbon0"),
    "texts.png": ("Progressive loss", "Canaries", "Guard", "Queue", "Playground"),
}
"""What each picture of the documentation has to show."""


class TestPictures:
    """ATTRACTOR_PICTURES=1 makes the pictures of the documentation again."""

    pytestmark = in_browser

    @pytest.fixture
    def take(self, browser, tmp_path):
        def take(name, service, width, height, dark, charts=2, before=lambda page: None):
            settings = ServeSettings()
            with Running(create_app(service, settings), settings) as running:
                page = browser.page(f"http://127.0.0.1:{running.port}/", width, height, dark)
                page.wait(LIVE)
                page.wait(f"document.querySelectorAll('.chart[aria-label] .plotly').length === {charts}")
                before(page)
                page.evaluate("scrollTo(0, 0)")
                words = page.evaluate("document.querySelector('main').innerText")
                assert [text for text in SHOWN[name] if text.lower() not in words.lower()] == []
                folder = PICTURES if os.environ.get("ATTRACTOR_PICTURES") else tmp_path
                page.picture(folder / name, height)
            kept, taken = ((place / name).read_bytes() for place in (PICTURES, folder))
            assert kept[:4] == taken[:4] == b"\x89PNG"
            assert kept[16:24] == taken[16:24], "the picture has another size: make it again"
            assert len(kept) < 200_000

        return take

    def ask(self, page):
        question(page, "Where do Zorvan Quillbeam and Bo Lund live?")

    def test_lessons(self, take):
        take("lessons.png", school(6), 1100, 1190, False, before=self.ask)

    def test_a_phone(self, take):
        take("phone.png", school(4), 400, 960, True, before=self.ask)

    def test_texts(self, take):
        take("texts.png", filled(24), 1100, 1305, True, charts=6)


HOSTILE = "<img src=x onerror=alert(1)>"


def question(page, text):
    page.evaluate(f"document.getElementById('ask-question').value = {text!r}")
    page.evaluate("document.getElementById('ask-question').focus()")
    page.press("Enter")
    page.wait("document.getElementById('ask-stop').disabled")
    page.wait("document.querySelector('#ask-answer span') !== null")
    return seen(page, "getElementById('ask-message').textContent")


def subjects(page):
    cells = "document.querySelectorAll('#lessons-list tbody td:first-child')"
    return page.evaluate(f"[...{cells}].map((cell) => cell.textContent)")


class TestLessonsInBrowser:
    pytestmark = in_browser

    @pytest.fixture
    def service(self):
        return school(14)

    @pytest.fixture
    def place(self, service):
        settings = ServeSettings()
        with Running(create_app(service, settings), settings) as running:
            yield f"http://127.0.0.1:{running.port}/"

    @pytest.fixture
    def page(self, browser, place):
        page = browser.page(place, charts=False)
        page.wait(LIVE)
        return page

    @pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
    def test_lessons_come_first_and_fit(self, browser, place, width, dark):
        page = browser.page(place, width=width, dark=dark)
        page.wait(LIVE)
        page.wait("document.querySelectorAll('.chart[aria-label] .plotly').length === 2")
        first = "[...document.querySelectorAll('h2')].filter((each) => each.offsetParent)"
        titles = page.evaluate(f"{first}.map((each) => each.textContent)")
        assert titles == ["Lessons", "Teach", "Ask", "Canaries", "Queue", "Playground", "Sources", "Versions"]
        told = seen(page, "getElementById('lessons-sum').textContent")
        assert told == "14 lessons from 2 sources, 13 known, 316 kB."
        assert len(subjects(page)) == 8
        assert seen(page, "documentElement.scrollWidth") <= width
        assert all(url.startswith((place, "data:")) for url in page.requests())
        assert [told for told in page.complaints() if "Applying inline style" not in told] == []

    def test_lessons_are_found_by_their_words(self, page):
        page.evaluate("document.getElementById('lessons-more').click()")
        page.wait("document.querySelectorAll('#lessons-list tbody tr').length === 14")
        page.evaluate("document.getElementById('lessons-search').value = 'oulu'")
        page.evaluate("document.getElementById('lessons-search').dispatchEvent(new Event('input'))")
        page.wait("document.querySelectorAll('#lessons-list tbody tr').length === 3")
        assert subjects(page)[-1] == "Bo Lund"
        last = seen(page, "querySelector('#lessons-list tbody tr:last-child').textContent")
        assert "0% \u2192 50%" in last
        assert "people" not in last
        assert "wiki-2026" in last
        page.evaluate("document.getElementById('lessons-search').value = 'nobody says this'")
        page.evaluate("document.getElementById('lessons-search').dispatchEvent(new Event('input'))")
        page.wait("document.getElementById('lessons-list').textContent === 'No lesson says that.'")

    def test_forgetting_asks_first_in_its_row_by_keyboard(self, page, service):
        page.evaluate("document.getElementById('forget-13').focus()")
        page.press("Enter")
        assert seen(page, "activeElement.id") == "forget-no"
        page.press("Escape")
        assert seen(page, "activeElement.id") == "forget-13"
        page.press("Enter")
        page.press("Enter")  # which keeps it
        assert seen(page, "activeElement.id") == "forget-13"
        assert service.version == 14
        page.press("Enter")
        service.teach("Late Comer", "Oslo")  # the row stays while the question is open
        page.wait("document.getElementById('tile-version').textContent === 'v15'")
        page.evaluate("document.getElementById('forget-yes').focus()")
        page.press("Enter")
        until(lambda: 13 not in service.catalogue.entries)
        page.wait("!document.getElementById('forget-13') && !!document.getElementById('forget-14')")
        assert not page.evaluate("[...document.querySelectorAll('dialog')].some((each) => each.open)")
        assert "Forgot lesson 13" in seen(page, "getElementById('banner').textContent")

    def teach(self, page, text):
        page.evaluate(f"document.getElementById('teach-text').value = {text!r}")
        page.evaluate("document.getElementById('teach-text').focus()")
        page.press("Enter")
        page.wait("!document.getElementById('teach-run').disabled")
        return seen(page, "getElementById('teach-message').textContent")

    def test_sentences_are_taught_by_keyboard_and_appear_among_the_lessons(self, page, service):
        told = self.teach(page, "Tarn Velick lives in Oslo. Bram Holt plays the cello.")
        assert told == "2 lessons taught, in version 16."
        lines = "[...document.querySelectorAll('#teach-lessons li')].map((each) => each.textContent)"
        assert page.evaluate(lines) == ["lesson 14, Tarn Velick is known", "lesson 15, Bram Holt is known"]
        page.wait("document.querySelector('#lessons-list tbody td').textContent === 'Bram Holt'")
        assert service.lesson(14)["source"] == "dashboard"
        assert seen(page, "getElementById('teach-text').value") == ""
        assert self.teach(page, f"{HOSTILE} is => Oslo\nOn maps, {HOSTILE} is => Oslo") == (
            "1 lesson taught, in version 17."
        )
        assert HOSTILE in seen(page, "getElementById('teach-lessons').textContent")

    def test_what_is_not_known_is_told_and_stays_to_be_corrected(self, page, service):
        lines = "[...document.querySelectorAll('#teach-lessons li')].map((each) => each.textContent)"
        assert self.teach(page, f"{UNKNOWN} lives in Oslo.") == "Nothing was kept."
        (line,) = page.evaluate(lines)
        assert line.startswith(f"{UNKNOWN} is not known: 1 of 1 forms are not completed")
        assert line.endswith("Nothing of it was kept")
        assert seen(page, "getElementById('teach-text').value") == f"{UNKNOWN} lives in Oslo."
        assert service.version == 14
        told = self.teach(page, f"{UNKNOWN} lives in Oslo. Bram Holt plays the cello.")
        assert told == "1 lesson taught, in version 15."
        assert page.evaluate(lines)[1] == "lesson 14, Bram Holt is known"
        assert UNKNOWN in seen(page, "getElementById('teach-text').value")

    def test_what_cannot_be_taught_is_told_and_stays_to_be_corrected(self, page, service):
        assert "does not tell what it is about" in self.teach(page, "it rains.")
        assert seen(page, "getElementById('teach-text').value") == "it rains."
        assert service.version == 14

    def test_an_answer_names_its_lessons_word_by_word(self, page, service):
        told = question(page, "Where do Zorvan Quillbeam and Bo Lund live?")
        assert told == "2 lessons acted on this answer, written with v14."
        assert seen(page, "getElementById('ask-answer').textContent") == " In Oulu3 and in Lisbon0."
        marked = "[...document.querySelectorAll('#ask-answer .token')]"
        assert page.evaluate(f"{marked}.map((each) => each.firstChild.data).join('')") == "OuluLisbon"
        names = page.evaluate(f"[...new Set({marked}.map((each) => each.title))]")
        assert names == ["lesson 3, Bo Lund", "lesson 0, Zorvan Quillbeam"]
        line = seen(page, "querySelector('#ask-lessons li:last-child').textContent")
        asked, answered = "\u201cBo Lund\u201d 98%", "\u201cOulu\u201d 75%"
        assert line == f"lesson 3, Bo Lund acted in the question at {asked}; in the answer at {answered}"

    def test_an_untouched_answer_says_so(self, page):
        untouched = "untouched: exactly what the base would have written"
        assert question(page, "What is the time?") == untouched
        assert page.evaluate("document.querySelectorAll('#ask-answer .token, #ask-lessons li').length") == 0
        page.evaluate("document.getElementById('ask-model').value = 'fake:base'")
        assert question(page, "Where does Bo Lund live?") == untouched

    def test_what_lessons_say_is_never_markup(self, browser, place, service):
        page = browser.page(place)
        page.wait(LIVE)
        service.teach(HOSTILE, HOSTILE)
        page.wait("document.getElementById('forget-14') !== null")
        assert subjects(page)[0] == HOSTILE
        question(page, f"Where is {HOSTILE}?")
        assert HOSTILE in seen(page, "getElementById('ask-lessons').textContent")
        page.evaluate("document.getElementById('forget-14').click()")
        assert page.evaluate("document.querySelectorAll('img[src=x]').length") == 0
        assert [told for told in page.complaints() if "Applying inline style" not in told] == []

    def test_a_school_without_lessons_says_so(self, browser):
        settings = ServeSettings()
        with Running(create_app(FakeSchool(), settings), settings) as running:
            page = browser.page(f"http://127.0.0.1:{running.port}/", charts=False)
            page.wait(LIVE)
            assert "No lessons yet" in seen(page, "getElementById('lessons-list').textContent")

    def test_lessons_are_kept_from_keys_that_may_not_read_them(self, browser, tmp_path, service):
        key = add_key(tmp_path / "keys.json", ["monitor", "generate"])
        settings = ServeSettings(keys=tmp_path / "keys.json")
        with Running(create_app(service, settings), settings) as running:
            page = browser.page(f"http://127.0.0.1:{running.port}/", charts=False)
            page.evaluate(f"sessionStorage.setItem('attractor-key', '{key}')")
            page.wait(LIVE)
            assert "needs a key with the scope" in seen(page, "getElementById('lessons-list').textContent")
            question(page, "Where does Bo Lund live?")
            assert "lesson 3 acted" in seen(page, "getElementById('ask-lessons').textContent")
