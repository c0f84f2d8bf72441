# SPDX-License-Identifier: Apache-2.0
"""Writes the reference page of all options from the dataclasses of deltackpt.options.

python tools/options_page.py docs/reference/options.md
python tools/options_page.py > options.md

It reads types and defaults from the fields, effects from the `Attributes:` section of each
docstring, and units from the suffix of the name. A new class or option needs no change here.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import re
import sys
import types
import typing
from pathlib import Path

import deltackpt
from deltackpt import options

_HEAD = """\
<!-- Written by tools/options_page.py: change the docstrings in deltackpt/options.py instead. -->

# Options

Pass a `ManagerOptions` to `CheckpointManager(options=...)`.
Options are keyword arguments of frozen dataclasses, unless marked as positional.
Invalid values raise `OptionError` when the object is created.
No environment variable changes an option.
"""
#: Suffix of a name to the unit of its value, the longest first.
_UNITS = {
    "bytes_per_sec": "bytes/s",
    "bytes": "bytes",
    "nbytes": "bytes",
    "secs": "s",
    "steps": "steps",
    "ratio": "ratio",
}
_INLINE = re.compile(r"``(.+?)``")
_MISSING = dataclasses.MISSING


class UndocumentedOption(Exception):
    """An option that the docstring of its class does not describe."""


def main() -> None:
    """Runs the command line."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(sys.argv[1]).write_text(page())
    else:
        sys.stdout.write(page())


def page() -> str:
    """Text of the whole page."""
    found = classes()
    contents = ",\n".join(f"[`{cls.__name__}`](#{cls.__name__.lower()})" for cls in found)
    return f"{_HEAD}\n{contents}.\n" + "".join(_section(cls, found) for cls in found)


def classes() -> list[type]:
    """Public dataclasses of deltackpt.options; each before the classes of its fields."""
    found = [
        value
        for name, value in vars(options).items()
        if dataclasses.is_dataclass(value)
        and isinstance(value, type)
        and f"{value.__module__}.".startswith(f"{options.__name__}.")
        and not name.startswith("_")
    ]
    order: list[type] = []

    def visit(cls: type) -> None:
        if cls in order:
            return
        order.append(cls)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            for other in found:
                if other in _parts(hints[field.name]):
                    visit(other)

    held = {
        other
        for cls in found
        for hint in typing.get_type_hints(cls).values()
        for other in _parts(hint)
    }
    for cls in [cls for cls in found if cls not in held]:
        visit(cls)
    return order


def _parts(hint: object) -> set[object]:
    """A type and all types inside it."""
    if typing.get_origin(hint) in (typing.Literal, collections.abc.Callable):
        return set()
    return {hint}.union(*(_parts(inner) for inner in typing.get_args(hint)))


def _section(cls: type, known: list[type]) -> str:
    effects, before, after = _documented(cls)
    hints = typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if field.name not in effects:
            raise UndocumentedOption(f"{cls.__name__}.{field.name}")
        name = f"`{field.name}`" + ("" if field.kw_only else " (positional)")
        unit = next((unit for end, unit in _UNITS.items() if _ends(field.name, end)), "")
        kind = _type(hints[field.name], known) + (f" ({unit})" if unit else "")
        cells = [name, kind, _default(field), effects[field.name]]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    table = "\n".join(["| option | type | default | effect |", "| --- | --- | --- | --- |", *rows])
    where = next(
        (f"deltackpt.{name}" for name in _homes(cls)), f"{cls.__module__}.{cls.__qualname__}"
    )
    text = f"\n## {cls.__name__}\n\n`{where}`\n\n{before}\n\n{table}\n"
    return text + (f"\n{after}\n" if after else "")


def _homes(cls: type) -> list[str]:
    """Public names of a class below deltackpt."""
    found = []
    if cls.__name__ in deltackpt.__all__:
        found.append(cls.__name__)
    for module in ("tiers", "wal", "policies", "handlers"):
        try:
            imported = __import__(f"deltackpt.{module}", fromlist=["_"])
        except ImportError:
            continue
        if cls.__name__ in dir(imported):
            found.append(f"{module}.{cls.__name__}")
    return found


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f"_{end}")


def _documented(cls: type) -> tuple[dict[str, str], str, str]:
    """Effects by option, and the text of the docstring before and after its `Attributes:`."""
    before, _, rest = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    effects: dict[str, str] = {}
    lines = rest.splitlines()
    name = None
    for number, line in enumerate(lines):
        if line and not line.startswith(" "):
            lines = lines[number:]
            break
        if match := re.fullmatch(r" {2}(\w+)(?: \(.*?\))?: (.*)", line):
            name = match[1]
            effects[name] = match[2]
        elif line.strip() and name is not None:
            effects[name] += " " + line.strip()
    else:
        lines = []
    after = re.sub(
        r"^(?:Examples?|Raises):.*", "", "\n".join(lines), flags=re.DOTALL | re.MULTILINE
    )
    return {name: _markdown(text) for name, text in effects.items()}, *map(_prose, (before, after))


def _prose(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(_markdown(" ".join(piece.split())) for piece in paragraphs if piece)


def _markdown(text: str) -> str:
    """Text of a docstring as Markdown, with a capital first letter."""
    text = _INLINE.sub(r"`\1`", text)
    return text[:1].upper() + text[1:]


def _type(hint: object, known: list[type]) -> str:
    """Readable name of a type: alternatives joined by "or", no module names."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{_literal(value)}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(piece, known) for piece in inner)
    if origin in (
        collections.abc.Collection,
        collections.abc.Sequence,
        list,
        tuple,
        set,
        frozenset,
    ):
        return f"collection of {_type(inner[0], known)}"
    if origin in (collections.abc.Mapping, dict):
        return f"mapping of {_type(inner[0], known)} to {_type(inner[1], known)}"
    if origin is collections.abc.Callable:
        return f"function that returns {_type(inner[-1], known)}"
    if hint is type(None):
        return "`None`"
    if hint in known:
        name = hint.__name__  # pyright: ignore[reportAttributeAccessIssue]
        return f"[`{name}`](#{name.lower()})"
    return f"`{getattr(hint, '__name__', None) or str(hint)}`"


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not _MISSING:
        return f"`{_literal(field.default_factory())}`"
    if field.default is _MISSING:
        return "required"
    return _size(field.default) or f"`{_literal(field.default)}`"


def _size(value: object) -> str | None:
    """A large integer in binary units, or None."""
    if isinstance(value, int) and value >= 1 << 20:
        for shift, unit in ((30, "GiB"), (20, "MiB")):
            if value % (1 << shift) == 0:
                return f"{value >> shift} {unit}"
    return None


def _literal(value: object) -> str:
    """Source code of a value."""
    if isinstance(value, str):
        return f'"{value}"'
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}()"
    return repr(value)


if __name__ == "__main__":
    main()
