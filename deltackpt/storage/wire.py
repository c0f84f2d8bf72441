# SPDX-License-Identifier: Apache-2.0
"""The strict subset of HTTP/1.1 that nodes use.

Anything ambiguous is rejected: repeated fields, lines without CR LF, keys with another spelling.
Lengths are limited before data is stored.
"""

from __future__ import annotations

import itertools
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import NamedTuple

#: Maximum size of a request's or an answer's head.
MOST_HEAD_BYTES = 8192
_MOST_FIELDS = 32
#: Maximum length of a key in UTF-8; file systems limit names to 255.
MOST_KEY_BYTES = 1024
#: Maximum number of keys in one answer to a listing.
PAGE = 1000
#: Maximum size of such an answer: a byte of a key is at most three bytes of its target.
MOST_PAGE_BYTES = PAGE * (3 * MOST_KEY_BYTES + 2)
#: Header of a request for the node's own objects only: the node queries no other one.
DIRECT = "Deltackpt-Direct"
HEAD_END = b"\r\n\r\n"
_REQUEST = re.compile(rb"([A-Z]{3,6}) (/[!-~]{0,6000}) HTTP/1\.1")
_ANSWER = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2})(?: [ -~]*)?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([ -~\t]*?)[ \t]*")
_SENDABLE = re.compile(r"[ -~]*")
_LENGTH = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


class Malformed(ValueError):
    """The received bytes are not a valid message; the connection is closed."""


class Head(NamedTuple):
    """The head of a request or an answer.

    Attributes:
      first: method and target, or the status.
      fields: values by lower-case name.
    """

    first: tuple[str, ...]
    fields: dict[str, str]

    @property
    def nbytes(self) -> int | None:
        """Length of the body, if given.

        Raises:
          Malformed: it is not a number, or the body is chunked.
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
    """Parses the head of a request, up to its empty line.

    Raises:
      Malformed: it is not a request.
    """
    return _parsed(head, _REQUEST)


def answer(head: bytes) -> Head:
    """Parses the head of an answer, up to its empty line.

    Raises:
      Malformed: it is not an answer.
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
    """Encodes the head of a request or an answer.

    Raises:
      Malformed: a field has a line break or is not ASCII; the error does not show it.
    """
    fields = [*fields]
    if not all(_SENDABLE.fullmatch(str(value)) for _, value in fields):
        raise Malformed("a field that cannot be sent")
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"{first}\r\n{lines}\r\n".encode("ascii")


def closes(fields: Mapping[str, str]) -> bool:
    """Returns whether the sender of these fields closes the connection after the answer."""
    return "close" in re.split(r"[ \t]*,[ \t]*", fields.get("connection", "").lower())


def page(body: bytes, folder: str, after: str) -> list[str]:
    """Parses the keys in one answer to a listing.

    Args:
      body: the body of the answer.
      folder: the listed folder.
      after: a key that all keys must sort after.

    Raises:
      Malformed: it holds other data, or keys that are not in order.
    """
    try:
        targets = body.decode("ascii").split("\n")
    except UnicodeDecodeError:
        targets = ["?"]
    if targets.pop():
        raise Malformed("a listing")
    inside = f"{folder}/" if folder else ""
    keys = [key_of(target) for target in targets]
    if not all(key.startswith(inside) for key in keys) or len(keys) > PAGE:
        raise Malformed("other keys than requested")
    if any(second <= first for first, second in itertools.pairwise([after, *keys])):
        raise Malformed("keys that are not in order")
    return keys


def target_of(key: str) -> str:
    """Returns the target of a key."""
    return "/" + urllib.parse.quote(key, safe="/")


def key_of(path: str) -> str:
    """Returns the key of a target, without its query; "" for the node itself.

    Raises:
      Malformed: the key is invalid, or would leave the store.
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
    """Returns whether a node accepts a key."""
    try:
        return bool(key) and key_of(target_of(key)) == key
    except (Malformed, UnicodeEncodeError):
        return False


def span_of(text: str | None, nbytes: int) -> tuple[int, int] | None:
    """Returns start and end of a byte range of an object; None if it starts after the end.

    Args:
      text: the Range field; None for the whole object.
      nbytes: length of the object.

    Raises:
      Malformed: it is not a single range.
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
    """Parses Content-Range: start, end, and length of the whole object.

    Raises:
      Malformed: the field is invalid.
    """
    found = _CONTENT_RANGE.fullmatch(text)
    if found is None:
        raise Malformed("Content-Range")
    first, last, total = map(int, found.groups())
    if not first <= last < total:
        raise Malformed("Content-Range")
    return first, last + 1, total
