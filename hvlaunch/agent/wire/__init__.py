"""Both ends of the channel between driver and agent, sessions that outlive a connection, and links between hosts."""
