# SPDX-License-Identifier: Apache-2.0
"""Which handler of ``CheckpointManager(handlers=...)`` is for what, and what it is given."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from deltackpt.errors import OptionError
from deltackpt.format import names
from deltackpt.state.choice import Tables

_EXAMPLE = "{'embeddings': Tables(select='params/emb/*')}"


def sorted_handlers(
    handlers: Mapping[str, Any] | None,
) -> tuple[str, Tables, dict[str, ocp.CheckpointHandler]]:
    """Tells our item from Orbax's.

    Args:
      handlers: item names to what handles them.

    Returns:
      Name and tables of our item, and the other handlers.

    Raises:
      OptionError: there is not exactly one ``Tables``, another value is no handler, or a name
        cannot be that of an item.
    """
    if handlers is not None and not isinstance(handlers, Mapping):
        raise OptionError(
            "handlers: expected a mapping of item names to what handles them, found "
            f"{_kind(handlers)}; give e.g. {_EXAMPLE}"
        )
    given = dict(handlers or {names.EMBEDDINGS_ITEM: Tables(select="**/embedding")})
    ours = {name: choice for name, choice in given.items() if isinstance(choice, Tables)}
    if len(ours) != 1:
        raise OptionError(
            "handlers: expected exactly one item with a deltackpt.Tables, found "
            f"{sorted(map(str, ours)) or 'none'}; give e.g. {_EXAMPLE}"
        )
    for name in given:
        if not names.is_item_name(name):
            raise OptionError(
                f"handlers[{name!r}]: expected a name that one folder of a step can have, found "
                f"one that is reserved ({names.DENSE_ITEM!r} holds the leaves that are neither "
                "tables nor slots) or no name of a folder; call the item something else"
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
    return item, chosen, others


def save_args(
    items: Mapping[str, Any] | None, handlers: dict[str, Any], tables: str
) -> dict[str, ocp.args.CheckpointArgs]:
    """Save arguments of further items, as they are now.

    Orbax's handlers copy arrays before ``save()`` returns; JSON and protobuf values they read
    when they write, and what the caller has changed by then would be saved.

    Args:
      items: item names to save arguments, as the user gave them.
      handlers: of further items, by name; one for JSON is added for each new name of such.
      tables: the name of our own item.

    Raises:
      OptionError: no handler takes them.
    """
    checked = _checked(items, handlers, tables, 0)
    return {name: _as_it_is(name, args) for name, args in checked.items()}


def restore_args(
    items: Mapping[str, Any] | None, handlers: dict[str, Any], tables: str
) -> dict[str, ocp.args.CheckpointArgs]:
    """Restore arguments of further items; None among them leaves an item to its handler.

    Raises:
      OptionError: no handler takes them.
    """
    return _checked(items, handlers, tables, 1)


def _checked(items: Any, handlers: dict[str, Any], tables: str, use: int) -> dict[str, Any]:
    """Items, each with arguments of the class that its handler saves (0) or restores (1) by."""
    if items is None:
        return {}
    if not isinstance(items, Mapping):
        raise OptionError(
            f"items: expected a mapping of item names to Orbax arguments, found {_kind(items)}; "
            "give e.g. {'progress': ocp.args.JsonSave({'epoch': 3})}"
        )
    for name, args in items.items():
        is_json = isinstance(args, (ocp.args.JsonSave, ocp.args.JsonRestore))
        if is_json and name != tables and names.is_item_name(name):
            handlers.setdefault(name, ocp.JsonCheckpointHandler())
        if name not in handlers:
            raise OptionError(
                f"items[{name!r}]: expected one of the further items that the manager has handlers "
                f"of, {sorted(handlers)}, found another name; give the manager what handles it, as "
                "in handlers={..., 'progress': ocp.JsonCheckpointHandler()} (the state itself is "
                "none: it goes in by save(step, state))"
            )
        handler = handlers[name]
        known = ocp.args.has_registered_args(handler)
        wanted = ocp.args.get_registered_args_cls(handler)[use] if known else None
        if (use and args is None) or (wanted is None and isinstance(args, ocp.args.CheckpointArgs)):
            continue
        if wanted is None or type(args) is not wanted:
            shown = "Orbax arguments" if wanted is None else wanted.__name__
            raise OptionError(
                f"items[{name!r}]: expected {shown}, which {type(handler).__name__} takes, found "
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
            f"items[{name!r}]: expected a value that JSON can hold, found that {error}; turn it "
            "into plain numbers, texts, lists and dicts first (float(x), x.tolist())"
        ) from error


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def json_args(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Save arguments of items that are what JSON can write; None without any."""
    return {name: ocp.args.JsonSave(value) for name, value in values.items()} or None
