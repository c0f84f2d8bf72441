# SPDX-License-Identifier: Apache-2.0
"""A rate-limited link between two loopback ports: a node's link to a bucket."""

from __future__ import annotations

import asyncio
import time

_PIECE = 64 << 10


class Pace:
    """A rate limit that both directions of all connections share."""

    def __init__(self, bytes_per_sec: float):
        self._rate = bytes_per_sec
        self._free_at = 0.0

    async def take(self, nbytes: int) -> None:
        """Waits until this many bytes may pass."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + nbytes / self._rate
        if (wait := self._free_at - now) > 0.002:
            await asyncio.sleep(wait)


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: Pace) -> None:
    """Forwards data until it ends."""
    try:
        while data := await reader.read(_PIECE):
            await pace.take(len(data))
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def serve(port: int, target: int, pace: Pace) -> None:
    """Listens forever."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(forward(reader, back, pace), forward(there, writer, pace))

    server = await asyncio.start_server(connected, "127.0.0.1", port, limit=1 << 20)
    async with server:
        await server.serve_forever()


def run(port: int, target: int, bytes_per_sec: float) -> None:
    """Forwards until the process is killed."""
    asyncio.run(serve(port, target, Pace(bytes_per_sec)))
