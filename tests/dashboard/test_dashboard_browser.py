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
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

import pytest
from hand_made import group, row
from page_runs import BROKEN
from tiny_runs import select

from headrace.config_file import explain
from headrace.insight.reports import triage_report
from headrace.insight.triage import Triage
from headrace.ledger.files import run_config, save_settings
from headrace.ledger.ledger import Ledger
from headrace.measured import ROW_METRICS

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
no_page = importlib.util.find_spec("nicegui") is None  # importing it takes seconds, and only the server needs it
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(no_page, reason="nicegui is not installed: pip install -e '.[dash]'"),
]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE_S = 60.0
VIEWS = ("overview", "curves", "settings", "timeline", "tokens", "lag", "publish", "rewards", "trajectories")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SCREENSHOTS = os.environ.get("HEADRACE_SCREENSHOTS")
LOOKS = [("desktop", "light"), ("phone", "dark"), *([("desktop", "dark"), ("phone", "light")] if SCREENSHOTS else [])]


# What lies outside its card and cannot be scrolled to.
OUTSIDE = """() => [...document.querySelectorAll('.card *')].filter(element => {
    const card = element.closest('.card'), box = element.getBoundingClientRect();
    for (let outer = element.parentElement; outer !== card; outer = outer.parentElement)
        if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(outer).overflowX)) return false;
    return box.width && !element.closest('svg') && box.right > card.getBoundingClientRect().right + 1;
}).map(element => element.textContent.slice(0, 60))"""


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
        words = ["dash", str(root), "--port", str(self.port)]
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

    def ask(self, path: str) -> tuple[int, str]:
        """The status of an answer, and the answer."""
        try:
            return 200, self.get(path)
        except HTTPError as error:
            return error.code, str(error.read().decode())

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


@pytest.mark.slow
def test_every_run_gets_an_answer_whatever_state_it_is_in(server: Server):
    for name, must_say in BROKEN.items():
        for view in VIEWS:
            answer = server.get(f"/run/{name}/{view}")
            assert "Traceback" not in answer
            assert must_say in answer or view == "settings" or "there is no ledger.sqlite" in answer, (name, view)
        for path in ("trajectory?id=x", "group?serial=1"):
            _, answer = server.ask(f"/run/{name}/{path}")
            assert must_say in answer
            assert "Something went wrong" not in answer
    for path in ("/", "/compare", "/plan?run=damaged", "/plan?run=nothing", "/compare?run=damaged&run=empty"):
        assert "Something went wrong" not in server.get(path)
    assert "Traceback" not in server.log()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/run/nothing/overview", "There is no run"),
        ("/run/%2e%2e/overview", "There is no run"),
        ("/run/%00/overview", "There is no run"),
        ("/run/..%2f..%2fetc/overview", "There is no page"),
        ("/run/real/nonsense", "There is no page"),
        ("/nonsense", "There is no page"),
        ("/run/real/timeline?steps=many", "steps=many in the address is not a number"),
        ("/run/real/trajectory?id=nonsense", "there is no trajectory nonsense"),
        ("/run/real/trajectory", "The address names no answer"),
        ("/run/real/trajectories?least=much", "least=much in the address is not a number"),
        ("/run/real/group?serial=12345", "There is no group 12345 in real"),
        ("/compare?run=real&run=nothing", "There is no run"),
    ],
)
def test_what_is_not_there_is_a_404_that_says_what_is(server: Server, path: str, says: str):
    status, answer = server.ask(path)
    assert status == 404
    assert says in answer
    assert "What there is" in answer
    assert "run real" in answer
    assert "Traceback" not in answer + server.log()


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
        "compare": "/compare?run=real&run=other&run=written",
        "plan": "/plan",
        "answer": f"/run/real/trajectory?id={id}",
        "group": f"/run/real/group?serial={id.split(':')[0]}",
    }
    drawn = {
        "overview": 11,
        "curves": len(ROW_METRICS) + 1,
        "timeline": 1,
        "tokens": 1,
        "lag": 3,
        "publish": 2,
        "rewards": 3,
        "compare": 4,
        "plan": 1,
    }
    for view, path in paths.items():
        page = tab.open(path, "svg" if view in drawn else ".page")
        page.wait_for_function(f"document.querySelectorAll('svg text').length >= {2 * drawn.get(view, 0)}")
        assert len(page.query_selector_all(".nicegui-echart svg")) == drawn.get(view, 0), view
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= SIZES[size][0], f"{view} is {width} pixels wide"
        assert page.evaluate(OUTSIDE) == [], view
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
    save_settings(run_config(real_run), run)
    assert text_of(tab.open("/run/growing/overview")).count("has no ledger yet") == 1  # for all panels
    with Ledger.create(run) as ledger:
        for step in (1, 2):
            ledger.row(row(step, reward_mean=step / 8))
            shown = f"document.body.innerText.includes('{step}\\nof 6;')"
            tab.page.wait_for_function(shown, timeout=DEADLINE_S * 1000)
    assert "0.188" in text_of(tab.page)  # the mean of both
    tab.page.wait_for_function("document.querySelector('.nicegui-echart svg').getBoundingClientRect().width > 800")
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


