# SPDX-License-Identifier: Apache-2.0
"""A web page and Prometheus metrics of a follower, by the standard library's server."""

from __future__ import annotations

import dataclasses
import http.server
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

_logger = logging.getLogger(__name__)

_STOP_SECS = 5.0
#: A client that neither sends nor receives for this long is disconnected.
_CLIENT_SECS = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableStatus:
    """One followed table.

    Attributes:
      rows: rows that this shard holds.
      nbytes: their size in bytes, with slots.
      looked_up: rows that this process has looked up.
      changed: rows that changed since the first version, without whole reloads.
    """

    rows: int
    nbytes: int
    looked_up: int
    changed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FollowerStatus:
    """The state of a follower.

    Attributes:
      directory: the checkpoint directory.
      position: the version: a step's save id, or a recovery point; None before the first.
      step: its training step.
      newest_step: newest committed training step at the last poll, intact or not.
      age_secs: seconds since the version was committed or captured.
      versions: number of versions so far.
      problem: why a newer version cannot be read, or None.
      unix_secs: time of this status, in seconds since 1970.
      tables: table name to its figures.
      dense_leaves: number of dense leaves.
      dense_bytes: their size.
      consumers: name of each consumer of changes to the versions that it is behind.
    """

    directory: str
    position: str | None
    step: int | None
    newest_step: int | None
    age_secs: float | None
    versions: int
    problem: str | None
    unix_secs: float
    tables: Mapping[str, TableStatus]
    dense_leaves: int
    dense_bytes: int
    consumers: Mapping[str, int]


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self, host: str, port: int, handler: type[http.server.BaseHTTPRequestHandler]):
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs why a client got no complete answer; the inherited method prints it."""
        error = sys.exception()
        if not isinstance(error, OSError):  # Otherwise, the client has disconnected.
            _logger.error("a status request failed", exc_info=error)


class StatusServer:
    """Answers HTTP requests for a status until it is closed; ``url`` is that of the page."""

    def __init__(self, status: Callable[[], FollowerStatus], host: str, port: int):
        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = _CLIENT_SECS

            def do_GET(self) -> None:
                code, kind, body = _answer(self.path.partition("?")[0], status)
                self.send_response(code)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are not logged."""

        self._server = _Server(host, port, Handler)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="deltackpt-status", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_STOP_SECS)


def _answer(path: str, status: Callable[[], FollowerStatus]) -> tuple[int, str, bytes]:
    if path == "/":
        return 200, "text/html", _PAGE.encode()
    if path == "/status.json":
        return 200, "application/json", json.dumps(dataclasses.asdict(status())).encode()
    if path != "/metrics":
        return 404, "text/plain", b"not found; see / or /status.json or /metrics\n"
    try:
        import prometheus_client
    except ImportError:
        text = b'prometheus_client is missing; run: pip install "deltackpt[metrics]"\n'
        return 501, "text/plain", text
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status()))
    return 200, "text/plain; version=0.0.4", prometheus_client.generate_latest(registry)


class _Collector:
    """The metrics of one status; see ``prometheus_client.registry.Collector``."""

    def __init__(self, status: FollowerStatus):
        self._status = status

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status
        for name, text, value in (
            ("step", "Training step of the version", status.step),
            ("newest_step", "Newest committed training step", status.newest_step),
            ("age_seconds", "Time since the version was committed", status.age_secs),
            ("healthy", "1 unless a newer version cannot be read", int(not status.problem)),
            ("dense_bytes", "Bytes of dense leaves", status.dense_bytes),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"deltackpt_serving_{name}", text, value)
        yield CounterMetricFamily("deltackpt_serving_versions", "Versions", status.versions)
        for kind, name, text, field in (
            (GaugeMetricFamily, "rows", "Rows held", "rows"),
            (GaugeMetricFamily, "bytes", "Bytes of rows", "nbytes"),
            (CounterMetricFamily, "looked_up_rows", "Rows looked up", "looked_up"),
            (CounterMetricFamily, "changed_rows", "Rows that changed", "changed"),
        ):
            family = kind(f"deltackpt_serving_{name}", text, labels=["table"])
            for table, figures in status.tables.items():
                family.add_metric([table], getattr(figures, field))
            yield family
        behind = GaugeMetricFamily(
            "deltackpt_serving_consumer_behind",
            "Versions that a consumer of changes is behind",
            labels=["consumer"],
        )
        for name, count in status.consumers.items():
            behind.add_metric([name], count)
        yield behind


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>deltackpt follower</title><style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } th, td { padding: .3rem .6rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr + tr { border-top: 1px solid #8884 }
#problem { color: #d33; white-space: pre-wrap }
</style></head><body>
<h1>deltackpt follower</h1><p id="directory"></p><p id="problem" role="alert"></p>
<table id="figures"></table><h2>Tables</h2><table id="tables"></table>
<h2>Consumers of changes</h2><table id="consumers"></table>
<script>
const $ = id => document.getElementById(id), count = new Intl.NumberFormat("en").format
const short = new Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 1}).format
let before = null
function fill(id, rows) {
  $(id).replaceChildren(...rows.map(cells => {
    const row = document.createElement("tr")
    for (const text of cells) row.insertCell().textContent = text
    return row
  }))
}
function show(now) {
  const secs = before ? now.unix_secs - before.unix_secs : 0
  const rate = pick => short(secs > 0 ? (pick(now) - pick(before)) / secs : 0)
  const total = field => one => Object.values(one.tables).reduce((sum, t) => sum + t[field], 0)
  $("directory").textContent = now.directory
  $("problem").textContent = now.problem ?? ""
  fill("figures", [
    ["training step", now.step === null ? "-" : count(now.step)],
    ["steps behind", now.step === null ? "-" : Math.max(0, (now.newest_step ?? 0) - now.step)],
    ["age", now.age_secs === null ? "-" : now.age_secs.toFixed(1) + " s"],
    ["versions per second", rate(one => one.versions)],
    ["rows looked up per second", rate(total("looked_up"))],
    ["rows changed per second", rate(total("changed"))],
    ["bytes held", short(total("nbytes")(now) + now.dense_bytes)]])
  fill("tables", [["table", "rows", "bytes", "looked up", "per second", "changed", "per second"],
    ...Object.entries(now.tables).map(([name, t]) => [name, count(t.rows), short(t.nbytes),
      count(t.looked_up), rate(one => one.tables[name]?.looked_up ?? 0),
      count(t.changed), rate(one => one.tables[name]?.changed ?? 0)])])
  fill("consumers", [["consumer", "versions behind"], ...Object.entries(now.consumers)])
  before = now
}
async function poll() {
  try { show(await (await fetch("status.json")).json()) }
  catch (error) { $("problem").textContent = "The follower does not answer." }
  setTimeout(poll, 1000)
}
poll()
</script></body></html>
"""
