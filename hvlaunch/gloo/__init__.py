"""hvlaunch's own controller: the engine that decides, and the loop that carries out."""
