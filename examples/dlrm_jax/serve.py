# SPDX-License-Identifier: Apache-2.0
"""Answers lookups of the newest rows of a DLRM over HTTP, without jax.

python examples/dlrm_jax/serve.py --directory dlrm-checkpoints --port 9470

``GET /rows?first=0&stop=16`` returns these rows of every table and the ``step`` leaf, all of one
version, as JSON. ``GET /digest?first=0&stop=16`` returns their SHA-256 instead.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

import numpy as np

from deltackpt import serving
from deltackpt.errors import ServiceUnavailable


def digest_of(step: int, tables: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of a step and of some rows of each table, by table name."""
    found = hashlib.sha256(str(step).encode())
    for name in sorted(tables):
        found.update(np.ascontiguousarray(tables[name]).tobytes())
    return found.hexdigest()


def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True, help="checkpoint directory")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--poll-secs", type=float, default=0.01)
    options = parser.parse_args()
    with serving.follow(options.directory, "step", tables="*", poll_secs=options.poll_secs) as live:

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                address = urllib.parse.urlsplit(self.path)
                asked = dict(urllib.parse.parse_qsl(address.query))
                rows = np.arange(int(asked.get("first", 0)), int(asked.get("stop", 1)))
                try:
                    answer = self._found(rows, address.path)
                except ServiceUnavailable as error:
                    self._send(503, {"error": str(error)})
                else:
                    self._send(200, answer)

            def _found(self, rows: np.ndarray, path: str) -> dict[str, Any]:
                with live.version() as version:
                    step = int(version.dense["step"])
                    tables = {name: version.lookup(name, rows) for name in version.tables}
                answer = {
                    "step": step,
                    "position": str(version.position),
                    "age_secs": time.time() - version.unix_secs,
                }
                if path == "/digest":
                    held = {name: values[found] for name, (values, found) in tables.items()}
                    return answer | {"digest": digest_of(step, held)}
                return answer | {
                    "rows": {name: values.tolist() for name, (values, _) in tables.items()}
                }

            def _send(self, code: int, answer: dict[str, Any]) -> None:
                body = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Requests are not logged."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
        status = live.serve_status()
        print(json.dumps({"port": server.server_port, "status": status}), flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
