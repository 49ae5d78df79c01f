"""hvlaunch from Python: functions in place of programs, and jobs that run already. docs/python.md is for users."""
