# SPDX-License-Identifier: Apache-2.0
"""Training under Ray's ``JaxTrainer``: a plain deltackpt loop that Ray restarts.

Ray Train keeps no copy of the state: what it is told of a checkpoint is where the committed step
lies, some hundred bytes. After the death of a worker, or a preemption, Ray starts all workers
anew, and ``restore_latest()`` finds the newest intact step as after any other restart.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray.train
from ray.train.v2.jax import JaxConfig, JaxTrainer

from deltackpt.errors import OptionError, RestoreError
from deltackpt.events import Event, FailureEvent

#: The only file of a checkpoint that is reported to Ray.
_REFERENCE = "deltackpt.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """Which committed step a Ray Train checkpoint stands for.

    Attributes:
      directory: root of the steps, as the run named it.
      step: the step.
    """

    directory: str
    step: int


class Session:
    """What a worker of a ``JaxTrainer`` has to do with Ray; a sink of its ``CheckpointManager``.

    Every worker makes one, gives it to its manager, and calls ``report`` and ``preempted`` at the
    same points of its program: Ray has the workers meet there.

    Example:
      A function for ``trainer()``; it goes on from the newest intact step however often it is
      started::

        def train(config):
            session = jax_trainer.Session(config["directory"])
            with deltackpt.CheckpointManager(config["directory"], sinks=(session,)) as manager:
                found = manager.restore_latest(template)
                state, first = (init(), 0) if found is None else (found.state, found.step)
                for step in range(first + 1, config["steps"] + 1):
                    state, loss = train_step(state)
                    if step % 100 == 0:
                        manager.save(step, state)
                        session.report({"loss": loss})
                manager.wait()
                session.report({"loss": loss})
    """

    def __init__(self, directory: str | os.PathLike[str]):
        """Checks that the workers are the processes of one jax job.

        Args:
          directory: root of the steps, the manager's.

        Raises:
          OptionError: each worker would train alone; see ``check_processes``.
        """
        check_processes()
        self._directory = os.fspath(directory)
        self._announced: ray.train.PreemptionInfo | None = None
        self._intact: Reference | None = None
        self._speaks = ray.train.get_context().get_world_rank() == 0
        latest = ray.train.get_checkpoint() if self._speaks else None
        self._reported = None if latest is None else reference(latest)

    def receive(self, event: Event) -> None:
        """Takes note of a step that was committed or restored (``deltackpt.events.Sink``)."""
        if not isinstance(event, FailureEvent):
            self._intact = Reference(directory=self._directory, step=event.step)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Reports metrics to Ray Train, and the newest committed step once.

        The first report after a commit bears a checkpoint that refers to the step, and
        ``checkpoint_step`` among its metrics. A save commits in the background, and the manager
        says so at its next ``save()``, ``wait()`` or ``close()``: so the step is that of an
        earlier save, unless ``wait()`` came before.

        Ray keeps the metrics of worker 0, of the reports that bear a checkpoint; others go to its
        callbacks. Scalar arrays become Python numbers: Ray stores metrics as JSON.

        Args:
          metrics: names to numbers or other values that JSON knows.
        """
        found = {name: _plain(value) for name, value in metrics.items()}
        if not self._speaks or self._intact is None or self._intact == self._reported:
            ray.train.report(found)
            return
        with tempfile.TemporaryDirectory(prefix="deltackpt-") as folder:
            text = json.dumps(dataclasses.asdict(self._intact))
            Path(folder, _REFERENCE).write_text(text)
            ray.train.report(
                {**found, "checkpoint_step": self._intact.step},
                checkpoint=ray.train.Checkpoint.from_directory(folder),
            )
        self._reported = self._intact

    def preempted(self) -> bool:
        """Whether Ray announces that nodes of this job will be taken away.

        True once for each announcement, on every worker alike: save, and ``wait()``. Training may
        go on; Ray starts the workers anew when the nodes are gone.
        """
        info = ray.train.get_preemption_info()
        known, self._announced = self._announced, info
        return info is not None and info != known


