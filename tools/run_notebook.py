# SPDX-License-Identifier: Apache-2.0
"""Runs a notebook afresh and keeps what it shows, without times, machine names or paths.

python tools/run_notebook.py docs/tutorials/inspecting.ipynb --pictures docs/assets
python tools/run_notebook.py docs/tutorials/inspecting.ipynb --output elsewhere.ipynb

The kernel is this interpreter's, in a home directory of its own: no registered kernel and no
settings of the user matter. A cell that fails ends the run, and nothing is written.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import traitlets
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.paths import jupyter_runtime_dir
from nbclient import NotebookClient

_CELL_SECS = 300
#: Stays the same wherever the notebook is run.
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}
_REPOSITORY = str(Path(__file__).resolve().parents[1])


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--output", type=Path, help="default: the notebook itself")
    parser.add_argument("--pictures", type=Path, help="folder for what its plots show, as PNG")
    options = parser.parse_args()
    notebook = nbformat.read(options.notebook, as_version=4)
    with tempfile.TemporaryDirectory() as home:
        run(notebook, options.notebook.parent, home)
    notebook = normalised(notebook)
    nbformat.write(notebook, options.output or options.notebook)
    if options.pictures is not None:
        for name, png in pictures(notebook):
            (options.pictures / f"{options.notebook.stem}-{name}.png").write_bytes(png)


def run(notebook: nbformat.NotebookNode, directory: Path, home: str) -> None:
    """Runs every cell in a kernel of this interpreter.

    Args:
      notebook: gets the outputs.
      directory: the kernel's working directory.
      home: where the kernel may leave its settings and history.

    Raises:
      CellExecutionError: a cell raised.
    """
    homes = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    os.environ.update(dict.fromkeys(homes, home), JAX_PLATFORMS="cpu")
    client = NotebookClient(
        notebook,
        kernel_manager_class=OwnKernel,
        kernel_name="python3",
        timeout=_CELL_SECS,
        record_timing=False,
        resources={"metadata": {"path": str(directory)}},
    )
    client.execute()


class OwnKernel(AsyncKernelManager):
    """Starts the kernel of this interpreter, reached through sockets that are files."""

    transport = "ipc"

    @traitlets.default("ip")
    def _ip_default(self) -> str:
        return os.path.join(jupyter_runtime_dir(), "kernel")

    @traitlets.default("kernel_spec_manager")
    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        # Without a directory to look in, the specification is that of this interpreter's ipykernel.
        return KernelSpecManager(kernel_dirs=[])


def normalised(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Removes what depends on the machine: absolute paths, random ids and standard error.

    Raises:
      SystemExit: an output names a path of this machine all the same.
    """
    temporary = re.escape(tempfile.gettempdir()) + r"/tmp\w+/"
    text = re.sub(temporary, "", nbformat.writes(notebook))
    for private in (_REPOSITORY, str(Path.home()) + "/", tempfile.gettempdir() + "/"):
        if private in text:
            sys.exit(f"expected no path of this machine in an output, found {private}")
    notebook = nbformat.reads(text, as_version=4)
    notebook.metadata = nbformat.from_dict(_METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            # A library may report there that it is slow, as Matplotlib does of its font cache.
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    return notebook


def pictures(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, bytes]]:
    """What cells with a call of ``plots`` show, by the name of the plot, as PNG."""
    for cell in notebook.cells:
        plot = re.search(r"^plots\.(\w+)\(", cell.source, re.MULTILINE)
        for output in cell.get("outputs", ()):
            png = output.get("data", {}).get("image/png")
            if plot is not None and png is not None:
                yield plot[1], base64.b64decode(png)


if __name__ == "__main__":
    main()
