"""The digits training, elastic, with torch and Gloo; obeys and reports as elastic_sums.py does.

elastic_training.py DIR [--restarts]: with hvlaunch.torch.elastic, or as a script that resumes from DIR/checkpoint.
What is ordered for a worker's start comes before torch is imported, which takes its time where much else runs.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from orders import Orders


def end_well_when_told() -> None:
    """Exit with 0 on SIGTERM, even while a collective waits."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in all threads that begin from now on

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    directory = Path(sys.argv[1])
    orders = Orders(directory)
    orders.obey("start")
    if "--restarts" in sys.argv:
        end_well_when_told()
        orders.obey("join")
        from digits_training import by_restarts

        by_restarts(orders, directory / "checkpoint")
    else:
        from digits_training import in_process

        in_process(orders)
    orders.obey("end")


if __name__ == "__main__":
    main()
