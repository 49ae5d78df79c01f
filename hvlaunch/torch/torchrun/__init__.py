"""torchrun's rendezvous backend `hvlaunch`. docs/reference/torchrun.md is the guide; hvlaunch.torchrun is the entry point."""
