#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes pages with `lockstep report` and looks at them in headless Chromium, on a desktop and a phone, light, dark and printed; and
hands it metrics, traces and comparisons that are cut off, of another version, of runs that died and of other models.

  report_test.py COMMAND [FOLDER]   FOLDER: where screenshots go
"""
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from docs_test import Browser

COMMAND = str(Path(sys.argv[1]).resolve())
SCREENSHOTS = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None


def lockstep(*words, code=0):
    done = subprocess.run([COMMAND, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
    return done.stderr


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])


def report(folder, *runs):
    """What the page of these runs draws, and what the command said of them."""
    page = folder / "page.html"
    said = lockstep("report", *runs, "--output", page)
    return data_of(page), said


def start(step=0, model="lenet", **more):
    return {"event": "start", "format": 1, "step": step, "command": "lockstep train", "launcher": "none",
            "machine": {"host": "here", "cpu": "one", "cores": 2, "memory_bytes": 2**33},
            "settings": {"model": model, "strategy": "ddp", "batch_size": 16}} | more


def step(number, loss=1.0):
    return {"event": "step", "epoch": 0, "step": number, "loss": loss, "seconds": 0.5, "samples": 16}


def epoch(number=0, accuracy=0.9):
    return {"event": "epoch", "epoch": number, "seconds": 2.0, "samples": 64, "samples_per_second": 32, "train_loss": 0.5, "val_loss": 0.6,
            "val_accuracy": accuracy}


def end(**more):
    return {"event": "run", "strategy": "ddp", "model": "lenet", "data": "synthetic", "ranks": 2, "steps": 4, "seconds": 3.0} | more


def write(file, *events):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    return file


def four_steps():
    return [start(), *map(step, range(4)), epoch(), end()]


# ---- Input that is not what it should be


def expect_partial(folder, texts, *runs):
    found, said = report(folder, *runs)
    assert found["runs"][0]["partial"] == texts, found["runs"][0]["partial"]
    assert all(text in said for text in texts), said
    return found


def expect_error(folder, text, *runs, code=1):
    page = folder / "none.html"
    said = lockstep("report", *runs, "--output", page, code=code)
    assert text in said, said
    assert not page.exists()


def bad_metrics(folder):
    whole = write(folder / "whole.jsonl", *four_steps())
    lines = whole.read_text()
    file = folder / "bad.jsonl"
    died = "no end: the run died after 4 steps, or is still going on"
    file.write_text(lines[: lines.rindex('"steps"')])
    expect_partial(folder, ["the last line is cut off", died], file)
    file.write_text(lines.replace('"step": 1', '"step": oops'))
    found = expect_partial(folder, ["1 line is damaged and left out"], file)
    assert found["runs"][0]["steps"]["step"] == [0, 2, 3]
    write(file, *four_steps()[:-1])
    expect_partial(folder, [died], file)
    write(file, *four_steps()[1:])
    expect_partial(folder, ["no command, machine and settings: an older lockstep has written it"], file)
    write(file, *four_steps()[:-1], {"event": "stop", "step": 4, "saved": False})
    expect_partial(folder, ["stopped by a signal"], file)
    expect_partial(folder, [], write(file, *four_steps(), {"event": "of a later version"}))
    expect_error(folder, "is in format 2, and this lockstep knows 1", write(file, start(format=2)))
    file.write_text("")
    expect_error(folder, "is empty", file)
    file.write_bytes(bytes(range(256)) * 40)
    expect_error(folder, "no event of lockstep", file)
    expect_error(folder, "no-such", folder / "no-such.jsonl")
    lockstep("report", whole, "--output", whole, code=2)
    assert whole.read_text() == lines, "an input is overwritten"
    assert "/no/such" in lockstep("report", whole, "--output", "/no/such/folder/x.html", code=1)


def no_python():
    done = subprocess.run([COMMAND, "report", "x.jsonl"], env={"PATH": "/nowhere"}, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "python3" in done.stderr, done


def resumed_metrics(folder):
    """The second attempt goes back to step 2; the first one's epoch and end are void."""
    events = [*four_steps()[:-1], {"event": "resume", "step": 2}, start(step=2), step(2, 7), step(3, 8), epoch(accuracy=0.5), end()]
    found, _ = report(folder, write(folder / "resumed.jsonl", *events))
    (run,) = found["runs"]
    assert run["steps"]["step"] == [0, 1, 2, 3] and run["steps"]["loss"] == [1, 1, 7, 8], run["steps"]
    assert run["steps"]["seconds"][-1] == 2 and run["epochs"]["val_accuracy"] == [0.5], run


