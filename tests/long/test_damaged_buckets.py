# SPDX-License-Identifier: Apache-2.0
"""Every entry point, with each object of a bucket removed, truncated or altered."""

from __future__ import annotations

import itertools

import damaged_roots
import pytest
import servers
from damaged_roots import CHAINS, READS, Bucket, Readers
from damages import DAMAGES
from test_bucket_faults import named

from deltackpt.ledger.view import JOURNAL

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("scheme", ["s3", "gcs", "azure"])
def test_a_damaged_object_never_blocks_a_bucket(campaign, figures, tmp_path, scheme):
    start = getattr(servers, scheme)
    with (
        start(tmp_path / "server") as server,
        servers.environment_of(server),
        damaged_roots.quick(),
    ):
        url = server.bucket("damaged") + "/run"
        bucket = Bucket(url, tmp_path, endpoint=server.endpoint)
        every = [*itertools.product(bucket.whole, DAMAGES)]
        drawn = campaign.random("damaged buckets", scheme)
        for key, how in drawn.sample(every, campaign.count(len(every))):
            intact = bucket.damage(bucket.whole, key, how)
            for reads in READS:
                with named(f"{key} {how}: {reads.__name__}"):
                    reads(Readers(url, bucket.states, intact, server.endpoint))
            if key.startswith(JOURNAL) or bucket.step_of(key) == max(CHAINS):
                with named(f"{key} {how}: a trainer"):
                    damaged_roots.goes_on(bucket.new_node(), bucket.states, intact)
    figures(
        "damaged objects of buckets", objects=len(bucket.whole), tried=campaign.count(len(every))
    )
