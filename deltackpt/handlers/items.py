# SPDX-License-Identifier: Apache-2.0
"""Additional items of a step: their handlers, arguments and Orbax writers."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from deltackpt.errors import OptionError
from deltackpt.format import naming
from deltackpt.lazy_import import ocp
from deltackpt.resources.runtime import Runtime
from deltackpt.save.commit import StepWriters
from deltackpt.state import paths
from deltackpt.state.tables import Tables
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.posix import fsync_tree

#: Item name to the argument for its handler.
Items = Mapping[str, object]


class HandlerItem:
    """An item that a handler writes; see ``commit.Item``."""

    def __init__(self, handler: Any, item_dir: Path, args: Any, runtime: Runtime):
        """Makes the handler capture its data; training may continue afterwards.

        ``item_dir`` exists, in the step's temporary directory; ``runtime`` is a thread for work
        that cannot be done in a running event loop.
        """
        # Orbax is imported for its handlers alone.
        from deltackpt.handlers.orbax_private import AsyncCheckpointHandler

        self._handler, self._futures, directory = handler, list[Any](), epath.Path(item_dir)
        if isinstance(handler, AsyncCheckpointHandler):
            self._futures = _awaited(handler.async_save(directory, args=args), runtime) or []
        else:
            handler.save(directory, args=args)

    def write(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        """See ``commit.Item``."""
        for future in self._futures:
            future.result()
        if writers.count == 1:
            return
        if not writers.shared_fs:
            self._adopt_own(item_dir, batch, writers)
            return
        for own in _own(item_dir, writers.process):
            batch.adopt(own)
        # Whichever process wrote the rest, this process's share is on disk.
        fsync_tree(item_dir, while_others_write=True)

    def _adopt_own(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        """Adds what this process wrote; arrays of several processes cannot be merged."""
        if _own(item_dir, writers.process):
            raise OptionError(
                f"item {item_dir.name}: expected one that {type(self._handler).__name__} writes on "
                "one process, with Tiers(shared=False), found arrays of several processes in it; "
                "use a staging directory that all processes see, or keep unusual leaves (strings "
                "and PRNG keys of several processes) out of the state"
            )
        if writers.process > 0:
            batch.adopt(item_dir)

    def complete(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        """See ``commit.Item``."""
        self._handler.finalize(epath.Path(item_dir))
        digested = [own for process in range(1, writers.count) for own in _own(item_dir, process)]
        batch.adopt(item_dir, but=digested)


class Metrics:
    """The user's metrics of a step, stored as Orbax stores them; see ``commit.Item``."""

    def __init__(self, metrics: Mapping[str, float]):
        self._text = json.dumps(dict(metrics))

    def write(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        """Writes the metrics, on process 0."""
        if writers.process == 0:
            batch.write(item_dir / naming.METRICS, self._text.encode())

    def complete(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        """Does nothing."""


def _own(item_dir: Path, process: int) -> list[Path]:
    """Returns the existing directories that Orbax's PyTree handler assigns to one process."""
    folder = item_dir / naming.dense_process_dir(process)
    return [folder] if folder.is_dir() else []


def _awaited(call: Any, runtime: Runtime) -> Any:
    """Returns the result of a coroutine, also in a notebook, whose thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(call)
    return runtime.start(asyncio.run, call).result()


_EXAMPLE = "{'embeddings': Tables(select='params/emb/*')}"


class Handlers(NamedTuple):
    """The name and the tables of deltackpt's item, and the handlers of additional items."""

    item: str
    tables: Tables
    others: dict[str, ocp.CheckpointHandler]


def sorted_handlers(handlers: Mapping[str, Any] | None) -> Handlers:
    """Checks the handlers that a manager is opened with."""
    if handlers is not None and not isinstance(handlers, Mapping):
        raise OptionError(
            "handlers: expected a mapping of item names to handlers, found "
            f"{_kind(handlers)}; pass e.g. {_EXAMPLE}"
        )
    given = dict(handlers or {naming.EMBEDDINGS_ITEM: Tables(select=paths.DEFAULT_SELECT)})
    ours = {name: choice for name, choice in given.items() if isinstance(choice, Tables)}
    if len(ours) != 1:
        default = (
            f"; without handlers, the tables are large leaves that match {paths.DEFAULT_SELECT}"
        )
        raise OptionError(
            "handlers: expected exactly one item with a deltackpt.Tables, found "
            f"{sorted(map(str, ours)) or 'none'}; pass e.g. {_EXAMPLE}{'' if ours else default}"
        )
    for name in given:
        if not naming.is_item_name(name):
            raise OptionError(
                f"handlers[{name!r}]: expected a valid directory name, found one that is invalid "
                f"or reserved ({naming.DENSE_ITEM!r} contains the leaves that are neither tables "
                "nor slots); choose another name"
            )
    [(item, chosen)] = ours.items()
    others = {name: handler for name, handler in given.items() if name != item}
    for name, handler in others.items():
        # By its methods: grain's handler, for one, names no base class.
        works = all(callable(getattr(handler, call, None)) for call in ("save", "restore"))
        if not works or isinstance(handler, type):
            raise OptionError(
                f"handlers[{name!r}]: expected an Orbax CheckpointHandler, such as "
                f"ocp.JsonCheckpointHandler(), found {_kind(handler)}"
            )
    return Handlers(item, chosen, others)


def save_args(
    items: Mapping[str, Any] | None, handlers: dict[str, Any], tables: str
) -> dict[str, ocp.args.CheckpointArgs]:
    """Returns the save arguments of additional items, as they are now.

    Orbax's handlers copy arrays before ``save()`` returns, but read JSON and protobuf values when
    they write them, so that a later change by the caller would be saved. These are copied here.
    Adds a JSON handler to ``handlers`` for each new JSON item.
    """
    checked = _checked(items, handlers, tables, 0)
    return {name: _as_it_is(name, args) for name, args in checked.items()}


def restore_args(
    items: Mapping[str, Any] | None, handlers: dict[str, Any], tables: str
) -> dict[str, ocp.args.CheckpointArgs]:
    """Returns the restore arguments of additional items; None leaves an item to its handler."""
    return _checked(items, handlers, tables, 1)


def _checked(items: Any, handlers: dict[str, Any], tables: str, use: int) -> dict[str, Any]:
    """Returns items with arguments of the class that their handlers save (0) or restore (1) by."""
    if items is None:
        return {}
    if not isinstance(items, Mapping):
        raise OptionError(
            f"items: expected a mapping of item names to Orbax arguments, found {_kind(items)}; "
            "pass e.g. {'progress': ocp.args.JsonSave({'epoch': 3})}"
        )
    for name, args in items.items():
        is_json = isinstance(args, (ocp.args.JsonSave, ocp.args.JsonRestore))
        if is_json and name != tables and naming.is_item_name(name):
            handlers.setdefault(name, ocp.JsonCheckpointHandler())
        if name not in handlers:
            raise OptionError(
                f"items[{name!r}]: expected one of the items with a handler, {sorted(handlers)}, "
                "found another name; pass the manager a handler for it, as in "
                "handlers={..., 'progress': ocp.JsonCheckpointHandler()} (the state itself is not "
                "an item: pass it as save(step, state))"
            )
        handler = handlers[name]
        known = ocp.args.has_registered_args(handler)
        wanted = ocp.args.get_registered_args_cls(handler)[use] if known else None
        if (use and args is None) or (wanted is None and isinstance(args, ocp.args.CheckpointArgs)):
            continue
        if wanted is None or type(args) is not wanted:
            shown = "Orbax arguments" if wanted is None else wanted.__name__
            raise OptionError(
                f"items[{name!r}]: expected {shown} for {type(handler).__name__}, found "
                f"{_kind(args)}; wrap it, as in ocp.args.JsonSave({{...}}) or "
                "ocp.args.JsonRestore() for JSON"
            )
    return dict(items)


def _as_it_is(name: str, args: Any) -> Any:
    if isinstance(args, ocp.args.ProtoSave):
        return dataclasses.replace(args, item=copy.deepcopy(args.item))
    if not isinstance(args, ocp.args.JsonSave):
        return args
    try:
        return dataclasses.replace(args, item=json.loads(json.dumps(args.item)))
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"items[{name!r}]: expected a JSON value, found that {error}; convert it to plain "
            "numbers, strings, lists and dicts first (float(x), x.tolist())"
        ) from error


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def json_args(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns save arguments of JSON items, or None."""
    return {name: ocp.args.JsonSave(value) for name, value in values.items()} or None
