# SPDX-License-Identifier: Apache-2.0
"""Which leaves of a state are tables, which are their slots, and how tables group.

``split`` takes a state apart into tables with slots, dense leaves and the TouchState; ``join``
puts it together. What it finds is cached by the structure of the state, since the training thread
splits at every save.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import tree_util

from deltackpt import events
from deltackpt.errors import (
    TableSelectionError,
    TemplateMismatch,
    TrackingError,
    UnsupportedLeaf,
)
from deltackpt.format import blocks
from deltackpt.format.manifest import DenseLeaf, KeyPath, Layout, path_name
from deltackpt.policy import CodecChoice
from deltackpt.state import paths, slots, touch_state
from deltackpt.state.choice import Tables
from deltackpt.state.groups import TableFields, group_tables
from deltackpt.state.nesting import dense_at, nested
from deltackpt.state.paths import Flat, Select
from deltackpt.state.touch_state import Marks, TouchSite, TouchState

#: Why a dense leaf cannot be stored under its key, None where it can.
DenseFault = Callable[[Any, Sequence[str]], str | None]
#: Layouts that one Tables remembers; a training run has one or two.
_REMEMBERED = 16
#: Fewer bytes of slots in the dense part of each save cost nothing worth a warning.
_DENSE_SLOT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A state taken apart.

    Attributes:
      layout: what is where.
      fields: table name to field name to leaf, (rows, *trailing).
      dense: nested dicts with string keys of the dense leaves.
      marks: the TouchStates of the state.
      codecs: group name to field name to how its rows are to be stored.
      windows: of each gradient accumulator (``optax.MultiSteps``) how many updates it has made and
        how many steps it has gathered for the next: scalars of the state.
    """

    layout: Layout
    fields: dict[str, dict[str, Any]]
    dense: dict[str, Any]
    marks: tuple[Marks, ...]
    codecs: dict[str, dict[str, CodecChoice]]
    windows: tuple[tuple[Any, Any], ...] = ()

    @property
    def touched(self) -> TouchState | None:
        """The state's TouchStates as one, None where it has none; see ``touch_state.combine``."""
        return touch_state.combine(marks.state for marks in self.marks)


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """What to take from which position of the flattened state."""

    layout: Layout
    #: Of dense leaves that are slots of tables by their structure.
    dense_slots: tuple[int, ...]
    codecs: dict[str, dict[str, CodecChoice]]
    fields: dict[str, dict[str, int]]
    dense: tuple[tuple[tuple[str, ...], int], ...]
    places: tuple[TouchSite, ...]
    windows: tuple[tuple[int, int], ...]


_plans: weakref.WeakKeyDictionary[Tables, dict[Any, _Plan]] = weakref.WeakKeyDictionary()
#: The one that was asked for last, with its key: its shardings are those of the next state, too,
#: where one jitted step has made both, and are quickly compared with themselves.
_newest: weakref.WeakKeyDictionary[Tables, tuple[Any, _Plan]] = weakref.WeakKeyDictionary()
#: Those whose dense leaves can be stored, with the numbers of those whose value decides.
_storable: weakref.WeakKeyDictionary[_Plan, list[int]] = weakref.WeakKeyDictionary()
#: Those whose user was told of slots that are saved whole each time.
_warned: weakref.WeakSet[Tables] = weakref.WeakSet()


