"""Prints everything that a script can see of its interpreter and process, as JSON: the end of test_preload.py's scripts."""

# ruff: noqa: PTH109, PTH115, PTH123, PTH208, T201, UP031 (pathlib would change what there is to see)

import atexit
import builtins
import faulthandler
import gc
import io
import json
import locale
import multiprocessing
import os
import random
import resource
import signal
import site
import sys
import tempfile
import threading
import warnings


def link(fd):
    try:
        target = os.readlink("/proc/self/fd/" + fd)
    except OSError:
        return None
    return target.partition(":")[0]


def stream(file):
    return [
        file.name,
        file.mode,
        file.encoding,
        file.errors,
        file.line_buffering,
        file.write_through,
        file.isatty(),
        file.newlines,
        type(file.buffer).__name__,
        file.fileno(),
    ]


def read(name):
    with open("/proc/self/" + name, "rb") as file:
        return file.read().decode("latin-1")


def status(name):
    return [line for line in read("status").splitlines() if line.startswith(name)]


main = sys.modules["__main__"]
scratch = os.environ.get("HVLAUNCH_SCRATCH")
seen = {
    "argv": sys.argv,
    "orig_argv": getattr(sys, "orig_argv", None),
    "path": sys.path,
    "flags": repr(sys.flags),
    "warnoptions": sys.warnoptions,
    "xoptions": sys._xoptions,
    "executable": [sys.executable, sys.prefix, sys.base_prefix],
    "main": sorted(vars(main)),
    "main names": [
        repr(getattr(main, name, None))
        for name in ("__name__", "__file__", "__package__", "__cached__", "__doc__", "__builtins__")
    ],
    "main spec": [getattr(main.__spec__, name, None) for name in ("name", "origin", "cached", "parent")],
    "main loader": type(main.__loader__).__name__,
    "debug": __debug__,
    "builtins": sorted(vars(builtins)),
    "seen by site": getattr(builtins, "seen_by_site", None),
    "environ": dict(os.environ),
    "cwd": os.getcwd(),
    "umask": os.umask(0),
    "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "wakeup": signal.set_wakeup_fd(-1),
    "timers": [signal.getitimer(which) for which in range(3)],
    "kernel signals": [status(name) for name in ("SigB", "SigI", "SigC", "SigP", "ShdP")],
    "limits": [
        resource.getrlimit(number)
        for number in range(resource.RLIM_NLIMITS if hasattr(resource, "RLIM_NLIMITS") else 16)
    ],
    "files": {fd: link(fd) for fd in sorted(os.listdir("/proc/self/fd"), key=int)},
    "ids": [os.getresuid(), os.getresgid(), os.getgroups()],
    "capabilities": status("Cap"),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "no new privileges": status("NoNew"),
    "threads": [
        len(os.listdir("/proc/self/task")),
        threading.active_count(),
        threading.current_thread().name,
        threading.main_thread() is threading.current_thread(),
    ],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug(), gc.callbacks],
    "locale": [
        locale.setlocale(category) for category in (locale.LC_ALL, locale.LC_CTYPE, locale.LC_NUMERIC)
    ],
    "encodings": [
        sys.getdefaultencoding(),
        sys.getfilesystemencoding(),
        sys.getfilesystemencodeerrors(),
        locale.getpreferredencoding(False),
    ],
    "streams": [stream(sys.stdout), stream(sys.stderr), stream(sys.stdin), sys.stdout is sys.__stdout__],
    "buffer": io.DEFAULT_BUFFER_SIZE,
    "stdin": sys.stdin.read(),
    "exit functions": atexit._ncallbacks(),
    "warnings": [repr(item) for item in warnings.filters],
    "tracing": [
        sys.gettrace(),
        sys.getprofile(),
        threading._trace_hook if hasattr(threading, "_trace_hook") else None,
    ],
    "hooks": [
        sys.breakpointhook is sys.__breakpointhook__,
        sys.excepthook is sys.__excepthook__,
        sys.displayhook is sys.__displayhook__,
        sys.unraisablehook is sys.__unraisablehook__,
        threading.excepthook is getattr(threading, "__excepthook__", threading.excepthook),
    ],
    "faulthandler": faulthandler.is_enabled(),
    "multiprocessing": [
        multiprocessing.get_start_method(allow_none=True),
        multiprocessing.current_process().name,
        multiprocessing.parent_process() is None,
    ],
    "import": [
        [type(item).__name__ if not isinstance(item, type) else item.__name__ for item in items]
        for items in (sys.meta_path, sys.path_hooks)
    ],
    "importers": sorted(path for path in sys.path_importer_cache if path in sys.path),
    "frames": [frame.f_code.co_name for frame in sys._current_frames().values()],
    "depth": len(__import__("inspect").stack()),
    "recursion": sys.getrecursionlimit(),
    "switch": sys.getswitchinterval(),
    "digits": getattr(sys, "get_int_max_str_digits", int)(),
    "bytecode": [sys.dont_write_bytecode, sys.pycache_prefix],
    "site": [site.ENABLE_USER_SITE, "sitecustomize" in sys.modules, "usercustomize" in sys.modules],
    "scheduling": [
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        sorted(os.sched_getaffinity(0)),
    ],
    "out of memory": read("oom_score_adj"),
    "command": read("cmdline"),
    "name": read("comm"),
    "program": os.readlink("/proc/self/exe"),
    "children": read("task/%d/children" % os.getpid()),
    "groups": read("cgroup"),
    "dumpable": os.access("/proc/self/mem", os.R_OK),
    "temporary": tempfile.gettempdir(),
    "modules": sorted(sys.modules),
    "environ at the start": sorted(read("environ").split("\0")),
    "pid": os.getpid(),
    "agent": os.getppid(),
    "random": random.random(),
    "hash": hash("a"),
    "authkey": multiprocessing.current_process().authkey.hex(),
}
print(json.dumps(seen, default=repr))
