"""What runs on a host. It travels over the channel, so: the standard library alone, Python >= 3.8."""
