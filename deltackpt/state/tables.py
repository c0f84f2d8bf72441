# SPDX-License-Identifier: Apache-2.0
"""The choice of tables, and the split of a state into tables, slots and dense leaves.

Splits are cached by the structure of the state: the training thread splits at every save.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import operator
import weakref
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)

import jax
from jax import tree_util
from jax.core import Tracer

from deltackpt import events, vocab
from deltackpt.errors import (
    OptionError,
    TableSelectionError,
    TemplateMismatch,
    TrackingError,
    UnsupportedLeaf,
)
from deltackpt.format import row_blocks
from deltackpt.format.manifest import (
    DenseEntry,
    KeyPath,
    Layout,
    dense_at,
    nest,
    nested,
    path_name,
)
from deltackpt.format.naming import Leaf, PyTree
from deltackpt.policies import CodecChoice
from deltackpt.state import paths, slots, stacks, touch_state
from deltackpt.state.groups import CodecOption, TableFields, group_tables
from deltackpt.state.paths import Flat, Select
from deltackpt.state.slots import Average
from deltackpt.state.stacks import StackedTable
from deltackpt.state.touch_state import Marks, TouchSite, TouchState


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """Selects the tables of a state. Create one and reuse it: it caches the layouts that it finds.

    Attributes:
      select: paths of the tables in the state; optimizer states are never searched. ``*`` matches
        within one path component, ``**`` across components. ``()`` declares a state without tables.
        Every array that matches becomes a table whose first axis is the rows, even a bias, so
        ``"**"`` selects the whole model. A scalar, a PRNG key or a Python number that matches
        raises ``TableSelectionError``.
      slots: None finds slots by optax's tree mapping. An empty mapping declares that there are
        none: optimizer states are then saved whole, with a warning if they are large. Otherwise,
        table path pattern to slot name to the slot's path, in which ``{table}`` is replaced by the
        table's path and ``{name}`` by its last component; tables that no pattern matches keep the
        slots that are found.
      key: path of the key column of each table, in which ``{table}`` and ``{name}`` are replaced as
        for ``slots``; a mapping from table path pattern to such a path if only some tables have
        one. It holds the id of each row, -1 for a row without one: (rows,) int32, int64 or uint64,
        or (rows, 2) int32 or uint32 for 64-bit ids without ``jax_enable_x64``. It is saved with its
        row as slot ``key``, uncompressed. A restore checks that ids are unique. Mark the rows whose
        ids change. A delta stores only the row index of a row without an id, if all its values and
        slots are 0. See ``deltackpt.vocab``.
      always: names of slots whose rows all move at every step; each save writes them whole. A
        pattern matches the whole name or its last component. Adafactor's are known.
      codec: how the tables' values are stored: the name of a codec for the rows of deltas, a
        ``BitWidthPolicy`` that chooses one, or a ``CodecChoice``; for all tables or by table path
        pattern (the first match applies; ``raw`` without a match). A lossy codec is used only if
        you name it.
      slot_codec: the same for the tables' slots.
      stacks: table path pattern to the layout of arrays in which jax-tpu-embedding stacked tables.
        Such an array and its slots are saved as one table for each member, of logical rows, whose
        paths are below that of the array.

    Examples:
      >>> import deltackpt
      >>> import jax.numpy as jnp
      >>> from deltackpt.handlers import split
      >>> state = {"params": {"emb": jnp.ones((4, 2)), "w": jnp.ones(3)}}
      >>> pieces = split(state, Tables(select="params/emb"))
      >>> [table.name for table in pieces.layout.tables], list(pieces.dense["params"])
      (['params/emb'], ['w'])
    """

    select: Select
    _: dataclasses.KW_ONLY
    slots: Mapping[str, Mapping[str, Select]] | None = None
    key: str | Mapping[str, Select] | None = None
    always: Sequence[str] = ()
    codec: CodecOption = "raw"
    slot_codec: CodecOption = "raw"
    stacks: Mapping[str, StackedTable] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        paths.check_select(self.select)
        for option in (self.codec, self.slot_codec):
            for given in option.values() if isinstance(option, Mapping) else [option]:
                CodecChoice.from_option(given)
        if not isinstance(self.stacks, Mapping):
            raise OptionError(f"stacks: expected a mapping, found {self.stacks!r}")
        for pattern, stack in self.stacks.items():
            if not isinstance(stack, StackedTable):
                raise OptionError(
                    f"stacks: expected a StackedTable for {pattern!r}, found {stack!r}"
                )
        if self.slots is not None and not isinstance(self.slots, Mapping):
            raise OptionError(f"slots: expected a mapping or None, found {self.slots!r}")
        for pattern, declared in (self.slots or {}).items():
            if not (
                isinstance(declared, Mapping) and all(isinstance(one, str) for one in declared)
            ):
                raise OptionError(
                    f"slots: expected a mapping from slot names to paths for {pattern!r}, found "
                    f"{declared!r}"
                )
            for select in declared.values():
                paths.check_select(select, "slots")
        if self.key is not None and not isinstance(self.key, (str, Mapping)):
            raise OptionError(f"key: expected a path, a mapping or None, found {self.key!r}")
        for select in self.key.values() if isinstance(self.key, Mapping) else ():
            paths.check_select(select, "key")
        for name in ("slots", "key", "codec", "slot_codec", "stacks"):
            given = getattr(self, name)
            for pattern in given if isinstance(given, Mapping) else ():
                paths.check_select(pattern, name)
        always = [self.always] if isinstance(self.always, str) else self.always
        if not (isinstance(always, Collection) and all(isinstance(one, str) for one in always)):
            raise OptionError(f"always: expected names of slots, found {always!r}")


_logger = logging.getLogger(__name__)

#: Why a dense leaf cannot be stored under its key, None where it can.
DenseFault = Callable[[Leaf, Sequence[str]], str | None]
#: Layouts that one Tables remembers; a training run has one or two.
_REMEMBERED = 16
#: Fewer bytes of slots in the dense part of each save cost nothing worth a warning.
_DENSE_SLOT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A split state.

    Attributes:
      layout: describes the parts.
      fields: table name to field name to leaf, (rows, *trailing).
      dense: nested dicts with string keys of the dense leaves.
      marks: the TouchStates of the state.
      codecs: group name to field name to codec choice.
      windows: for each gradient accumulator (``optax.MultiSteps``), scalars of the state: the
        number of updates that it has made, and the number of steps gathered for the next one.
    """

    layout: Layout
    fields: dict[str, dict[str, Leaf]]
    dense: dict[str, PyTree]
    marks: tuple[Marks, ...]
    codecs: dict[str, dict[str, CodecChoice]]
    windows: tuple[tuple[Leaf, Leaf], ...] = ()

    @property
    def touched(self) -> TouchState | None:
        """Returns the state's TouchStates as one, or None; see ``touch_state.combine``."""
        return touch_state.combine(marks.state for marks in self.marks)


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """What to take from which position of the flattened state."""

    layout: Layout
    #: Of dense leaves that are slots of tables by their structure.
    dense_slots: tuple[int, ...]
    averages: tuple[Average, ...]
    codecs: dict[str, dict[str, CodecChoice]]
    #: Name of a table, names of its fields, and what gets these from the leaves.
    fields: tuple[tuple[str, tuple[str, ...], Callable[[Sequence[Leaf]], tuple[Leaf, ...]]], ...]
    #: Their positions follow those of the leaves.
    views: tuple[stacks.StackedView, ...]
    dense: tuple[tuple[tuple[str, ...], int], ...]
    places: tuple[TouchSite, ...]
    windows: tuple[tuple[int, int], ...]