def check_processes() -> None:
    """Checks that jax counts the workers of this run as its processes.

    Raises:
      OptionError: it does not, and each worker would train a copy of its own, in silence. That is
        what a ``JaxTrainer`` does without accelerators, unless it is told otherwise.
    """
    # Not at the top: jax would seize the TPU of the machine that submits a job.
    import jax

    expected, found = ray.train.get_context().get_world_size(), jax.process_count()
    if found != expected:
        raise OptionError(
            f"JaxTrainer of {expected} workers: expected jax to count {expected} processes, found "
            f"{found}: each worker would train by itself and save over the others; make the "
            "trainer by deltackpt.service.jax_trainer.trainer(), or give yours "
            "jax_config=JaxConfig(use_gpu=True) and, on CPUs, JAX_PLATFORMS=cpu in "
            "RunConfig.worker_runtime_env"
        )


def reference(checkpoint: ray.train.Checkpoint) -> Reference:
    """The step that a checkpoint of a Ray Train result stands for.

    Args:
      checkpoint: one that ``Session.report`` reported.

    Raises:
      RestoreError: the checkpoint is not one of these.
    """
    with checkpoint.as_directory() as folder:
        path = Path(folder, _REFERENCE)
        if not path.is_file():
            raise RestoreError(
                f"Ray Train checkpoint {checkpoint.path}: expected {_REFERENCE} in it, found "
                f"{sorted(entry.name for entry in Path(folder).iterdir())}; give it to the code "
                "that reported it"
            )
        return Reference(**json.loads(path.read_text()))


def trainer(
    train: Callable[[dict[str, Any]], Any],
    config: Mapping[str, Any],
    *,
    scaling: ray.train.ScalingConfig,
    run: ray.train.RunConfig,
) -> JaxTrainer:
    """A ``JaxTrainer`` whose workers are the processes of one jax job, on any kind of device.

    Of the two configurations everything is kept. Added are what makes Ray start
    ``jax.distributed`` on CPUs too, and ``JAX_PLATFORMS`` in the workers' environment where it is
    not there yet: the accelerator that ``scaling`` asks for, and the host beside it.

    Args:
      train: what each worker runs.
      config: its argument.
      scaling: workers and their resources. GPUs: ``use_gpu`` and one worker per node with all its
        GPUs, ``resources_per_worker={"GPU": 8}``, because Ray numbers each worker's GPUs from 0.
        TPUs: ``use_tpu``, ``topology`` and ``accelerator_type``, one worker per host.
      run: name, a storage path that all nodes see, and how many failures Ray may answer with a
        restart.

    Raises:
      OptionError: Ray would not restart anything.
    """
    if run.failure_config is None or run.failure_config.max_failures == 0:
        raise OptionError(
            "RunConfig.failure_config: expected max_failures other than 0, found 0, Ray's default: "
            "the death of a worker would end the run; give "
            "FailureConfig(max_failures=...), the restarts of the whole run"
        )
    platforms = "tpu,cpu" if scaling.use_tpu else "cuda,cpu" if scaling.use_gpu else "cpu"
    environment = dict(run.worker_runtime_env or {})
    environment["env_vars"] = {"JAX_PLATFORMS": platforms} | environment.get("env_vars", {})
    return JaxTrainer(
        train,
        train_loop_config=dict(config),
        # With neither flag Ray leaves jax alone; on CPUs either of them means JAX_PLATFORMS.
        jax_config=JaxConfig(use_tpu=scaling.use_tpu, use_gpu=not scaling.use_tpu),
        scaling_config=scaling,
        run_config=dataclasses.replace(run, worker_runtime_env=environment),
    )


def _plain(value: Any) -> Any:
    """A number of any array library as Python's."""
    return value.item() if hasattr(value, "item") else value
