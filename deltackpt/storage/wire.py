# SPDX-License-Identifier: Apache-2.0
"""The HTTP/1.1 that nodes speak to each other: a subset, read strictly.

What two readers could take for two things is refused: a field that comes twice, a line that does
not end in CR LF, a key that has another spelling. Lengths are bounded before anything is kept.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable
from typing import NamedTuple

#: Of a request or an answer, without its body.
MOST_HEAD_BYTES = 8192
_MOST_FIELDS = 32
#: Of a key, in UTF-8; a file system takes names of 255.
MOST_KEY_BYTES = 1024
#: Keys of one answer to a listing.
PAGE = 1000
#: Of who asks a node for what it holds itself: it asks no other one.
DIRECT = "Deltackpt-Direct"
HEAD_END = b"\r\n\r\n"
_REQUEST = re.compile(rb"([A-Z]{3,6}) (/[!-~]{0,6000}) HTTP/1\.1")
_ANSWER = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2})(?: [ -~]*)?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([ -~\t]*?)[ \t]*")
_LENGTH = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


class Malformed(ValueError):
    """What came is none of these messages; whoever sent it is not listened to any longer."""


class Head(NamedTuple):
    """A request or an answer without its body.

    Attributes:
      first: method and target, or the status alone.
      fields: values by their names in lower case.
    """

    first: tuple[str, ...]
    fields: dict[str, str]

    @property
    def nbytes(self) -> int | None:
        """Bytes of the body, where it is said.

        Raises:
          Malformed: it is no number; or the body is to come in chunks.
        """
        if "transfer-encoding" in self.fields:
            raise Malformed("Transfer-Encoding")
        found = self.fields.get("content-length")
        if found is None:
            return None
        if not _LENGTH.fullmatch(found):
            raise Malformed("Content-Length")
        return int(found)


def request(head: bytes) -> Head:
    """A request, up to its empty line.

    Raises:
      Malformed: it is none.
    """
    return _parsed(head, _REQUEST)


def answer(head: bytes) -> Head:
    """An answer, up to its empty line.

    Raises:
      Malformed: it is none.
    """
    return _parsed(head, _ANSWER)


def _parsed(head: bytes, pattern: re.Pattern[bytes]) -> Head:
    first, *lines = head.removesuffix(HEAD_END).split(b"\r\n")
    found = pattern.fullmatch(first)
    if found is None or len(lines) > _MOST_FIELDS:
        raise Malformed("first line" if found is None else "too many fields")
    fields: dict[str, str] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise Malformed("field")
        name = field[1].decode("ascii").lower()
        if name in fields:
            raise Malformed("field that comes twice")
        fields[name] = field[2].decode("ascii")
    return Head(tuple(each.decode("ascii") for each in found.groups()), fields)


def head(first: str, fields: Iterable[tuple[str, object]]) -> bytes:
    """A request or an answer as bytes, without its body."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"{first}\r\n{lines}\r\n".encode("ascii")


def target_of(key: str) -> str:
    """The target of a key."""
    return "/" + urllib.parse.quote(key, safe="/")


def key_of(path: str) -> str:
    """The key of a target, without its query; "" of the node itself.

    Raises:
      Malformed: no store has such a key, or it would lead out of where keys are.
    """
    if path == "/":
        return ""
    names = [_name_of(each) for each in path[1:].split("/")]
    key = "/".join(names)
    if len(key.encode()) > MOST_KEY_BYTES:
        raise Malformed("key")
    return key


def _name_of(quoted: str) -> str:
    try:
        name = urllib.parse.unquote(quoted, errors="strict")
    except UnicodeDecodeError as error:
        raise Malformed("key") from error
    if name in ("", ".", "..") or "/" in name or any(c < " " or c == "\x7f" for c in name):
        raise Malformed("key")
    return name


def is_key(key: str) -> bool:
    """Whether a node takes a key."""
    try:
        return bool(key) and key_of(target_of(key)) == key
    except (Malformed, UnicodeEncodeError):
        return False


def span_of(text: str | None, nbytes: int) -> tuple[int, int] | None:
    """First byte and end of a range of an object; None of one that lies behind its end.

    Args:
      text: the field Range; all of the object where there is none.
      nbytes: of the object.

    Raises:
      Malformed: it is none, or several.
    """
    if text is None:
        return 0, nbytes
    found = _RANGE.fullmatch(text)
    if found is None or found[1] == found[2] == "":
        raise Malformed("Range")
    if not found[1]:
        return (max(0, nbytes - int(found[2])), nbytes) if int(found[2]) and nbytes else None
    first, stop = int(found[1]), min(nbytes, int(found[2]) + 1) if found[2] else nbytes
    if found[2] and int(found[2]) < first:
        raise Malformed("Range")
    return (first, stop) if first < nbytes else None


def content_range(text: str) -> tuple[int, int, int]:
    """First byte, end, and bytes of the whole object, of an answer with a part of it.

    Raises:
      Malformed: they are none.
    """
    found = _CONTENT_RANGE.fullmatch(text)
    if found is None:
        raise Malformed("Content-Range")
    first, last, total = map(int, found.groups())
    if not first <= last < total:
        raise Malformed("Content-Range")
    return first, last + 1, total
