"""What measures a host and its workers, beside the agent: a process of its own, since what it asks may hang."""
