# SPDX-License-Identifier: Apache-2.0
"""Inspection commands: ls, show, diff, history, report. They need neither jax nor Orbax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from deltackpt import units
from deltackpt.cli import terminal
from deltackpt.cli.terminal import Output, ReadSource, as_commands
from deltackpt.inspect.listing import Listing

if TYPE_CHECKING:
    from deltackpt.inspect import Checkpoints, Diff, History, LazyArray, Save, Step, Wal
    from deltackpt.inspect.dense_items import DenseLeaf

_field = click.option(
    "--field", default="values", show_default=True, help="values, or slot.<name> for a slot."
)


def _open(source: ReadSource) -> Checkpoints:
    from deltackpt import inspect

    opened = inspect.open(source.directory, **source.options)
    return click.get_current_context().with_resource(opened)


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt ls /data/run-17\n"
    "  deltackpt ls /data/run-17 --last 20 --json\n"
    "  deltackpt ls /data/run-17 --wal"
)
@terminal.reads
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="List only the newest N.")
@click.option(
    "--wal", "points", is_flag=True, help="List the WAL's recovery points instead of steps."
)
@terminal.prints
def ls(source: ReadSource, last: int | None, points: bool) -> Output:
    """List the steps of DIRECTORY with kinds, chains, rows and bytes, and its WAL epochs.

    If the trainer has a retention policy, the column `kept because` shows which steps it keeps, and
    which are kept only because a chain needs them.
    """
    ck = _open(source)
    if points:
        return _wal(ck.wal, last)
    saves = ck.saves if last is None else ck.saves_of(ck.steps[-last:])
    kept = ck.stays_for
    return Output(
        lambda: [{**_save(save), "kept_because": kept.get(save.step)} for save in saves],
        _listed(ck, saves, kept, last),
    )


def _listed(
    ck: Checkpoints, saves: tuple[Save, ...], kept: Mapping[int, str], last: int | None
) -> Iterator[str | Listing]:
    from deltackpt.inspect.descriptions import list_saves

    columns, lines, _ = list_saves(saves)
    lines = [
        (*line[:-1], as_commands(save.problem)) if save.problem else line
        for save, line in zip(saves, lines, strict=True)
    ]
    if kept:
        why = {"nothing": "not kept"}
        reasons = [kept.get(save.step) for save in saves]
        columns = (*columns[:-1], "kept because", columns[-1])
        lines = [
            (*line[:-1], why.get(one or "", one), line[-1])
            for line, one in zip(lines, reasons, strict=True)
        ]
    yield Listing(columns, lines)
    bases = {} if last is not None else ck.compacted
    on_disk = sum(save.disk_bytes for save in saves) + sum(bases.values())
    counted = f" and {units.count(len(bases), 'compacted base')}" if bases else ""
    yield f"{units.count(len(saves), 'step')}{counted}, {units.size(on_disk)} on disk"
    yield from _epochs(ck.wal)


def _epochs(wal: Wal) -> Iterator[str | Listing]:
    from deltackpt.inspect.descriptions import list_epochs

    if wal.epochs:
        yield list_epochs(wal)
    if wal.problem:
        yield f"cannot determine which WAL epochs are valid: {wal.problem}"


def _wal(wal: Wal, last: int | None) -> Output:
    from deltackpt.inspect.descriptions import list_points

    points = wal.recovery_points()[:last]
    epochs = []
    for epoch in wal.epochs:
        plain = terminal.plain(epoch)
        counts = {
            "recovery_points": len(epoch.recovery_points),
            "full_recovery_points": epoch.full_points,
        }
        epochs.append({"number": epoch.number, "valid": plain.pop("live"), **plain, **counts})
    shown = [*_epochs(wal), *([list_points(points)] if points else [])]
    return Output(
        {"epochs": epochs, "recovery_points": points, "problem": wal.problem},
        [*shown, units.count(len(points), "recovery point")],
    )


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt show /data/run-17\n"
    "  deltackpt show /data/run-17 12000 --json\n"
    "  deltackpt show /data/run-17 12007"
)
@terminal.reads
@click.argument("step", type=terminal.STEP, required=False)
@terminal.prints
def show(source: ReadSource, step: int | None) -> Output:
    """Show a step, or a full recovery point, of DIRECTORY; the newest step by default.

    STEP is a step, or the training step of a full recovery point. The output lists its save and
    chain, its tables and slots, and its dense leaves. For dense leaves stored as blocks, it also
    lists their codecs and the number of changed blocks. Leaves without a value
    (None, optax's MaskedNode and EmptyState) are only counted.
    """
    ck = _open(source)
    found = ck.at(step)
    save = ck.save_of(found.step) if found.point is None else None
    return Output(lambda: _step(found, save), _shown(found, save))


def _shown(step: Step, save: Save | None) -> Iterator[str | Listing]:
    from deltackpt.inspect.dense_items import list_dense, list_saved
    from deltackpt.inspect.descriptions import list_figures, utc
    from deltackpt.inspect.step import list_fields

    if save is not None:
        yield f"step {step.step}, save {step.save_id}: {save.reason}"
        yield f"committed {utc(save.committed_at) or 'at an unknown time'} UTC"
    elif step.point is not None:
        yield f"{step.point}, WAL record {step.save_id}"
        yield f"appended {utc(step.point.unix_secs)} UTC"
    yield f"reads {' -> '.join(step.reads)}"
    if step.tables:
        yield list_fields(step)._replace(title="tables and slots")
    if save is not None and save.tables:
        yield list_figures(save)
    columns, lines, empty = list_dense(step.dense.values())
    if lines:
        yield Listing(columns, lines, "dense leaves")
    if empty:
        yield empty
    if step.dense_saved:
        yield list_saved(step.dense_saved)


def _save(save: Save) -> dict[str, object]:
    names = ("step", "kind", "parent", "chain_length", "compacted", "rows", "total_rows")
    sizes = {"array_bytes": save.nbytes, "dense_bytes": save.dense_nbytes}
    more = ("dense_codecs", "disk_bytes", "committed_at", "reason", "problem", "tables")
    return {
        **{name: getattr(save, name) for name in names},
        **sizes,
        **{name: getattr(save, name) for name in more},
    }


def _step(step: Step, save: Save | None) -> dict[str, object]:
    about = {"step": step.step, "kind": "recovery point", "recovery_point": step.point}
    return {
        **(about if save is None else _save(save)),
        "save_id": step.save_id,
        "chain": step.chain,
        "reads": step.reads,
        "state": {
            name: {field: _array(held) for field, held in table.fields.items()}
            for name, table in step.tables.items()
        },
        "dense": {name: _leaf(leaf) for name, leaf in step.dense.items()},
        "dense_saved": step.dense_saved,
    }


def _leaf(leaf: DenseLeaf) -> dict[str, object]:
    if leaf.kind in ("None", "empty", "string"):
        return {"kind": leaf.kind, "value": leaf.value}
    impl = {"prng_impl": leaf.prng_impl} if leaf.kind == "key" else {}
    return {"kind": leaf.kind, **_array(leaf), **impl}


def _array(held: LazyArray | DenseLeaf) -> dict[str, object]:
    return {"shape": held.shape, "dtype": held.dtype.name, "nbytes": held.nbytes}


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt diff /data/run-17 1000 2000\n"
    "  deltackpt diff /data/run-17 1000 2000 --table users --field slot.accumulator --largest 20"
)
@terminal.reads
@click.argument("a", type=terminal.STEP)
@click.argument("b", type=terminal.STEP)
@click.option("--table", "tables", multiple=True, help="Only this table; repeatable.")
@_field
@click.option(
    "--largest", type=click.IntRange(min=0), default=5, show_default=True, help="Rows to list."
)
@terminal.prints
def diff(
    source: ReadSource, a: int, b: int, tables: tuple[str, ...], field: str, largest: int
) -> Output:
    """Show which rows differ between steps A and B, or between recovery points.

    A and B are steps, or training steps of full recovery points. A row differs if any bit differs.
    Changes are reported as l2 norms.
    """
    found = _open(source).diff(a, b, tables=tables or None, field=field)
    value = {
        "a": found.a,
        "b": found.b,
        "field": found.field,
        "tables": {
            name: {
                "rows_changed": len(changed.rows),
                "total_rows": changed.total_rows,
                "added": changed.added,
                "norms": changed.quantiles(),
                "relative": changed.quantiles(relative=True),
                "largest": changed.largest(largest),
            }
            for name, changed in found.tables.items()
        },
        "only_a": found.only_a,
        "only_b": found.only_b,
    }
    return Output(value, _differences(found, largest))


def _differences(found: Diff, largest: int) -> Iterator[str | Listing]:
    from deltackpt.inspect.changes import list_differences

    yield list_differences(found)
    for step, names in ((found.a, found.only_a), (found.b, found.only_b)):
        if names:
            yield f"only at step {step}, or incompatible there: {', '.join(names)}"
    for name, changed in found.tables.items():
        rows = changed.largest(largest).tolist()
        ids = {} if changed.ids is None else dict(zip(changed.rows.tolist(), changed.ids.tolist()))
        shown = [f"{row} (id {ids[row]})" if ids else str(row) for row in rows]
        if shown:
            yield f"{name}: rows that changed most: {', '.join(shown)}"


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt history /data/run-17 users 4711\n"
    "  deltackpt history /data/run-17 users 4711 4712 --field slot.accumulator --json\n"
    "  deltackpt history /data/run-17 users --id 8123456789012"
)
@terminal.reads
@click.argument("table")
@click.argument("rows", metavar="[ROW]...", type=click.IntRange(min=0), nargs=-1)
@_field
@click.option(
    "--id",
    "ids",
    type=int,
    multiple=True,
    help="An id instead of rows, in tables with a key column; repeatable.",
)
@click.option("--step", "steps", type=terminal.STEP, multiple=True, help="A step; repeatable.")
@click.option("--no-wal", is_flag=True, help="Only steps, without recovery points.")
@click.option(
    "--columns", type=click.IntRange(min=1), default=6, show_default=True, help="Values to show."
)
@terminal.prints
def history(
    source: ReadSource,
    table: str,
    rows: tuple[int, ...],
    field: str,
    ids: tuple[int, ...],
    steps: tuple[int, ...],
    no_wal: bool,
    columns: int,
) -> Output:
    """Show the values of rows at each step, and at the recovery points between steps.

    The column `written` shows whether that save or WAL record contains the row: a base contains
    every row, a delta or a WAL record the touched ones. With --id, steps at which the row of the id
    had another id are omitted.
    """
    if bool(rows) == bool(ids):
        raise click.UsageError("Name rows, or ids with --id.")
    found = _open(source).history(
        table,
        list(rows) or None,
        ids=list(ids) or None,
        field=field,
        steps=steps or None,
        wal=not no_wal,
    )
    value = [one for number in range(len(found.steps)) for one in _row_values(found, number)]
    return Output(value, [_history(found, value, columns)])


_Values = dict[str, Any]


def _row_values(found: History, number: int) -> Iterator[_Values]:
    """The values of each row at one step."""
    for place, row in enumerate(found.rows):
        if found.present[number, place]:
            yield {
                "step": int(found.steps[number]),
                "recovery_point": found.point_kinds[number],
                "row": int(row),
                **({} if found.ids is None else {"id": int(found.ids[place])}),
                "written": bool(found.written[number, place]),
                "values": found.values[number, place],
            }


def _history(found: History, values: list[_Values], columns: int) -> Listing:
    """The values, row by row."""
    import numpy as np

    width = int(np.prod(found.values.shape[2:]))
    heads = {
        "step": "step",
        **({"recovery_point": "recovery point"} if any(found.point_kinds) else {}),
        **({} if found.ids is None else {"id": "id"}),
        "row": "row",
        "written": "written",
    }
    order = {int(row): place for place, row in enumerate(found.rows)}
    lines = []
    for one in sorted(values, key=lambda one: order[one["row"]]):
        row = one["values"].reshape(-1)
        wide = row.astype(np.complex128 if row.dtype.kind == "c" else np.float64)
        texts = {**one, "written": "yes" if one["written"] else ""}
        texts["recovery_point"] = one["recovery_point"] or ""
        norm = float(np.linalg.norm(wide))
        lines.append([*(texts[key] for key in heads), norm, *wide[:columns].tolist()])
    names = [*heads.values(), "norm", *map(str, range(min(columns, width)))]
    title = f"{found.table}, {found.field}: {units.count(width, 'value')} per row"
    return Listing(names, lines, title)


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt report /data/run-17\n"
    "  deltackpt report /data/run-17 -o run-17.html --json"
)
@terminal.reads
@click.option(
    "-o",
    "--output",
    type=terminal.UserPath(dir_okay=False),
    default="report.html",
    show_default=True,
    help="File for the page.",
)
@terminal.prints
def report(source: ReadSource, output: str) -> Output:
    """Write an HTML page about DIRECTORY: its contents, what can be restored, and plots.

    The page is one self-contained file. The command reads manifests and some rows of the busiest
    table; `deltackpt verify` reads every byte.
    """
    from deltackpt.inspect import report as page

    done = page.write(_open(source), output)
    text = f"{done.path}: {units.count(done.steps, 'step')}, {units.size(done.nbytes)}"
    return Output(done, [text, *(f"  {as_commands(warning)}" for warning in done.warnings)])
