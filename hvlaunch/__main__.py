"""`python -m hvlaunch` is `hvlaunch`."""

import sys

from hvlaunch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
