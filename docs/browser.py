"""Pictures of pages, taken by Chromium."""

import tempfile
import time
from pathlib import Path

from tests.browser import Browser

__all__ = ["take"]


def take(url: str, picture: Path, *, width: int, height: int, seconds: float = 0.0) -> None:
    """Of a page in light colours, when it has had so many seconds; its text goes to a file of that name, for a test to compare.

    `width` and `height` are of the window, in pixels.
    """
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        try:
            browser.web.set_window_size(width, height)
            browser.web.get(url)
            time.sleep(seconds)
            browser.web.save_screenshot(str(picture))
            picture.with_suffix(".txt").write_text(browser.text("body") + "\n")
        finally:
            browser.web.quit()