def split(state: Any, tables: Tables, *, dense_fault: DenseFault | None = None) -> Split:
    """Takes a state apart into tables with slots, dense leaves and the TouchState.

    Args:
      state: any pytree: nested dicts, a flax ``TrainState``, an nnx state or module, tuples of
        them. Leaves may be ``jax.Array``, ``np.ndarray`` or abstract.
      tables: which leaves are tables.
      dense_fault: of a state that is to be saved: why a leaf cannot be stored as a dense one under
        its key. It is asked once for each structure, and each time about leaves without a dtype.

    Returns:
      The parts; leaves are those of the state, not copies.

    Raises:
      TableSelectionError: a pattern matches nothing, a chosen leaf cannot be a table, a path
        names two leaves, or slots are ambiguous; the message lists the paths.
      UnsupportedLeaf: a dense leaf cannot be stored.
    """
    leaves, treedef = paths.flatten(state, touch_state.is_touch_state)
    plan = _plan_of(state, tables, leaves, treedef)
    if dense_fault is not None:
        _check_storable(plan, leaves, dense_fault)
        _tell_dense_slots(plan, leaves, tables)
    fields = {
        name: {field: leaves[i] for field, i in positions.items()}
        for name, positions in plan.fields.items()
    }
    dense: dict[str, Any] = {}
    for key, i in plan.dense:
        node = dense
        for step in key[:-1]:
            node = node.setdefault(step, {})
        node[key[-1]] = _plain_empty(leaves[i])
    marks = tuple(Marks(path_name(place.path), _touched_at(place, leaves)) for place in plan.places)
    windows = tuple((leaves[updates], leaves[gathered]) for updates, gathered in plan.windows)
    return Split(plan.layout, fields, dense, marks, plan.codecs, windows)


def join(
    template: Any,
    layout: Layout,
    fields: Mapping[str, Mapping[str, Any]],
    dense: Mapping[str, Any],
    touched: TouchState | None,
) -> Any:
    """Puts the parts of a state together.

    Args:
      template: a state of the wanted structure, abstract or not; None makes nested dicts and
        lists.
      layout: where tables and dense leaves stand.
      fields: table name to field name to leaf.
      dense: nested dicts of the dense leaves, as by ``split``.
      touched: what to put in place of the template's TouchStates; None puts fresh ones.

    Returns:
      The state; without a template no TouchState is in it, and tuples are lists, named ones dicts.

    Raises:
      TemplateMismatch: the template asks for a leaf that the parts do not hold.
      TrackingError: ``touched`` lacks a table of the template's TouchState.
    """
    by_name = {
        path_name(path): fields[table.name][field]
        for table in layout.tables
        if table.name in fields
        for field, path in table.leaves.items()
        if field in fields[table.name]
    }
    if template is None:
        return nested(layout, by_name, dense)
    flat = paths.flatten_with_paths(template, touch_state.is_touch_state)
    _, treedef = paths.flatten(template, touch_state.is_touch_state)
    leaves: list[Any] = list(flat.leaves)
    tracked = set()
    for place in touch_state.sites(flat):
        _put_touched(place, leaves, touched)
        tracked.update(place.positions)
    missing = []
    for i, path in enumerate(flat.paths):
        name = path_name(path)
        if i in tracked or paths.is_empty(flat.leaves[i]):
            continue
        if name in by_name:
            leaves[i] = by_name[name]
            continue
        try:
            leaves[i] = dense_at(dense, _dense_key(path))
        except KeyError:
            missing.append(name)
    if missing:
        raise TemplateMismatch(
            f"the template asks for leaves that the step does not hold:\n{paths.listed(missing)}\n"
            "restore with a template of the saved structure, or without one"
        )
    return tree_util.tree_unflatten(treedef, leaves)


def _plan_of(state: Any, tables: Tables, leaves: list[Any], treedef: Any) -> _Plan:
    known = _plans.setdefault(tables, {})
    key = (treedef, tuple(map(_signature, leaves)))
    try:
        newest = _newest.get(tables)
        if newest is not None and newest[0] == key:
            plan = newest[1]
        else:
            plan = known.get(key)
    except (TypeError, ValueError):  # a static field that cannot be hashed, or compared
        return _find_plan(state, tables)
    if plan is None:
        plan = _find_plan(state, tables)
        if len(known) >= _REMEMBERED:
            known.clear()
        known[key] = plan
    _newest[tables] = key, plan
    return plan


def _signature(leaf: Any) -> Any:
    try:
        # An abstract leaf of a template may look like the array that can be saved.
        return type(leaf), leaf.shape, leaf.dtype, leaf.sharding
    except AttributeError:
        if isinstance(leaf, TouchState):
            return TouchState
        return type(leaf), getattr(leaf, "shape", None), getattr(leaf, "dtype", None)


