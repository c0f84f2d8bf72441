# SPDX-License-Identifier: Apache-2.0
"""Inspection commands: ls, show, diff, history, report. They need neither jax nor Orbax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deltackpt import units
from deltackpt.cli import terminal
from deltackpt.cli.terminal import as_commands

if TYPE_CHECKING:
    import numpy as np

    from deltackpt.inspect import Checkpoints, Diff, History, LazyArray, Save, Step, Wal, WalEpoch
    from deltackpt.inspect.dense_items import DenseLeaf
    from deltackpt.wal import KafkaWal

_field = click.option(
    "--field", default="values", show_default=True, help="values, or slot.<name> for a slot."
)
#: How ``ls`` shows why a step is kept.
_KEPT_BECAUSE = {"policy": "policy", "chain": "chain", "nothing": "not kept", None: None}


def _open(
    directory: str, item: str | None, endpoint: str | None, wal: KafkaWal | None
) -> Checkpoints:
    from deltackpt import inspect

    opened = inspect.open(directory, item=item, endpoint=endpoint, wal=wal)
    return click.get_current_context().with_resource(opened)


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt ls /data/run-17\n"
    "  deltackpt ls /data/run-17 --last 20 --json\n"
    "  deltackpt ls /data/run-17 --wal"
)
@terminal.root
@terminal.item
@terminal.endpoint
@terminal.kafka_config
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="List only the newest N.")
@click.option(
    "--wal", "points", is_flag=True, help="List the WAL's recovery points instead of steps."
)
@terminal.as_json
def ls(
    directory: str,
    item: str | None,
    endpoint: str | None,
    wal: KafkaWal | None,
    last: int | None,
    points: bool,
    as_json: bool,
) -> None:
    """List the steps of DIRECTORY with kinds, chains, rows and bytes, and its WAL epochs.

    If the trainer has a retention policy, the column `kept because` shows which steps it keeps, and
    which are kept only because a chain needs them.
    """
    from deltackpt.inspect.descriptions import SAVE_COLUMNS, save_line

    ck = _open(directory, item, endpoint, wal)
    if points:
        _list_wal(ck.wal, last, as_json)
        return
    saves = ck.saves if last is None else ck.saves_of(ck.steps[-last:])
    stays_for = ck.stays_for
    if as_json:
        terminal.print_json(
            [{**_save(save), "kept_because": stays_for.get(save.step)} for save in saves]
        )
        return
    columns, lines = SAVE_COLUMNS, [save_line(save) for save in saves]
    lines = [(*line[:-1], as_commands(str(line[-1]))) for line in lines]
    if stays_for:
        columns = (*columns[:-1], "kept because", columns[-1])
        kept = (_KEPT_BECAUSE[stays_for.get(save.step)] for save in saves)
        lines = [(*line[:-1], why, line[-1]) for line, why in zip(lines, kept, strict=True)]
    terminal.print_table(columns, lines)
    bases = {} if last is not None else ck.compacted
    on_disk = sum(save.disk_bytes for save in saves) + sum(bases.values())
    counted = units.count(len(saves), "step")
    if bases:
        counted += f" and {units.count(len(bases), 'compacted base')}"
    click.echo(f"{counted}, {units.size(on_disk)} on disk")
    _print_epochs(ck.wal)


def _print_epochs(wal: Wal) -> None:
    from deltackpt.inspect.descriptions import EPOCH_COLUMNS, epoch_line

    if wal.epochs:
        lines = [epoch_line(one) for one in wal.epochs]
        terminal.print_table(EPOCH_COLUMNS, lines, "write-ahead log")
    if wal.problem:
        click.echo(f"cannot determine which WAL epochs are valid: {wal.problem}")


def _list_wal(wal: Wal, last: int | None, as_json: bool) -> None:
    from deltackpt.inspect.descriptions import POINT_COLUMNS, point_lines

    points = wal.recovery_points()[:last]
    if as_json:
        epochs = [_epoch(one) for one in wal.epochs]
        terminal.print_json({"epochs": epochs, "recovery_points": points, "problem": wal.problem})
        return
    _print_epochs(wal)
    if points:
        terminal.print_table(POINT_COLUMNS, point_lines(points))
    click.echo(units.count(len(points), "recovery point"))


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt show /data/run-17\n"
    "  deltackpt show /data/run-17 12000 --json\n"
    "  deltackpt show /data/run-17 12007"
)
@terminal.root
@click.argument("step", type=terminal.STEP, required=False)
@terminal.item
@terminal.endpoint
@terminal.kafka_config
@terminal.as_json
def show(
    directory: str,
    step: int | None,
    item: str | None,
    endpoint: str | None,
    wal: KafkaWal | None,
    as_json: bool,
) -> None:
    """Show a step, or a full recovery point, of DIRECTORY; the newest step by default.

    STEP is a step, or the training step of a full recovery point. The output lists its save and
    chain, its tables and slots, and its dense leaves. For dense leaves stored as blocks, it also
    lists their codecs and the number of changed blocks. Leaves without a value
    (None, optax's MaskedNode and EmptyState) are only counted.
    """
    from deltackpt.inspect import descriptions
    from deltackpt.inspect.dense_items import DENSE_COLUMNS, SAVED_COLUMNS, dense_lines, saved_line
    from deltackpt.inspect.descriptions import FIGURE_COLUMNS, figure_lines
    from deltackpt.inspect.step import FIELD_COLUMNS, field_lines

    ck = _open(directory, item, endpoint, wal)
    found = ck.at(step)
    save = ck.save_of(found.step) if found.point is None else None
    if as_json:
        terminal.print_json(_shown(found, save))
        return
    if save is not None:
        click.echo(f"step {found.step}, save {found.save_id}: {save.reason}")
        click.echo(f"committed {descriptions.utc(save.committed_at) or 'at an unknown time'} UTC")
    elif found.point is not None:
        click.echo(f"{found.point}, WAL record {found.save_id}")
        click.echo(f"appended {descriptions.utc(found.point.unix_secs)} UTC")
    click.echo(f"reads {' -> '.join(found.reads)}")
    if found.tables:
        terminal.print_table(FIELD_COLUMNS, field_lines(found))
    if save is not None and save.tables:
        terminal.print_table(FIGURE_COLUMNS, figure_lines(save), "in this save")
    lines, empty = dense_lines(found.dense.values())
    if lines:
        terminal.print_table(DENSE_COLUMNS, lines)
    if empty:
        click.echo(empty)
    if found.dense_saved:
        lines = [saved_line(leaf) for leaf in found.dense_saved]
        terminal.print_table(SAVED_COLUMNS, lines, "dense leaves in this save")


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt diff /data/run-17 1000 2000\n"
    "  deltackpt diff /data/run-17 1000 2000 --table users --field slot.accumulator --largest 20"
)
@terminal.root
@click.argument("a", type=terminal.STEP)
@click.argument("b", type=terminal.STEP)
@terminal.item
@terminal.endpoint
@terminal.kafka_config
@click.option("--table", "tables", multiple=True, help="Only this table; repeatable.")
@_field
@click.option(
    "--largest", type=click.IntRange(min=0), default=5, show_default=True, help="Rows to list."
)
@terminal.as_json
def diff(
    directory: str,
    a: int,
    b: int,
    item: str | None,
    endpoint: str | None,
    wal: KafkaWal | None,
    tables: tuple[str, ...],
    field: str,
    largest: int,
    as_json: bool,
) -> None:
    """Show which rows differ between steps A and B, or between recovery points.

    A and B are steps, or training steps of full recovery points. A row differs if any bit differs.
    Changes are reported as l2 norms.
    """
    from deltackpt.inspect.changes import DIFF_COLUMNS, diff_lines

    found = _open(directory, item, endpoint, wal).diff(a, b, tables=tables or None, field=field)
    if as_json:
        terminal.print_json(_diff(found, largest))
        return
    terminal.print_table(DIFF_COLUMNS, diff_lines(found), f"{field}: step {found.a} -> {found.b}")
    for step, names in ((a, found.only_a), (b, found.only_b)):
        if names:
            click.echo(f"only at step {step}, or incompatible there: {', '.join(names)}")
    for name, changed in found.tables.items():
        if largest and len(changed.rows):
            rows = changed.largest(largest).tolist()
            shown = ", ".join(map(str, rows))
            if changed.ids is not None:
                id_of = dict(zip(changed.rows.tolist(), changed.ids.tolist(), strict=True))
                shown = ", ".join(f"{row} (id {id_of[row]})" for row in rows)
            click.echo(f"{name}: rows that changed most: {shown}")


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt history /data/run-17 users 4711\n"
    "  deltackpt history /data/run-17 users 4711 4712 --field slot.accumulator --json\n"
    "  deltackpt history /data/run-17 users --id 8123456789012"
)
@terminal.root
@click.argument("table")
@click.argument("rows", metavar="[ROW]...", type=click.IntRange(min=0), nargs=-1)
@terminal.item
@terminal.endpoint
@terminal.kafka_config
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
@terminal.as_json
def history(
    directory: str,
    table: str,
    rows: tuple[int, ...],
    item: str | None,
    endpoint: str | None,
    wal: KafkaWal | None,
    field: str,
    ids: tuple[int, ...],
    steps: tuple[int, ...],
    no_wal: bool,
    columns: int,
    as_json: bool,
) -> None:
    """Show the values of rows at each step, and at the recovery points between steps.

    The column `written` shows whether that save or WAL record contains the row: a base contains
    every row, a delta or a WAL record the touched ones. With --id, steps at which the row of the id
    had another id are omitted.
    """
    if bool(rows) == bool(ids):
        raise click.UsageError("Name rows, or ids with --id.")
    found = _open(directory, item, endpoint, wal).history(
        table,
        list(rows) or None,
        ids=list(ids) or None,
        field=field,
        steps=steps or None,
        wal=not no_wal,
    )
    if as_json:
        terminal.print_json(_history(found))
        return
    flat = found.values.reshape(len(found.steps), len(found.rows), -1)
    count = min(columns, flat.shape[2])
    names = ["step", "row", "written", "norm", *map(str, range(count))]
    if found.ids is not None:
        names[1:2] = ["id", "row"]
    if any(found.point_kinds):
        names.insert(1, "recovery point")
    lines = [
        _history_line(found, flat, number, place, count)
        for place in range(len(found.rows))
        for number in range(len(found.steps))
        if found.present[number, place]
    ]
    title = f"{found.table}, {field}: {units.count(flat.shape[2], 'value')} per row"
    terminal.print_table(names, lines, title)


def _history_line(
    found: History, flat: np.ndarray, number: int, place: int, count: int
) -> list[object]:
    import numpy as np

    row = flat[number, place]
    wide = row.astype(np.complex128 if row.dtype.kind == "c" else np.float64)
    written = "yes" if found.written[number, place] else ""
    norm = float(np.linalg.norm(wide))
    first = wide[:count].tolist()
    mark = [found.point_kinds[number] or ""] if any(found.point_kinds) else []
    own = [] if found.ids is None else [int(found.ids[place])]
    return [int(found.steps[number]), *mark, *own, int(found.rows[place]), written, norm, *first]


def _epoch(epoch: WalEpoch) -> dict[str, object]:
    plain = terminal.plain(epoch)
    return {
        "number": epoch.number,
        "valid": plain.pop("live"),
        **plain,
        "recovery_points": len(epoch.recovery_points),
        "full_recovery_points": epoch.full_points,
    }


def _save(save: Save) -> dict[str, object]:
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
        "dense_codecs": save.dense_codecs,
        "disk_bytes": save.disk_bytes,
        "committed_at": save.committed_at,
        "reason": save.reason,
        "problem": save.problem,
        "tables": save.tables,
    }


def _shown(step: Step, save: Save | None) -> dict[str, object]:
    tables = {
        name: {"values": _array(table)}
        | {f"slot.{slot}": _array(held) for slot, held in table.slots.items()}
        for name, table in step.tables.items()
    }
    dense = {
        name: {"kind": leaf.kind, "value": leaf.value}
        if leaf.kind in ("None", "empty", "string")
        else {"kind": leaf.kind, **_array(leaf)}
        | ({"prng_impl": leaf.prng_impl} if leaf.kind == "key" else {})
        for name, leaf in step.dense.items()
    }
    if save is not None:
        about = _save(save)
    else:
        assert step.point is not None
        about = {"step": step.step, "kind": "recovery point", "recovery_point": step.point}
    return {
        **about,
        "save_id": step.save_id,
        "chain": step.chain,
        "reads": step.reads,
        "state": tables,
        "dense": dense,
        "dense_saved": step.dense_saved,
    }


def _array(held: LazyArray | DenseLeaf) -> dict[str, object]:
    return {"shape": held.shape, "dtype": held.dtype.name, "nbytes": held.nbytes}


def _diff(found: Diff, largest: int) -> dict[str, object]:
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


def _history(found: History) -> list[dict[str, object]]:
    return [
        {
            "step": int(step),
            "recovery_point": found.point_kinds[number],
            "row": int(row),
            **({} if found.ids is None else {"id": int(found.ids[place])}),
            "written": bool(found.written[number, place]),
            "values": found.values[number, place],
        }
        for number, step in enumerate(found.steps)
        for place, row in enumerate(found.rows)
        if found.present[number, place]
    ]


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt report /data/run-17\n"
    "  deltackpt report /data/run-17 -o run-17.html --json"
)
@terminal.root
@click.option(
    "-o",
    "--output",
    type=terminal.UserPath(dir_okay=False),
    default="report.html",
    show_default=True,
    help="File for the page.",
)
@terminal.item
@terminal.endpoint
@terminal.kafka_config
@terminal.as_json
def report(
    directory: str,
    output: str,
    item: str | None,
    endpoint: str | None,
    wal: KafkaWal | None,
    as_json: bool,
) -> None:
    """Write an HTML page about DIRECTORY: its contents, what can be restored, and plots.

    The page is one self-contained file. The command reads manifests and some rows of the busiest
    table; `deltackpt verify` reads every byte.
    """
    from deltackpt.inspect import report as page

    written = page.write(_open(directory, item, endpoint, wal), output)
    if as_json:
        terminal.print_json(written)
        return
    click.echo(
        f"{written.path}: {units.count(written.steps, 'step')}, {units.size(written.nbytes)}"
    )
    for warning in written.warnings:
        click.echo(f"  {as_commands(warning)}")
