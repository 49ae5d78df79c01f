"""The variables that the user passes on to workers, and their form in messages; docs/reference/environment.md is for users."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from hvlaunch.errors import BadEnvironment
from hvlaunch.hosts.local import OUTER_RANK_VARIABLES, OWN_VARIABLES, is_pattern, matcher

__all__ = [
    "MAX_STRING",
    "SET_BY_HVLAUNCH",
    "EnvMode",
    "left_out",
    "proxies_with_password",
    "shown",
    "user_env",
]

EnvMode = Literal["default", "all", "none"]

MAX_STRING = 131072
"""Limit of execve(2) for an argument or NAME=VALUE with its NUL: MAX_ARG_STRLEN, 32 pages of 4 KiB."""

_FORWARDED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_*",
    "NCCL_*",
    "GLOO_*",
    "UCX_*",
    "TORCH_*",
    "PYTORCH_*",
    "TORCHDYNAMO_*",
    "TORCHINDUCTOR_*",
    "CUDA_*",
    "XLA_*",
    "OMP_*",
    "MKL_*",
    "KMP_*",
    "HF_*",
    "TOKENIZERS_PARALLELISM",
    "WANDB_*",
    "LANG",
    "LC_*",
    # Python's variables, except for paths and prompts at a terminal.
    "PYTHONPATH",
    "PYTHONASYNCIODEBUG",
    "PYTHONBREAKPOINT",
    "PYTHONCOERCECLOCALE",
    "PYTHONDEVMODE",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONFAULTHANDLER",
    "PYTHONHASHSEED",
    "PYTHONINTMAXSTRDIGITS",
    "PYTHONIOENCODING",
    "PYTHONMALLOC",
    "PYTHONNODEBUGRANGES",
    "PYTHONNOUSERSITE",
    "PYTHONOPTIMIZE",
    "PYTHONPERFSUPPORT",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONSAFEPATH",
    "PYTHONTRACEMALLOC",
    "PYTHONUNBUFFERED",
    "PYTHONUTF8",
    "PYTHONVERBOSE",
    "PYTHONWARNINGS",
    "PYTHON_GIL",
    "PYTHON_JIT",
)
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
_FORWARDED_PROXIES = (*_PROXIES, *map(str.upper, _PROXIES))
_SECRET = ("WANDB_API_KEY",)

SET_BY_HVLAUNCH = (
    "HVLAUNCH_*",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "HOROVOD_HOSTNAME",
    "HOROVOD_GLOO_RENDEZVOUS_*",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
)
"""Set for each worker; values of the user are ignored."""

_LEFT_BEHIND = (
    # hvlaunch chooses these by default; values here may belong to a job around this one.
    "MASTER_ADDR",
    "MASTER_PORT",
    "HOROVOD_GLOO_IFACE",
    *OUTER_RANK_VARIABLES,
    *OWN_VARIABLES,
)


def user_env(
    environ: Mapping[str, str],
    *,
    mode: EnvMode = "default",
    files: Sequence[Path] = (),
    chosen: Sequence[str] = (),
    more: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, str], list[str]]:
    """Return the variables for JobSpec.env, and warnings of one line each.

    `environ` is the driver's environment. Later ones of these override earlier ones: variables forwarded by `mode` and `more`
    (patterns of names), `variables` set by options, `files` (--env-file), `chosen` (-x: NAME, NAME=VALUE or a pattern).
    Bytes that are not UTF-8 are surrogates, as in os.environ.

    Raises BadEnvironment for names and values that no process can be started with, BadUsage for files.
    """
    env = {**dict(_forwarded(environ, mode, more)), **variables}
    warnings: list[str] = []
    if files:
        # Its patterns take 1 ms to compile.
        from hvlaunch.cli.env_file import read_env_file  # noqa: PLC0415 (most jobs have no file)

        for path in files:
            for line in read_env_file(path):
                env.update(_variable(environ, line.name, line.value, f"{path}:{line.number}: ", warnings))
    for word in chosen:
        name, equals, value = word.partition("=")
        if is_pattern(name):
            env.update(_matching(environ, name, equals, warnings))
        else:
            env.update(_variable(environ, name, value if equals else None, "", warnings))
    for name, value in env.items():
        _check_size(name, value)
    return env, warnings


def left_out(environ: Mapping[str, str], env: Mapping[str, str]) -> list[str]:
    """Return names of variables that could be passed on and are not; a whole family such as `AWS_` is a pattern."""
    stays_here = matcher(*SET_BY_HVLAUNCH, *_LEFT_BEHIND)
    families: dict[str, list[str]] = {}
    for name in environ:
        if name and name not in env and not stays_here(name):
            families.setdefault(_family(name), []).append(name)
    # `AWS_*` would be wrong if one variable of the family is passed on.
    whole = families.keys() - {_family(name) for name in env}
    folded = (
        [f"{family}*"] if len(names) > 1 and family in whole else map(shown, names)
        for family, names in families.items()
    )
    return sorted(chain.from_iterable(folded))


def _family(name: str) -> str:
    beginning, underscore, _ = name.partition("_")
    return shown(beginning + underscore)


def proxies_with_password(environ: Mapping[str, str]) -> list[str]:
    """Return names of proxies with a user or password, which are not passed on: other users of a host could read them."""
    return [name for name in _FORWARDED_PROXIES if "@" in environ.get(name, "")]


def _forwarded(environ: Mapping[str, str], mode: EnvMode, more: Sequence[str]) -> Iterator[tuple[str, str]]:
    if mode == "none":
        return
    is_forwarded = matcher("*") if mode == "all" else matcher(*_FORWARDED, *_FORWARDED_PROXIES, *more)
    # --env all is the user's explicit wish; by default secrets stay here.
    secrets = () if mode == "all" else (*_SECRET, *proxies_with_password(environ))
    stays_here = matcher(*SET_BY_HVLAUNCH, *_LEFT_BEHIND, *secrets)
    for name, value in environ.items():
        if name and is_forwarded(name) and not stays_here(name):
            yield name, value


def _variable(
    environ: Mapping[str, str], name: str, value: str | None, place: str, warnings: list[str]
) -> dict[str, str]:
    _check_name(name, place)
    if matcher(*SET_BY_HVLAUNCH)(name):
        warnings.append(
            f"{place}variable {shown(name)} is set by hvlaunch for each worker; your value is ignored"
        )
        return {}
    if value is None and name not in environ:
        warnings.append(f"{place}variable {shown(name)} is not set here, so it is not passed on")
        return {}
    value = environ[name] if value is None else value
    if "\0" in value:
        raise BadEnvironment(shown(name), f"{place}its value has a NUL byte")
    return {name: value}


def _matching(environ: Mapping[str, str], pattern: str, equals: str, warnings: list[str]) -> dict[str, str]:
    if equals:
        raise BadEnvironment(shown(pattern), "a pattern takes no value")
    matches, is_own = matcher(pattern), matcher(*SET_BY_HVLAUNCH)
    matching = {name: value for name, value in environ.items() if matches(name) and not is_own(name) and name}
    if not matching:
        warnings.append(f"no variable here matches {shown(pattern)}")
    return matching


def _check_name(name: str, place: str) -> None:
    if not name:
        raise BadEnvironment("''", f"{place}the name is empty")
    for character, text in (("=", "="), ("\0", "a NUL byte")):
        if character in name:
            raise BadEnvironment(shown(name), f"{place}the name has {text}")


def _check_size(name: str, value: str) -> None:
    size = len(os.fsencode(f"{name}={value}"))
    if size >= MAX_STRING:
        raise BadEnvironment(
            shown(name),
            f"name and value take {size} bytes; no process can be started with more than {MAX_STRING - 1}",
        )


def shown(name: str) -> str:
    """Return a name for a message, escaped unless it prints as a plain word."""
    return name if name.isprintable() else ascii(name)
