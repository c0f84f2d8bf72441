# SPDX-License-Identifier: Apache-2.0
"""Parses URLs: S3, Google Cloud Storage or Azure buckets, node stores, and kvstore specs.

Credentials are found as the services' SDKs find them, and are in no URL, error, event or record.
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
from deltackpt.storage import redaction
from deltackpt.storage.posix import user_path
from deltackpt.storage.store import DEADLINE_SECS, Exists, Missing, Refused, Store, StorePath

#: One slash is enough: pathlib turns "s3://bucket" into "s3:/bucket".
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/(/?)")
#: A query, as in a presigned URL. A "?" alone may be part of a name.
_QUERY = re.compile(r"\?[^/]*=")
#: TensorStore has no driver for the last one.
_DRIVERS = {"s3": "s3", "gs": "gcs", "az": "azure"}
#: Specs have no field for the endpoint of Google's API: TensorStore reads only this variable.
_GCS_ENDPOINT = "TENSORSTORE_GCS_HTTP_URL"
#: Retries after transient errors and broken connections. The back-off is short, because callers
#: that wait longer use a deadline.
_RETRIES = {"max_retries": 4, "initial_delay": "100ms", "max_delay": "2s"}
_CREDENTIALS = "AWS_ACCESS_KEY_ID"
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
#: The probe's objects are in the journal's folder, without a number.
_PROBES, _PROBE = "journal", "probe."
_NODES = "nodes"
#: Token for a node store: a secret, like the keys of other services.
_NODES_TOKEN = "DELTACKPT_NODES_TOKEN"
#: Driver to the variables that name the endpoint of a service.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gcs": (_GCS_ENDPOINT,),
    "azure": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


@dataclasses.dataclass(frozen=True)
class BucketLocation:
    """The location of a bucket, and how to access it."""

    url: str  # Canonical; opens it again.
    spec: Mapping[str, Any]  # A TensorStore spec, or similar; its path is empty, or ends in "/".

    def open(self, *, deadline_secs: float = DEADLINE_SECS) -> StorePath:
        """Opens the folder in its store; raises ``MissingExtra`` without the service's client."""
        # The client of a service is imported when it is needed.
        folder = str(self.spec.get("path", ""))
        if self.spec["driver"] == "azure":
            from deltackpt.storage.azure import AzureStore

            store: Store = AzureStore(
                str(self.spec["bucket"]),
                folder.rstrip("/"),
                self.url,
                endpoint=self.spec.get("endpoint"),
                deadline_secs=deadline_secs,
                retries=int(self.spec["azure_request_retries"]["max_retries"]),
            )
            return StorePath(store, "")
        if self.spec["driver"] == _NODES:
            from deltackpt.storage.striping import NodesStore

            token = nodes_token()
            if not token:
                raise Refused(
                    f"{self.url}: expected the token of the nodes in {_NODES_TOKEN}, found none; "
                    "set it to what 'deltackpt node-store' was started with"
                )
            nodes, below = self.spec["addresses"], folder.rstrip("/")
            return StorePath(NodesStore(nodes, below, token, deadline_secs=deadline_secs), "")
        from deltackpt.storage.kv_store import KvStore

        # The store is the bucket's folder: its keys are relative to it.
        store = KvStore({**self.spec, "path": folder}, self.url, deadline_secs=deadline_secs)
        return StorePath(store, "")


def nodes_token() -> str | None:
    """Returns the token for node stores, if this process has one."""
    return os.environ.get(_NODES_TOKEN) or None


def is_url(where: str | os.PathLike[str]) -> bool:
    """Returns whether something is a URL or a kvstore spec as JSON, not a path."""
    text = os.fspath(where)
    return text.startswith("{") or _URL.match(text) is not None


def file_path(where: str | os.PathLike[str]) -> Path | None:
    """Returns the local path; None for a bucket. A URL of another host's file is an OptionError."""
    text = os.fspath(where)
    if text.startswith("{"):
        return None
    found = _URL.match(text)
    if found is None:
        return user_path(text)
    if found[1].lower() != "file":
        return None
    # Neither "#" nor "?" ends the name of a directory.
    host, _, path = (
        text[found.end() :].partition("/") if found[2] else ("", "", text[found.end() :])
    )
    if host not in ("", "localhost"):
        found_host = "another host" if "@" in text else f"the host {host!r}"
        raise OptionError(
            f"{redaction.shown(text)}: expected file:/// and an absolute path, found "
            f"{found_host}; write three slashes, or pass the path alone"
        )
    return user_path(os.path.join("/", urllib.parse.unquote(path)))


def locate(where: str | os.PathLike[str], *, endpoint: str | None = None) -> BucketLocation:
    """Parses a URL or a kvstore spec as JSON; ``endpoint`` is the server if not the default."""
    text = os.fspath(where)
    if text.startswith("{"):
        return _by_spec(text, endpoint)
    found = _URL.match(text)
    scheme = found[1].lower() if found is not None else ""
    if found is not None and scheme == _NODES:
        return _of_nodes(text, text[found.end() :], endpoint)
    if found is None or scheme not in _DRIVERS:
        raise UnsupportedRoot(
            f"{redaction.shown(text)}: expected a path, or a URL with file://, s3://, gs://, "
            f"az:// or nodes://, found the scheme {scheme!r}, which deltackpt does not support; "
            "mount it, or pass a TensorStore kvstore spec as JSON"
        )
    bucket, _, path = text[found.end() :].partition("/")
    path = path.strip("/")
    # A password must not be in a URL, which errors, records and process listings show.
    problem = "" if bucket else "none"
    problem = "credentials or a port" if "@" in bucket or ":" in bucket else problem
    problem = "a query" if _QUERY.search(text) else problem
    if problem:
        raise OptionError(
            f"{scheme}://{'...' if bucket else ''}: expected a bucket name after "
            f"{scheme}://, found {problem}; write {scheme}://bucket/path, pass an address as the "
            "endpoint, and set credentials in the environment"
        )
    url = f"{scheme}://{bucket}/{path}".rstrip("/")
    folder = f"{path}/" if path else ""
    spec = {"driver": _DRIVERS[scheme], "bucket": bucket, "path": folder}
    return BucketLocation(url, _with_endpoint(spec, endpoint))