NASTY = "<script>alert(1)</script><img src=x onerror='document.title=1'>\"\x1b{{ 1 + 1 }}"


def nasty_run(runs: Path, name: str, real_run: Path) -> str:
    """A run that has a hostile text wherever it can have one; returns the id of an answer."""
    run, written = runs / name, group(0)
    run.mkdir()
    config = run_config(real_run, [f"reward.function={NASTY.replace(chr(27), '')}"])
    save_settings(config, run)
    answer = written.trajectories[0]
    object.__setattr__(answer, "text", NASTY)
    object.__setattr__(answer, "reward_parts", {NASTY: 1.0})
    with Ledger.create(run) as ledger:
        ledger.started(4)
        ledger.sampled(9)
        ledger.buffered(written)
        ledger.row(row(1))
    (run / "summary.json").write_text(json.dumps({"steps": 1, "reward_failure": NASTY}))
    return answer.id


@pytest.mark.slow
def test_what_a_policy_writes_is_never_markup(browser: Any, server: Server, real_run: Path):
    tab, name = Tab(browser, server), "<img src=x onerror='document.title=2'>{{ 2 + 2 }}"
    id = nasty_run(real_run.parent, name, real_run)
    run, shown = f"/run/{quote(name, safe='')}", NASTY.replace("\x1b", "\\x1b")
    paths = {
        f"{run}/trajectory?id={id}": shown,
        f"{run}/trajectories": shown,
        f"{run}/group?serial=0": shown,
        f"{run}/curves": "{{ 1 + 1 }}",
        f"{run}/settings": "{{ 1 + 1 }}",
        f"{run}/overview": name,
        "/": name,
        f"/compare?run={quote(name)}&run=real": name,
    }
    for path, text in paths.items():
        page = tab.open(path)
        page.wait_for_function(f"document.body.textContent.includes({json.dumps(text)})")
        assert page.query_selector(".page img, .page script") is None, path
        assert "\x1b" not in page.content()
        assert page.title() not in ("1", "2")
    tab.close()
    for path in (f"/{quote(NASTY)}", f"{run}/overview", f"{run}/nonsense"):
        assert "<img" not in server.ask(path)[1], path
    shutil.rmtree(real_run.parent / name)


def test_curves_follow_the_axis_and_the_smoothing(browser: Any, server: Server):
    tab = Tab(browser, server)
    page = tab.open("/run/real/curves", "svg")
    pale = (
        "[...document.querySelectorAll('svg path')].filter(one => one.getAttribute('stroke-opacity') === '0.3').length"
    )
    assert page.evaluate(pale) == 0
    page.get_by_label("curves along").click()
    page.get_by_role("option", name="hours").click()
    page.wait_for_function("[...document.querySelectorAll('svg text')].some(one => one.textContent === 'hours')")
    slider = page.get_by_role("slider", name="smoothing")
    box = slider.bounding_box()
    slider.click(position={"x": box["width"] * 0.9, "y": box["height"] / 2})
    page.wait_for_function(f"{pale} > 5")
    assert {"Entropy", "KL reference", "Reward parts"} <= set(page.inner_text("body").split("\n"))
    tab.close()


def test_settings_show_what_was_set_and_on_request_all(browser: Any, server: Server):
    tab = Tab(browser, server)
    page = tab.open("/run/real/settings", "tbody tr")
    keys = [cell.inner_text() for cell in page.query_selector_all("tbody td:first-child")]
    assert "loop.max_lag" in keys
    assert "learner.betas" not in keys
    page.get_by_text("show all settings").click()
    page.wait_for_function(f"document.querySelectorAll('tbody tr').length >= {len(explain())}")
    meanings = {setting.key: setting.doc for setting in explain()}
    assert meanings["loop.max_lag"] in text_of(page)
    now = [cell.inner_text() for cell in page.query_selector_all("tbody td:first-child")]
    assert now[: len(keys)] == keys  # what was set still comes first
    tab.close()


def test_any_number_of_runs_is_compared(browser: Any, server: Server):
    tab = Tab(browser, server)
    page = tab.open("/compare?run=real&run=other", "svg")
    page.get_by_label("runs").first.click()
    page.get_by_role("option", name="written").click()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url("**run=real&run=other&run=written")
    page.wait_for_selector("svg")
    page.wait_for_function(says("learner.lr"))
    titles = [cell.inner_text() for cell in page.query_selector_all("th")]
    assert titles == ["", "real", "other", "written", "setting", "real", "other", "written"]
    legend = page.evaluate("[...document.querySelectorAll('svg text')].map(one => one.textContent)")
    assert {"real", "other", "written"} <= set(legend)
    tab.close()


