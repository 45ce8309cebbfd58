"""The pages in a browser, as people meet them: Debian's Chromium without a window, and axe-core for
those who see little or use no mouse."""

from __future__ import annotations

import re
import socket
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
import uvicorn
from fastapi.routing import APIRoute
from jobs_builder import make_jobs
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from shared_data import needed_program
from test_pages import NASTY
from web_service import serving

from benchmarks.serve import make
from tuna import api
from tuna.db.engine import writing
from tuna.db.models import ConfigRow, Job, Session
from tuna.settings import get_settings
from tuna_serve.web import change_pages, pages, request_pages, twins
from tuna_serve.web.app import Site, create_app

pytestmark = pytest.mark.keeps_processes
WIDTHS, SCHEMES = (390, 1280), ("light", "dark")
#: Waits for what a page does by itself, in seconds.
LONG_S = 60
PAGES = [
    one
    for router in (twins.pages, pages.router, change_pages.router, request_pages.router)
    for one in router.routes
    if isinstance(one, APIRoute) and "GET" in one.methods
    if not re.match("/static|.*/live$", one.path)
]
_AXE = """
const done = arguments[0];
axe.run({resultTypes: ["violations"]}).then((found) => done(found.violations
  .filter((one) => ["serious", "critical"].includes(one.impact))
  .map((one) => [one.id, one.nodes.slice(0, 3).map((node) => node.html.slice(0, 200))])));
"""
_ACTIONS = """
window.reached = new Set();
document.addEventListener("focusin", (event) => reached.add(event.target));
window.actions = [...document.querySelectorAll("a[href], button, input, select, textarea, summary")]
  .filter((one) => one.type !== "hidden" && (one.checkVisibility?.() ?? true));
return actions.length;
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """A browser that reaches no other machine; what it downloads is in `browser.downloads`."""
    options = webdriver.ChromeOptions()
    options.binary_location = needed_program("chromium")
    folder = tmp_path_factory.mktemp("downloads")
    for word in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(
            "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        ),
    ):
        options.add_argument(word)
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(needed_program("chromedriver"))
    driver = webdriver.Chrome(options, service)
    driver.downloads = folder  # type: ignore[attr-defined]
    driver.set_script_timeout(LONG_S)
    yield driver
    driver.quit()


@contextmanager
def site() -> Iterator[str]:
    """The service of this home in a thread; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(Site(api.open_database(), get_settings(), [f"http://{host}"]))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield f"http://{host}"
        server.should_exit = server.force_exit = True
        thread.join(LONG_S)


def enter(browser: webdriver.Chrome, address: str, role: Any = "admin") -> None:
    """Open the service with a token of this role."""
    browser.delete_all_cookies()
    browser.get(f"{address}/login?token={api.create_visitor_token(role, 600)}")
    faults(browser)


def faults(browser: webdriver.Chrome) -> list[str]:
    """Errors of the console, and addresses on another host that were asked for, since the last
    call."""
    found = [one["message"] for one in browser.get_log("browser") if one["level"] == "SEVERE"]
    own = urlsplit(browser.current_url).netloc
    for one in browser.get_log("performance"):
        asked = re.search(r'"Network\.requestWillBeSent".*?"url":"(\w+://[^/"]*)', one["message"])
        if asked and urlsplit(asked[1]).netloc != own and not asked[1].startswith("chrome"):
            found.append(f"asked for {asked[1]}")
    return found


