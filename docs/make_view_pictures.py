"""Makes the pictures of docs/guides/watch.md from a real job on this machine: make pictures (textual, selenium, chromium)."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.browser import take  # noqa: E402
from hvlaunch.cli.jobs.feed import JobFeed  # noqa: E402
from hvlaunch.cli.jobs.top_screen import TopScreen  # noqa: E402
from hvlaunch.outside import jobs_directory, known_jobs  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
WORKER = """\
import os, time
from hvlaunch.rendezvous import progress
rank, step = int(os.environ["RANK"]), 0
while True:
    step += 1
    loss = 2.3 / step ** 0.3
    progress(step, 1000, loss=loss)
    print(f"step {step} loss {loss:.3f}", flush=True)
    sum(number * number for number in range(200_000 * (rank + 1)))
    if rank == 1 and step == 30 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
    time.sleep(0.2)
"""
SECONDS = 40


async def terminal(feed: JobFeed) -> str:
    """The full screen, when it has shown something for a while."""
    screen = TopScreen(feed)
    async with screen.run_test(size=(110, 22)) as pilot:
        await pilot.pause(6)
        return screen.export_screenshot(title="hvlaunch top")


def main(pictures: Path, seconds: float) -> None:
    """Run the job, and make both in that folder; the page gets so many seconds."""
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        options = ["--detach", "--job-name", "baseline", "-np", "4", "--min-np", "4", "-H", "localhost:4"]
        subprocess.run([*HVLAUNCH, *options, sys.executable, "-c", WORKER], check=True)
        with subprocess.Popen([*HVLAUNCH, "top", "--web"], stdout=subprocess.PIPE, text=True) as page:
            assert page.stdout is not None  # noqa: S101 (for the type checker)
            url = page.stdout.readline().strip()
            take(url, pictures / "page.png", width=1000, height=1250, seconds=seconds)
            page.terminate()
        job = known_jobs(jobs_directory(os.environ))[0]
        (pictures / "top.svg").write_text(asyncio.run(terminal(JobFeed(job))))
        subprocess.run([*HVLAUNCH, "stop"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2])) if sys.argv[1:] else main(PICTURES, SECONDS)
