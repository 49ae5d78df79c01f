"""A running job as people look at it: rows, a time line, figures. Pure; shared by the terminal, the plain table and the page."""
