"""Jobs as other programs of the same user see them: each has a directory, and in it a socket that leads to its driver."""
