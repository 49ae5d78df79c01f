"""How other processes ask a driver: the control socket and the page."""
