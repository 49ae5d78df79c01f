"""The entry point: it is loaded in every torchrun, so it must cost nothing and never fail."""

import subprocess
import sys
from importlib.metadata import entry_points

LOAD = """
import sys
before = set(sys.modules)
from hvlaunch.torchrun import handler
handler()
print(*sorted(name for name in set(sys.modules) - before))
"""


def test_it_is_installed():
    (found,) = entry_points(group="torchrun.handlers", name="hvlaunch")
    assert found.value == "hvlaunch.torchrun:handler"


def test_to_load_it_imports_neither_torch_nor_anything_else_of_hvlaunch():
    run = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert {name for name in loaded if name.startswith("hvlaunch")} == {"hvlaunch", "hvlaunch.torchrun"}
    assert "torch" not in loaded
    assert len(loaded) < 40
