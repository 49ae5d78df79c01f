"""Errands: hvlaunch's own functions for hosts, one file each. See docs/internals/errands.md."""
