# SPDX-License-Identifier: Apache-2.0
"""Buckets on real servers meet the contract of a store and report what is wrong with them."""

from __future__ import annotations

import base64
import concurrent.futures
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import servers
from servers import environment_of

from deltackpt.errors import MissingExtra, OptionError, StorageError, UnsupportedRoot
from deltackpt.storage import buckets
from deltackpt.storage.store import Exists, Missing, Refused, StorePath, Unanswered
from deltackpt.testing import MemoryStore
from deltackpt.testing.store_suite import StoreSuite

_numbers = itertools.count()


@pytest.fixture(scope="module")
def s3(tmp_path_factory) -> Iterator[servers.Server]:
    with servers.s3(tmp_path_factory.mktemp("s3")) as server, environment_of(server):
        yield server


@pytest.fixture(scope="module")
def gcs(tmp_path_factory) -> Iterator[servers.Server]:
    with servers.gcs(tmp_path_factory.mktemp("gcs")) as server, environment_of(server):
        yield server


@pytest.fixture(scope="module")
def azure(tmp_path_factory) -> Iterator[servers.Server]:
    with servers.azure(tmp_path_factory.mktemp("azure")) as server, environment_of(server):
        yield server


def opened(server: servers.Server, **how) -> StorePath:
    """Opens a fresh folder in a fresh bucket."""
    url = f"{server.bucket(f'bucket{next(_numbers)}')}/some/run"
    return buckets.locate(url, endpoint=server.endpoint).open(**how)


class TestS3(StoreSuite):
    @pytest.fixture
    def make(self, s3):
        return lambda: opened(s3).store


class TestAzure(StoreSuite):
    @pytest.fixture
    def make(self, azure):
        return lambda: opened(azure).store


class TestGcs(StoreSuite):
    @pytest.fixture
    def make(self, gcs):
        return lambda: opened(gcs).store


@pytest.fixture(params=["s3", "gcs", "azure"])
def server(request) -> servers.Server:
    return request.getfixturevalue(request.param)


def test_a_server_supports_conditional_writes(server):
    root = opened(server)
    buckets.probe(root)
    assert root.keys() == []


def test_a_missing_bucket_is_named(server):
    at = buckets.locate(f"{server.scheme}://nobody-made-it/run", endpoint=server.endpoint).open()
    with pytest.raises(Refused, match=r"nobody-made-it/run: .* to write x, found: .*NotF|NOT_F"):
        at.store.put("x", b"")
    with pytest.raises(Missing):
        at.store.get("x")


def test_a_silent_server_times_out(server):
    secs = 3.0 if server.scheme == "az" else 0.5  # Azurite is slower on a busy machine.
    at = opened(server, deadline_secs=secs)
    opened(server).store.put("x", b"abc")  # The server has answered before.
    os.kill(server.process.pid, signal.SIGSTOP)
    os.waitpid(server.process.pid, os.WUNTRACED)  # Each of its threads has stopped.
    try:
        asks = (
            lambda: at.store.get("x"),
            lambda: at.store.put("y", b"late"),
            lambda: at.store.keys(""),
            lambda: at.store.delete(["x"]),
        )
        with concurrent.futures.ThreadPoolExecutor(len(asks)) as pool:
            for future in [pool.submit(ask) for ask in asks]:
                with pytest.raises(Unanswered, match=rf"found no answer within {secs:g} s"):
                    future.result()
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def test_a_stopped_server_is_unanswered_and_a_restarted_one_answers(tmp_path):
    with servers.s3(tmp_path) as server, environment_of(server):
        at = opened(server, deadline_secs=10)
        at.store.put("x", b"abc")
        port = int(server.endpoint.rpartition(":")[2])
    with pytest.raises(Unanswered):
        at.store.get("x")
    with servers.s3(tmp_path, port) as server, environment_of(server):
        assert at.store.get("x") == b"abc"