def _check_storable(plan: _Plan, leaves: list[Any], dense_fault: DenseFault) -> None:
    numbers = _storable.get(plan)
    faults = []
    for number in range(len(plan.dense)) if numbers is None else numbers:
        key, place = plan.dense[number]
        if fault := dense_fault(leaves[place], key):
            name = path_name(plan.layout.dense[number].path) or "(the state itself)"
            faults.append(f"{paths.printable(name)} {fault}")
    if faults:
        raise UnsupportedLeaf(
            f"save: expected leaves that can be stored, found\n{paths.listed(faults)}\n"
            "make each an array of plain numbers (np.frombuffer(it, np.uint8) of bytes, "
            "it.view(np.int64) of dates, it.astype(np.uint8) of uint4, np.complex128(it)), or take "
            "it out of the state and give it to save(items=...), as JSON for instance"
        )
    if numbers is None:
        values = enumerate(leaves[i] for _, i in plan.dense)
        _storable[plan] = [number for number, leaf in values if not hasattr(leaf, "dtype")]


def _tell_dense_slots(plan: _Plan, leaves: list[Any], tables: Tables) -> None:
    """Warns, once for a choice of tables, of slots that each save holds whole."""
    nbytes = sum(math.prod(leaves[i].shape) * leaves[i].dtype.itemsize for i in plan.dense_slots)
    if nbytes < _DENSE_SLOT_BYTES or tables in _warned:
        return
    _warned.add(tables)
    paths_of = {i: entry.path for entry, (_, i) in zip(plan.layout.dense, plan.dense, strict=True)}
    names = paths.listed(path_name(paths_of[i]) for i in plan.dense_slots)
    events.warn(
        f"{nbytes / 1e6:.1f} MB of slots go whole into each save, since Tables(slots=...) names "
        f"other slots of their tables, or none:\n{names}\nleave slots out, so that they are "
        "found, or name each of them"
    )


def _find_plan(state: Any, tables: Tables) -> _Plan:
    flat = paths.flatten_with_paths(state, touch_state.is_touch_state)
    places = tuple(touch_state.sites(flat))
    tracked = {i for place in places for i in place.positions}
    optimizer = slots.optimizer_leaves(state, flat)
    found = _choose(flat, tables, tracked, optimizer)
    taken = {i for table in found for i, _ in table.fields.values()} | tracked
    dense = [i for i in range(len(flat.leaves)) if i not in taken]
    grouped = group_tables(found, flat, tables.codec, tables.slot_codec)
    layout = Layout(
        grouped.groups,
        grouped.tables,
        tuple(DenseLeaf(path=flat.paths[i], key=_dense_key(flat.paths[i])) for i in dense),
        tuple(place.path for place in places),
    )
    fields = {table.name: {field: i for field, (i, _) in table.fields.items()} for table in found}
    # A plan outlives the state: it keeps where the TouchState stands, not its arrays.
    kept = tuple(place._replace(touched=TouchState(None, {}, None)) for place in places)  # pyright: ignore[reportArgumentType]
    keys = tuple((_dense_key(flat.paths[i]), i) for i in dense)
    dense_slots = _dense_slots(flat, tables, found, taken, optimizer)
    windows = _windows(flat)
    return _Plan(layout, dense_slots, grouped.choices, fields, keys, kept, windows)


def _windows(flat: Flat) -> tuple[tuple[int, int], ...]:
    """Positions of the counters of each ``optax.MultiSteps``: updates made, steps gathered."""
    at = {path: i for i, path in enumerate(flat.paths)}
    names: dict[KeyPath, dict[Any, int]] = {}
    for path, i in at.items():
        if path and path[-1][1] in ("gradient_step", "mini_step"):
            names.setdefault(path[:-1], {})[path[-1][1]] = i
    gathers = {path[:n] for path in at for n, step in enumerate(path) if step[1] == "acc_grads"}
    return tuple(
        (counters["gradient_step"], counters["mini_step"])
        for path, counters in names.items()
        if len(counters) == 2 and path in gathers
    )