def long_metrics(folder):
    found, _ = report(folder, write(folder / "long.jsonl", start(), *(step(n, n % 2) for n in range(1200)), step(1200, None), end(stage_0_bytes=1e6)))
    steps = found["runs"][0]["steps"]
    results = found["runs"][0]["results"]
    assert [results[name] for name in ("step, median", "step, 95th percentile", "samples/s")] == [0.5, 0.5, 32], results
    assert results["bytes moved"] is None, "the memory of a stage is taken for bytes that were moved"
    assert len(steps["step"]) == 401 and steps["step"][0] == 2 and steps["samples"][-1] == 1201 * 16, steps["step"]
    assert (steps["low"][0], steps["high"][0]) == (0, 1) and steps["loss"][-1] is None


def other_models(folder):
    runs = [write(folder / f"{model}.jsonl", start(model=model), step(0), end(model=model)) for model in ("lenet", "mlp")]
    found, _ = report(folder, *runs)
    assert found["warnings"] == ["The runs differ in model (lenet, mlp): their losses and times say nothing about each other."]


def bad_traces(folder, trace):
    metrics = write(folder / "run.jsonl", *four_steps())
    lines = trace.read_text()
    file = folder / "cut.json"
    file.write_text(lines[: len(lines) * 2 // 3])
    found = expect_partial(folder, ["the trace is cut off"], f"{metrics},{file}")
    assert found["runs"][0]["trace"]["ranks"][0]["steps"] > 0
    file.write_text(lines.replace('"complete":true', '"complete":false'))
    expect_partial(folder, ["the trace is of a run that failed"], f"{metrics},{file}")
    file.write_text(lines.replace('"format":1', '"format":2'))
    expect_error(folder, "is in format 2", f"{metrics},{file}")
    file.write_text("{}")
    expect_error(folder, "has no span", f"{metrics},{file}")
    ring = folder / "x.json.rank1"
    ring.write_bytes(b"ring")
    expect_error(folder, "what one rank kept", f"{metrics},{ring}")
    expect_error(folder, f"lockstep trace {folder}/x.json", ring)
    for content in lines, lines[: len(lines) // 2]:
        file.write_text(content.replace('"format":1', '"format":2'))
        expect_error(folder, "is in format 2, and this lockstep knows 1", file)


def comparison(folder):
    """A comparison of two strategies on one and two devices, with two seeds; one run has failed, and one is missing."""
    runs = []
    for strategy, devices, seed in [("single", 1, 1), ("single", 1, 2), ("ddp", 2, 1), ("ddp", 2, 2), ("towers", 2, 1), ("towers", 2, 2)]:
        name = f"{strategy}-{devices}-seed{seed}"
        state = {"towers-2-seed1": "failed", "towers-2-seed2": "missing"}.get(name, "finished")
        runs.append({"name": name, "folder": f"runs/{name}", "strategy": strategy, "devices": devices, "seed": seed, "varied": {},
                     "state": state, "seconds": 3.0, "number": len(runs), "contender": strategy})
        events = four_steps() if state == "finished" else four_steps()[:3]
        if state != "missing":
            write(folder / "compared/runs" / name / "metrics.jsonl", *[e | {"seconds": 0.5 / devices + seed / 100} if e["event"] == "step" else e
                                                                     for e in events])
    description = {"lockstep_comparison": 1, "experiment": "scaling", "across": "devices", "settings": {}, "machine": {"host": "here", "cores": 2},
                   "command": "lockstep compare scaling", "runs": runs[::-1]}  # in the order in which they were made
    file = folder / "compared/comparison.json"
    write(file, description)
    found, _ = report(folder, folder / "compared")
    partial = {run["name"]: run["partial"] for run in found["runs"]}
    assert partial["ddp-2-seed1"] == [], partial
    assert partial["towers-2-seed1"][-1] == "state: failed" and partial["towers-2-seed2"] == ["there is nothing of it", "state: missing"], partial
    assert found["comparison"]["experiment"] == "scaling" and found["runs"][0]["name"] == "single-1-seed1", found["runs"][0]
    assert report(folder, folder / "compared/comparison.json")[0] == found
    expect_error(folder, "is a second comparison", folder / "compared", folder / "compared", code=2)
    write(folder / "later/comparison.json", description | {"lockstep_comparison": 2})
    expect_error(folder, "is in format 2", folder / "later")
    (folder / "later/comparison.json").write_text(file.read_text()[:99])
    expect_error(folder, "does not describe a comparison", folder / "later")
    for lost in ("contender", "devices", "varied"):
        older = [{key: value for key, value in run.items() if key != lost} for run in runs]
        write(folder / "older/comparison.json", description | {"runs": older})
        expect_error(folder, "does not describe a comparison", folder / "older")
    expect_error(folder, "neither metrics.jsonl nor comparison.json", folder, code=2)


def kinds_of_two_models(folder):
    """A comparison that is drawn against its contenders and varies the model."""
    runs = []
    for contender, devices in [("single", 1), ("kvstore-local", 2), ("kvstore-dist_sync", 2)]:
        for model in ("inception", "alexnet"):
            name = f"{contender}-{devices}-model={model}"
            runs.append({"name": name, "number": len(runs), "folder": f"runs/{name}", "contender": contender, "strategy": contender.split("-")[0],
                         "devices": devices, "seed": 1, "varied": {"model": model}, "state": "finished"})
            write(folder / "kinds/runs" / name / "metrics.jsonl", start(model=model), *map(step, range(4)), end(model=model, pushed_bytes=4e6))
    write(folder / "kinds/comparison.json", {"lockstep_comparison": 1, "experiment": "kvstore-kinds", "across": "contender", "runs": runs})
    found, _ = report(folder, folder / "kinds")
    assert found["warnings"] == [], found["warnings"]


def diverged(folder):
    write(folder / "diverged.jsonl", start(), step(0, 2.0), step(1, 1e9), step(2, None))


def benchmark(folder):
    model = {"lockstep": {"step": 0.05}, "pytorch": {"ddp": 0.1, "no_sync": 0.06, "one_process_contiguous": 0.1, "one_process_channels_last": 0.05}}
    write(folder / "step.json", {"machine": "one", "ranks": 2, "models": {"lenet": model, "mlp": {"lockstep": {"step": 0.2}, "pytorch": {}}}})
    found, said = report(folder, folder / "step.json")
    assert found["runs"] == [] and said == "", said
    for models in ({"lenet": {}}, {"lenet": 3}, ["lenet"]):
        write(folder / "other.json", {"models": models})
        expect_error(folder, "no event of lockstep", folder / "other.json")


def ways_to_name_a_run(folder, metrics, trace):
    lines = metrics.read_text()
    (folder / "run").mkdir()
    (folder / "run/metrics.jsonl").write_text(lines)
    (folder / "run/trace.json").write_text(trace.read_text())
    found, said = report(folder, metrics, f"{metrics},{trace}", trace, f"{folder}/run/", f"mine={metrics}")
    assert said == "", said
    parts = {run["name"]: ("steps" in run, "trace" in run) for run in found["runs"]}
    assert parts == {"ddp": (True, False), "ddp (2)": (True, True), "ddp.json": (False, True), "run": (True, True), "mine": (True, False)}, parts
    began = found["runs"][0]["start"]
    assert began["command"].startswith("lockstep train --quiet --model lenet") and began["launcher"] == "none", began
    assert began["machine"]["cores"] > 0 and began["settings"]["batch_size"] == 16, began
    assert [rank["rank"] for rank in found["runs"][0]["run"]["each_rank"]] == [0, 1]


# ---- Pages in a browser


class Screen:
    def __init__(self, folder):
        self.browser = Browser(folder)
        self.driver = self.browser.driver

    def open(self, page, width, scheme, media="screen", last="To repeat it"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500})
        self.browser.open(page)
        self.browser.find("section:last-of-type h2", last)
        console = self.driver.get_log("browser")
        assert console == [], console
        assert self.ask("document.scrollingElement.scrollWidth") <= width, f"{page} is wider than {width} pixels"
        assert self.ask("charts.every(each => each.width > 100 && each.width < innerWidth)")
        colours = self.ask("""charts.map(each => new Set(new Uint32Array(
            each.ctx.getImageData(0, 0, each.canvas.width, each.canvas.height).data.buffer)).size)""")
        assert colours and min(colours) > 3, f"an empty chart: {colours}"
        if SCREENSHOTS:
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": self.ask("document.scrollingElement.scrollHeight"),
                                                                               "deviceScaleFactor": 1, "mobile": width < 500})
            self.driver.save_screenshot(str(SCREENSHOTS / f"{Path(page).stem}-{width}-{scheme}-{media}.png"))

    def ask(self, script):
        return self.driver.execute_script(f"return {script}")

    def background(self):
        return self.ask("getComputedStyle(document.body).backgroundColor")

    def titles(self):
        return [heading.text for heading in self.browser.elements("h2")]


