"""Files that outlive a killed driver: append-only logs, and numbers in shared memory."""