@dataclasses.dataclass(eq=False)
class _Known:
    """What is kept of one ``Tables``, which managers and Orbax's stateless handlers share."""

    #: Newest last: its shardings are those of the next state, too, if one jitted step has made
    #: both, and are quickly compared with themselves.
    plans: list[tuple[Hashable, _Plan]] = dataclasses.field(default_factory=list)
    #: Plans whose dense leaves can be stored, with the numbers of those whose value decides.
    storable: MutableMapping[_Plan, list[int]] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )
    #: Warnings that were issued.
    warned: set[str] = dataclasses.field(default_factory=set)

    def warns(self, kind: str) -> bool:
        """Returns whether to issue a warning, which is issued once."""
        is_new = kind not in self.warned
        self.warned.add(kind)
        return is_new


_known: weakref.WeakKeyDictionary[Tables, _Known] = weakref.WeakKeyDictionary()


def split(state: PyTree, tables: Tables, *, dense_fault: DenseFault | None = None) -> Split:
    """Splits a state into tables with slots, dense leaves and the TouchState.

    Args:
      state: any pytree: nested dicts, a flax ``TrainState``, an nnx state or module, tuples of
        them. Leaves may be ``jax.Array``, ``np.ndarray`` or abstract.
      tables: which leaves are tables.
      dense_fault: for a state to save: returns why a dense leaf cannot be stored under its key, or
        None. Called once per structure, and every time for leaves without a dtype.

    Returns:
      The parts; their leaves are the state's own, not copies.

    Raises:
      TableSelectionError: a pattern matches nothing, a selected leaf cannot be a table, a path
        names two leaves, or slots are ambiguous; the message lists the paths.
      UnsupportedLeaf: a dense leaf cannot be stored; a leaf is a tracer, or was deleted.
    """
    leaves, treedef = paths.flatten(state, touch_state.is_touch_state)
    if dense_fault is not None:
        _check_readable(state, leaves)
    plan = _plan_of(state, tables, leaves, treedef)
    if dense_fault is not None:
        known = _known.setdefault(tables, _Known())
        _check_storable(plan, leaves, dense_fault, known)
        _log_dense_slots(plan, leaves, known)
        _log_averages(plan, leaves, known)
        if tables.select is paths.DEFAULT_SELECT:
            _report_default(plan, known)
    held = [*leaves, *(view.of(leaves) for view in plan.views)] if plan.views else leaves
    fields = {name: dict(zip(names, of(held))) for name, names, of in plan.fields}
    dense = nest((key, _plain_empty(leaves[i])) for key, i in plan.dense)
    marks = tuple(Marks(path_name(place.path), _touched_at(place, leaves)) for place in plan.places)
    windows = tuple((leaves[updates], leaves[gathered]) for updates, gathered in plan.windows)
    return Split(plan.layout, fields, dense, marks, plan.codecs, windows)


