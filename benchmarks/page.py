"""How soon a long run is on the screen: the overview of 10,000 steps, on desktop and phone. See benchmarks/README.md.

    python benchmarks/page.py [--shots DIR]

Beside it a run of 30 steps, in the same browser: what is left then is the page itself. The server has read neither run
before; the browser has the page's libraries. Needs Chromium (`make browser`) and playwright.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from big_ledger import make_big_ledger

STEPS = {"short": 30, "long": 10_000}
SCREENS = {"desktop": (1280, 900), "phone": (390, 800)}
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
CHARTS = 9  # of the overview's: reward, and what to watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=Path, help="write screenshots into this directory")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        chromium = next(
            path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))
        )
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, steps in STEPS.items():
            make_big_ledger(Path(scratch) / name, num_steps=steps)
        print("screen    run      first paint, s   charts, s")
        for screen, (width, height) in SCREENS.items():
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            server = subprocess.Popen([sys.executable, "-m", "headrace.cli", "dash", scratch, "--port", str(port)])
            try:
                look(browser.new_page(viewport={"width": width, "height": height}), port, screen, arguments.shots)
            finally:
                server.terminate()
                server.wait()
        browser.close()


def look(page: Any, port: int, screen: str, shots: Path | None) -> None:
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        with suppress(OSError):
            urllib.request.urlopen(f"{address}/run/short/settings").close()
            break
        time.sleep(0.1)
    page.goto(f"{address}/run/short/settings")  # its libraries
    page.wait_for_timeout(2000)
    for name in STEPS:
        begun = time.perf_counter()
        page.goto(f"{address}/run/{name}/overview")
        page.wait_for_function(f"document.querySelectorAll('svg').length >= {CHARTS}")
        charts_s = time.perf_counter() - begun
        print(f"{screen:<9} {name:<8} {page.evaluate(PAINTED) / 1e3:13.2f} {charts_s:11.2f}", flush=True)
        if shots is not None:
            shots.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=shots / f"{screen}-{name}.png", full_page=True)


if __name__ == "__main__":
    main()
