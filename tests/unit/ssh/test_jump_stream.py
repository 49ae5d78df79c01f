"""A stream through a jump host ends without disturbing the others on the same connection."""

import threading

from hvlaunch.ssh.jump_stream import JumpStream


class SlowChannel:
    """A channel whose send() takes until it is let go, as paramiko's does outside its own lock."""

    closed = False

    def __init__(self):
        self.sending = threading.Event()
        self.let_go = threading.Event()
        self.happened = []

    def send(self, data):
        self.sending.set()
        assert self.let_go.wait(10)
        self.happened.append("data")
        return len(data)

    def close(self):
        self.happened.append("close")


def test_no_data_follow_the_close():
    """sshd ends the connection to the jump host over data for a channel that is closed."""
    channel = SlowChannel()
    stream = JumpStream(channel, "gate", "10.0.0.1", "n1")
    sender = threading.Thread(target=stream.send, args=(b"x",))
    sender.start()
    assert channel.sending.wait(10)
    closer = threading.Thread(target=stream.close)
    closer.start()
    channel.let_go.set()
    sender.join()
    closer.join()
    assert channel.happened == ["data", "close"]


def test_a_send_that_is_stuck_does_not_hold_up_the_close():
    channel = SlowChannel()
    stream = JumpStream(channel, "gate", "10.0.0.1", "n1")
    sender = threading.Thread(target=stream.send, args=(b"x",), daemon=True)
    sender.start()
    assert channel.sending.wait(10)
    stream.close()
    assert channel.happened == ["close"]
    channel.let_go.set()
    sender.join()
