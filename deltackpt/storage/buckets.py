# SPDX-License-Identifier: Apache-2.0
"""What a URL means: a bucket of S3, Google Cloud Storage or Azure, some nodes, or a kvstore.

Credentials are found as the SDKs of the services find them; none is in a URL, an error, an event or
a record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import urllib.parse
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltackpt.errors import OptionError, StorageError, UnsupportedRoot
from deltackpt.storage.azure import AzureStore
from deltackpt.storage.kv_store import KvStore
from deltackpt.storage.nodes import NodesStore, addresses_of
from deltackpt.storage.store import DEADLINE_SECS, Exists, Missing, Refused, Spot, Store

#: One slash is enough: pathlib turns "s3://bucket" into "s3:/bucket".
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/(/?)")
#: The last one is none of TensorStore's.
_DRIVERS = {"s3": "s3", "gs": "gcs", "az": "azure"}
#: An endpoint of Google's API is no part of a spec: TensorStore takes it from here.
_GCS_ENDPOINT = "TENSORSTORE_GCS_HTTP_URL"
#: Of requests that a service refuses for the moment, or that break off; its own back-off is short,
#: since whoever waits for longer does so by a deadline.
_RETRIES = {"max_retries": 4, "initial_delay": "100ms", "max_delay": "2s"}
_CREDENTIALS = "AWS_ACCESS_KEY_ID"
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
#: What is tried stands in the folder of the journal, under no number.
_PROBES, _PROBE = "journal", "probe."
_NODES = "nodes"
#: What a store of nodes lets in: a secret, as the keys of other services are.
_NODES_TOKEN = "DELTACKPT_NODES_TOKEN"
_AZURE_ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a bucket is, and how to speak to it.

    Attributes:
      url: how it is named everywhere: what opens it again.
      spec: of TensorStore, or like one; its path is empty, or ends in "/".
    """

    url: str
    spec: Mapping[str, Any]

    def open(self, *, deadline_secs: float = DEADLINE_SECS) -> Spot:
        """The folder in the store.

        Raises:
          StorageError: it cannot be opened.
          MissingExtra: what speaks to the service is not installed.
        """
        folder = str(self.spec.get("path", ""))
        if self.spec["driver"] == "azure":
            store: Store = AzureStore(
                str(self.spec["bucket"]),
                folder.rstrip("/"),
                self.url,
                endpoint=self.spec.get("endpoint"),
                deadline_secs=deadline_secs,
                retries=int(self.spec["azure_request_retries"]["max_retries"]),
            )
            return Spot(store, "")
        if self.spec["driver"] == _NODES:
            token = nodes_token()
            if not token:
                raise Refused(
                    f"{self.url}: expected the token of the nodes in {_NODES_TOKEN}, found none; "
                    "set it to what 'deltackpt node-store' was started with"
                )
            nodes, below = self.spec["addresses"], folder.rstrip("/")
            return Spot(NodesStore(nodes, below, token, deadline_secs=deadline_secs), "")
        # The store is the bucket's folder: its keys are what is below.
        store = KvStore({**self.spec, "path": folder}, self.url, deadline_secs=deadline_secs)
        return Spot(store, "")


def nodes_token() -> str | None:
    """The token of a store of nodes, where this process was given one."""
    return os.environ.get(_NODES_TOKEN) or None


def is_url(where: str | os.PathLike[str]) -> bool:
    """Whether something is a URL, or a kvstore spec as JSON, and no path of a file system."""
    text = os.fspath(where)
    return text.startswith("{") or _URL.match(text) is not None


def is_path(where: str | os.PathLike[str]) -> bool:
    """Whether something is a path of a file system, or a URL of one."""
    return file_path(where) is not None


def file_path(where: str | os.PathLike[str]) -> Path | None:
    """The path that is meant; None of a bucket.

    Raises:
      OptionError: a URL of a file on another host.
    """
    text = os.fspath(where)
    if text.startswith("{"):
        return None
    found = _URL.match(text)
    if found is None:
        return Path(text)
    if found[1].lower() != "file":
        return None
    # Neither "#" nor "?" ends the name of a directory.
    host, _, path = (
        text[found.end() :].partition("/") if found[2] else ("", "", text[found.end() :])
    )
    if host not in ("", "localhost"):
        raise OptionError(
            f"{text}: expected file:/// and an absolute path, found the host {host!r}; write three "
            "slashes, or give the path alone"
        )
    return Path("/", urllib.parse.unquote(path))


def place(where: str | os.PathLike[str], *, endpoint: str | None = None) -> Place:
    """What a URL, or a kvstore spec as JSON, means.

    Args:
      where: ``s3://bucket/path``, ``gs://bucket/path``, ``az://container/path``,
        ``nodes://host:port,host:port/path``, or JSON.
      endpoint: address of the server, where it is not the service's own.

    Raises:
      UnsupportedRoot: the scheme is none of these.
      OptionError: there is no bucket in it, or the JSON is none.
    """
    text = os.fspath(where)
    if text.startswith("{"):
        return _by_spec(text, endpoint)
    found = _URL.match(text)
    scheme = found[1].lower() if found is not None else ""
    if found is not None and scheme == _NODES:
        named, _, path = text[found.end() :].partition("/")
        return _of_nodes(named, path, endpoint)
    if found is None or scheme not in _DRIVERS:
        raise UnsupportedRoot(
            f"{text}: expected a path of a file system, or a URL with file://, s3://, gs://, "
            f"az:// or nodes://, found the scheme {scheme!r}, which deltackpt does not commit on; "
            "mount it, or give a kvstore spec of TensorStore as JSON"
        )
    bucket, _, path = text[found.end() :].partition("/")
    path = path.strip("/")
    if not bucket or "@" in bucket or ":" in bucket:
        # A password must not be in a URL, which errors, records and listings of processes show.
        shown = f"{scheme}://..." if bucket else text
        raise OptionError(
            f"{shown}: expected the name of a bucket after {scheme}://, found "
            f"{'credentials or a port' if bucket else 'none'}; write {scheme}://bucket/path, and "
            "give an address as the endpoint, credentials in the environment"
        )
    url = f"{scheme}://{bucket}/{path}".rstrip("/")
    folder = f"{path}/" if path else ""
    spec = {"driver": _DRIVERS[scheme], "bucket": bucket, "path": folder}
    return Place(url, _with_endpoint(spec, endpoint))


