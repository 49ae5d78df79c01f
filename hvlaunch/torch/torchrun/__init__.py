"""torchrun's rendezvous backend `hvlaunch`. docs/torchrun.md is the guide; hvlaunch.torchrun is the entry point."""
