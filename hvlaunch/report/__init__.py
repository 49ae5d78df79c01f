"""How a job failed, or how it ended well: one structure, and what shows it in a terminal, to programs and as a page."""
