"""Both ends of the channel between driver and agent: frames, their forms, and sessions that outlive a connection."""
