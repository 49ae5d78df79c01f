"""The options that say how hosts are reached."""

from typing import get_args

from hvlaunch.cli.options import values
from hvlaunch.cli.options.option import Group, Option, Value
from hvlaunch.job import HostKeyPolicy, SSHClient

__all__ = ["SSH"]

SSH = Group(
    "SSH",
    pages=(("SSH", "ssh.md"),),
    options=(
        Option(
            "ssh_port",
            ("-p", "--ssh-port"),
            "port of sshd on hosts for which none is given",
            values.PORT,
            field="ssh.port",
            default="that of the ssh configuration, else 22",
        ),
        Option(
            "ssh_identity_file",
            ("-i", "--ssh-identity-file"),
            "private key to log in with",
            values.FILE,
            field="ssh.identity",
            convert=values.readable,
            source="own",
        ),
        Option(
            "ssh_user",
            ("--ssh-user",),
            "user name on hosts for which none is given",
            Value(("NAME",), values.user),
            field="ssh.user",
            default="that of the ssh configuration, else yours",
            example="hvlaunch -H 'gpu[01-16]' --ssh-user ml python train.py",
            is_everyday=True,
        ),
        Option(
            "ssh_config",
            ("--ssh-config",),
            "configuration file of ssh",
            values.FILE,
            field="ssh.config",
            default="`~/.ssh/config` and the system's",
            convert=values.readable,
            source="own",
        ),
        Option(
            "host_keys",
            ("--host-keys",),
            "what to do where known_hosts has no key",
            Value(choices=get_args(HostKeyPolicy)),
            field="ssh.host_keys",
            more="`strict`: refuse the host; `accept-new`: add its key to known_hosts; `off`: check no key at all.",
            source="own",
        ),
        Option(
            "ssh_client",
            ("--ssh-client",),
            "program that speaks ssh",
            Value(choices=get_args(SSHClient)),
            field="ssh.client",
            more="`paramiko`: hvlaunch itself, with this library; `openssh`: the `ssh` binary, for GSSAPI, FIDO keys, PKCS#11, and "
            "connections that are open already (ControlPath).",
            source="own",
        ),
        Option(
            "forward_agent",
            ("--forward-agent",),
            "let programs on the hosts use your ssh agent",
            field="ssh.forward_agent",
            more="It needs `--ssh-client openssh`. Whoever controls a host can then log in as you, wherever your keys are accepted, while the job "
            "runs. `ForwardAgent` of the ssh configuration is not followed.",
            source="own",
        ),
        Option(
            "connect_limit",
            ("--connect-limit",),
            "most connections made to a host at a time",
            values.NUMBER,
            field="ssh.connect_limit",
            more="The same holds for a jump host.",
        ),
        Option(
            "remote_python",
            ("--remote-python",),
            "Python >= 3.8 for hvlaunch on the hosts",
            Value(("PATH",), values.not_empty, completion="file"),
            field="remote_python",
            default="the path of the Python here, else python3, else python",
            source="own",
        ),
        Option(
            "start_timeout",
            ("--start-timeout",),
            "time to connect to all hosts",
            values.SECONDS,
            field="start_timeout",
        ),
    ),
)
