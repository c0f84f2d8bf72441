# SPDX-License-Identifier: Apache-2.0
"""Tokens and passwords never appear in errors, warnings, logs or files."""

from __future__ import annotations

import contextlib
import json
import logging
import urllib.parse
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import command
import h11
import pytest

import deltackpt
from deltackpt import inspect
from deltackpt.errors import DeltackptError, OptionError
from deltackpt.interchange.target import local_path
from deltackpt.ledger.directory import Root
from deltackpt.ledger.opening import open_steps
from deltackpt.nodes.blobs import MemoryBlobs
from deltackpt.nodes.server import NodeServer, Tokens
from deltackpt.options import Tiers
from deltackpt.storage import buckets, node_client, redaction, wire
from deltackpt.storage.node_client import Node
from deltackpt.storage.store import Refused
from deltackpt.storage.striping import NodesStore
from deltackpt.tiers import copy

SECRET = "hush0hush0hush0hush0"
#: Some contain characters that end the password of a URL, so that a part could be shown.
PASSWORDS = [SECRET, f"{SECRET}/x", f"a/{SECRET}", f"a@{SECRET}", f"a:{SECRET}", f"a?{SECRET}"]


def everything_of(value: object, seen: set[int]) -> Iterator[str]:
    """Everything that a debugger or an error tracker finds on an exception."""
    if id(value) in seen:
        return
    seen.add(id(value))
    yield f"{value!r} {value!s}"
    if isinstance(value, BaseException):
        inner = [value.args, value.__cause__, value.__context__, getattr(value, "__notes__", ())]
        inner += [
            vars(value),
            *(getattr(value, name, None) for name in dir(value) if name[0] != "_"),
        ]
    elif isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = [*value]
    else:
        inner = []
    for one in inner:
        yield from everything_of(one, seen)


@contextlib.contextmanager
def nothing_told(caplog, *secrets: str) -> Iterator[None]:
    """Checks that no secret is in a raised error, a warning, or a log record."""
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            yield
        except BaseException as error:
            told = "\n".join(everything_of(error, set()))
            for secret in secrets:
                assert secret not in told, told
            raise
        finally:
            told = "\n".join([caplog.text, *(str(one.message) for one in warned)])
            assert not any(secret in told for secret in secrets), told


# ---- tokens

BAD_TOKENS = {
    "letters of another alphabet": f"ключ{SECRET}",
    "a line break": f"{SECRET}\r\nDeltackpt-Direct: 1",
    "a line feed at the end": f"{SECRET}\n",
    "a space": f"{SECRET} {SECRET}",
    "a NUL": f"{SECRET}\0",
    "nothing": "",
    "half a pair": f"{SECRET}\ud800",
    "very many": SECRET * 1000,
}


