"""What --since takes."""

from datetime import datetime, timedelta, timezone

import pytest

from hvlaunch.cli.jobs import since
from hvlaunch.cli.options import BadValue

NOW = datetime(2026, 11, 22, 14, 30, 5, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("0s", timedelta(0)),
        ("10m", timedelta(minutes=10)),
        ("2h", timedelta(hours=2)),
        ("3d", timedelta(days=3)),
        ("14:30", timedelta(seconds=5)),
        ("9:30", timedelta(hours=5, seconds=5)),
        ("14:30:04", timedelta(seconds=1)),
        ("14:31", timedelta(hours=23, minutes=59, seconds=5)),
        ("2026-11-22T14:00:00+00:00", timedelta(minutes=30, seconds=5)),
    ],
)
def test_times(text, ago):
    assert since(text, NOW) == (NOW - ago).timestamp()


@pytest.mark.parametrize("text", ["", "m", "10", "10w", "25:00", "yesterday", "2026-13-01", "-1s", "1:2"])
def test_malformed_times_are_refused(text):
    with pytest.raises(BadValue):
        since(text, NOW)
