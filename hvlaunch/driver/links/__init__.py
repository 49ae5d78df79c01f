"""The connections to hosts: a session each, its frames, and its end."""
