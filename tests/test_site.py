"""The site of the documentation: it builds without a warning, and can be searched where it lies on a disk."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser import Browser, chromium

ROOT = Path(__file__).parent.parent
SEARCH = """(() => {
    const box = document.querySelector("[data-md-component=search-query]");
    box.focus();
    box.value = "canary";
    box.dispatchEvent(new Event("input", { bubbles: true }));
    box.dispatchEvent(new Event("keyup", { bubbles: true }));
})()"""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(chromium() is None, reason="there is no Chromium")
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: the extra docs"
)
def test_the_site_is_searched_from_a_disk(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("links: none is dead\n")
    with Browser.find() as browser:
        page = browser.page((tmp_path / "site" / "tutorials" / "teach.html").as_uri())
        page.evaluate(SEARCH)
        page.wait("document.querySelectorAll('.md-search-result__item a').length > 1")
        found = page.evaluate(
            "[...document.querySelectorAll('.md-search-result__item a')].map((a) => a.href)"
        )
        assert all(link.startswith((tmp_path / "site").as_uri()) for link in found)
        assert page.complaints() == []
        assert all(url.startswith(("file:", "data:")) for url in page.requests())
