# SPDX-License-Identifier: Apache-2.0
"""``deltackpt export`` and ``deltackpt import``: conversion to and from other formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from deltackpt import units
from deltackpt.cli import terminal
from deltackpt.cli.terminal import Output
from deltackpt.errors import OptionError
from deltackpt.inspect.listing import Listing

if TYPE_CHECKING:
    from deltackpt.format.naming import PyTree
    from deltackpt.interchange import Exported

_step = click.argument("step", type=terminal.STEP, required=False)
_leaves = click.option(
    "--leaf",
    "leaves",
    multiple=True,
    default=("**",),
    help="Path pattern of tables, slots and dense leaves; repeatable. All by default.",
)
_target = click.argument("target", type=terminal.UserPath())


class _Rows(click.ParamType):
    name = "start:stop"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        start, colon, stop = value.partition(":")
        if not (colon and start.isdecimal() and stop.isdecimal()):
            self.fail(f"{value!r}: expected a range of rows such as 0:1000", param, ctx)
        return int(start), int(stop)


@click.group(name="export")
def export() -> None:
    """Write a step in a format that other programs read."""


@export.command(
    name="orbax",
    epilog="\b\nExamples:\n"
    "  deltackpt export orbax /data/run-17 /data/run-17-orbax\n"
    "  deltackpt export orbax /data/run-17 /data/served 12000 --leaf 'params/**'",
)
@terminal.directory
@_target
@_step
@_leaves
@terminal.item
@terminal.kafka_config
@terminal.prints
def export_orbax(**options: object) -> Output:
    """Write a step of DIRECTORY as a plain Orbax checkpoint at TARGET.

    STEP is a step, or the training step of a full recovery point; the newest step by default.

    Stock Orbax restores it with either of its APIs, without deltackpt. The export needs memory for
    three copies of the state.
    """
    from deltackpt import interchange

    return _exported(interchange.export_orbax, "reading", options)


@export.command(
    name="safetensors",
    epilog="\b\nExamples:\n"
    "  deltackpt export safetensors /data/run-17 /data/published\n"
    "  deltackpt export safetensors /data/run-17 /data/published 12000 --shard 1GiB\n"
    "  deltackpt export safetensors /data/run-17 /data/weights --leaf 'params/**'",
)
@terminal.directory
@_target
@_step
@_leaves
@terminal.item
@click.option(
    "--shard",
    "shard_bytes",
    type=terminal.Size(),
    default="4GiB",
    show_default=True,
    help="Maximum size of the tensors in a file.",
)
@terminal.kafka_config
@terminal.prints
def export_safetensors(**options: object) -> Output:
    """Write a step of DIRECTORY as safetensors files, following Hugging Face's conventions.

    STEP is a step, or the training step of a full recovery point; the newest step by default.
    """
    from deltackpt import interchange

    return _exported(interchange.export_safetensors, "exporting", options)


@export.command(
    name="parquet",
    epilog="\b\nExamples:\n"
    "  deltackpt export parquet /data/run-17 /data/features\n"
    "  deltackpt export parquet /data/run-17 /data/users --table 'params/emb/users' --no-slots\n"
    "  deltackpt export parquet /data/run-17 /data/first --rows 0:1000",
)
@terminal.directory
@_target
@_step
@terminal.item
@click.option(
    "--table",
    "tables",
    multiple=True,
    default=("**",),
    help="Path pattern of tables; repeatable. All by default.",
)
@click.option("--slots/--no-slots", default=True, help="Whether to export the slots too.")
@click.option("--rows", type=_Rows(), help="Rows of each table; all by default.")
@terminal.kafka_config
@terminal.prints
def export_parquet(**options: object) -> Output:
    """Write each table of a step of DIRECTORY as a Parquet file in TARGET.

    STEP is a step, or the training step of a full recovery point; the newest step by default.
    """
    from deltackpt import interchange

    return _exported(interchange.export_parquet, "exporting", options)


@click.command(
    name="import",
    epilog="\b\nExamples:\n"
    "  deltackpt import /data/orbax-run /data/run-17 --tables 'params/emb/*'\n"
    "  deltackpt import /data/ckpt /data/run-17 --tables 'params/emb/*' --step 12000 \\\n"
    "    --template my_model.train:abstract_state",
)
@click.argument("source", type=terminal.UserPath(exists=True, file_okay=False))
@terminal.directory
@click.option("--tables", "select", multiple=True, required=True, help="Path pattern of tables.")
@click.option(
    "--slot",
    "slots",
    multiple=True,
    metavar="NAME=PATH",
    help="A slot of each table; in the path, {table} is the table's path and {name} its last "
    "component. Found in the optimizer state by default.",
)
@click.option("--always", multiple=True, help="Slots whose rows all change at every step.")
@click.option(
    "--step",
    type=terminal.STEP,
    help="The step to import, if SOURCE has several; otherwise the number of the new step.",
)
@click.option("--item", "source_item", help="The pytree in a step that has several items.")
@click.option(
    "--template",
    metavar="MODULE:FUNCTION",
    help="Function that returns the training state, abstract or not; the working directory is "
    "searched too.",
)
@terminal.prints
def import_(
    source: str,
    directory: str,
    select: tuple[str, ...],
    slots: tuple[str, ...],
    always: tuple[str, ...],
    step: int | None,
    source_item: str | None,
    template: str | None,
) -> Output:
    """Import the stock Orbax checkpoint SOURCE as the first base of a run in DIRECTORY.

    SOURCE is a pytree, a step or a directory of steps, and is only read. To resume training, call
    restore_latest() on DIRECTORY.
    """
    from deltackpt import interchange
    from deltackpt.state.tables import Tables

    declared = {"**": dict(_slot(text) for text in slots)} if slots else None
    done = interchange.import_orbax(
        source,
        directory,
        tables=Tables(select=select, slots=declared, always=always),
        step=step,
        item=source_item,
        abstract_state=None if template is None else _template(template),
    )
    rows = [(name, ", ".join(found) or None) for name, found in done.tables.items()]
    text = f"imported {units.size(done.nbytes)} of tables and slots from {done.source}"
    return Output(done, [Listing(("table", "slots"), rows), f"step {done.step}: {text}"])


def _slot(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise click.BadParameter(f"{text!r}: expected NAME=PATH", param_hint="--slot")
    return name, path


def _template(text: str) -> PyTree:
    """Calls the user's function and makes its leaves abstract, which frees their memory."""
    import importlib
    import os
    import sys

    import jax

    name, colon, function = text.partition(":")
    if not (name and colon and function):
        raise click.BadParameter(f"{text!r}: expected MODULE:FUNCTION", param_hint="--template")
    # As `python -m` does: a console script has only its own directory on the path.
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError) as error:
        raise OptionError(
            f"--template {text}: expected a function that can be imported, found {error}; run the "
            "command in the directory of the module, or set PYTHONPATH"
        ) from error

    def abstract(leaf: object) -> object:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(abstract, made())


def _exported(export: Callable[..., Exported], label: str, options: dict[str, object]) -> Output:
    with terminal.progress(label) as progress:
        done = export(progress=progress, **options)
    files = units.count(len(done.files), "file")
    lines = [f"step {done.step}: {files} of {units.size(done.nbytes)} in {done.path}"]
    lines += [f"stored as {kind}: {name}" for name, kind in done.changed.items()]
    lines += [f"left out: {name}" for name in done.left_out]
    return Output(done, lines)