def join(
    template: PyTree,
    layout: Layout,
    fields: Mapping[str, Mapping[str, object]],
    dense: Mapping[str, object],
    touched: TouchState | None,
) -> PyTree:
    """Puts the parts of a state together; the inverse of ``split``.

    Without a template, the state is nested dicts and lists, without TouchState. ``touched``
    replaces the template's TouchStates; None puts fresh ones.
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
    by_name |= {name: stacks.assembled(chunks) for name, chunks in stacks.by_leaf(by_name).items()}
    flat = paths.flatten_with_paths(template, touch_state.is_touch_state)
    leaves = list(flat.leaves)
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
            f"template: expected leaves that the step has, found more:\n{paths.listed(missing)}\n"
            "restore with a template of the saved structure, or without one"
        )
    return tree_util.tree_unflatten(flat.treedef, leaves)


def _plan_of(state: PyTree, tables: Tables, leaves: list[Leaf], treedef: object) -> _Plan:
    plans = _known.setdefault(tables, _Known()).plans
    key = (treedef, *_signature(leaves))
    try:
        found = next((one for one in reversed(plans) if one[0] == key), None)
    except (TypeError, ValueError):  # A static field that cannot be compared.
        return _find_plan(state, tables)
    if found is None:
        found = key, _find_plan(state, tables)
    plans[:] = [*(one for one in plans if one[1] is not found[1]), found][-_REMEMBERED:]
    return found[1]


def _signature(leaves: list[Leaf]) -> Iterator[tuple[object, ...]]:
    """Yields what determines a plan, apart from the structure."""
    # An abstract leaf of a template may look like the array that can be saved.
    yield tuple(map(type, leaves))
    # A tuple for each leaf would live on: after a few saves of a thousand tables, Python would
    # look through all its objects for garbage.
    for name in ("shape", "dtype", "sharding"):
        yield tuple([getattr(leaf, name, None) for leaf in leaves])


def check_touched(touched: TouchState | None) -> None:
    """Raises ``UnsupportedLeaf`` if an array of a TouchState passed by the caller has no values."""
    _check_readable({"touched": touched}, jax.tree.leaves(touched))


def _check_readable(state: PyTree, leaves: list[Leaf]) -> None:
    if not any(_any_unreadable(kind, leaves) for kind in {*map(type, leaves)}):
        return
    flat = paths.flatten_with_paths(state, touch_state.is_touch_state)
    named = (
        f"{path_name(path) or '(the state itself)'} {fault}"
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if (fault := _unreadable(leaf))
    )
    raise UnsupportedLeaf(
        f"save: expected leaves with values, found\n{paths.listed(named)}\n"
        "call save() and append() outside of jit, grad and scan, and pass the state that the "
        "training step returned: with donate_argnums a step deletes its argument"
    )


def _any_unreadable(kind: type, leaves: list[Leaf]) -> bool:
    """Returns whether a leaf of a type has no values; checking each leaf takes 5 % of a save."""
    if issubclass(kind, (Tracer, TouchState)):
        check: Callable[[Leaf], object] = _unreadable
    elif (found := getattr(kind, "is_deleted", None)) is not None:
        check = found
    else:
        return False
    return any(map(check, [leaf for leaf in leaves if type(leaf) is kind]))


def _unreadable(leaf: object) -> str | None:
    if isinstance(leaf, TouchState):
        return next(filter(None, map(_unreadable, jax.tree.leaves(leaf))), None)
    if isinstance(leaf, Tracer):
        return "is a tracer, without values"
    is_deleted = getattr(leaf, "is_deleted", None)
    return "was deleted" if is_deleted is not None and is_deleted() else None


def _check_storable(
    plan: _Plan, leaves: list[Leaf], dense_fault: DenseFault, known: _Known
) -> None:
    numbers = known.storable.get(plan)
    faults = []
    for number in range(len(plan.dense)) if numbers is None else numbers:
        key, place = plan.dense[number]
        if fault := dense_fault(leaves[place], key):
            name = path_name(plan.layout.dense[number].path) or "(the state itself)"
            faults.append(f"{paths.printable(name)} {fault}")
    if faults:
        raise UnsupportedLeaf(
            f"save: expected leaves that can be stored, found\n{paths.listed(faults)}\n"
            "convert each to an array of plain numbers (np.frombuffer(it, np.uint8) for bytes, "
            "it.view(np.int64) for dates, it.astype(np.uint8) for uint4, np.complex128(it)), or "
            "take it out of the state and pass it to save(items=...), e.g. as JSON"
        )
    if numbers is None:
        values = enumerate(leaves[i] for _, i in plan.dense)
        known.storable[plan] = [number for number, leaf in values if not hasattr(leaf, "dtype")]


def _log_dense_slots(plan: _Plan, leaves: list[Leaf], known: _Known) -> None:
    nbytes = sum(slots.bytes_of(leaves[i]) for i in plan.dense_slots)
    if nbytes < _DENSE_SLOT_BYTES or not known.warns("slots"):
        return
    paths_of = {i: entry.path for entry, (_, i) in zip(plan.layout.dense, plan.dense, strict=True)}
    names = paths.listed(path_name(paths_of[i]) for i in plan.dense_slots)
    events.warn(
        f"each save stores {nbytes / 1e6:.1f} MB of slots whole, since Tables(slots=...) names "
        f"other slots of their tables, or none:\n{names}\nomit slots=, so that they are found, or "
        "name each of them"
    )


def _log_averages(plan: _Plan, leaves: list[Leaf], known: _Known) -> None:
    nbytes = sum(slots.bytes_of(leaves[one.leaf]) for one in plan.averages)
    if nbytes >= _DENSE_SLOT_BYTES and known.warns("averages"):
        events.warn(slots.warning(plan.averages, leaves))


def _report_default(plan: _Plan, known: _Known) -> None:
    """Logs the tables that the default pattern selects, once; warns if it selects none."""
    if not known.warns("default"):
        return
    pattern = " or ".join(map(repr, paths.DEFAULT_SELECT))
    advice = 'CheckpointManager(handlers={"embeddings": Tables(select=...)})'
    if plan.layout.tables:
        found = ", ".join(f"{table.name} ({table.rows:,} rows)" for table in plan.layout.tables)
        _logger.info("tables: %s, selected by %s; to select others: %s", found, pattern, advice)
        return
    events.warn(
        f"no leaf matches {pattern} and has at least {paths.DEFAULT_MIN_ROWS:,} rows, so the state "
        f"has no table and all leaves are saved whole; select tables: {advice}, or declare that "
        "there are none: select=()"
    )


def _find_plan(state: PyTree, tables: Tables) -> _Plan:
    flat = paths.flatten_with_paths(state, touch_state.is_touch_state)
    places = tuple(touch_state.sites(flat))
    tracked = {i for place in places for i in place.positions}
    optimizer = slots.optimizer_leaves(state, flat)
    found = _choose(flat, tables, tracked, optimizer)
    taken = {i for table in found for i, _ in table.fields.values()} | tracked
    dense = [i for i in range(len(flat.leaves)) if i not in taken]
    _check_dense_keys([flat.paths[i] for i in dense])
    members, expanded, views = stacks.expanded(found, flat, tables.stacks)
    grouped = group_tables(members, expanded, tables.codec, tables.slot_codec)
    layout = Layout(
        grouped.groups,
        grouped.tables,
        tuple(DenseEntry(path=flat.paths[i], key=_dense_key(flat.paths[i])) for i in dense),
        tuple(place.path for place in places),
    )
    fields = tuple(
        (table.name, tuple(table.fields), _getter([i for i, _ in table.fields.values()]))
        for table in members
    )
    # A plan outlives the state: it keeps the position of the TouchState, not its arrays.
    kept = tuple(place._replace(touched=TouchState(None, {}, None)) for place in places)  # pyright: ignore[reportArgumentType]
    keys = tuple((_dense_key(flat.paths[i]), i) for i in dense)
    dense_slots = _dense_slots(flat, tables, found, taken, optimizer)
    windows = _windows(flat)
    chosen = {table.fields[row_blocks.VALUES][0] for table in found}
    outside = [i for i in dense if optimizer[i] is None]
    likely = slots.averages_of(flat.paths, flat.leaves, chosen, outside)
    return _Plan(layout, dense_slots, likely, grouped.choices, fields, views, keys, kept, windows)


def _getter(positions: Sequence[int]) -> Callable[[Sequence[Leaf]], tuple[Leaf, ...]]:
    """Returns what gets the leaves at some positions; for one, ``itemgetter`` has no tuple."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    [only] = positions
    return lambda leaves: (leaves[only],)


