"""The package must work where torch is not installed: the planner and the tools run there.

Numba is for compiled simulation alone and slow to import, so that loads it.
"""

from __future__ import annotations

import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numba") or name.startswith("megatron.core"):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Refuse())
import megatron.adaptive.schedule as package
names = [module.name for module in pkgutil.iter_modules(package.__path__)]
for name in names:
    importlib.import_module(f"{package.__name__}.{name}")
assert "torch" not in sys.modules and "numba" not in sys.modules
print(len(names))
"""


def test_no_module_of_the_package_imports_torch_or_numba() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20
