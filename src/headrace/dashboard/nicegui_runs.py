"""Runs: a list of all, one with a view for each question, its answers, and several compared."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from nicegui import run as threads
from nicegui import ui

from headrace.config_file import changed, explain
from headrace.dashboard import books, charts
from headrace.dashboard import nicegui_elements as page
from headrace.dashboard.books import PAGE_COLUMNS, Page, Rewards, Timeline, Wanted, number, read_accounts
from headrace.dashboard.charts import CARDS, Card, Drawn, Look, metric_curves
from headrace.dashboard.site import LiveRun, Overview, Site, address
from headrace.insight.reports import triage_report
from headrace.insight.triage import Triage
from headrace.ledger.files import is_run, run_config
from headrace.ledger.ledger import Books
from headrace.runs import show
from headrace.runs.facts import RunFacts, RunState, UnknownNameError
from headrace.runs.report import Section, duration, or_dash, percent, printable

TIMELINE_STEPS = (3, 10, 30)
WATCHED = ("generated", "trained", "backlog", "waiting", "versions", "kl", "spread", "latency")  # of every run
MAIN = "the main ones"
_MAIN_TITLES = ("Reward mean", "Wall", "Lag mean")
ANY = "any"
TOKENS_SHOWN = 400  # at once


async def runs(site: Site) -> None:
    """The list of runs, or the run itself where there is but one to show."""
    if is_run(site.root):
        ui.navigate.to(address("run", site.root.name, "overview"))
        return
    with page.frame("Runs", str(site.root)):
        page.table_panel(CARDS["runs"], lambda: _runs(site.facts()), search="search by name or state")
        await page.follow()


def _runs(found: list[RunFacts]) -> page.Listing:
    problems = tuple((facts.path.name, facts.problem) for facts in found if facts.problem)
    cells = [(show.drawn_rewards(facts.rewards), show.run_row(facts)) for facts in found]
    return page.Listing(
        columns=(*show.RUN_COLUMNS[:3], "reward", *show.RUN_COLUMNS[3:]),
        rows=[(*row[:3], curve, *row[3:]) for curve, row in cells],
        numeric={2, 4, 5, 6, 7},
        links=[address("run", facts.path.name, "overview") for facts in found],
        wide={2, 4, 5, 6},
        kinds={1: "state", 3: "curve"},
        sort_by={
            3: [facts.rewards[-1] if facts.rewards else None for facts in found],
            4: [facts.score_after if facts.score_after is not None else facts.score_before for facts in found],
            7: [-facts.written.timestamp() for facts in found],
        },
        below=Section(title="Cannot be read", facts=problems) if problems else None,
        instead="There is no run here yet. `headrace train` makes one.",
    )


async def run_view(view: str, site: Site, name: str) -> None:
    shown = RunViews(site, name)
    with page.frame(name, run=name, view=view):
        getattr(shown, view)()
        await page.follow()


class RunViews:
    """What is on the views of one run: each is a method that makes its panels."""

    def __init__(self, site: Site, name: str) -> None:
        self._name, self._live = name, site.run(name)
        self._look: Callable[[], Look] = Look

    def _curves(self, *curves: Card, height_px: int = 280) -> None:
        for curve in curves:
            page.chart_panel(curve, partial(self._drawn, curve), height_px)

    def _drawn(self, curve: Card) -> Drawn:
        return curve.drawn(self._live.series(), self._look(), self._live.facts())

    def overview(self) -> None:
        page.panel(lambda: Overview(self._live).numbers(self._live.triage()), page.numbers)
        self._look = page.look_controls()
        self._curves(CARDS["reward"])
        with ui.element("div").classes("trio"):
            self._curves(*(CARDS[name] for name in WATCHED), height_px=200)
        with page.card("How it went"):
            page.panel(self._live.history, page.section)
        with page.card(CARDS["triage"]):
            page.panel(self._live.triage, _verdict)
            ui.link("Try other stage times on the plan page", address("plan", run=self._name))
        with ui.element("div").classes("pair"):
            self._curves(CARDS["goodput"], CARDS["stage_times"])

    def curves(self) -> None:
        self._look = page.look_controls()
        for group, found in metric_curves().items():
            with ui.element("h2").classes("group"):
                ui.label(group.capitalize())
            with ui.element("div").classes("trio"):
                self._curves(*found, height_px=200)
                if group == "reward":
                    page.chart_panel(CARDS["reward_parts"], self._parts, 200)

    def _parts(self) -> Drawn:
        return charts.parts_drawn(self._live.tally(books.PARTS), self._live.series(), self._look())

    def settings(self) -> None:
        with page.card(CARDS["settings"]):
            everything = ui.switch("show all settings")
            grid = page.Grid(search="search settings")
            shown = page.Panel(lambda: self._settings(everything.value), grid.show)
        everything.on_value_change(shown.refresh)

    def _settings(self, everything: bool) -> page.Listing:
        """What was set, and with `everything` what was not, with what each one means."""
        given = _set(self._live)
        known = sorted(explain(), key=lambda setting: setting.key not in given)
        shown = [setting for setting in known if everything or setting.key in given]
        rows = [(one.key, given.get(one.key, one.default), one.default, one.doc) for one in shown]
        columns = ("setting", "value", "default", "meaning")
        instead = "Every setting is at its default."
        return page.Listing(columns=columns, rows=rows, wide={2}, stacked=True, instead=instead)

    def timeline(self) -> None:
        asked = number(page.query(), "steps") or TIMELINE_STEPS[0]
        steps, here = min(max(asked, 1), TIMELINE_STEPS[-1]), partial(address, "run", self._name, "timeline")
        page.views((f"last {n} steps", here(steps=n), n == steps) for n in TIMELINE_STEPS)
        page.chart_panel(CARDS["timeline"], lambda: charts.timeline(Timeline(self._live.path, steps)), 380)

    def tokens(self) -> None:
        page.chart_panel(CARDS["tokens"], lambda: charts.sankey(read_accounts(self._live.path)), 360)
        page.table_panel(CARDS["accounts"], self._accounts)

    def _accounts(self) -> page.Listing:
        held, here = read_accounts(self._live.path), ("run", self._name, "trajectories")
        found = show.accounts(held)
        links = [address(*here, state=one.state, reason=one.reason) for one in found]
        return page.Listing(
            columns=(*show.ACCOUNT_COLUMNS, "because"),
            rows=[(*one.row(held.generated), one.explanation) for one in found],
            numeric=range(1, 5),
            links=[*links[:-1], ""],  # what is in flight has no record yet
            wide={4, 5},
        )

    def lag(self) -> None:
        page.chart_panel(CARDS["lag"], self._lags)
        self._look = page.look_controls()
        self._curves(CARDS["ratio"], CARDS["weights"])

    def _lags(self) -> Drawn:
        live, allowed = self._live, run_config(self._live.path).loop.max_lag
        return charts.lag_bars(live.tally(books.LAGS), live.series().last_step, allowed)

    def publish(self) -> None:
        self._look = page.look_controls()
        self._curves(CARDS["latency"], CARDS["bytes"])

    def rewards(self) -> None:
        page.chart_panel(CARDS["rewards"], lambda: charts.reward_bars(Rewards(self._live.path)))
        self._look = page.look_controls()
        with ui.element("div").classes("pair"):
            self._curves(CARDS["spread"], CARDS["lengths"])


def _set(live: LiveRun) -> dict[str, str]:
    """The settings of a run that are not at their defaults."""
    return dict(text.split("=", 1) for text in changed(run_config(live.path)))


def _verdict(found: Triage | str) -> None:
    parts = [Section(sentences=(found,))] if isinstance(found, str) else triage_report(found).sections
    for part in parts:
        page.section(part)


async def trajectories(site: Site, name: str) -> None:
    path, wanted = site.run(name).path, Wanted.of(page.query())
    place = {side: number(page.query(), side) for side in ("older", "newer")}

    def there(**changes: Any) -> str:
        return address("run", name, "trajectories", **asdict(wanted) | changes)

    def draw(read: tuple[Books, Page]) -> None:
        held, found = read
        with page.card(CARDS["answers"]):
            _filters(wanted, list(held.dropped), there)
        listing = page.Listing(
            columns=PAGE_COLUMNS,
            rows=found.rows,
            numeric={1, 2, 4, 5},
            links=[address("run", name, "trajectory", id=row[0], **asdict(wanted)) for row in found.rows],
            wide={2, 4, 5, 6},
            instead="No answer is like this." if wanted != Wanted() else "No answer is finished yet.",
        )
        with page.card():
            page.Grid().show(listing)
            if found.places:
                newer = there(newer=found.places[0]) if found.has_newer else None
                older = there(older=found.places[-1]) if found.has_older else None
                _links({"← newer": newer, "older →": older})

    with page.frame(name, run=name):
        shown = page.panel(lambda: (read_accounts(path), Page(path, wanted, **place)), draw)
        await shown.refresh()  # not followed: a list that moves is hard to click


def _filters(wanted: Wanted, reasons: list[str], there: Any) -> None:
    def go(state: str | None = wanted.state, reason: str | None = wanted.reason) -> None:
        state, reason = (None if chosen == ANY else chosen for chosen in (state, reason))
        typed = {name: field.value for name, field in numbers.items()}
        typed["step"] = None if typed["step"] is None else int(typed["step"])
        ui.navigate.to(there(state=state, reason=reason if state == "dropped" else None, **typed))

    with ui.element("div").classes("line"):
        states = [ANY, "trained", "dropped", "buffered"]
        page.choice(states, wanted.state or ANY, "state", lambda event: go(event.value))
        if reasons:
            because = [ANY, *reasons]
            page.choice(because, wanted.reason or ANY, "dropped because", lambda event: go("dropped", event.value))
        labels = {"step": "trained in step", "least": "reward from", "most": "reward to"}
        numbers = {}
        for name, label in labels.items():
            field = ui.number(label, value=getattr(wanted, name)).classes("field")
            numbers[name] = field.props("outlined dense clearable").on("keydown.enter", lambda: go())
        ui.button("Show", on_click=lambda: go()).props("outline no-caps")


async def trajectory(site: Site, name: str) -> None:
    path, wanted, start = site.run(name).path, Wanted.of(page.query()), number(page.query(), "start") or 0
    if not (id := page.query().get("id")):
        raise UnknownNameError("The address names no answer: it ends with trajectory?id=... of one.")
    read = await threads.io_bound(books.Answer, path, id, wanted)
    found, here = read.found, partial(address, "run", name, "trajectory", **asdict(wanted))
    links = {"← newer answer": read.newer, "older answer →": read.older}
    links = {text: other and here(id=other) for text, other in links.items()}
    links["all answers to this prompt"] = address("run", name, "group", serial=found.serial)
    with page.frame(f"Answer {id}", f"of run {name}", run=name):
        _links(links)
        with page.card("What became of it"):
            page.facts(show.trajectory_facts(found).items())
        _prompt(read.prompt, read.fields)
        if found.whole is None:
            with page.card("Answer"):
                page.message(show.NO_TOKENS)
            return
        for title, text in show.said(found.whole).items():
            with page.card(CARDS.get(title, title.capitalize())):
                ui.label(printable(text)).classes("written")
        num_tokens = len(found.whole.token_ids)
        start = min(max(start, 0), max(num_tokens - 1, 0)) // TOKENS_SHOWN * TOKENS_SHOWN
        with page.card(CARDS["answer_tokens"]):
            if num_tokens > TOKENS_SHOWN:
                firsts = range(0, num_tokens, TOKENS_SHOWN)
                texts = {a: f"{a}-{min(a + TOKENS_SHOWN, num_tokens) - 1}" for a in firsts}
                page.views((text, here(id=id, start=a), a == start) for a, text in texts.items())
            if read.texts is None:
                page.message("The run's tokenizer cannot be read, so tokens are shown as their ids.")
            cells = _in_reading_order(show.tokens(found.whole, read.texts, start, TOKENS_SHOWN))
        with page.card("The same as a table"):
            page.Grid().show(page.Listing.of(cells, numeric={0, 2, 3, 4, 5}, wide={2, 6}))


def _prompt(text: str | None, fields: Mapping[str, str]) -> None:
    with page.card(CARDS["prompt"]):
        ui.label(printable(text) if text else "(not kept)").classes("written")
        page.facts(fields.items())


def _links(found: Mapping[str, str | None]) -> None:
    with ui.element("div").classes("line"):
        for text, target in found.items():
            if target:
                ui.link(text, target)


async def group(site: Site, name: str) -> None:
    path, serial = site.run(name).path, number(page.query(), "serial")
    if serial is None:
        raise UnknownNameError("The address names no group: it ends with group?serial=... of one.")
    read = await threads.io_bound(books.GroupAnswers, path, serial)
    with page.frame(f"All answers to {read.prompt_id}", f"group {serial} of run {name}", run=name):
        sides = {"← newer group": read.newer, "older group →": read.older}.items()
        _links({text: address("run", name, "group", serial=other) for text, other in sides if other is not None})
        _prompt(read.prompt, read.fields)
        with ui.element("div").classes("answers"):
            for id, facts, text in read.answers:
                with page.card():
                    ui.link(printable(id), address("run", name, "trajectory", id=id)).classes("part")
                    page.facts(facts.items())
                    ui.label(printable(text) if text is not None else "(text not kept)").classes("written")


def _in_reading_order(shown: Iterable[show.Token]) -> list[dict[str, str]]:
    """The surer the policy was, the paler; what was given is grey. Returns the same for a table."""
    version, cells = None, []
    with ui.element("div").classes("tokens"):
        for token in shown:
            if token.version is not None and token.version != version:
                version = token.version
                ui.label(f"v{version}").classes("version")
            text = printable(token.text).replace("\n", "⏎\n").replace("\t", "⇥\t") or "∅"
            label = ui.label(text).classes("token")
            told = {"log-prob": "", "probability": "", "version": "", "mask": "given"}
            if token.probability is None:
                label.classes("given").props["title"] = f"token {token.position}: given"
            else:
                label.style(f"--surprise: {0.75 * (1.0 - token.probability):.3f}")
                odds = f"log-prob {token.logprob:.3f}, version {token.version}"
                label.props["title"] = f"token {token.position}, id {token.id}: {odds}"
                told = {"log-prob": f"{token.logprob:.3f}", "probability": f"{token.probability:.1%}"}
                told |= {"version": str(token.version), "mask": "sampled"}
            cells.append({"place": str(token.position), "token": repr(token.text), "id": str(token.id)} | told)
    return cells


async def compare(site: Site) -> None:
    query = page.query()
    found = await threads.io_bound(site.facts)
    names = [facts.path.name for facts in found if facts.state is not RunState.UNREADABLE]
    asked = [name for name in dict.fromkeys(query.getlist("run")) if name]
    chosen = [site.run(name) for name in asked or names[:2]]
    group = query.get("curves") or MAIN

    def go(curves: str) -> None:
        ui.navigate.to(address("compare", run=several.value or None, curves=None if curves == MAIN else curves))

    with page.frame("Compare runs"):
        with page.card(CARDS["compare"]), ui.element("div").classes("line"):
            shown = [live.name for live in chosen]
            options = list(dict.fromkeys((*names, *shown)))
            several = ui.select(options, value=shown, label="runs", multiple=True, with_input=True)
            several.classes("field grow").props("outlined dense options-dense use-chips")
            page.choice([MAIN, *metric_curves()], group, "curves", lambda event: go(event.value))
            ui.button("Compare", on_click=lambda: go(group)).props("outline no-caps")
        if len(chosen) < 2:
            held = f"{site.root} holds {len(names)} that can be read"
            page.message(f"Comparing takes two runs or more: choose them above; {held}.")
            return
        page.table_panel("In numbers", lambda: _numbers(chosen))
        look = page.look_controls()

        def drawn(curve: Card) -> Drawn:
            return curve.compared({live.name: live.series() for live in chosen}, look())

        groups = metric_curves()
        main = [one for curves in groups.values() for one in curves if one.title in _MAIN_TITLES]
        with ui.element("div").classes("pair"):
            for curve in groups.get(group, [*main, CARDS["goodput"]]):
                page.chart_panel(curve, partial(drawn, curve))
        page.table_panel(CARDS["differences"], lambda: _differences(chosen))
        await page.follow()


def _numbers(chosen: list[LiveRun]) -> page.Listing:
    sides = []
    for live in chosen:
        seen, verdict = Overview(live), live.triage()
        facts, series = seen.facts, seen.series
        side = {
            "state": str(facts.state),
            "steps": f"{series.last_step:,} / {facts.wanted_steps:,}",
            "reward, last steps": or_dash(series.now("reward_mean")),
            "held-out score, before → latest": show.scores(facts),
            "goodput, tokens/s": or_dash(series.goodput()),
            "seconds per step": or_dash(series.now("wall_s")),
            "bottleneck": "…" if isinstance(verdict, str) else str(verdict.bottleneck),
            "largest lag": str(seen.lag_max),
            "share trained on": percent(seen.useful_share, 1),
            "time": duration(seen.elapsed_s),
        }
        sides.append(side)
    rows = [(name, *(side[name] for side in sides)) for name in sides[0]]
    numeric = range(1, len(chosen) + 1)
    return page.Listing(columns=("", *(live.name for live in chosen)), rows=rows, numeric=numeric)


def _differences(chosen: list[LiveRun]) -> page.Listing:
    sides = [_set(live) for live in chosen]
    default = {setting.key: f"{setting.default} (default)" for setting in explain()}
    keys = sorted({key for side in sides for key in side} - {"run.dir"})
    rows = [(key, *(side.get(key, default[key]) for side in sides)) for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    columns = ("setting", *(live.name for live in chosen))
    return page.Listing(columns=columns, rows=rows, instead="All settings are the same.")