def _windows(flat: Flat) -> tuple[tuple[int, int], ...]:
    """Returns positions of the counters of each ``optax.MultiSteps``: updates, steps."""
    at = {path: i for i, path in enumerate(flat.paths)}
    names: dict[KeyPath, dict[str | int, int]] = {}
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
    """Returns positions of leaves that are slots of tables by structure, and were not declared."""
    if tables.slots is None:
        return ()
    chosen = [table.fields[row_blocks.VALUES][0] for table in found]
    with contextlib.suppress(TableSelectionError):  # It is ambiguous whose they are.
        all_slots = slots.find_slots(flat, chosen, optimizer)
        return tuple(sorted({slot.leaf for slot in all_slots} - taken))
    return ()


def _choose(
    flat: Flat, tables: Tables, tracked: set[int], optimizer: list[bool | None]
) -> list[TableFields]:
    names = flat.names
    usable = [
        i for i in range(len(names)) if i not in tracked and not paths.is_empty(flat.leaves[i])
    ]
    outside = [i for i in usable if optimizer[i] is None]
    chosen = paths.choose(tables.select, flat, outside)
    paths.check_tables("select", flat, chosen)
    found = {i: TableFields(names[i], {row_blocks.VALUES: (i, False)}) for i in chosen}
    explicit = _explicit_slots(tables, found, flat, usable)
    if tables.slots is None or tables.slots:
        searched = [i for i in chosen if i not in explicit]
        for slot in slots.find_slots(flat, searched, optimizer):
            if slot.leaf not in tracked:
                always = slot.always or slots.is_always(slot.name, tables.always)
                found[slot.table].fields[row_blocks.slot_field(slot.name)] = (slot.leaf, always)
    _add_keys(tables, found, flat, usable)
    _check_always(tables.always, found)
    _check_taken_once(found, names)
    _check_names([names[i] for table in found.values() for i, _ in table.fields.values()], names)
    return sorted(found.values(), key=lambda table: table.name)