def test_wrong_credentials_are_refused_and_not_in_the_error(s3):
    url = s3.bucket("secrets") + "/run"
    with mock.patch.dict(os.environ, {"AWS_ACCESS_KEY_ID": "who", "AWS_SECRET_ACCESS_KEY": "hush"}):
        at = buckets.locate(url, endpoint=s3.endpoint).open()
        with pytest.raises(StorageError, match="expected to write x") as caught:
            at.store.put("x", b"")
    told, cause = str(caught.value), caught.value.__cause__
    assert isinstance(caught.value, Refused)
    assert not any(secret in f"{told}{cause}" for secret in ("hush", "who", "Signature="))


def test_a_wrong_azure_key_is_refused_and_not_in_the_error(azure):
    url = azure.bucket("secrets") + "/run"
    hush = base64.b64encode(b"hush" * 16).decode()
    with mock.patch.dict(os.environ, {"AZURE_STORAGE_ACCOUNT_KEY": hush}):
        at = buckets.locate(url, endpoint=azure.endpoint).open()
    for ask in (
        lambda: at.store.put("x", b""),
        lambda: at.store.get("x"),
        lambda: at.store.keys(""),
    ):
        with pytest.raises(Refused, match=r"status code: 403") as caught:
            ask()
        assert hush not in f"{caught.value}{caught.value.__cause__}{caught.value.__cause__.args}"


def test_azure_without_an_account_names_what_to_set(monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Refused, match=r"az://con/run: expected .*AZURE_STORAGE_ACCOUNT_NAME"):
        buckets.locate("az://con/run").open()


def test_azure_without_obstore_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=r"pip install 'deltackpt\[azure\]'"):
        buckets.locate("az://con/run").open()


def test_the_azure_endpoint_is_read_from_the_environment(azure, monkeypatch):
    url = azure.bucket("endpoints") + "/run"
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure.endpoint)
    at = buckets.locate(url).open()
    at.store.put("x", b"abc")
    assert at.store.get("x") == b"abc"


# URLs.


@pytest.mark.parametrize(
    ("url", "driver", "bucket", "path"),
    [
        ("s3://b/some/run", "s3", "b", "some/run/"),
        ("s3://b", "s3", "b", ""),
        ("S3://b/x/", "s3", "b", "x/"),
        ("gs://b/x y/#1", "gcs", "b", "x y/#1/"),
        ("s3:/b/x", "s3", "b", "x/"),
        ("az://con/a/b", "azure", "con", "a/b/"),
    ],
)
def test_a_url_is_a_bucket_and_a_folder(url, driver, bucket, path):
    found = buckets.locate(url).spec
    assert (found["driver"], found["bucket"], found["path"]) == (driver, bucket, path)


@pytest.mark.parametrize(
    ("url", "expected", "message"),
    [
        ("ftp://b/x", UnsupportedRoot, "found the scheme 'ftp'"),
        ("s3://", OptionError, "expected a bucket name after s3://, found none"),
        ("s3://key:hush@b/x", OptionError, "found credentials or a port"),
        ("{", OptionError, "expected a TensorStore kvstore spec as JSON"),
        ('{"a": 1}', OptionError, "a driver"),
    ],
)
def test_an_invalid_bucket_url_is_an_error(url, expected, message):
    with pytest.raises(expected, match=message) as caught:
        buckets.locate(url)
    assert "hush" not in str(caught.value)


def test_paths_and_urls_are_distinguished(tmp_path):
    assert [buckets.is_url(one) for one in ("s3://b", "gs:/b", '{"driver": "memory"}')] == [
        True
    ] * 3
    assert not buckets.is_url(tmp_path) and not buckets.is_url("a/b:c")
    assert buckets.file_path("file:///a%20b/c#d") == buckets.file_path("/a b/c#d")
    assert buckets.file_path("s3://b/x") is None
    with pytest.raises(OptionError, match="the host 'elsewhere'"):
        buckets.file_path("file://elsewhere/x")


def test_a_store_that_takes_every_write_is_refused():
    class Careless(MemoryStore):
        def put(self, key, data, *, absent=False):
            super().put(key, data)

    class Stubborn(MemoryStore):
        def put(self, key, data, *, absent=False):
            raise Exists(key)

    for store, found in (
        (Careless(), "both accepted"),
        (Stubborn(), "write of a new key rejected"),
    ):
        with pytest.raises(UnsupportedRoot, match=found):
            buckets.probe(StorePath(store, ""))
        assert store.keys("") == []
