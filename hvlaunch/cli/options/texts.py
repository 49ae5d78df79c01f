"""What help, the page of options and the manual page say alike."""

from hvlaunch.cli.options.given import default_of
from hvlaunch.cli.options.option import Option

__all__ = ["EXAMPLES", "EXIT_CODES", "default_text", "sentences"]

EXIT_CODES = (
    ("0", "all workers ended with 0"),
    ("1-125", "the first failing worker's own"),
    ("126, 127", "its command can't be executed; was not found"),
    ("128+n", "signal n ended it; 130, 143: Ctrl-C, SIGTERM ended the job"),
    ("2", "bad usage"),
    ("69", "a host can't be used, or was lost"),
    ("70", "a defect of hvlaunch"),
    ("74", "an answer could not be printed"),
    ("75", "too few workers for an elastic job"),
)
EXAMPLES = (
    ("two workers on this machine", "hvlaunch -np 2 python train.py"),
    ("eight workers on two hosts", "hvlaunch -np 8 -H gpu01:4,gpu02:4 python train.py --epochs 3"),
    (
        "one worker for each GPU of sixteen hosts, as user ml",
        "hvlaunch -H 'gpu[01-16]' --ssh-user ml python train.py",
    ),
    (
        "hosts from a file, secrets from another, NCCL's log on",
        "hvlaunch --hostfile hosts --env-file keys -x NCCL_DEBUG=INFO \\\n    python train.py",
    ),
    (
        "two to eight workers on hosts that come and go",
        "hvlaunch -np 4 --min-np 2 --max-np 8 \\\n    --host-discovery-script ./discover.sh python train.py",
    ),
    ("what would be started where", "hvlaunch --dry-run -np 8 -H gpu01:4,gpu02:4 python train.py"),
)
"""What they do, and the command line."""


def default_text(option: Option) -> str:
    """What holds where the option is not given: `60 s`; empty where it is nothing."""
    if option.default or option.value is None:
        return option.default
    value = default_of(option)
    if value in (None, (), []):
        return ""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if not option.value.choices and isinstance(value, str):
        text = f"'{text}'"
    return f"{text} {option.value.unit}".rstrip()


def sentences(option: Option) -> str:
    """All that there is to say of it, but for its default."""
    repeated = "May be repeated." if option.repeats else ""
    return " ".join(text for text in (f"{option.help}.", option.more, repeated) if text)
