"""A real browser, as a person has it."""

import json
import shutil
from pathlib import Path

import pytest

from tests.testhosts.hosts import wait_until

__all__ = ["Browser", "needs_chromium"]

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
LIMIT = 100.0
needs_chromium = pytest.mark.skipif(None in (CHROMIUM, DRIVER), reason="there is no Chromium")


class Browser:
    """Chromium, with a profile of its own."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for word in (
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        self.web = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.web.set_window_size(1200, 1400)
        self.asked: set[str] = set()

    def text(self, selector: str) -> str:
        return str(
            self.web.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def shows(self, selector: str, text: str) -> str:
        """What the element shows when the text is in it."""
        return wait_until(
            lambda: shown if text in (shown := self.text(selector)) else None,
            f"{text} in {selector}",
            LIMIT,
        )

    def click(self, selector: str) -> None:
        self.web.find_element("css selector", selector).click()

    def requests(self) -> set[str]:
        """The addresses of all that this page asked for."""
        for entry in self.web.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.asked.add(message["params"]["request"]["url"])
        return self.asked
