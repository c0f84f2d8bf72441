# SPDX-License-Identifier: Apache-2.0
"""Authentication by bearer tokens."""

from __future__ import annotations

import hashlib
import hmac
import re
import threading

from deltackpt.errors import OptionError

#: 16 characters from an alphabet of 64 cannot be guessed.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,1024}")


class Tokens:
    """The valid tokens; thread-safe. Only their digests are stored."""

    def __init__(self, *tokens: str):
        """Accepts the given tokens; without any, no client.

        Raises:
          OptionError: a token is too short, or has invalid characters.
        """
        self._lock = threading.Lock()
        self._digests: tuple[bytes, ...] = tuple(map(_digest, tokens))

    def admit(self, token: str) -> None:
        """Accepts an additional token.

        Raises:
          OptionError: it is too short, or has invalid characters.
        """
        digest = _digest(token)
        with self._lock:
            if digest not in self._digests:
                self._digests += (digest,)

    def rotate(self, token: str) -> None:
        """Accepts only this token, and revokes all others.

        Raises:
          OptionError: it is too short, or has invalid characters.
        """
        digest = _digest(token)
        with self._lock:
            self._digests = (digest,)

    def let_in(self, token: str) -> bool:
        """Returns whether a token is valid, in constant time."""
        shown = hashlib.sha256(token.encode(errors="backslashreplace")).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(shown, digest)
        return found


def _digest(token: str) -> bytes:
    if not _TOKEN.fullmatch(token):
        raise OptionError(
            f"token: expected 16 to 1,024 letters, digits and ._~+/=-, found {len(token)} other "
            "characters; generate one: python -c 'import secrets; "
            "print(secrets.token_urlsafe(32))'"
        )
    return hashlib.sha256(token.encode()).digest()
