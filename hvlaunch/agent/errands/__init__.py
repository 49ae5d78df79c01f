"""Errands: hvlaunch's own functions for hosts, one file or package each. See docs/internals/errands.md."""
