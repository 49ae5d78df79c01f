"""Watchers of a job: they see events and actions, and change nothing; the narrator for people, the recorder for programs."""
