"""Tables of options, and their values."""
