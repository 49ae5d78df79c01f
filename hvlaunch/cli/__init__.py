"""From the command line to a job: arguments, environment, exit codes."""
