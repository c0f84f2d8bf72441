# SPDX-License-Identifier: Apache-2.0
"""Entry point of a Ray job: trains the DLRM of examples/dlrm_jax under Ray's JaxTrainer.

Submitted from the root of the repository; what stands after the second ``--`` goes to
examples/dlrm_jax/main.py:

ray job submit --working-dir . -- python ray_cluster/train_dlrm.py --workers 2 \
    --directory /shared/dlrm --storage /shared/ray -- --steps 2000 --save-every 50
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import ray.train

from deltackpt import service
from deltackpt.service import jax_trainer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def main() -> None:
    """Runs the command line."""
    options = parsed()
    # The workers import the example from here, wherever they run.
    modules = [str(EXAMPLES / name) for name in ("dlrm_jax", "running")]
    ray.init(runtime_env={"py_modules": modules})
    if options.service:
        # It outlives this job: the next one restores from it. Nothing where it runs already.
        service.start(
            options.directory,
            options=service.ServiceOptions(
                shards=options.service_shards,
                replicas=options.service_replicas,
                memory_bytes=options.service_bytes,
            ),
        )
    trainer = jax_trainer.trainer(
        train,
        {"arguments": [*options.arguments, "--resume", f"--directory={options.directory}"]}
        | {"directory": str(options.directory)},
        scaling=scaling(options),
        run=ray.train.RunConfig(
            name=options.name,
            storage_path=str(options.storage),
            failure_config=ray.train.FailureConfig(max_failures=options.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=options.references),
            worker_runtime_env={"env_vars": environment(options)},
        ),
    )
    checkpoint = trainer.fit().checkpoint
    assert checkpoint is not None  # A run ends with a report.
    found = jax_trainer.reference(checkpoint)
    print(f"done: step {found.step} is the newest in {found.directory}")


def train(config: dict[str, Any]) -> None:
    """What each worker runs, again after each restart."""
    # Here, because the machine that starts the job may have no accelerator.
    from dlrm_jax import main as example

    example.main(config["arguments"], jax_trainer.Session(config["directory"]))


def scaling(options: argparse.Namespace) -> ray.train.ScalingConfig:
    """Workers and what each of them needs."""
    if options.topology is not None:
        return ray.train.ScalingConfig(
            num_workers=options.workers,
            use_tpu=True,
            topology=options.topology,
            accelerator_type=options.accelerator_type,
        )
    if options.gpus:
        return ray.train.ScalingConfig(
            num_workers=options.workers,
            use_gpu=True,
            resources_per_worker={"GPU": options.gpus},
        )
    return ray.train.ScalingConfig(num_workers=options.workers)


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Variables of the workers."""
    if options.gpus or options.topology is not None:
        return {}
    return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={options.cpu_devices}"}


def parsed() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("arguments", nargs="*", help="after --: options of examples/dlrm_jax/main.py")
    add("--directory", type=Path, required=True, help="of the steps; every node sees it")
    add("--storage", type=Path, required=True, help="of Ray's results; every node sees it")
    add("--name", default="dlrm", help="of the run, below --storage")
    add("--workers", type=int, default=2, help="one per node with GPUs, one per TPU host")
    add("--max-failures", type=int, default=10, help="restarts of the whole run; -1: any number")
    add("--references", type=int, default=20, help="committed steps that Ray remembers")
    group = parser.add_argument_group("devices of a worker")
    group.add_argument("--cpu-devices", type=int, default=2, help="virtual devices without GPUs")
    group.add_argument("--gpus", type=int, default=0, help="GPUs of a worker: all of its node")
    group.add_argument("--topology", help="of the TPU slice, e.g. 4x4")
    group.add_argument("--accelerator-type", help="of the TPU slice, e.g. TPU-V6E")
    group = parser.add_argument_group("restore service")
    group.add_argument(
        "--service",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="hold the newest step in memory, for restarts",
    )
    group.add_argument("--service-shards", type=int, help="shards of the rows; default: nodes")
    group.add_argument("--service-replicas", type=int, default=1, help="replicas of each shard")
    group.add_argument("--service-bytes", type=int, help="maximum memory of a replica")
    options = parser.parse_args()
    for name in ("directory", "storage"):
        if not getattr(options, name).is_absolute():
            parser.error(f"--{name}: expected an absolute path, found {getattr(options, name)}")
    return options


if __name__ == "__main__":
    main()