def show(browser: webdriver.Chrome, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def check(browser: webdriver.Chrome) -> None:
    """The page that is shown fits, has no fault, and its actions are reached by keyboard."""
    where = browser.current_url
    browser.execute_script((resources.files("axe_core_python") / "axe.min.js").read_text())
    for width in WIDTHS:
        for scheme in SCHEMES:
            show(browser, width, scheme)
            wide = browser.execute_script("return document.documentElement.scrollWidth")
            assert wide <= width, f"{where} is {wide} wide on {width}"
            if (width == WIDTHS[0]) == (scheme == "dark"):
                assert browser.execute_async_script(_AXE) == [], f"{where}, {width}, {scheme}"
    number = browser.execute_script(_ACTIONS)
    webdriver.ActionChains(browser).send_keys(Keys.TAB * (number + 20)).perform()
    missed = "return actions.filter((one) => !reached.has(one)).map((one) => one.outerHTML)"
    assert browser.execute_script(missed) == [], where
    assert faults(browser) == [], where


def page_of(link: str) -> str:
    """The route of a page, with the names of its filters; empty for what is no page."""
    parts = urlsplit(link)
    matching = [one.path for one in PAGES if one.path_regex.match(parts.path)]
    names = ",".join(re.findall(r"(\w+)=", parts.query))
    return f"{matching[0]} {names}" if matching else ""


def checked_from(browser: webdriver.Chrome, *places: str) -> set[str]:
    """Check these pages and those that links lead to, one of each kind; returns the kinds."""
    seen = {""}
    with site() as address:
        enter(browser, address)
        waiting = [f"{address}/{one}" for one in places]
        while waiting:
            link = waiting.pop()
            if page_of(link) in seen:
                continue
            seen.add(page_of(link))
            browser.get(link)
            check(browser)
            waiting += browser.execute_script("return [...document.links].map((a) => a.href)")
    return seen


@pytest.mark.drill(only=True)
def test_each_page_fits_is_accessible_and_asks_no_other_host(
    browser: webdriver.Chrome, filled: dict[str, Any]
) -> None:
    """Those that links lead to, one of each kind, and those that a form leads to."""
    compared = "compare?session_id={first}&session_id={second}".format(**filled)
    seen = checked_from(browser, "sessions", "workers/box/cordoned", compared)
    missed = {one.path for one in PAGES} - {one.partition(" ")[0] for one in seen}
    assert missed == {"/"} | {one.path for one in PAGES if one.path.startswith("/requests/")}


def test_pages_of_an_empty_database_and_of_hostile_names(
    browser: webdriver.Chrome, with_redis: None
) -> None:
    with site() as address:
        enter(browser, address, "read")
        for place in ("requests", "query", "workers"):
            browser.get(f"{address}/{place}")
            check(browser)
        make_jobs(api.open_database(), 1)
        with writing(api.open_database()) as connection:
            connection.execute(sa.update(Session).values(reason=NASTY + "x" * 2000))
            connection.execute(sa.update(ConfigRow).values(label=NASTY))
        for place in ("sessions", "sessions/1/jobs", "jobs/1"):
            browser.get(f"{address}/{place}")
            check(browser)


@pytest.mark.drill(only=True)
def test_pages_of_a_million_jobs(browser: webdriver.Chrome, with_redis: None) -> None:
    make(api.open_database(), 1_000_000)
    seen = checked_from(browser, "sessions", "sessions/1", "sessions/2/jobs?state=errored")
    assert {"/query ", "/sessions/{session_id}/jobs state", "/jobs/{job_id} "} <= seen


@pytest.fixture
def failed(home: Path) -> list[int]:
    """Ids of the jobs of session 1; two of ten failed."""
    engine = api.open_database()
    make_jobs(engine, 1)
    with writing(engine) as connection:
        ids = list(connection.execute(sa.select(Job.id).order_by(Job.id)).scalars())
        errored = {"state": "errored", "cause": "build_error"}
        connection.execute(sa.update(Job).where(Job.id.in_(ids[:2])).values(errored))
    return ids


def rows(browser: webdriver.Chrome) -> list[str]:
    return [one.text for one in browser.find_elements(By.CSS_SELECTOR, "tbody tr")]


def press(browser: webdriver.Chrome, text: str) -> None:
    """Choose a link or button with this text, by keyboard alone."""
    wanted = f"//a[normalize-space()='{text}'] | //button[normalize-space()='{text}']"
    target, before = browser.find_element(By.XPATH, wanted), browser.current_url
    for _ in range(200):
        webdriver.ActionChains(browser).send_keys(Keys.TAB).perform()
        if browser.switch_to.active_element == target:
            webdriver.ActionChains(browser).send_keys(Keys.ENTER).perform()
            WebDriverWait(browser, LONG_S).until(lambda one: one.current_url != before)
            return
    raise AssertionError(f"{text} is not reached by keyboard")


def state_counts() -> dict[str, int]:
    (found,) = api.status(1, commands=False)
    return dict(found.jobs)


@pytest.mark.drill(only=True)
def test_failed_jobs_are_sent_back_and_others_canceled_by_keyboard(
    browser: webdriver.Chrome, failed: list[int]
) -> None:
    with site() as address:
        enter(browser, address)
        browser.get(f"{address}/sessions/1")
        press(browser, "Retry all that failed")
        press(browser, "Retry")
        assert state_counts() == {"new": 10}
        assert "Done" in browser.find_element(By.CSS_SELECTOR, "[role=status]").text
        press(browser, "Cancel")
        press(browser, "Cancel them")
        assert state_counts() == {"canceled": 10}
        assert len(rows(browser)) == 2, "both changes are shown"


@pytest.mark.drill(only=True)
def test_a_link_to_filtered_rows_shows_them_again_and_figures_change_by_themselves(
    browser: webdriver.Chrome, failed: list[int]
) -> None:
    with site() as address:
        enter(browser, address)
        browser.get(f"{address}/sessions/1/jobs")
        assert len(rows(browser)) == 10
        browser.find_element(By.XPATH, "//option[normalize-space()='errored']").click()
        press(browser, "Show")
        shown, link = rows(browser), browser.current_url
        assert len(shown) == 2
        browser.switch_to.new_window("tab")
        browser.get(link)
        assert rows(browser) == shown
        browser.get(f"{address}/sessions/1")
        browser.execute_script("window.here = true")
        says(browser, "errored 2")
        with writing(api.open_database()) as connection:
            evaluated = {"state": "evaluated", "cause": None}
            connection.execute(sa.update(Job).where(Job.id == failed[0]).values(evaluated))
        changed = time.monotonic()
        says(browser, "errored 1")
        assert time.monotonic() - changed < LONG_S
        assert browser.execute_script("return window.here"), "it was not loaded anew"


def says(browser: webdriver.Chrome, words: str) -> None:
    """Wait until the page has these words."""
    WebDriverWait(browser, LONG_S, poll_frequency=0.05).until(
        lambda one: words in one.find_element(By.TAG_NAME, "main").text, words
    )


@pytest.mark.drill(only=True)
@pytest.mark.service
@pytest.mark.usefixtures("forked")
def test_a_request_is_submitted_watched_over_a_restart_and_taken_away(
    browser: webdriver.Chrome,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[[Callable[[], object], float], None],
) -> None:
    program = home / "slow"
    program.write_text("#!/bin/sh\nsleep 0.3\n")
    program.chmod(0o700)
    monkeypatch.setenv("TUNA_EXAMPLE_PROGRAM", str(program))
    layers = home / "layers.txt"
    layers.write_text("".join(f"MIOpenDriver gemm -m 8 -n 8 -k {k}\n" for k in range(1, 9)))
    with serving(home, killed=True) as link:
        address = link.partition("/login")[0]
        browser.delete_all_cookies()
        browser.get(link)
        browser.get(f"{address}/requests")
        for name, value in (("file", str(layers)), ("name", "mine"), ("library", "example")):
            browser.find_element(By.NAME, name).send_keys(value)
        press(browser, "Submit")
        browser.execute_script("window.here = true")
        says(browser, "tuning")
    with serving(home, "--listen", address.removeprefix("http://")):
        says(browser, "built")
        assert browser.execute_script("return window.here"), "it was not loaded anew"
        faults(browser)  # the service was away
        check(browser)
        browser.find_element(By.LINK_TEXT, "all in one archive").click()
        whole = browser.downloads  # type: ignore[attr-defined]
        eventually(lambda: [*whole.glob("*.zip")], LONG_S)
        (path,) = whole.glob("*.zip")
        with zipfile.ZipFile(path) as archive:
            assert "results.json" in archive.namelist()
        press(browser, "Requests")
        assert len(rows(browser)) == 1