def look_at_runs(screen):
    screen.open("runs.html", 1200, "light")
    assert screen.background() == "rgb(255, 255, 255)"
    assert screen.titles() == ["Runs", "Curves", "Where a step's time goes", "Balance between ranks", "Delays of asynchronous gradients", "Bytes by collective",
                               "Memory", "To repeat it"], screen.titles()
    assert screen.ask("charts[0].options.scales.x.title.text") == "time of training steps"
    screen.browser.click(".choice button", "samples")
    assert screen.ask("charts[0].data.datasets[0].data.at(-1).x") == 640
    assert not screen.browser.elements("b"), "text became markup"
    assert screen.driver.get_log("browser") == []
    screen.open("runs.html", 1200, "dark")
    assert screen.background() == "rgb(13, 17, 23)"
    screen.open("runs.html", 1200, "dark", "print")
    assert screen.background() == "rgb(255, 255, 255)"
    assert screen.ask("LIGHT.sets.includes(charts[0].data.datasets[0].borderColor)"), "a printed curve has colours for the dark"
    assert len(screen.driver.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 10000
    screen.open("runs.html", 360, "dark")
    screen.open("runs.html", 360, "light")


def look_at_a_comparison(screen):
    screen.open("comparison.html", 360, "light")
    screen.open("comparison.html", 1200, "light")
    assert "Comparison" in screen.titles()
    drawn = dict(screen.ask("charts.map(each => [each.canvas.ariaLabel, each.data.datasets.map(set => [set.label, set.data, set.errors])])"))
    labels, means, errors = zip(*drawn["speed-up over one device"])
    assert labels == ("single", "ddp"), labels
    assert means[0][0] == 1 or abs(means[0][0] - 1) < 1e-3, means
    assert abs(means[1][1] - (0.515 / 0.265)) < 0.01 and errors[1][1][0] < means[1][1] < errors[1][1][1], (means, errors)


def look_at_other_pages(screen):
    screen.open("kinds.html", 1200, "light")
    (kinds,) = (found for found in screen.ask("charts.map(each => [each.canvas.ariaLabel, each.data.labels, each.data.datasets.map(set => set.label)])")
                if found[0] == "bytes moved")
    assert kinds[1:] == [["single", ["kvstore", "local"], ["kvstore", "dist", "sync"]], ["model inception", "model alexnet"]], kinds
    screen.open("diverged.html", 1200, "light")
    assert screen.ask("charts[0].scales.y.max") == 6
    for width, scheme in ((360, "dark"), (1200, "light")):
        screen.open("step.html", width, scheme, last="Benchmark")
    assert screen.ask("charts[0].data.datasets.map(set => set.data)") == [[0.5, 1], [1, None], [0.5, None]]


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = folder / "ddp.json"
        common = ["--quiet", "--model", "lenet", "--data", "synthetic:320x1x28x28", "--ranks", 2, "--threads", 1, "--batch-size", 16]
        lockstep("train", *common, "--epochs", 2, "--metrics", folder / "ddp.jsonl", "--trace", trace)
        lockstep("train", *common, "--epochs", 1, "--strategy", "kvstore", "--kvstore", "dist_async", "--metrics", folder / "async.jsonl")
        for check in (bad_metrics, resumed_metrics, long_metrics, other_models, comparison, kinds_of_two_models, benchmark, diverged):
            check(folder)
        bad_traces(folder, trace)
        no_python()
        ways_to_name_a_run(folder, folder / "ddp.jsonl", trace)
        lockstep("report", f"</script><b>ddp</b>={folder}/ddp.jsonl,{trace}", folder / "async.jsonl", "--output", folder / "runs.html")
        for page, what in {"comparison": "compared", "kinds": "kinds", "step": "step.json", "diverged": "diverged.jsonl"}.items():
            lockstep("report", folder / what, "--output", folder / f"{page}.html")
        screen = Screen(folder)
        try:
            look_at_runs(screen)
            look_at_a_comparison(screen)
            look_at_other_pages(screen)
        finally:
            screen.driver.quit()


if __name__ == "__main__":
    main()