def _of_nodes(text: str, named: str, endpoint: str | None) -> BucketLocation:
    if endpoint is not None:
        raise OptionError(
            "endpoint: expected none with a nodes:// URL, which names its servers, found one; "
            "leave it out"
        )
    if "?" in named:
        raise OptionError(
            f"{redaction.shown(text)}: expected node addresses and a path, found a query; set "
            f"the token in {_NODES_TOKEN}"
        )
    from deltackpt.storage.node_client import addresses_of

    named, _, path = named.partition("/")
    addresses, path = addresses_of(named, shown=redaction.shown(text)), path.strip("/")
    url = f"{_NODES}://{','.join(addresses)}/{path}".rstrip("/")
    folder = f"{path}/" if path else ""
    return BucketLocation(url, {"driver": _NODES, "addresses": addresses, "path": folder})


def _by_spec(text: str, endpoint: str | None) -> BucketLocation:
    shown, (spec, problem) = redaction.shown(text), redaction.parse_spec(text)
    if problem:
        raise OptionError(
            f"{shown}: expected a TensorStore kvstore spec as JSON, found {problem}; correct it"
        )
    if not isinstance(spec, dict) or not isinstance(spec.get("driver"), str):
        raise OptionError(f"{shown}: expected a kvstore spec with a driver, found none; name one")
    if (key := redaction.secret_in(spec)) is not None:
        raise OptionError(
            f"{shown}: expected a kvstore spec without credentials, since errors, records and "
            f"process lists show it, found some in {key!r}; set them in the environment"
        )
    path = str(spec.get("path", "")).rstrip("/")
    spec = {**spec, "path": f"{path}/" if path else ""}
    if endpoint is not None:
        spec = _with_endpoint(spec, endpoint)
    return BucketLocation(json.dumps(spec, sort_keys=True), spec)


def _with_endpoint(spec: Mapping[str, object], endpoint: str | None) -> Mapping[str, object]:
    driver = str(spec["driver"])
    redaction.check_endpoint(endpoint)
    if driver not in _ENDPOINTS:
        if endpoint is None:
            return spec
        raise OptionError(
            f"{driver}: expected an s3://, gs:// or az:// URL with an endpoint; leave the endpoint "
            "out"
        )
    known = next((os.environ[name] for name in _ENDPOINTS[driver] if os.environ.get(name)), None)
    if driver == "gcs":
        if endpoint not in (None, known):
            redaction.check_endpoint(known)
            raise OptionError(
                f"gs://{spec['bucket']}: expected {_GCS_ENDPOINT}={endpoint} in the environment, "
                "from which alone TensorStore takes the endpoint of gs:// URLs, found "
                f"{known or 'none'}; set it before the program starts"
            )
        return {**spec, "gcs_request_retries": _RETRIES}
    endpoint = endpoint or known
    redaction.check_endpoint(endpoint)
    found: dict[str, object] = {f"{driver}_request_retries": _RETRIES, **spec}
    if driver == "azure":
        return found if endpoint is None else {**found, "endpoint": endpoint}
    if endpoint is not None:
        region = next((os.environ[name] for name in _REGIONS if os.environ.get(name)), "us-east-1")
        found = {"aws_region": region, **found, "endpoint": endpoint}
    if os.environ.get(_CREDENTIALS):
        # Otherwise the SDK's credential chain is queried, which takes 0.1 s and prints.
        found = {"aws_credentials": {"type": "environment"}, **found}
    return found


def probe(root: StorePath) -> None:
    """Raises ``UnsupportedRoot`` unless a write-if-absent of an existing key is rejected."""
    at = root / _PROBES / f"{_PROBE}{uuid.uuid4().hex}"
    try:
        at.store.put(at.key, b"first", absent=True)
        try:
            at.store.put(at.key, b"second", absent=True)
        except Exists:
            if at.store.get(at.key) == b"first" and at.name in probes(root):
                return
            raise _unsupported(root, "a different object, or none, in a listing") from None
    except Exists as error:
        raise _unsupported(root, "a conditional write of a new key rejected") from error
    except Missing as error:
        raise _unsupported(root, "a newly written object missing") from error
    except Refused as error:
        if "NOT_IMPLEMENTED" in str(error) or "UNIMPLEMENTED" in str(error):
            raise _unsupported(root, str(error)) from error
        raise
    finally:
        with contextlib.suppress(StorageError):
            at.store.delete([at.key])
    raise _unsupported(root, "both accepted")


def probes(root: StorePath) -> list[str]:
    """Returns names that an interrupted ``probe`` left in the journal's folder."""
    return [name for name in (root / _PROBES).names() if name.startswith(_PROBE)]


def _unsupported(root: StorePath, found: str) -> UnsupportedRoot:
    return UnsupportedRoot(
        f"{root}: expected the second of two write-if-absent requests for one key to be rejected, "
        f"found {found}; use a service with conditional writes (S3, GCS, and servers that honor "
        "If-None-Match), or save to a directory and copy"
    )