def test_all_answers_to_a_prompt_stand_side_by_side(browser: Any, server: Server, real_run: Path):
    tab = Tab(browser, server)
    (id, serial) = select(real_run, "SELECT id, serial FROM trajectories WHERE state = 'trained' ORDER BY rowid")[0]
    page = tab.open(f"/run/real/trajectory?id={id}")
    page.get_by_text("all answers to this prompt").click()
    page.wait_for_selector(".answers")
    assert len(page.query_selector_all(".answers .card")) == 4
    tops = {round(card.bounding_box()["y"]) for card in page.query_selector_all(".answers .card")}
    assert len(tops) == 1
    other = real_run.parent / "other"
    (id,) = select(other, "SELECT id FROM trajectories WHERE state = 'trained' ORDER BY rowid")[0]
    said = tab.open(f"/run/other/trajectory?id={id}").locator(".card", has_text="Printed by the reward function")
    assert "heard '" in said.inner_text()
    page = tab.open(f"/run/real/group?serial={serial}")
    page.get_by_text("newer group").click()
    page.wait_for_url(lambda url: f"serial={serial}" not in url.split("group")[1])
    page.wait_for_selector(".answers")
    tab.close()


def test_five_hundred_runs_are_listed_searched_sorted_and_scrolled(browser: Any, server: Server, real_run: Path):
    names = [f"many-{number:03d}" for number in range(500)]
    for name in names:
        (real_run.parent / name).mkdir()
        for file in ("ledger.sqlite", "config.toml", "summary.json"):
            os.link(real_run / file, real_run.parent / name / file)
    tab = Tab(browser, server)
    begin = time.perf_counter()
    page = tab.open("/", ".curve")
    print(f"500 runs: listed after {time.perf_counter() - begin:.2f} s")
    assert len(page.query_selector_all("tbody tr")) < 300  # only what can be seen is drawn
    assert len(page.query_selector_all(".state.finished")) > 10
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    last = "[...document.querySelectorAll('tbody a')].some(one => one.getBoundingClientRect().top < innerHeight && %s)"
    page.wait_for_function(last % "one.getBoundingClientRect().top > 0")
    assert page.evaluate("scrollY") > 5000
    page.evaluate("window.scrollTo(0, 0)")
    page.get_by_label("search by name or state").fill("many-12")
    page.wait_for_function("document.querySelectorAll('tbody a').length === 10")
    for order in (1, -1):
        page.click("th:has-text('run')")
        page.wait_for_function(f"document.querySelector('tbody a').innerText === 'many-12{0 if order == 1 else 9}'")
    page.get_by_label("search by name or state").fill("no such run")
    page.wait_for_function(says("Nothing here is like that."))
    tab.close()
    for name in names:
        shutil.rmtree(real_run.parent / name)


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
        found = threads.submit(Triage, real_run).result()
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
    assert "rollout: decoding takes most of the step" in text
    assert re.search(r"as it is\s+34 s", text)
    assert "rollout in half the time" in text
    slider = page.get_by_role("slider", name="train")
    box = slider.bounding_box()
    slider.click(position={"x": box["width"] - 2, "y": box["height"] / 2})
    page.wait_for_function(says("train: the gradient (or the reference) takes most of the step"))
    tab.close()


@pytest.mark.slow
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


CLOSED = """
import asyncio, threading
from nicegui import Client, ui
from headrace.dashboard.nicegui_elements import Panel

async def main():
    shown, begun, go_on = [], asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    def read():
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(10)
        return "what was read"
    with Client(ui.page("")):
        panel = Panel(read, shown.append)
        go_on.set()
        await panel.refresh()
        go_on.clear()
        begun.clear()
        looking = asyncio.create_task(panel.refresh())
    await begun.wait()
    looking.cancel()  # as NiceGUI does when a page is closed
    await asyncio.gather(looking, return_exceptions=True)
    go_on.set()
    print(shown)

asyncio.run(main())
"""


def test_a_page_that_is_closed_while_it_is_read_shows_nothing():
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.stdout.strip(), done.returncode) == ("['what was read']", 0), done.stderr


def test_a_long_run_is_on_the_screen_soon(browser: Any, server: Server):
    """Held against a run of a few steps, both as a browser sees them that has been here before."""
    tab, seconds = Tab(browser, server), {}
    for name in ("real", "real", "large"):
        begin = time.perf_counter()
        tab.open(f"/run/{name}/overview", "svg")
        seconds[name] = time.perf_counter() - begin
    print("first paint:", *(f"{name} {taken_s:.2f} s" for name, taken_s in seconds.items()))
    assert seconds["large"] < 10 * seconds["real"]
    tab.close()
