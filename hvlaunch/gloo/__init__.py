"""hvlaunch's own controller, which Horovod names gloo too. It is not torch's Gloo, the collectives that workers may use.

`engine` decides and is pure, `driver` carries out, `watch` looks on.
"""
