"""The console: the printer and its displays, files of output, and the store of a job's output."""