def _check_names(taken: list[str], names: list[str]) -> None:
    """Checks the paths of tables and slots, by which a restore finds a template's leaves."""
    counts = collections.Counter(names)
    clashes = {name for name in taken if counts[name] > 1}
    if clashes:
        raise TableSelectionError(
            f"select: each of these paths names more than one leaf:\n{paths.listed(clashes)}\n"
            "a key that contains '/' looks like two; rename it"
        )
    halves = [shown for name in taken if (shown := paths.printable(name)) != name]
    if halves:
        raise TableSelectionError(
            f"select: these paths have lone surrogates, and are not valid Unicode:\n"
            f"{paths.listed(halves)}\nrename them"
        )


def _explicit_slots(
    tables: Tables, found: dict[int, TableFields], flat: Flat, usable: list[int]
) -> set[int]:
    """Gives tables the slots that the user declared; returns positions of these tables."""
    concerned = set()
    for pattern, declared in (tables.slots or {}).items():
        for i in _matching("slots", pattern, found):
            concerned.add(i)
            for slot, select in declared.items():
                leaf = _declared_leaf(found[i].name, slot, select, flat, usable)
                rows, shape = flat.leaves[i].shape[0], getattr(flat.leaves[leaf], "shape", ())
                fault = paths.table_fault(flat.leaves[leaf])
                if fault or shape[:1] != (rows,):
                    raise TableSelectionError(
                        f"slots: slot {slot!r} of table {found[i].name}: expected {rows} rows, "
                        f"found that {flat.names[leaf]} {fault or f'has shape {tuple(shape)}'}"
                    )
                always = slots.is_always(slot, tables.always)
                found[i].fields[row_blocks.slot_field(slot)] = (leaf, always)
    return concerned


