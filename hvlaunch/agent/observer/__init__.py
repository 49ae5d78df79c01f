"""Measurements of a host and its workers, made by the observer (agent/errands/observer.py)."""
