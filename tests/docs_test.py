#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the site of the documentation, where a warning is an error, and clicks through it in headless Chromium."""

import functools
import http.server
import re
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / ".deps/docs-tools"))
from selenium import webdriver  # noqa: E402
from selenium.common.exceptions import WebDriverException  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build/docs/html"


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Says nothing of each request."""


class Browser:
    """Chromium at a folder's pages, which a server on a free port gives it. Waits for what it looks for; an error after a minute."""

    def __init__(self, folder=SITE):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
        self.server.handle_error = lambda *_: None  # the browser went on before it had everything
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.start = f"http://127.0.0.1:{self.server.server_port}/"
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for option in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1400,1000",
                       "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"):  # what a page wants of other servers is an error
            options.add_argument(f"--{option}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))

    def open(self, page=""):
        self.driver.get(self.start + page)

    def until(self, what, action):
        """Does it again and again, also while the page is still changing, until it succeeds."""
        wait = WebDriverWait(self.driver, 60, ignored_exceptions=[WebDriverException, IndexError])
        return wait.until(lambda _: action(), f"{what} at {self.driver.current_url}")

    def elements(self, css, text=None):
        return [e for e in self.driver.find_elements("css selector", css) if text is None or e.text == text]

    def find(self, css, text=None):
        return self.until(f"no {css} {text or ''}", lambda: next(iter(self.elements(css, text)), None))

    def click(self, css, text):
        self.until(f"nothing to click: {css} {text}", lambda: self.elements(css, text)[0].click() or True)

    def expect_heading(self, text):
        self.until(f"no heading {text}", lambda: self.elements("h1")[0].text.rstrip("#¶") == text)

    def errors(self):
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


def search(browser, words, result, heading):
    browser.open()
    browser.expect_heading("lockstep")
    browser.find("input[name=q]").send_keys(words + "\n")
    browser.click("#search-results a", result)
    browser.expect_heading(heading)


def walk_to_a_cpp_class(browser):
    browser.open()
    browser.click(".sidebar-tree a", "C++")
    browser.expect_heading("C++")
    browser.click("article a", "ddp.h")
    browser.expect_heading("ddp.h")
    browser.find("dt .descname", "DistributedDataParallel")
    browser.find("dt .descname", "backward")


def walk_to_python(browser):
    browser.open()
    browser.click(".sidebar-tree a", "Python")
    browser.expect_heading("Python")
    (names,) = re.findall(r"^__all__ = \[(.*?)\]", (ROOT / "python/src/lockstep/__init__.py").read_text(), re.MULTILINE | re.DOTALL)
    for name in re.findall(r'"(\w+)"', names):
        browser.find(f"dt[id='lockstep.{name}']")


def visit_every_page(browser):
    for page in sorted(SITE.rglob("*.html")):
        browser.open(str(page.relative_to(SITE)))
        browser.find("h1, a")
        if errors := browser.errors():
            raise SystemExit(f"{page}:\n  " + "\n  ".join(errors))


def main():
    subprocess.run(["make", "docs"], cwd=ROOT, check=True)
    browser = Browser()
    try:
        search(browser, "all_gather_rows", "lockstep::World::all_gather_rows", "world.h")
        walk_to_a_cpp_class(browser)
        walk_to_python(browser)
        visit_every_page(browser)
    finally:
        browser.driver.quit()


if __name__ == "__main__":
    main()
