"""Copies of the working tree for the hosts: what it has, a snapshot of it, and its way to them (docs/internals/sync.md)."""