def _dense_slots(
    flat: Flat,
    tables: Tables,
    found: list[TableFields],
    taken: set[int],
    optimizer: list[bool | None],
) -> tuple[int, ...]:
    """Positions of leaves that are slots of tables by their structure, and were not declared."""
    if tables.slots is None:
        return ()
    chosen = [table.fields[blocks.VALUES][0] for table in found]
    with contextlib.suppress(TableSelectionError):  # It cannot be said whose they are.
        all_slots = slots.find_slots(flat, chosen, optimizer)
        return tuple(sorted({slot.leaf for slot in all_slots} - taken))
    return ()


def _choose(
    flat: Flat, tables: Tables, tracked: set[int], optimizer: list[bool | None]
) -> list[TableFields]:
    """The tables with their slots, in the order of their names."""
    names = [path_name(path) for path in flat.paths]
    usable = [
        i for i in range(len(names)) if i not in tracked and not paths.is_empty(flat.leaves[i])
    ]
    outside = [i for i in usable if optimizer[i] is None]
    chosen = [
        outside[i]
        for i in paths.choose(
            tables.select, [flat.paths[i] for i in outside], [flat.leaves[i] for i in outside]
        )
    ]
    faults = [
        f"{names[i] or '(the state itself)'} {fault}"
        for i in chosen
        if (fault := paths.table_fault(flat.leaves[i]))
    ]
    if faults:
        raise TableSelectionError(
            f"select: these leaves cannot be tables:\n{paths.listed(faults)}\n"
            "a table is an array of numbers whose first axis are the rows"
        )
    found = {i: TableFields(names[i], {blocks.VALUES: (i, False)}) for i in chosen}
    explicit = _explicit_slots(tables, found, flat, names, usable)
    if tables.slots is None or tables.slots:
        searched = [i for i in chosen if i not in explicit]
        for slot in slots.find_slots(flat, searched, optimizer):
            if slot.leaf not in tracked:
                always = slots.is_always(slot, tables.always)
                found[slot.table].fields[blocks.slot_field(slot.name)] = (slot.leaf, always)
    _check_always(tables.always, found)
    _check_taken_once(found, names)
    _check_names([names[i] for table in found.values() for i, _ in table.fields.values()], names)
    return sorted(found.values(), key=lambda table: table.name)


def _check_names(taken: list[str], names: list[str]) -> None:
    """Checks the paths of tables and slots: a template's leaves are found by them at a restore."""
    counts = collections.Counter(names)
    clashes = {name for name in taken if counts[name] > 1}
    if clashes:
        raise TableSelectionError(
            f"select: each of these paths names more than one leaf:\n{paths.listed(clashes)}\n"
            "a key that holds '/' reads like two; rename it"
        )
    halves = [shown for name in taken if (shown := paths.printable(name)) != name]
    if halves:
        raise TableSelectionError(
            f"select: these paths have half a character, and are no Unicode:\n"
            f"{paths.listed(halves)}\nrename them"
        )


def _explicit_slots(
    tables: Tables, found: dict[int, TableFields], flat: Flat, names: list[str], usable: list[int]
) -> set[int]:
    """Gives tables the slots that the user declared; positions of the tables concerned."""
    concerned = set()
    for pattern, declared in (tables.slots or {}).items():
        matched = [i for i, table in found.items() if paths.matches(pattern, table.name)]
        if not matched:
            raise TableSelectionError(
                f"slots: pattern {pattern!r} matches no table; the tables are\n"
                f"{paths.listed(table.name for table in found.values())}"
            )
        for i in matched:
            concerned.add(i)
            for slot, select in declared.items():
                leaf = _declared_leaf(found[i].name, slot, select, flat, names, usable)
                rows, shape = flat.leaves[i].shape[0], getattr(flat.leaves[leaf], "shape", ())
                fault = paths.table_fault(flat.leaves[leaf])
                if fault or shape[:1] != (rows,):
                    raise TableSelectionError(
                        f"slots: slot {slot!r} of table {found[i].name}: expected {rows} rows, "
                        f"found that {names[leaf]} {fault or f'has shape {tuple(shape)}'}"
                    )
                candidate = slots.Slot(i, leaf, slot, False)
                always = slots.is_always(candidate, tables.always)
                found[i].fields[blocks.slot_field(slot)] = (leaf, always)
    return concerned