def _add_keys(tables: Tables, found: dict[int, TableFields], flat: Flat, usable: list[int]) -> None:
    if tables.key is None:
        return
    field = row_blocks.slot_field(row_blocks.KEY_SLOT)
    declared = {"**": tables.key} if isinstance(tables.key, str) else tables.key
    for pattern, select in declared.items():
        for i in _matching("key", pattern, found):
            table = found[i]
            if field in table.fields:
                raise TableSelectionError(
                    f"key: expected one key column and no slot {row_blocks.KEY_SLOT!r} of table "
                    f"{table.name}, found two; name one of them"
                )
            leaf = _declared_leaf(table.name, row_blocks.KEY_SLOT, select, flat, usable)
            rows, column = flat.leaves[i].shape[0], flat.leaves[leaf]
            fault = paths.table_fault(column) or vocab.column_fault(column.shape, column.dtype)
            if fault or column.shape[0] != rows:
                raise TableSelectionError(
                    f"key: table {table.name}, {flat.names[leaf]}: "
                    f"{fault or f'expected {rows} rows, found {column.shape[0]}'}"
                )
            table.fields[field], table.key = (leaf, False), field


def _matching(option: str, pattern: str, found: dict[int, TableFields]) -> list[int]:
    paths.matching(option, pattern, (table.name for table in found.values()))
    return [i for i, table in found.items() if paths.matches(pattern, table.name)]


