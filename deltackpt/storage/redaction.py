# SPDX-License-Identifier: Apache-2.0
"""URLs, kvstore specs and tokens without their secrets, for errors, events, logs and records.

Every URL, endpoint or spec is checked on input. Until then, ``shown`` hides rather too much.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

from deltackpt.errors import OptionError

_HIDDEN = "..."
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):(/+)")
#: A secret may hold any character, so that only the last "@" is known to end it.
_USER = re.compile(r".*@", re.DOTALL)
_QUERY = re.compile(r"[?#].*", re.DOTALL)
_SECRET_KEY = re.compile(
    r"token|secret|passw|credential|authorization|signature|sas\b|api_?key|access_?key|cookie",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"[!-~]{1,4096}")


def shown(where: str | os.PathLike[str]) -> str:
    """Returns a path, URL or kvstore spec for error messages, without credentials and queries."""
    text = os.fspath(where)
    if text.startswith("{"):
        spec, _ = parse_spec(text)
        return json.dumps(_redacted(spec), sort_keys=True) if isinstance(spec, dict) else "{...}"
    found = _URL.match(text)
    if found is None:
        return text
    rest = _QUERY.sub(lambda match: match[0][0] + _HIDDEN, text[found.end() :])
    return found[0] + _USER.sub(f"{_HIDDEN}@", rest)


def parse_spec(text: str) -> tuple[object, str]:
    """Returns a kvstore spec, and what is wrong with it as JSON, if anything is."""
    try:
        return json.loads(text), ""
    except ValueError as error:  # Not chained by callers: it contains the complete text.
        return None, str(error)
    except RecursionError:
        return None, "objects that are nested too deep"


def secret_in(spec: object) -> str | None:
    """Returns the first key of a kvstore spec that holds credentials, or None."""
    return next(_secret_keys(spec, ""), None)


def check_endpoint(endpoint: str | None) -> None:
    """Rejects credentials and queries in an address, since errors and other files show it."""
    if endpoint is not None and set(endpoint) & set("@?#"):
        raise OptionError(
            "endpoint: expected an address such as https://host:port, found credentials or a query "
            "in it; set credentials in the environment, where the SDKs of the services find them"
        )


def check_token(token: str) -> None:
    """Rejects a token that cannot be sent in a request, without showing it."""
    if not _TOKEN.fullmatch(token):
        raise OptionError(
            f"token: expected 1 to 4,096 printable ASCII characters without spaces, found "
            f"{len(token)} that are not; use the one that the nodes were started with"
        )


def _redacted(value: object, key: str = "") -> object:
    if isinstance(value, dict):
        return {name: _redacted(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner, key) for inner in value]
    if not isinstance(value, str):
        return value
    return _HIDDEN if _is_secret(key, value) else value


def _secret_keys(value: object, key: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _secret_keys(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _secret_keys(inner, key)
    elif isinstance(value, str) and _is_secret(key, value):
        yield key


def _is_secret(key: str, value: str) -> bool:
    # Any header may hold credentials, so headers are not checked one by one. A URL may if it has
    # more than a host.
    is_named = key == "headers" or _SECRET_KEY.search(key) is not None
    return is_named or (_URL.match(value) is not None and shown(value) != value)