def _declared_leaf(
    table: str, slot: str, select: Select, flat: Flat, names: list[str], usable: list[int]
) -> int:
    """Position of the one leaf that a declared slot names."""
    if isinstance(select, str):
        select = select.replace("{table}", table).replace("{name}", table.rpartition("/")[2])
    matched = paths.choose(
        select, [flat.paths[i] for i in usable], [flat.leaves[i] for i in usable]
    )
    if len(matched) != 1:
        raise TableSelectionError(
            f"slots: slot {slot!r} of table {table}: expected one leaf, found\n"
            f"{paths.listed(names[usable[i]] for i in matched)}\n"
            "'{table}' and '{name}' in a path stand for the table's path and its last step"
        )
    return usable[matched[0]]


def _check_always(always: Sequence[str], found: dict[int, TableFields]) -> None:
    names = {
        field.removeprefix(blocks.slot_field(""))
        for table in found.values()
        for field in table.fields
        if field != blocks.VALUES
    }
    for pattern in [always] if isinstance(always, str) else always:
        if not any(slots.is_always(slots.Slot(0, 0, name, False), pattern) for name in names):
            raise TableSelectionError(
                f"always: pattern {pattern!r} matches no slot; the slots are\n{paths.listed(names)}"
            )


def _check_taken_once(found: dict[int, TableFields], names: list[str]) -> None:
    owners: dict[int, list[str]] = {}
    for table in found.values():
        for field, (i, _) in table.fields.items():
            owners.setdefault(i, []).append(f"{table.name} ({field})")
    shared = [
        f"{names[i]}: {', '.join(sorted(claims))}"
        for i, claims in owners.items()
        if len(claims) > 1
    ]
    if shared:
        raise TableSelectionError(
            f"these leaves are claimed more than once:\n{paths.listed(shared)}\n"
            "say which leaves are slots with Tables(slots={table pattern: {slot name: path}})"
        )


def _dense_key(path: KeyPath) -> tuple[str, ...]:
    """Key of a dense leaf. Orbax joins keys with '.', so a '.' in a step is escaped."""
    return tuple(str(step).replace("%", "%25").replace(".", "%2E") or "%" for _, step in path) or (
        "%",
    )


def _plain_empty(leaf: Any) -> Any:
    """None, or an empty container of a plain type for one that Orbax would not know."""
    if not paths.is_empty(leaf) or leaf is None:
        return leaf
    if isinstance(leaf, dict):
        return {}
    return None if hasattr(type(leaf), "_fields") else []


def _touched_at(site: TouchSite, leaves: list[Any]) -> TouchState:
    found = [leaves[i] for i in site.positions]
    return touch_state.of_leaves(found, site.names) if site.names else touch_state.plain(found[0])


def _put_touched(site: TouchSite, leaves: list[Any], touched: TouchState | None) -> None:
    """Puts ``touched``, else a fresh TouchState, where the template has one."""
    wanted = site.touched.stamps
    given = touched if touched is not None else touch_state.fresh(site.touched)
    if absent := wanted.keys() - given.stamps.keys():
        raise TrackingError(
            f"{path_name(site.path)}: the TouchState given lacks tables\n{paths.listed(absent)}"
        )
    content = given._replace(stamps={name: given.stamps[name] for name in wanted})
    if site.names:
        stamps = (content.stamps[name] for name in site.names)
        values = (content.clock, *stamps, content.identity)
        for i, value in zip(site.positions, values, strict=True):
            leaves[i] = value
        return
    (position,) = site.positions
    structure = tree_util.tree_structure(leaves[position])
    leaves[position] = tree_util.tree_unflatten(structure, tree_util.tree_leaves(content))
