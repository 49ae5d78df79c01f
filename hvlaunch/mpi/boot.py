"""What the launcher starts in place of the user's command: a few lines that call the driver, and become the agent.

Nothing of hvlaunch is on the hosts, so these lines are on the launcher's command line, and nothing secret
is in them. They find the driver's addresses and the token in their environment. Both sides prove that they
have the token, without showing it, before anything of the other's is used: the agent's program is run
only when it comes from the driver.
"""

import sys

from hvlaunch.gloo.driver.bundle import NEW_ENOUGH

__all__ = ["ADDRESSES", "AGENT", "DRIVER", "TOKEN", "boot_command"]

TOKEN = "HVLAUNCH_TOKEN"  # noqa: S105 (the variable's name)
ADDRESSES = "HVLAUNCH_DRIVER"
"""Where the driver listens, the likeliest first: `ADDRESS PORT,ADDRESS PORT`."""
DRIVER, AGENT = b"hvlaunch driver", b"hvlaunch agent"
"""What each side adds to the challenges, so that an answer is no good for the other side."""

_STAGGER = 0.25  # seconds between addresses: one that leads nowhere may take minutes to say so
_BOOT = f"""\
import hashlib,hmac,json,os,socket,sys,threading,zlib
token=os.environ["{TOKEN}"].encode()
where=os.environ.pop("{ADDRESSES}").split(",")
turn=threading.Lock();won=threading.Event();tries=[]
def proof(who,*parts):return hmac.new(token,who+b"".join(parts),hashlib.sha256).digest()
def get(s,n):
    data=b""
    while len(data)<n:
        part=s.recv(n-len(data))
        if not part:raise OSError("the driver hung up")
        data+=part
    return data
def call(turns,address,port):
    if won.wait(turns*{_STAGGER}):return
    try:
        s=socket.create_connection((address,int(port)),30)
        s.setsockopt(socket.IPPROTO_TCP,socket.TCP_NODELAY,1)
        s.setsockopt(socket.SOL_SOCKET,socket.SO_KEEPALIVE,1)
        mine=os.urandom(32);s.sendall(mine)
        answer=get(s,64)
        if not hmac.compare_digest(answer[32:],proof({DRIVER!r},mine,answer[:32])):raise OSError("that is not the driver")
        with turn:
            if not won.is_set():
                s.settimeout(None)
                told=json.dumps([socket.gethostname(),{{k:v for k,v in os.environ.items() if k in NAMES}}]).encode()
                s.sendall(proof({AGENT!r},answer[:32],mine)+len(told).to_bytes(4,"big")+told)
                tries.append(s);won.set()
    except OSError as error:
        tries.append("%s port %s: %s"%(address,port,error))
    if len(tries)==len(where):won.set()
for i,one in enumerate(where):threading.Thread(target=call,args=(i,*one.split()),daemon=True).start()
won.wait()
with turn:found=[one for one in tries if isinstance(one,socket.socket)]
if not found:sys.exit("hvlaunch: %s can't reach the driver: %s"%(socket.gethostname(),"; ".join(tries)))
try:program=get(found[0],int.from_bytes(get(found[0],4),"big"))
except OSError:sys.exit(1)
os.dup2(found[0].fileno(),0);os.dup2(0,1);found[0].close()
exec(zlib.decompress(program))
"""
# The launcher hands each word on as it is: the program is $0, the interpreters to try are the rest.
_SHELL = (
    f'for p; do case "$("$p" -V </dev/null 2>/dev/null)" in {NEW_ENOUGH}) '
    'exec "$p" -I -S -X utf8 -c "$0";; esac; done; echo "hvlaunch: host $(uname -n): no Python >= 3.8 among $*" >&2; '
    "exit 127"
)


def boot_command(names: frozenset[str], python: str | None = None) -> tuple[str, ...]:
    """The words for the launcher. `names` are the variables that the agent tells the driver of.

    `python` is the interpreter; None tries this one's path, python3 and python.
    """
    program = _BOOT.replace("NAMES", repr(sorted(names)))
    candidates = [sys.executable, "python3", "python"] if python is None else [python]
    return ("/bin/sh", "-c", _SHELL, program, *candidates)