@pytest.mark.parametrize("token", BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_an_invalid_token_is_refused_when_it_is_given(token, caplog, monkeypatch):
    for make in (
        lambda: Node("127.0.0.1:1", token),
        lambda: NodesStore(["127.0.0.1:1"], "run", token),
        lambda: Tokens(token),
    ):
        with nothing_told(caplog, SECRET), pytest.raises(OptionError, match="token"):
            make()
    if "\0" not in token and "\ud800" not in token and token:
        monkeypatch.setenv("DELTACKPT_NODES_TOKEN", token)
        with pytest.raises(OptionError, match="token"), nothing_told(caplog, SECRET):
            open_steps("nodes://127.0.0.1:1/run")


def test_no_header_field_injects_another_one():
    for value in ("a\r\nb: c", "a\n", "ä", "\0"):
        with pytest.raises(wire.Malformed) as caught:
            fields = [("Host", "a-node"), ("X", value)]
            wire.head(h11.Connection(h11.CLIENT), h11.Request, fields, method="GET", target="/")
        assert value not in "".join(everything_of(caught.value, set()))


def test_no_error_of_a_refusal_or_an_outage_contains_the_token(caplog):
    blobs = MemoryBlobs(1 << 20)
    with contextlib.closing(blobs):
        server = NodeServer(blobs, bind="127.0.0.1", tokens=Tokens("x" * 20))
        with contextlib.closing(Node(server.address, SECRET, deadline_secs=5.0)) as node:
            for ask in (
                lambda: node.get("x"),
                lambda: node.put("x", [b"a"]),
                lambda: node.put("x", [bytes(1 << 20)]),
                lambda: node.keys(""),
                lambda: node.delete(["x"]),
            ):
                with pytest.raises(Refused), nothing_told(caplog, SECRET):
                    ask()
            server.close()
            with pytest.raises(DeltackptError), nothing_told(caplog, SECRET):
                node.get("x")
        assert SECRET not in repr(node) + repr(server)


# ---- locations


def places(secret: str) -> Iterator[str]:
    """Locations with credentials, as users write them by mistake."""
    for password in {secret, urllib.parse.quote(secret, safe="")}:
        for scheme in ("http", "https", "ftp", "s3", "gs", "az", "nodes", "file", "hdfs", "S3"):
            yield f"{scheme}://user:{password}@10.0.0.1:9470/run"
            if scheme != "file":  # Otherwise it is a path.
                yield f"{scheme}:/user:{password}@10.0.0.1:9470/run"
            if "/" not in password:  # Otherwise it may be a bucket and a path.
                yield f"{scheme}://{password}@10.0.0.1/run"
    for query in (f"token={secret}", f"a=1&X-Amz-Signature={secret}", f"sig={secret}#x"):
        for scheme in ("http", "s3", "gs", "az", "nodes", "ftp"):
            yield f"{scheme}://10.0.0.1:9470/run?{query}"
        yield f"s3://bucket/run?{query}"
        yield f"nodes://10.0.0.1:9470?{query}"
        yield f"nodes://10.0.0.1:9470,10.0.0.2:9470?{query}"
    yield f"nodes://10.0.0.1:9470,user:{secret}@10.0.0.2:9470,10.0.0.1:9470/run"
    for spec in (
        {"driver": "http", "base_url": f"http://user:{secret}@host/", "path": "x"},
        {
            "driver": "http",
            "base_url": "http://host/",
            "headers": [f"Authorization: Bearer {secret}"],
        },
        {"driver": "http", "base_url": "http://host/", "headers": [f"X: {secret}"]},
        {"driver": "s3", "bucket": "b", "endpoint": f"http://user:{secret}@host:9000"},
        {"driver": "s3", "bucket": "b", "endpoint": f"http://host:9000/?sig={secret}"},
        {"driver": "s3", "bucket": "b", "aws_credentials": {"secret_access_key": secret}},
        {"driver": "gcs", "bucket": "b", "token": secret},
        {"driver": "ocdbt", "base": {"driver": "s3", "bucket": "b", "password": secret}},
        {"driver": "ocdbt", "base": f"s3://user:{secret}@b/x"},
        {"password": secret},
        {"driver": ["x"], "headers": [secret]},
    ):
        yield json.dumps(spec)
        yield json.dumps(spec)[:-1]
    yield '{"a":' * 100_000 + secret


ASKED: dict[str, Callable[[str], object]] = {
    "a manager": lambda where: deltackpt.CheckpointManager(
        where, handlers={"embeddings": deltackpt.Tables(select="tables/*")}
    ),
    "reading": lambda where: open_steps(where),
    "inspect": lambda where: inspect.open(where),
    "copy from": lambda where: copy.copy(where, "/nowhere/x"),
    "copy to": lambda where: copy.copy("/nowhere/x", where),
    "a directory": lambda where: Root.open(where, item="embeddings"),
    "export": local_path,
    "a stage": lambda where: deltackpt.CheckpointManager(
        "s3://bucket/run",
        handlers={"embeddings": deltackpt.Tables(select="tables/*")},
        options=deltackpt.ManagerOptions(tiers=Tiers(staging_dir=where)),
    ),
}


@pytest.mark.parametrize("asked", ASKED)
def test_credentials_in_a_location_are_refused_and_not_repeated(
    asked, caplog, tmp_path, monkeypatch
):
    monkeypatch.setenv("DELTACKPT_NODES_TOKEN", "x" * 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for password in PASSWORDS if asked == "reading" else PASSWORDS[1:2]:
        for where in places(password):
            if asked in ("a directory", "a stage", "export") and where.startswith("{"):
                continue  # Here it is the name of a directory.
            with pytest.raises(DeltackptError), nothing_told(caplog, SECRET):
                ASKED[asked](where)
    assert SECRET not in "".join(map(str, tmp_path.rglob("*")))


@pytest.mark.parametrize("name", ["ls", "verify", "show", "doctor"])
def test_no_command_repeats_credentials(name):
    for where in (
        f"http://user:{SECRET}@host/run",
        f"nodes://10.0.0.1:1/run?token={SECRET}",
        json.dumps({"driver": "http", "base_url": f"http://user:{SECRET}@host/"}),
    ):
        found = command.run(name, where, "--json")
        assert found.returncode and SECRET not in found.stdout + found.stderr


@pytest.mark.parametrize(
    "endpoint",
    [
        f"http://user:{SECRET}@host:1",
        f"user:{SECRET}@host:1",
        f"http://host:1/?sig={SECRET}",
        f"http://host:1/#{SECRET}",
        f"http://[{SECRET}@",
    ],
)
def test_credentials_in_an_endpoint_are_in_no_error_and_no_options(endpoint, caplog, monkeypatch):
    for make in (
        lambda: Tiers(endpoint=endpoint),
        lambda: buckets.locate("s3://bucket/run", endpoint=endpoint),
        lambda: buckets.locate("az://bucket/run", endpoint=endpoint),
        lambda: open_steps("s3://bucket/run", endpoint=endpoint),
    ):
        with (
            pytest.raises(OptionError, match="credentials or a query"),
            nothing_told(caplog, SECRET),
        ):
            make()
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", endpoint)
    with pytest.raises(OptionError), nothing_told(caplog, SECRET):
        buckets.locate("gs://bucket/run", endpoint="http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(OptionError), nothing_told(caplog, SECRET):
        buckets.locate("s3://bucket/run")


@pytest.mark.parametrize(
    ("where", "shown"),
    [
        ("/data/run", "/data/run"),
        ("run@2?x", "run@2?x"),
        (Path("/data"), "/data"),
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3:/bucket/run", "s3:/bucket/run"),
        ("nodes://10.0.0.1:1,10.0.0.2:2/run", "nodes://10.0.0.1:1,10.0.0.2:2/run"),
        ("http://a:b@c/d", "http://...@c/d"),
        ("http://c/d?e=f#g", "http://c/d?..."),
        ("{", "{...}"),
        ('{"driver": "s3", "bucket": "b"}', '{"bucket": "b", "driver": "s3"}'),
        ('{"token": "a", "x": ["http://a:b@c/"]}', '{"token": "...", "x": ["..."]}'),
    ],
)
def test_locations_are_shown_without_credentials(where, shown):
    assert redaction.shown(where) == shown


def test_names_with_a_question_mark_or_an_at_sign_are_names():
    assert buckets.locate("s3://b/what?/x@y").url == "s3://b/what?/x@y"
    assert node_client.addresses_of("b:1,a:2") == ["a:2", "b:1"]
    assert buckets.locate("nodes://a:2,b:1/x@y").url == "nodes://a:2,b:1/x@y"
