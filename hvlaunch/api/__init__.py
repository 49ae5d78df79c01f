"""hvlaunch from Python: functions in place of programs, and jobs that run already. docs/guides/python.md is for users."""
