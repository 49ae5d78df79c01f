"""The failure report: one data structure, shown in a terminal, as JSON and as an HTML page."""
