# SPDX-License-Identifier: Apache-2.0
"""Real object-store servers on loopback, started and stopped by tests."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import email.utils
import hmac
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from machine import free_port, required

HERE = Path(__file__).resolve().parent.parent
#: The output directory of `make servers`.
_BUILT = HERE / "build" / "servers" / "bin"
_START_SECS = 120


@dataclasses.dataclass(frozen=True)
class Server:
    """A running object store.

    Attributes:
      scheme: the scheme of its URLs.
      endpoint: its address.
      environment: credentials as environment variables for SDKs.
      make: creates a bucket.
      process: the server's process.
    """

    scheme: str
    endpoint: str
    environment: dict[str, str]
    make: Callable[[str], None]
    process: subprocess.Popen[bytes]

    def bucket(self, name: str) -> str:
        """URL of a new bucket; the name needs at least 3 letters."""
        self.make(name)
        return f"{self.scheme}://{name}"


@dataclasses.dataclass(frozen=True)
class Certificate:
    """A server's TLS certificate and its authority.

    Attributes:
      authority: file with the certificate of an authority that no machine trusts.
      shown: file with the server's certificate, for the loopback address.
      key: file with the server's private key.
    """

    authority: Path
    shown: Path
    key: Path

    @classmethod
    def made(cls, folder: Path) -> Certificate:
        """Creates a certificate that is valid for two days."""
        required(shutil.which("openssl") is not None, "openssl is needed to make a certificate")
        asked, about, key = folder / "asked.pem", folder / "about", folder / "authority.key"
        found = cls(folder / "authority.pem", folder / "shown.pem", folder / "shown.key")
        about.write_text("subjectAltName=IP:127.0.0.1\n")
        fresh = ("-newkey", "rsa:2048", "-nodes")
        for command in (
            ("req", "-x509", *fresh, "-keyout", key, "-out", found.authority, "-days", "2")
            + ("-subj", "/CN=authority"),
            ("req", *fresh, "-keyout", found.key, "-out", asked, "-subj", "/CN=server"),
            ("x509", "-req", "-in", asked, "-CA", found.authority, "-CAkey", key, "-days", "2")
            + ("-CAcreateserial", "-extfile", about, "-out", found.shown),
        ):
            subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True)
        return found

    def trust(self) -> contextlib.AbstractContextManager[object]:
        """Makes this process and its children trust the authority in the context."""
        return mock.patch.dict(os.environ, {"SSL_CERT_FILE": str(self.authority)})


@contextlib.contextmanager
def s3(
    folder: Path, port: int | None = None, certificate: Certificate | None = None
) -> Iterator[Server]:
    """versitygw; its buckets are folders of a directory.

    Args:
      folder: the directory of its data and its log.
      port: the port to listen on; a free one by default.
      certificate: its TLS certificate; None: no TLS.
    """
    held = folder / "buckets"
    held.mkdir(parents=True, exist_ok=True)
    keys = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "secret"}
    root = {"ROOT_ACCESS_KEY": "tester", "ROOT_SECRET_KEY": "secret"}
    port = port or free_port()
    command = [program("versitygw"), "--port", f"127.0.0.1:{port}", "--keep-alive"]
    command += _shows(certificate, "--cert", "--key")
    with _running([*command, "posix", str(held)], folder, root, port) as process:
        environment = {**keys, "AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1"}
        yield Server(
            "s3",
            f"{_scheme(certificate)}://127.0.0.1:{port}",
            environment,
            lambda name: (held / name).mkdir(exist_ok=True),
            process,
        )


@contextlib.contextmanager
def gcs(
    folder: Path, port: int | None = None, certificate: Certificate | None = None
) -> Iterator[Server]:
    """fake-gcs-server, with all data in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    address = f"{_scheme(certificate)}://127.0.0.1:{port}"

    def make(name: str) -> None:
        asked = urllib.request.Request(
            f"{address}/storage/v1/b?project=test",
            data=json.dumps({"name": name}).encode(),
            headers={"Content-Type": "application/json"},
        )
        _ask(asked, certificate)

    command = [
        *(program("fake-gcs-server"), "-scheme", _scheme(certificate), "-host", "127.0.0.1"),
        *("-port", str(port), "-backend", "memory", "-log-level", "error"),
        *("-external-url", address, "-public-host", f"127.0.0.1:{port}"),
        *_shows(certificate, "-cert-location", "-private-key-location"),
    ]
    with _running(command, folder, {}, port) as process:
        yield Server("gs", address, {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "x"}, make, process)


#: Azurite's well-known account: documented, not a secret.
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@contextlib.contextmanager
def azure(
    folder: Path, port: int | None = None, certificate: Certificate | None = None
) -> Iterator[Server]:
    """Azurite, with all data in memory."""
    pytest.importorskip("obstore")
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    address = f"{_scheme(certificate)}://127.0.0.1:{port}/{_AZURE_ACCOUNT}"

    def make(name: str) -> None:
        when = email.utils.formatdate(usegmt=True)
        headers = {"x-ms-date": when, "x-ms-version": "2021-08-06"}
        named = "".join(f"{key}:{value}\n" for key, value in headers.items())
        about = f"/{_AZURE_ACCOUNT}/{_AZURE_ACCOUNT}/{name}\nrestype:container"
        signed = f"PUT{chr(10) * 12}{named}{about}".encode()
        key = base64.b64decode(_AZURE_KEY)
        signature = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
        headers |= {"Authorization": f"SharedKey {_AZURE_ACCOUNT}:{signature}"}
        asked = urllib.request.Request(
            f"{address}/{name}?restype=container", headers=headers, method="PUT", data=b""
        )
        asked.add_unredirected_header("Content-Type", "")
        _ask(asked, certificate)

    command = [
        *(program("azurite-blob"), "--blobHost", "127.0.0.1", "--blobPort", str(port)),
        *("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"),
        *_shows(certificate, "--cert", "--key"),
    ]
    environment = {
        "AZURE_STORAGE_ACCOUNT_NAME": _AZURE_ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": _AZURE_KEY,
    }
    with _running(command, folder, {}, port) as process:
        yield Server("az", address, environment, make, process)


def environment_of(server: Server) -> contextlib.AbstractContextManager[object]:
    """Sets the environment variables that a client of the server needs."""
    found = {"TENSORSTORE_GCS_HTTP_URL": server.endpoint} if server.scheme == "gs" else {}
    return mock.patch.dict(os.environ, {**server.environment, **found})


def program(name: str) -> str:
    """Path of a server's program; if it is missing, the test is skipped, or fails in CI."""
    built = _BUILT / name
    found = str(built) if built.exists() else shutil.which(name)
    required(found is not None, f"{name} is not built: make servers")
    assert found is not None
    return found


def _scheme(certificate: Certificate | None) -> str:
    return "http" if certificate is None else "https"


def _shows(certificate: Certificate | None, shown: str, key: str) -> list[str]:
    """Command-line options for a server's certificate."""
    if certificate is None:
        return []
    return [shown, str(certificate.shown), key, str(certificate.key)]


def _ask(asked: urllib.request.Request, certificate: Certificate | None) -> None:
    trusted = certificate and ssl.create_default_context(cafile=certificate.authority)
    urllib.request.urlopen(asked, timeout=120, context=trusted).close()


@contextlib.contextmanager
def _running(
    command: list[str], folder: Path, environment: dict[str, str], port: int
) -> Iterator[subprocess.Popen[bytes]]:
    log = folder / "log"
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}
        )
    try:
        deadline = time.monotonic() + _START_SECS
        while True:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()
