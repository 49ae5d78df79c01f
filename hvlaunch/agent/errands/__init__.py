"""Errands: hvlaunch's own functions that run on hosts, one file each. docs/internals/errands.md explains them."""
