"""The page in a real browser: it shows what the workers count, who is dead, and who came back.

``TENSORWIRE_SCREENSHOTS=FOLDER`` keeps pictures of it, light and dark.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorwire.watching.dashboard.server import Page
from tensorwire.watching.hub import Question, Viewer
from tensorwire.watching.jobs import running_jobs
from tensorwire.watching.views import JobView, NodeView, WorkerView
from tests.tensorwire.launch.jobs import FORKED, SECONDS, Job, job
from tests.waiting import until

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
_BROWSER, _DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (_BROWSER and _DRIVER), reason="needs chromium and chromedriver"),
]
STALLS = str(Path(__file__).parent / "stalls.py")
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        with job(tmp_path) as made:
            yield made


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = _BROWSER
    for flag in (*_FLAGS.split(), f"--user-data-dir={tmp_path}/chromium"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(_DRIVER))
    driver.set_window_size(1100, 900)
    try:
        yield driver
    finally:
        driver.quit()


def shown(browser: Any, name: str) -> list[str]:
    """The cells of a worker's row; none if there is no such row."""
    script = (
        "return [...document.querySelectorAll('#workers tr')]"
        ".filter(r => r.dataset.worker === arguments[0])"
        ".flatMap(r => [...r.cells].map(c => c.textContent))"
    )
    cells: list[str] = browser.execute_script(script, name)
    return cells


def seen(name: str) -> dict[str, Any]:
    """The job's own record of a worker."""
    with Viewer(running_jobs()[0].path) as viewer:
        view = viewer.ask({"ask": "job"})
    found: dict[str, Any] = next(each for each in view["workers"] if each["name"] == name)
    return found


def keep(browser: Any, name: str) -> None:
    folder = os.environ.get("TENSORWIRE_SCREENSHOTS")
    if folder:
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            browser.execute_async_script(
                "requestAnimationFrame(() => setTimeout(arguments[0], 50))"
            )
            browser.save_screenshot(f"{folder}/{name}-{scheme}.png")


HTML = "<img src=x onerror=\"document.title='run'\">"


class ManyWorkers:
    """A job of a thousand workers, whose names, phases, alarms and logs are HTML."""

    def __init__(self) -> None:
        self._asked = 0

    def answer(self, question: Question) -> object:
        if question["ask"] == "log":
            return f"{HTML}\n{'x' * 100_000}\nlast"
        self._asked += 1
        workers = tuple(self._worker(number) for number in range(1000))
        now = float(self._asked)
        view = JobView(HTML, "running", now, (NodeView(0, HTML),), workers, (HTML,), (HTML,))
        return view.plain()

    def _worker(self, number: int) -> WorkerView:
        made = [
            {"peer": f"{HTML}:{peer}", "calls": self._asked, "in_flight": 0, "errors": 0,
             "bytes_out": 1, "bytes_in": 1, "buckets": [self._asked, 0, 0]}
            for peer in range(20)
        ]  # fmt: skip
        progress = {"steps": 3 * self._asked, "age": 0, "phase": HTML, "phase_age": 0, "longest": 0}
        facts = {"progress": progress, "made": made, "waiting": [], "sources": {HTML: {HTML: HTML}}}
        return WorkerView(f"{HTML}:{number}", HTML, number, 1, "runs", 0, HTML, HTML, None, facts)


def test_a_thousand_workers_are_shown_and_html_in_what_they_tell_is_text(browser: Any) -> None:
    with contextlib.closing(Page(ManyWorkers(), "0")) as page:
        browser.get(page.address)
        name = f"{HTML}:999"
        until(lambda: shown(browser, name)[4:6] not in ([], ["3", ""]), 120, 0.2)
        cells = shown(browser, name)
        assert (cells[0], cells[3], cells[8]) == (name, f"0 {HTML}", HTML)
        rows = "return document.querySelectorAll('#calls tbody tr').length"
        assert browser.execute_script(rows) == 300
        more = browser.execute_script("return document.getElementById('more-calls').textContent")
        assert more == "and 19700 pairs of workers with fewer calls"
        lines = "return document.querySelectorAll('#chart .u-series').length"
        assert browser.execute_script(lines) <= 3  # the time and one role, not a thousand
        log = "document.querySelectorAll('#workers tbody tr')[5].querySelectorAll('button')[1]"
        browser.execute_script(f"{log}.click()")
        text = "return document.getElementById('text').textContent"
        until(lambda: browser.execute_script(text).endswith("last"), 120, 0.2)
        assert browser.execute_script(text).startswith(HTML)
        assert browser.execute_script("return document.images.length") == 0
        assert browser.title == f"{HTML}: running"


def test_the_page_shows_what_workers_count_and_who_died(work: Job, browser: Any) -> None:
    (work.folder / "go").touch()
    work.start("--standalone", "--dashboard", "0", "--tee", "3", "--role", "moves:2,max_restarts=2",
               "--role", "sleeps:1", "--role", "serves:1", *FORKED, STALLS, str(work.folder),
               XDG_RUNTIME_DIR=os.environ["XDG_RUNTIME_DIR"])  # fmt: skip
    until(lambda: "the job's page: " in work.said, SECONDS, 0.1)
    browser.get(work.said.partition("the job's page: ")[2].split()[0])
    until(
        lambda: len(shown(browser, "moves:1")) > 4 and shown(browser, "moves:1")[4] > "5", 90, 0.2
    )
    assert "token" not in browser.current_url

    before = seen("moves:1")["facts"]["progress"]["steps"]
    until(lambda: int(shown(browser, "moves:1")[4] or 0) >= before, SECONDS, 0.1)
    assert int(shown(browser, "moves:1")[4]) <= seen("moves:1")["facts"]["progress"]["steps"]
    until(lambda: "waits" in shown(browser, "sleeps:0")[8], SECONDS, 0.1)
    keep(browser, "page")

    os.kill(seen("moves:1")["process"]["pid"], signal.SIGKILL)
    until(lambda: shown(browser, "moves:1")[2] == "2", SECONDS, 0.1)
    until(lambda: shown(browser, "moves:1")[1] == "runs", SECONDS, 0.1)
    news = browser.execute_script("return document.getElementById('news').textContent")
    assert "moves:1 started again, as life 2: ended with signal SIGKILL" in news

    browser.execute_script(
        "[...document.querySelectorAll('#workers tr')].find(r => r.dataset.worker === 'serves:0')"
        ".querySelector('button').click()"
    )
    text = "return document.getElementById('text').textContent"
    until(lambda: "sleep_in_a_handler" in browser.execute_script(text), SECONDS, 0.2)
    browser.set_window_size(400, 800)
    wide = "return document.documentElement.scrollWidth <= window.innerWidth"
    assert browser.execute_script(wide)
    work.end()
