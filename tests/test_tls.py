# SPDX-License-Identifier: Apache-2.0
"""Buckets behind TLS: a server is used only if its certificate authority is trusted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import servers
from servers import Certificate, environment_of

pytestmark = pytest.mark.processes

_TRAINER = """
import sys
import jax.numpy as jnp
import deltackpt
url, stage, endpoint = sys.argv[1:]
tiers = deltackpt.Tiers(staging_dir=stage, endpoint=endpoint)
state = {"tables": {"words": jnp.arange(12.0).reshape(4, 3)}}
with deltackpt.CheckpointManager(
    url,
    handlers={"embeddings": deltackpt.Tables(select="tables/*")},
    options=deltackpt.ManagerOptions(tiers=tiers),
) as manager:
    manager.save(7, state)
    manager.wait_until_finished()
    found = manager.restore_latest(state)
    assert found.step == 7 and (found.state["tables"]["words"] == state["tables"]["words"]).all()
"""


def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
    # A process reads the trusted authorities only once.
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))


@pytest.mark.parametrize("scheme", ["s3", "gcs", "azure"])
def test_a_bucket_behind_tls_is_used_only_if_its_authority_is_trusted(tmp_path, scheme):
    certificate = Certificate.made(tmp_path)
    start = getattr(servers, scheme)
    with start(tmp_path / "server", certificate=certificate) as server, environment_of(server):
        assert server.endpoint.startswith("https://")
        url = server.bucket("bucket") + "/run"
        about = (url, tmp_path / "stage", server.endpoint)
        listed = ("-m", "deltackpt.cli", "ls", url, "--endpoint", server.endpoint)
        # TensorStore does not report why a GCS listing fails.
        told = "Failed to parse response" if scheme == "gcs" else "SSL_CERT_FILE"
        refused = ran("-c", _TRAINER, *about)
        assert refused.returncode == 1 and told in refused.stderr, refused
        with certificate.trust():
            trained = ran("-c", _TRAINER, *about)
            assert trained.returncode == 0, trained.stderr
            found = ran(*listed)
            assert found.returncode == 0 and " 7 " in found.stdout, found
        found = ran(*listed)
        assert found.returncode == 1 and told in found.stderr, found
