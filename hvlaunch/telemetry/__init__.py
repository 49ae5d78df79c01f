"""What a job is doing: what hosts measure of their workers, and what is made of it. Pure."""
