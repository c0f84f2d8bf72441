# SPDX-License-Identifier: Apache-2.0
"""Buckets of real servers behind a faulty network, and the entries of a journal in one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping
from unittest import mock

import proxy
import servers
from proxy import Proxy

from deltackpt.ledger import entries
from deltackpt.ledger.view import JOURNAL, entry_name
from deltackpt.storage import buckets
from deltackpt.storage.store import StorePath

_RETRIES = {
    "s3": "s3_request_retries",
    "gs": "gcs_request_retries",
    "az": "azure_request_retries",
}
_numbers = itertools.count()


@contextlib.contextmanager
def faulty(server: servers.Server) -> Iterator[Proxy]:
    """A faulty network in front of a server."""
    with proxy.before(server) as network:
        endpoint = {"TENSORSTORE_GCS_HTTP_URL": network.endpoint} if server.scheme == "gs" else {}
        with mock.patch.dict(os.environ, {**server.environment, **endpoint}):
            yield network


def fresh(network: Proxy) -> str:
    """Makes a bucket and returns its name, which contains no other bucket's name.

    fake-gcs-server scans a whole bucket to list some of it.
    """
    network.server.bucket(name := f"bucket{next(_numbers):06d}")
    return name


def opened(network: Proxy, name: str, deadline_secs: float, *, retries: bool = True) -> StorePath:
    """Opens a folder of a bucket; without retries, each fault is reported at once."""
    scheme = network.server.scheme
    place = buckets.locate(f"{scheme}://{name}/run", endpoint=network.endpoint)
    if not retries:
        spec = {**place.spec, _RETRIES[scheme]: {"max_retries": 0}}
        place = dataclasses.replace(place, spec=spec)
    return place.open(deadline_secs=deadline_secs)


def chain(root: StorePath, damaged: Mapping[str, bytes] | None = None) -> list[entries.Entry]:
    """All entries of a journal from which none was collected, oldest first.

    Args:
      root: where the journal is.
      damaged: the original bytes of entries that were damaged since, by name.
    """
    damaged = damaged or {}
    names = {name for name in (root / JOURNAL).keys() if ".copy." not in name}
    found = []
    for number, name in enumerate(sorted(names | damaged.keys()), 1):
        assert f"{JOURNAL}/{name}" == entry_name(number)
        data = damaged[name] if name in damaged else (root / JOURNAL / name).read()
        found.append(entries.entry_from(data, name=name, number=number))
    assert [one.previous for one in found] == ["", *(one.nonce for one in found)][:-1]
    return found
