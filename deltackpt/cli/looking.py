# SPDX-License-Identifier: Apache-2.0
"""Commands that look inside a directory; they need neither jax nor Orbax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from deltackpt import units
from deltackpt.cli import arguments, terminal

if TYPE_CHECKING:
    from deltackpt.inspect import Checkpoints, Diff, History, LazyArray, Log, Save, Step

_field = click.option(
    "--field", default="values", show_default=True, help="values, or slot.<name> of a slot."
)


def _open(directory: str, item: str | None, endpoint: str | None) -> Checkpoints:
    # Imported here: the help of other commands need not pay for it.
    from deltackpt import inspect

    return inspect.open(directory, item=item, endpoint=endpoint)


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt ls /data/run-17\n"
    "  deltackpt ls /data/run-17 --last 20 --json\n"
    "  deltackpt ls /data/run-17 --log"
)
@arguments.root
@arguments.item
@arguments.endpoint
@click.option("--last", type=click.IntRange(min=1), help="Only so many of the newest.")
@click.option("--log", is_flag=True, help="The points of the log between the steps, instead.")
@arguments.as_json
def ls(
    directory: str,
    item: str | None,
    endpoint: str | None,
    last: int | None,
    log: bool,
    as_json: bool,
) -> None:
    """List the steps of DIRECTORY: kinds, chains, rows, bytes; and the stretches of its log.

    Where the trainer has a policy of retention, ``stays for`` says which steps that keeps, and
    which stay only for a chain that goes through them.
    """
    from deltackpt.inspect.save import SAVE_COLUMNS, save_line

    ck = _open(directory, item, endpoint)
    if log:
        _list_log(ck.log, last, as_json)
        return
    saves = ck.saves if last is None else ck.saves_of(ck.steps[-last:])
    stays_for = ck.stays_for
    if as_json:
        terminal.print_json(
            [{**_save(save), "stays_for": stays_for.get(save.step)} for save in saves]
        )
        return
    columns, lines = SAVE_COLUMNS, [save_line(save) for save in saves]
    if stays_for:
        columns = (*columns[:-1], "stays for", columns[-1])
        lines = [(*line[:-1], stays_for.get(line[0]), line[-1]) for line in lines]
    terminal.print_table(columns, lines)
    bases = {} if last is not None else ck.compacted
    on_disk = sum(save.disk_bytes for save in saves) + sum(bases.values())
    counted = units.count(len(saves), "step")
    if bases:
        counted += f" and {units.count(len(bases), 'compacted base')}"
    click.echo(f"{counted}, {units.size(on_disk)} on disk")
    _print_stretches(ck.log)


def _print_stretches(log: Log) -> None:
    from deltackpt.inspect.logs import STRETCH_COLUMNS, stretch_line

    if log.stretches:
        lines = [stretch_line(one) for one in log.stretches]
        terminal.print_table(STRETCH_COLUMNS, lines, "the log between the steps")
    if log.problem:
        click.echo(f"nobody can tell which stretches count: {log.problem}")


def _list_log(log: Log, last: int | None, as_json: bool) -> None:
    from deltackpt.inspect.logs import POINT_COLUMNS, point_lines

    points = log.points()[:last]
    if as_json:
        stretches = [
            {**terminal.plain(one), "full_points": one.full_points, "points": len(one.points)}
            for one in log.stretches
        ]
        shown = [point._asdict() for point in points]
        terminal.print_json({"stretches": stretches, "points": shown, "problem": log.problem})
        return
    _print_stretches(log)
    if points:
        terminal.print_table(POINT_COLUMNS, point_lines(points))
    click.echo(units.count(len(points), "point"))


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt show /data/run-17\n"
    "  deltackpt show /data/run-17 12000 --json"
)
@arguments.root
@click.argument("step", type=arguments.STEP, required=False)
@arguments.item
@arguments.endpoint
@arguments.as_json
def show(
    directory: str, step: int | None, item: str | None, endpoint: str | None, as_json: bool
) -> None:
    """Show a step of DIRECTORY, the newest by default.

    That is its save and chain, its tables and slots, and its dense leaves; of a delta that has
    these as blocks, by which codes, and how many blocks changed.
    """
    from deltackpt.inspect import html
    from deltackpt.inspect.dense import DENSE_COLUMNS, dense_line
    from deltackpt.inspect.dense_of_blocks import SAVED_COLUMNS, saved_line
    from deltackpt.inspect.save import FIGURE_COLUMNS, figure_lines
    from deltackpt.inspect.step import FIELD_COLUMNS, field_lines

    ck = _open(directory, item, endpoint)
    found = ck.at(step)
    save = ck.save_of(found.step)
    if as_json:
        terminal.print_json(_shown(found, save))
        return
    click.echo(f"step {found.step}, save {found.save_id}: {save.reason}")
    click.echo(f"committed {html.utc(save.committed_at) or 'at an unknown time'} UTC")
    click.echo(f"read through {' -> '.join(found.reads)}")
    terminal.print_table(FIELD_COLUMNS, field_lines(found))
    terminal.print_table(FIGURE_COLUMNS, figure_lines(save), "in this save")
    if found.dense:
        lines = [dense_line(leaf) for leaf in found.dense.values()]
        terminal.print_table(DENSE_COLUMNS, lines)
    if found.dense_saved:
        lines = [saved_line(leaf) for leaf in found.dense_saved]
        terminal.print_table(SAVED_COLUMNS, lines, "dense leaves in this save")


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt diff /data/run-17 1000 2000\n"
    "  deltackpt diff /data/run-17 1000 2000 --table users --field slot.accumulator --largest 20"
)
@arguments.root
@click.argument("a", type=arguments.STEP)
@click.argument("b", type=arguments.STEP)
@arguments.item
@arguments.endpoint
@click.option(
    "--table",
    "tables",
    multiple=True,
    help="Only this table; may be repeated.",
)
@_field
@click.option(
    "--largest", type=click.IntRange(min=0), default=5, show_default=True, help="Rows to name."
)
@arguments.as_json
def diff(
    directory: str,
    a: int,
    b: int,
    item: str | None,
    endpoint: str | None,
    tables: tuple[str, ...],
    field: str,
    largest: int,
    as_json: bool,
) -> None:
    """Show which rows differ between steps A and B.

    A row differs where any bit does; by how much is told by l2 norms of the changes.
    """
    from deltackpt.inspect.changes import DIFF_COLUMNS, diff_lines

    found = _open(directory, item, endpoint).diff(a, b, tables=tables or None, field=field)
    if as_json:
        terminal.print_json(_diff(found, largest))
        return
    terminal.print_table(DIFF_COLUMNS, diff_lines(found), f"{field}: step {found.a} -> {found.b}")
    for step, names in ((a, found.only_a), (b, found.only_b)):
        if names:
            click.echo(f"only at step {step}, or of another kind there: {', '.join(names)}")
    for name, changed in found.tables.items():
        if largest and len(changed.rows):
            rows = ", ".join(map(str, changed.largest(largest).tolist()))
            click.echo(f"{name}: changed most: rows {rows}")


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt history /data/run-17 users 4711\n"
    "  deltackpt history /data/run-17 users 4711 4712 --field slot.accumulator --json"
)
@arguments.root
@click.argument("table")
@click.argument("rows", metavar="ROW...", type=click.IntRange(min=0), nargs=-1, required=True)
@arguments.item
@arguments.endpoint
@_field
@click.option("--step", "steps", type=arguments.STEP, multiple=True, help="Only this step.")
@click.option("--no-log", is_flag=True, help="The steps alone, without marks of the log.")
@click.option(
    "--columns", type=click.IntRange(min=1), default=6, show_default=True, help="Numbers to show."
)
@arguments.as_json
def history(
    directory: str,
    table: str,
    rows: tuple[int, ...],
    item: str | None,
    endpoint: str | None,
    field: str,
    steps: tuple[int, ...],
    no_log: bool,
    columns: int,
    as_json: bool,
) -> None:
    """Show values of rows of a table over the steps, and the points of the log between them.

    ``held`` says whether the save of the step holds the row: a base holds all, a delta, or a mark
    of the log, those that were touched.
    """
    found = _open(directory, item, endpoint).history(
        table, list(rows), field=field, steps=steps or None, log=not no_log
    )
    if as_json:
        terminal.print_json(_history(found))
        return
    flat = found.values.reshape(len(found.steps), len(found.rows), -1)
    count = min(columns, flat.shape[2])
    names = ["step", "row", "held", "norm", *map(str, range(count))]
    if any(found.marks):
        names.insert(1, "mark")
    lines = [
        _history_line(found, flat, number, place, count)
        for place in range(len(found.rows))
        for number in range(len(found.steps))
        if found.present[number, place]
    ]
    terminal.print_table(names, lines, f"{found.table}, {field}: {flat.shape[2]} numbers a row")


def _history_line(found: History, flat: Any, number: int, place: int, count: int) -> list[Any]:
    import numpy as np

    row = flat[number, place]
    wide = row.astype(np.complex128 if row.dtype.kind == "c" else np.float64)
    held = "yes" if found.written[number, place] else ""
    norm = float(np.linalg.norm(wide))
    first = wide[:count].tolist()
    mark = [found.marks[number] or ""] if any(found.marks) else []
    return [int(found.steps[number]), *mark, int(found.rows[place]), held, norm, *first]


def _save(save: Save) -> dict[str, Any]:
    return {
        "step": save.step,
        "kind": save.kind,
        "parent": save.parent,
        "chain_length": save.chain_length,
        "compacted": save.compacted,
        "rows": save.rows,
        "total_rows": save.total_rows,
        "array_bytes": save.nbytes,
        "dense_bytes": save.dense_nbytes,
        "disk_bytes": save.disk_bytes,
        "committed_at": save.committed_at,
        "reason": save.reason,
        "problem": save.problem,
        "tables": save.tables,
    }


def _shown(step: Step, save: Save) -> dict[str, Any]:
    tables = {
        name: {"values": _array(table)}
        | {f"slot.{slot}": _array(held) for slot, held in table.slots.items()}
        for name, table in step.tables.items()
    }
    dense = {
        name: {"kind": leaf.kind, "value": leaf.value}
        if leaf.kind in ("None", "empty", "string")
        else {"kind": leaf.kind, **_array(leaf)}
        for name, leaf in step.dense.items()
    }
    return {
        **_save(save),
        "save_id": step.save_id,
        "chain": step.chain,
        "reads": step.reads,
        "state": tables,
        "dense": dense,
        "dense_saved": step.dense_saved,
    }


def _array(held: LazyArray | Any) -> dict[str, Any]:
    return {"shape": held.shape, "dtype": held.dtype.name, "nbytes": held.nbytes}


def _diff(found: Diff, largest: int) -> dict[str, Any]:
    tables = {
        name: {
            "rows_changed": len(changed.rows),
            "total_rows": changed.total_rows,
            "added": changed.added,
            "norms": changed.quantiles(),
            "relative": changed.quantiles(relative=True),
            "largest": changed.largest(largest),
        }
        for name, changed in found.tables.items()
    }
    return {
        "a": found.a,
        "b": found.b,
        "field": found.field,
        "tables": tables,
        "only_a": found.only_a,
        "only_b": found.only_b,
    }


def _history(found: History) -> list[dict[str, Any]]:
    return [
        {
            "step": int(step),
            "mark": found.marks[number],
            "row": int(row),
            "held": bool(found.written[number, place]),
            "values": found.values[number, place],
        }
        for number, step in enumerate(found.steps)
        for place, row in enumerate(found.rows)
        if found.present[number, place]
    ]
