"""The connections to hosts: one session each, its frames, and its end."""
