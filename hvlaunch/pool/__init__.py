"""The process of a warm pool: connections to hosts, and what forks agents there, for one job after the other."""
