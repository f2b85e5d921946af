"""The page in a real browser, against a real run: what is drawn, at which width, in which light, and how soon.

HEADRACE_SCREENSHOTS=DIR keeps a picture of every view, to be looked at.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from hand_made import group, row
from page_runs import BROKEN
from tiny_runs import select

from headrace.config_file import dump
from headrace.insight.reports import triage_report
from headrace.insight.triage import triage
from headrace.ledger.files import run_config
from headrace.ledger.ledger import Ledger

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
no_page = importlib.util.find_spec("nicegui") is None  # importing it takes seconds, and only the server needs it
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(no_page, reason="nicegui is not installed: pip install 'headrace[dash]'"),
]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE_S = 60.0
VIEWS = ("overview", "timeline", "tokens", "lag", "publish", "rewards", "trajectories")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SCREENSHOTS = os.environ.get("HEADRACE_SCREENSHOTS")
LOOKS = [("desktop", "light"), ("phone", "dark"), *([("desktop", "dark"), ("phone", "light")] if SCREENSHOTS else [])]


class Server:
    """`headrace dash` in a process of its own."""

    def __init__(self, root: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        env = {
            name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
        }  # NiceGUI looks for it
        words = ["dash", str(root), "--port", str(self.port), "--dollars-per-hour", "2.5"]
        command = [sys.executable, "-c", "from headrace.cli import app; app()", *words]
        self._log = (root.parent / "dash.log").open("w+")
        self.process = subprocess.Popen(command, env=env, stdout=self._log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                self.get("/plan")
                return
            except OSError:
                assert self.process.poll() is None, self.log()
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def get(self, path: str, host: str | None = None) -> str:
        """What a plain request is answered with."""
        headers = {"Host": host} if host else {}
        with urllib.request.urlopen(urllib.request.Request(self.address + path, headers=headers), timeout=30) as answer:
            return str(answer.read().decode())

    def log(self) -> str:
        """Everything that the server printed."""
        self._log.seek(0)
        return self._log.read()

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(DEADLINE_S)
        self._log.close()


@pytest.fixture(scope="module")
def server(site_dir: Path, large_run: Path) -> Iterator[Server]:
    """The page over a directory of runs, some of them broken, one of them long."""
    shutil.copytree(large_run, site_dir / "large")
    server = Server(site_dir)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (on Debian and Ubuntu: apt install chromium, or make browser)")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield launched
        launched.close()


class Tab:
    """A page of the browser that notes what must not happen: errors, and requests that leave the machine."""

    def __init__(self, browser: Any, server: Server, size: str = "desktop", scheme: str = "light") -> None:
        width, height = SIZES[size]
        self._context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self._context.new_page()
        self.server, self.errors, self.strangers = server, [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("request", self._asked)
        self._name = f"{size}-{scheme}"

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.server.address, f"ws://127.0.0.1:{self.server.port}", "data:", "blob:")):
            self.strangers.append(request.url)

    def open(self, path: str, wait_for: str = ".page") -> Any:
        """Go there, and wait until something is drawn."""
        self.page.goto(self.server.address + path)
        self.page.wait_for_selector(wait_for, timeout=DEADLINE_S * 1000)
        return self.page

    def picture(self, name: str) -> None:
        """For people to look at."""
        if SCREENSHOTS:
            self.page.wait_for_timeout(400)
            Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=f"{SCREENSHOTS}/{name}-{self._name}.png", full_page=True)

    def close(self) -> None:
        """Nothing bad must have happened."""
        self._context.close()
        assert self.errors == []
        assert self.strangers == []


def text_of(page: Any) -> str:
    return str(page.inner_text("body"))


def test_every_run_gets_an_answer_whatever_state_it_is_in(server: Server):
    for name, must_say in BROKEN.items():
        for view in VIEWS:
            answer = server.get(f"/run/{name}/{view}")
            assert "Traceback" not in answer
            assert must_say in answer or "there is no ledger.sqlite" in answer, (name, view)
        assert must_say in (answer := server.get(f"/run/{name}/trajectory?id=x"))
        assert "Something went wrong" not in answer
    for path in ("/", "/compare", "/plan?run=damaged", "/plan?run=nothing", "/compare?a=damaged&b=empty"):
        assert "Something went wrong" not in server.get(path)
    with pytest.raises(HTTPError, match="404"):
        server.get("/run/..%2f..%2fetc/overview")
    for name in ("%2e%2e", "nothing", "%00"):
        assert "There is no run" in server.get(f"/run/{name}/overview")
    assert "Traceback" not in server.log()


def test_prometheus_reads_the_newest_run_or_the_one_it_names(server: Server, real_run: Path):
    for asked in ("/metrics", f"/metrics?run={real_run.name}"):
        assert "# TYPE headrace_trained_tokens_total counter" in server.get(asked)


def test_another_site_cannot_read_the_page_under_a_name_of_its_own(server: Server):
    with pytest.raises(HTTPError, match="400"):
        server.get("/", host="evil.example")


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_every_view_is_drawn_and_fits_the_screen(browser: Any, server: Server, real_run: Path, size: str, scheme: str):
    tab = Tab(browser, server, size, scheme)
    id = select(real_run, "SELECT id FROM trajectories WHERE state = 'trained' ORDER BY num_tokens DESC")[0][0]
    paths = {view: f"/run/real/{view}" for view in VIEWS}
    paths |= {
        "runs": "/",
        "compare": "/compare?a=real&b=other",
        "plan": "/plan",
        "answer": f"/run/real/trajectory?id={id}",
    }
    drawn = {"overview": 3, "timeline": 1, "tokens": 1, "lag": 3, "publish": 2, "rewards": 3, "compare": 4, "plan": 1}
    for view, path in paths.items():
        page = tab.open(path, "svg" if view in drawn else ".page")
        page.wait_for_function(f"document.querySelectorAll('svg text').length >= {2 * drawn.get(view, 0)}")
        assert len(page.query_selector_all(".nicegui-echart svg")) == drawn.get(view, 0), view
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= SIZES[size][0], f"{view} is {width} pixels wide"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) < 384) == (scheme == "dark"), (
            view
        )
        tab.picture(view)
    tab.close()


def test_the_overview_shows_the_numbers_of_the_ledger(browser: Any, server: Server, real_run: Path):
    tab = Tab(browser, server)
    text = text_of(tab.open("/run/real/overview", "svg"))
    assert "6\nof 6; finished" in text
    assert "Cost so far" in text
    assert "tokens trained on per second" in text
    tab.open("/run/real/tokens", "svg")
    (trained,) = select(real_run, "SELECT tokens FROM accounts WHERE name = 'trained'")[0]
    assert f"{trained:,}" in text_of(tab.page)
    tab.close()


def test_a_run_that_goes_on_is_followed(browser: Any, server: Server, real_run: Path):
    run, tab = real_run.parent / "growing", Tab(browser, server)
    run.mkdir()
    dump(run_config(real_run), run / "config.toml")
    assert "has no ledger yet" in text_of(tab.open("/run/growing/overview"))
    with Ledger.create(run) as ledger:
        for step in (1, 2):
            ledger.row(row(step, reward_mean=step / 8))
            shown = f"document.body.innerText.includes('{step}\\nof 6;')"
            tab.page.wait_for_function(shown, timeout=DEADLINE_S * 1000)
    assert "0.188" in text_of(tab.page)  # the mean of both
    tab.close()


def test_answers_are_found_by_filter_and_read_token_by_token(browser: Any, server: Server):
    tab = Tab(browser, server)
    page = tab.open("/run/real/trajectories", "table")
    page.get_by_label("state").click()
    page.get_by_role("option", name="dropped").click()
    page.wait_for_url("**state=dropped**")
    page.wait_for_selector("table")
    fates = [cell.inner_text() for cell in page.query_selector_all("tbody tr td:nth-child(4)")]
    assert fates
    assert all(fate.startswith("dropped") for fate in fates)
    tab.open("/run/real/trajectories?state=trained", "table")
    page.click("tbody a")
    page.wait_for_selector(".token.given")
    assert page.query_selector(".token:not(.given)") is not None
    assert "trained on in step" in text_of(page)
    tab.close()


def test_what_a_policy_writes_is_never_markup(browser: Any, server: Server, real_run: Path):
    run, tab = real_run.parent / "nasty", Tab(browser, server)
    nasty = "<script>alert(1)</script><img src=x onerror='document.title=1'>\"\x1b{{ 1 + 1 }}"
    run.mkdir()
    dump(run_config(real_run), run / "config.toml")
    written = group(0)
    object.__setattr__(written.trajectories[0], "text", nasty)
    with Ledger.create(run) as ledger:
        ledger.started(4)
        ledger.sampled(9)
        ledger.buffered(written)
    id = written.trajectories[0].id
    shown = nasty.replace("\x1b", "\\x1b")
    for path in (f"/run/nasty/trajectory?id={id}", "/run/nasty/trajectories"):
        page = tab.open(path, "table")
        page.wait_for_function(says("{{ 1 + 1 }}"))
        assert shown in text_of(page)
        assert page.query_selector(".page img, .page script") is None
        assert "\x1b" not in page.content()
        with closing(sqlite3.connect(run / "ledger.sqlite")) as connection, connection:  # for the second page
            connection.execute("UPDATE trajectories SET finish = ? WHERE id = ?", (nasty, id))
    tab.close()


def test_tables_sort_by_the_numbers_in_them(browser: Any, server: Server):
    tab = Tab(browser, server)
    page = tab.open("/run/real/trajectories", "table")
    for order in (1, -1):
        page.click("th:has-text('tokens')")
        page.wait_for_selector("th.sorted")
        page.wait_for_timeout(300)
        cells = [cell.inner_text() for cell in page.query_selector_all("tbody tr td:nth-child(3)")]
        tokens = [int(cell.replace(",", "")) for cell in cells]
        assert len(set(tokens)) > 2
        assert tokens[::order] == sorted(tokens)
    tab.close()


def says(text: str) -> str:
    return f"document.body.innerText.includes({json.dumps(text)})"


def test_the_overview_names_the_wall_and_what_to_change(browser: Any, server: Server, real_run: Path):
    tab = Tab(browser, server)
    with ThreadPoolExecutor() as threads:  # the browser's event loop is in this one
        found = threads.submit(triage, real_run).result()
    page = tab.open("/run/real/overview", "svg")
    told = triage_report(found)
    page.wait_for_function(says(told.sections[0].sentences[0]), timeout=DEADLINE_S * 1000)
    text = text_of(page)
    assert f"Against {found.bottleneck} in general" in text
    assert "as it is" in text or not found.moves
    for move in found.moves:
        assert f"{move.gain:.2f}x" in text
    tab.close()


def test_the_plan_follows_its_sliders(browser: Any, server: Server):
    tab = Tab(browser, server)
    page = tab.open("/plan", "svg")
    text = text_of(page)
    assert "generation: decoding takes most of the step" in text
    assert re.search(r"as it is\s+34 s", text)
    assert "rollout in half the time" in text
    slider = page.get_by_role("slider", name="train")
    box = slider.bounding_box()
    slider.click(position={"x": box["width"] - 2, "y": box["height"] / 2})
    page.wait_for_function(says("learner: the gradient takes most of the step"))
    tab.close()


def test_the_plan_answers_what_is_typed_and_says_what_is_wrong_beside_it(browser: Any, server: Server):
    tab = Tab(browser, server)
    page = tab.open("/plan", "svg")
    page.set_default_timeout(DEADLINE_S * 1000)  # layouts are simulated
    page.wait_for_function(says("If not Headrace"))
    text = text_of(page)
    said = ("7B on 8 x H100", "placement", "goodput", "dollars a million", "loop.max_lag", "of 80 GB", "publish")
    said += ("Take this", "The bottleneck", "Other layouts", "If not Headrace")
    assert [word for word in said if word not in text] == []
    page.get_by_label("model size").fill("70B")
    page.wait_for_function(says("70B cannot be trained on 8 x H100"))
    page.get_by_label("GPUs").fill("64")
    page.wait_for_function(says("70B on 64 x H100"))
    page.get_by_label("spread of lengths").fill("wide")
    page.wait_for_function(says("'wide' is not a number"))
    page.wait_for_function(says("Put right what is marked above: spread of lengths."))
    tab.picture("plan-wrong")
    page.get_by_label("spread of lengths").fill("0.5")
    page.get_by_text("train a low-rank adapter only").click()
    page.wait_for_function(says("adapter weights in buckets"))
    tab.close()


def test_a_long_run_is_on_the_screen_soon(browser: Any, server: Server):
    tab = Tab(browser, server)
    tab.open("/plan", "svg")  # a browser that has been here before
    begin = time.perf_counter()
    tab.open("/run/large/overview", "svg")
    first_s = time.perf_counter() - begin
    print(f"a long run: first paint after {first_s:.2f} s")
    assert first_s < 6.0  # about one second on an idle machine
    tab.close()
