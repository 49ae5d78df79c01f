"""Makes the pictures of docs/view.md from a real job on this machine: python docs/make_view_pictures.py (textual, selenium, chromium)."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402

from hvlaunch.cli.job_feed import JobFeed  # noqa: E402
from hvlaunch.cli.top_screen import TopScreen  # noqa: E402
from hvlaunch.outside.directory import jobs_directory  # noqa: E402
from hvlaunch.outside.known import known_jobs  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
WORKER = """\
import os, time
rank, step = int(os.environ["RANK"]), 0
while True:
    step += 1
    print(f"step {step} loss {2.3 / step ** 0.3 + rank / 100:.3f}", flush=True)
    sum(number * number for number in range(200_000 * (rank + 1)))
    if rank == 1 and step == 30 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
    time.sleep(0.2)
"""
SECONDS = 40


async def terminal(feed: JobFeed) -> None:
    """The full screen, when it has shown something for a while."""
    screen = TopScreen(feed)
    async with screen.run_test(size=(110, 22)) as pilot:
        await pilot.pause(6)
        (PICTURES / "top.svg").write_text(screen.export_screenshot(title="hvlaunch top"))


def page(url: str) -> None:
    """The page, light, when its plots have had time."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    web = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    try:
        web.set_window_size(1000, 1250)
        web.get(url)
        time.sleep(SECONDS)
        web.save_screenshot(str(PICTURES / "page.png"))
    finally:
        web.quit()


def main() -> None:
    """Run the job, and take both."""
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        options = ["--detach", "--job-name", "baseline", "-np", "4", "--min-np", "4", "-H", "localhost:4"]
        subprocess.run([*HVLAUNCH, *options, sys.executable, "-c", WORKER], check=True)
        url = subprocess.run([*HVLAUNCH, "top", "--web"], check=True, capture_output=True, text=True).stdout
        page(url.strip())
        asyncio.run(terminal(JobFeed(known_jobs(jobs_directory(os.environ))[0])))
        subprocess.run([*HVLAUNCH, "stop"], check=True)


if __name__ == "__main__":
    main()
