# SPDX-License-Identifier: Apache-2.0
"""A rate-limited link between two loopback ports: a node's link to a bucket."""

from __future__ import annotations

import asyncio
import time

_PIECE = 64 << 10


async def _serve(port: int, target: int, bytes_per_sec: float) -> None:
    free_at = 0.0  # Both directions of all connections share the rate.

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal free_at
        try:
            while data := await reader.read(_PIECE):
                now = time.monotonic()
                free_at = max(now, free_at) + len(data) / bytes_per_sec
                if (wait := free_at - now) > 0.002:
                    await asyncio.sleep(wait)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(forward(reader, back), forward(there, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", port, limit=1 << 20)
    async with server:
        await server.serve_forever()


def run(port: int, target: int, bytes_per_sec: float) -> None:
    """Forwards until the process is killed."""
    asyncio.run(_serve(port, target, bytes_per_sec))
