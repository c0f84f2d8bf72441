# SPDX-License-Identifier: Apache-2.0
"""Compiles ``deltackpt._kernels``, in place or into a wheel.

python hatch_build.py         # builds deltackpt/_kernels.abi3.so in this checkout
python hatch_build.py FILE    # builds the module there

If that fails, for example without a C compiler or Python's headers, the wheel is pure: numpy and
XLA do the same work more slowly. The environment variable DELTACKPT_KERNELS makes the choice
explicit: 0 builds a pure wheel, and 1 raises an error if the module cannot be compiled. CC and
CFLAGS have their usual meaning.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT / "deltackpt" / "_kernels.c"
MODULE = SOURCE.with_name("_kernels.abi3.so")
#: Every instruction set must compute the same bits: no contraction, no reassociation.
FLAGS = (
    "-std=gnu11 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fno-strict-aliasing "
    "-fPIC -fvisibility=hidden -Wall -Wextra "
    "-Werror=implicit-function-declaration"
)


class BuildHook(BuildHookInterface):
    """Adds the compiled module to wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the module; a wheel with it fits this platform and Python 3.11 or later."""
        wanted = os.environ.get("DELTACKPT_KERNELS", "")
        fault = "DELTACKPT_KERNELS is 0" if wanted == "0" else build(MODULE)
        if fault and wanted == "1":
            raise RuntimeError(f"DELTACKPT_KERNELS is 1, and the kernels were not built: {fault}")
        if fault:
            MODULE.unlink(missing_ok=True)
            self.app.display_warning(f"deltackpt._kernels was not built: {fault}")
        elif version != "editable":
            build_data["force_include"][str(MODULE)] = f"deltackpt/{MODULE.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{_platform()}"


def build(module: Path) -> str:
    """Compiles the module; returns an empty string, or the reason if that failed."""
    flags = shlex.split(f"{FLAGS} {os.environ.get('CFLAGS', '')}")
    flags += (
        ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    )
    compiler = shlex.split(os.environ.get("CC", "cc"))
    include = sysconfig.get_path("include")
    flags.append(f"-DSOURCE_CRC32={zlib.crc32(SOURCE.read_bytes())}L")
    # Renamed when complete: a concurrent import must not read half a file.
    made = module.with_suffix(f".{os.getpid()}.so")
    command = [*compiler, *flags, f"-I{include}", str(SOURCE), "-o", str(made)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(module)
    except OSError:
        return f"no C compiler {compiler[0]!r}"
    except subprocess.CalledProcessError as error:
        made.unlink(missing_ok=True)
        return f"{shlex.join(command)} failed:\n{error.stderr}"
    return ""


def _platform() -> str:
    """Returns the platform tag of wheels built here; ``auditwheel`` makes it portable."""
    platforms = (tag.platform for tag in sys_tags())
    return next(name for name in platforms if not name.startswith(("manylinux", "musllinux")))


if __name__ == "__main__":
    if fault := build(Path(sys.argv[1]) if len(sys.argv) > 1 else MODULE):
        print(fault, file=sys.stderr)
        # Without a compiler, the module is optional; a failed compilation is an error.
        optional = fault.startswith("no C compiler") and os.environ.get("DELTACKPT_KERNELS") != "1"
        sys.exit(not optional)