def _declared_leaf(table: str, slot: str, select: Select, flat: Flat, usable: list[int]) -> int:
    """Returns the position of the one leaf that a declared slot names."""
    if isinstance(select, str):
        select = select.replace("{table}", table).replace("{name}", table.rpartition("/")[2])
    matched = paths.choose(select, flat, usable)
    if len(matched) != 1:
        raise TableSelectionError(
            f"slots: slot {slot!r} of table {table}: expected one leaf, found\n"
            f"{paths.listed(flat.names[i] for i in matched)}\n"
            "'{table}' and '{name}' in a path are replaced by the table's path and its last "
            "component"
        )
    return matched[0]


def _check_always(always: Sequence[str], found: dict[int, TableFields]) -> None:
    names = {
        field.removeprefix(row_blocks.slot_field(""))
        for table in found.values()
        for field in table.fields
        if field != row_blocks.VALUES
    }
    for pattern in [always] if isinstance(always, str) else always:
        if not any(slots.is_always(name, pattern) for name in names):
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
            "declare the slots with Tables(slots={table pattern: {slot name: path}})"
        )


def _dense_key(path: KeyPath) -> tuple[str, ...]:
    """Returns the key of a dense leaf. Orbax joins keys with '.', so a '.' is escaped."""
    return tuple(str(step).replace("%", "%25").replace(".", "%2E") or "%" for _, step in path) or (
        "%",
    )


def _check_dense_keys(found: Sequence[KeyPath]) -> None:
    """Checks that no dense leaf would be stored in the place of another one, or inside it."""
    held = sorted((_dense_key(path), number) for number, path in enumerate(found))
    # Sorted keys with the same leading path components are adjacent.
    clashes = {
        path_name(found[number])
        for (key, number), (other, _) in itertools.pairwise(held)
        if other[: len(key)] == key
    }
    if clashes:
        raise TableSelectionError(
            f"state: each of these paths names more than one leaf:\n{paths.listed(clashes)}\n"
            "keys are stored as text, so 1 and '1' are equal; rename one of them"
        )


def _plain_empty(leaf: object) -> object:
    """Replaces an empty container that Orbax would not know by one of a plain type, or None."""
    if not paths.is_empty(leaf) or leaf is None:
        return leaf
    if isinstance(leaf, dict):
        return {}
    return None if hasattr(type(leaf), "_fields") else []


def _touched_at(site: TouchSite, leaves: list[Leaf]) -> TouchState:
    found = [leaves[i] for i in site.positions]
    return touch_state.from_leaves(found, site.names) if site.names else touch_state.plain(found[0])


def _put_touched(site: TouchSite, leaves: list[Leaf], touched: TouchState | None) -> None:
    """Puts ``touched``, else a fresh TouchState, where the template has one."""
    wanted = site.touched.stamps
    given = touched if touched is not None else touch_state.fresh(site.touched)
    if absent := wanted.keys() - given.stamps.keys():
        raise TrackingError(
            f"{path_name(site.path)}: the given TouchState lacks tables\n{paths.listed(absent)}"
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
