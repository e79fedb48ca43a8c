#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the plots of README.md and docs/ with `lockstep report` and headless Chromium, and copies the tables of comparisons.

  docs/site/plots.py COMMAND [COMPARISON...]

Draws docs/images/step-time.png out of bench/results, and docs/images/compare-EXPERIMENT.png out of each folder that `lockstep
compare` has written. Where a page of docs/ has the lines <!-- compare EXPERIMENT --> and <!-- end -->, the command, the machine, the date
and the tables go between them.
"""
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from docs_test import Browser  # noqa: E402

STEP_TIMES = [ROOT / "bench/results/step.json"]
CHARTS = {  # of the section Comparison
    "strategies": ["speed-up over one device", "best val. accuracy"],
    "scaling": ["speed-up over one device", "memory"],
    "server-vs-ring": ["step, median", "busiest link, per step"],
    "batch-and-rate": ["best val. accuracy", "time per epoch"],
    "average-every": ["best val. accuracy", "time per epoch"],
    "staleness": ["best val. accuracy", "mean delay"],
    "bubble": ["step, median", "bubble"],
    "kvstore-kinds": ["step, median", "bytes moved in a step"],
}
KEEP = """const shown = [...document.querySelectorAll('.chart')].filter(box => arguments[0].includes(box.querySelector('h3').textContent));
const place = shown[0].parentElement;
place.style.padding = '8px';
place.style.background = 'white';
place.replaceChildren(...shown);
document.body.replaceChildren(place);
charts.forEach(each => each.canvas.isConnected && each.resize());
return place;"""


def draw(command, runs, titles, target):
    """The charts of a report that have these titles, beside each other, as a picture in light colours."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([command, "report", *map(str, runs), "--output", Path(folder) / "page.html"], check=True)
        browser = Browser(folder)
        try:
            width = 1040 if len(titles) > 1 else 720
            browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                           {"width": width, "height": 1000, "deviceScaleFactor": 2, "mobile": False})
            browser.open("page.html")
            browser.find("h3", titles[0])
            browser.driver.execute_script(KEEP, titles).screenshot(str(target))
            if errors := browser.errors():
                raise SystemExit("\n".join(errors))
        finally:
            browser.driver.quit()
    print(f"drawn: {target.relative_to(ROOT)}")


def described(folder):
    """Returns what a page says of a comparison: the command, the machine, the date, and the tables."""
    about = json.loads((folder / "comparison.json").read_text())
    command = re.sub(r" --output \S+", "", about["command"])
    day = time.strftime("%Y-%m-%d", time.gmtime((folder / "tables.md").stat().st_mtime))
    tables = (folder / "tables.md").read_text().split("\n\n", 1)[1]  # without the heading, which says the same
    tables = tables[max(0, tables.find("N workers, a host each")):]  # over hosts: what the links carry, beside the formulas
    tables = re.sub(r"; \S+output.txt says more", "", tables)
    return f"`{command}` ({about['machine']['description']}; {day}):\n\n{tables}"


def put_into_docs(experiment, text):
    place = re.compile(rf"(<!-- compare {experiment} -->\n).*?(<!-- end -->)", re.DOTALL)
    for page in (ROOT / "docs").rglob("*.md"):
        before = page.read_text()
        if place.search(before):
            page.write_text(place.sub(lambda found: f"{found[1]}{text}{found[2]}", before))
            print(f"written: {page.relative_to(ROOT)}")


def main():
    command, *comparisons = sys.argv[1:]
    if not comparisons:
        draw(command, STEP_TIMES, ["Time of a training step"], ROOT / "docs/images/step-time.png")
    for folder in map(Path, comparisons):
        experiment = json.loads((folder / "comparison.json").read_text())["experiment"]
        draw(command, [folder], CHARTS[experiment], ROOT / f"docs/images/compare-{experiment}.png")
        put_into_docs(experiment, described(folder))


if __name__ == "__main__":
    main()
