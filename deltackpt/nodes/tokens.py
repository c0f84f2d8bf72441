# SPDX-License-Identifier: Apache-2.0
"""Who is let in: whoever shows a token that holds at the moment."""

from __future__ import annotations

import hashlib
import hmac
import re
import threading

from deltackpt.errors import OptionError

#: Of 64 letters and more than 16 of them nobody guesses one.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,1024}")


class Tokens:
    """The tokens that hold; thread-safe. They are kept as digests only."""

    def __init__(self, *tokens: str):
        """Lets in who shows one of them; without any nobody.

        Raises:
          OptionError: one is too short, or has what does not stand in a token.
        """
        self._lock = threading.Lock()
        self._digests: tuple[bytes, ...] = tuple(map(_digest, tokens))

    def admit(self, token: str) -> None:
        """Lets in who shows this one, too.

        Raises:
          OptionError: it is too short, or has what does not stand in a token.
        """
        digest = _digest(token)
        with self._lock:
            if digest not in self._digests:
                self._digests += (digest,)

    def rotate(self, token: str) -> None:
        """Lets in who shows this one, and from now on nobody else.

        Raises:
          OptionError: it is too short, or has what does not stand in a token.
        """
        digest = _digest(token)
        with self._lock:
            self._digests = (digest,)

    def let_in(self, token: str) -> bool:
        """Whether a token holds; how long this takes says nothing of those that do."""
        shown = hashlib.sha256(token.encode()).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(shown, digest)
        return found


def _digest(token: str) -> bytes:
    if not _TOKEN.fullmatch(token):
        raise OptionError(
            f"token: expected 16 to 1,024 letters, digits and ._~+/=-, found {len(token)} "
            "characters that are not; make one: python -c 'import secrets; "
            "print(secrets.token_urlsafe(32))'"
        )
    return hashlib.sha256(token.encode()).digest()
