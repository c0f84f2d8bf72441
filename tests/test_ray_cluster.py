# SPDX-License-Identifier: Apache-2.0
"""The cluster files: their structure, and the size limits that their comments require."""

# ruff: noqa: E402
from __future__ import annotations

import pytest

pytest.importorskip("ray.autoscaler", reason="needs deltackpt[ray]")

import yaml
from ray.autoscaler._private import util

UNITS = {"Gi": 1 << 30}


def loaded(repository, name):
    return yaml.safe_load((repository / "ray_cluster" / name).read_text())


def nbytes(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def test_the_launcher_accepts_the_cluster_file_of_vms(repository):
    util.validate_config(util.prepare_config(loaded(repository, "vms.yml")))


def test_the_memory_of_each_pod_holds_the_object_store_and_its_volume(repository):
    spec = loaded(repository, "kuberay.yml")["spec"]
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        [volume] = [one for one in pod["volumes"] if one["name"] == "object-store"]
        assert {"mountPath": "/dev/shm", "name": "object-store"} in container["volumeMounts"]
        shared_memory = nbytes(volume["emptyDir"]["sizeLimit"])
        assert int(group["rayStartParams"]["object-store-memory"]) < shared_memory
        assert 4 * shared_memory <= nbytes(container["resources"]["limits"]["memory"])


def test_accelerators_are_not_started_until_requested(repository):
    spec = loaded(repository, "kuberay.yml")["spec"]
    replicas = {group["groupName"]: group["replicas"] for group in spec["workerGroupSpecs"]}
    assert replicas == {"cpu": 2, "gpu": 0, "tpu": 0}
    types = loaded(repository, "vms.yml")["available_node_types"]
    least = {name: node.get("min_workers", 0) for name, node in types.items()}
    assert least == {"head": 0, "cpu": 2, "gpu": 0, "tpu": 0}
