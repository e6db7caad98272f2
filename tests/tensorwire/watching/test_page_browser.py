"""The page in a real browser: it shows what the workers count, who is dead, and who came back.

``TENSORWIRE_SCREENSHOTS=FOLDER`` keeps pictures of it, light and dark.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorwire.watching.hub import Viewer
from tensorwire.watching.jobs import running_jobs
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
