"""The rendezvous backend `hvlaunch` of torchrun. docs/torchrun.md is the guide; hvlaunch.torchrun is the way in."""
