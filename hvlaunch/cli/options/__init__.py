"""The tables of options, and reading their values."""
