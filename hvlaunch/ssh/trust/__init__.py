"""Trust: the user's keys and passphrases, known host keys and host certificates."""
