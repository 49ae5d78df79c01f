"""`python -m hvlaunch` is `hvlaunch`."""

from hvlaunch.cli.main import script

if __name__ == "__main__":
    script()