def _of_nodes(named: str, path: str, endpoint: str | None) -> Place:
    if endpoint is not None:
        raise OptionError(
            "endpoint: expected none beside nodes://, which names its servers, found one; leave it "
            "out"
        )
    addresses, path = addresses_of(named), path.strip("/")
    url = f"{_NODES}://{','.join(addresses)}/{path}".rstrip("/")
    folder = f"{path}/" if path else ""
    return Place(url, {"driver": _NODES, "addresses": addresses, "path": folder})


def _by_spec(text: str, endpoint: str | None) -> Place:
    try:
        spec = json.loads(text)
    except ValueError as error:
        raise OptionError(
            f"{text}: expected a kvstore spec of TensorStore as JSON, found {error}"
        ) from error
    if not isinstance(spec, dict) or not isinstance(spec.get("driver"), str):
        raise OptionError(f"{text}: expected a kvstore spec with a driver, found none; name one")
    path = str(spec.get("path", "")).rstrip("/")
    spec = {**spec, "path": f"{path}/" if path else ""}
    if endpoint is not None:
        spec = _with_endpoint(spec, endpoint)
    return Place(json.dumps(spec, sort_keys=True), spec)


def _with_endpoint(spec: dict[str, Any], endpoint: str | None) -> dict[str, Any]:
    """A spec that names a server, and says how often to ask it again."""
    found: dict[str, Any]
    _check_endpoint(endpoint)
    if spec["driver"] == "gcs":
        if endpoint is not None:
            known = os.environ.get(_GCS_ENDPOINT)
            if known not in (None, endpoint):
                raise OptionError(
                    f"gs://{spec['bucket']}: expected the endpoint {known} as in {_GCS_ENDPOINT}, "
                    f"found {endpoint}; a process speaks to one server of gs:// URLs"
                )
            os.environ[_GCS_ENDPOINT] = endpoint
        return {**spec, "gcs_request_retries": _RETRIES}
    if spec["driver"] == "azure":
        known = (os.environ[name] for name in _AZURE_ENDPOINTS if os.environ.get(name))
        endpoint = endpoint or next(known, None)
        _check_endpoint(endpoint)
        found = {"azure_request_retries": _RETRIES, **spec}
        return found if endpoint is None else {**found, "endpoint": endpoint}
    if spec["driver"] != "s3":
        if endpoint is None:
            return spec
        raise OptionError(
            f"{spec['driver']}: expected an s3://, gs:// or az:// URL beside an endpoint; leave "
            "that out"
        )
    found = {"s3_request_retries": _RETRIES, **spec}
    endpoint = (
        endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    _check_endpoint(endpoint)
    if endpoint is not None:
        region = next((os.environ[name] for name in _REGIONS if os.environ.get(name)), "us-east-1")
        found = {"aws_region": region, **found, "endpoint": endpoint}
    if os.environ.get(_CREDENTIALS):
        # Else the chain of the SDK is asked, which takes 0.1 s and prints.
        found = {"aws_credentials": {"type": "environment"}, **found}
    return found


def _check_endpoint(endpoint: str | None) -> None:
    """Refuses what must not be in an address, which orders of stages and errors show."""
    found = urllib.parse.urlsplit(endpoint or "")
    if "@" in found.netloc or found.query or found.fragment:
        raise OptionError(
            "endpoint: expected an address such as https://host:port, found credentials or a query "
            "in it; give credentials in the environment, as the SDKs of the services find them"
        )


def probe(root: Spot) -> None:
    """Checks that a store refuses a conditional write of what is there: commits rest on that.

    Raises:
      UnsupportedRoot: it does not, or knows no such writes.
      StorageError: it cannot be written.
    """
    at = root / _PROBES / f"{_PROBE}{uuid.uuid4().hex}"
    try:
        at.store.put(at.key, b"first", absent=True)
        try:
            at.store.put(at.key, b"second", absent=True)
        except Exists:
            if at.store.get(at.key) == b"first" and at.name in probes(root):
                return
            raise _unsupported(root, "another object, or none in a listing") from None
    except Exists as error:
        raise _unsupported(root, "one of a fresh key refused") from error
    except Missing as error:
        raise _unsupported(root, "an object gone that was just written") from error
    except Refused as error:
        if "NOT_IMPLEMENTED" in str(error) or "UNIMPLEMENTED" in str(error):
            raise _unsupported(root, str(error)) from error
        raise
    finally:
        with contextlib.suppress(StorageError):
            at.store.delete([at.key])
    raise _unsupported(root, "both accepted")


def probes(root: Spot) -> list[str]:
    """Names in the folder of the journal that ``probe`` has left where it was cut."""
    return [name for name in (root / _PROBES).names() if name.startswith(_PROBE)]


def _unsupported(root: Spot, found: str) -> UnsupportedRoot:
    return UnsupportedRoot(
        f"{root}: expected that of two writes of one key on condition that there is none the "
        f"second is refused, found {found}; use a service with conditional writes (S3, GCS, and "
        "servers that keep If-None-Match), or save to a directory and copy"
    )
