"""Jobs and pools as other programs of the same user see them: a directory, and in it a socket of the driver or pool."""
