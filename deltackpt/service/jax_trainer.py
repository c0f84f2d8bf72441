# SPDX-License-Identifier: Apache-2.0
"""Training under Ray's ``JaxTrainer``: a plain deltackpt loop that Ray restarts.

Ray Train keeps no copy of the state: each reported checkpoint is only a reference of a few hundred
bytes to the committed step. After a worker's death or a preemption, Ray restarts all workers, and
``restore_latest()`` finds the newest intact step as after any other restart.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import ray.train
from ray.train.v2.jax import JaxConfig, JaxTrainer

from deltackpt.errors import OptionError, RestoreError
from deltackpt.events import Event, RestoreEvent, SaveEvent

#: The only file in a checkpoint that is reported to Ray.
_REFERENCE = "deltackpt.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """The committed step that a Ray Train checkpoint refers to.

    Attributes:
      directory: the checkpoint directory, as the run named it.
      step: the step.
    """

    directory: str
    step: int


class Session:
    """A ``JaxTrainer`` worker's link to Ray; also an event handler of its ``CheckpointManager``.

    Every worker creates one, passes it to its manager, and calls ``report`` and ``preempted`` at
    the same points of its program, because Ray synchronizes the workers there.

    Examples:
      A function for ``trainer()``, which resumes from the newest intact step at every start::

        def train(config):
            session = jax_trainer.Session(config["directory"])
            directory = config["directory"]
            with deltackpt.CheckpointManager(directory, event_handlers=(session,)) as manager:
                found = manager.restore_latest(template)
                state, first = (init(), 0) if found is None else (found.state, found.step)
                for step in range(first + 1, config["steps"] + 1):
                    state, loss = train_step(state)
                    if step % 100 == 0:
                        manager.save(step, state)
                        session.report({"loss": loss})
                manager.wait_until_finished()
                session.report({"loss": loss})
    """

    def __init__(self, directory: str | os.PathLike[str]):
        """Checks that the workers are the processes of one JAX job; see ``check_processes``."""
        check_processes()
        self._directory = os.fspath(directory)
        self._announced: ray.train.PreemptionInfo | None = None
        self._intact: Reference | None = None
        self._speaks = ray.train.get_context().get_world_rank() == 0
        latest = ray.train.get_checkpoint() if self._speaks else None
        self._reported = None if latest is None else reference(latest)

    def receive(self, event: Event) -> None:
        """Records a step that was committed or restored."""
        # Not that of a WAL record or an upload, whose step is not committed, or an older one.
        if isinstance(event, SaveEvent):
            self._intact = Reference(directory=self._directory, step=event.step)
        elif isinstance(event, RestoreEvent):
            # For a recovery point, it names the step below, which is committed.
            self._intact = Reference(directory=self._directory, step=event.chain[-1])

    def report(self, metrics: Mapping[str, object]) -> None:
        """Reports metrics to Ray Train, and each newly committed step once.

        The first report after a commit carries a checkpoint that refers to the step, and the metric
        ``checkpoint_step``. A save commits in the background, and the manager emits its event in
        the next ``save()``, ``wait_until_finished()`` or ``close()``. The step is therefore that of
        an earlier save, unless you called ``wait_until_finished()`` first.

        Ray keeps worker 0's metrics for the reports that carry a checkpoint; the others go to its
        callbacks. Scalar arrays are converted to Python numbers, because Ray stores metrics as
        JSON.

        Args:
          metrics: a mapping from names to numbers or other JSON values.
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
        """Returns whether Ray has announced that nodes of this job will be taken away.

        Returns True once per announcement, on every worker: save then, and call
        ``wait_until_finished()``. Training may continue; Ray restarts the workers when the nodes
        are gone.
        """
        info = ray.train.get_preemption_info()
        known, self._announced = self._announced, info
        return info is not None and info != known


def check_processes() -> None:
    """Checks that JAX counts the workers of this run as its processes.

    Raises:
      OptionError: it does not, so each worker would silently train its own copy. By default a
        ``JaxTrainer`` without accelerators does that.
    """
    # Imported here, because JAX would seize the TPU of the machine that submits a job.
    import jax

    expected, found = ray.train.get_context().get_world_size(), jax.process_count()
    if found != expected:
        raise OptionError(
            f"JaxTrainer of {expected} workers: expected jax to count {expected} processes, found "
            f"{found}: each worker would train alone and overwrite the others' saves; create the "
            "trainer with deltackpt.service.jax_trainer.trainer(), or pass "
            "jax_config=JaxConfig(use_gpu=True) and, on CPUs, JAX_PLATFORMS=cpu in "
            "RunConfig.worker_runtime_env"
        )


def reference(checkpoint: ray.train.Checkpoint) -> Reference:
    """Returns the step that a checkpoint of a Ray Train result refers to.

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
                f"{sorted(entry.name for entry in Path(folder).iterdir())}; pass it to the code "
                "that reported it"
            )
        return Reference(**json.loads(path.read_text()))


def trainer(
    train: Callable[[dict[str, object]], object],
    config: Mapping[str, object],
    *,
    scaling: ray.train.ScalingConfig,
    run: ray.train.RunConfig,
) -> JaxTrainer:
    """Creates a ``JaxTrainer`` whose workers are the processes of one JAX job, on any device kind.

    Both configurations are kept. Two settings are added: one makes Ray start ``jax.distributed`` on
    CPUs as well; the other sets ``JAX_PLATFORMS`` in the workers' environment, unless it is set, to
    the accelerator that ``scaling`` requests and the CPU.

    Args:
      train: the function that each worker runs.
      config: its argument.
      scaling: workers and their resources. GPUs: ``use_gpu`` and one worker per node with all its
        GPUs, ``resources_per_worker={"GPU": 8}``, because Ray numbers each worker's GPUs from 0.
        TPUs: ``use_tpu``, ``topology`` and ``accelerator_type``, one worker per host.
      run: name, a storage path that all nodes see, and after how many failures Ray may restart.

    Raises:
      OptionError: Ray would not restart anything.
    """
    if run.failure_config is None or run.failure_config.max_failures == 0:
        raise OptionError(
            "RunConfig.failure_config: expected max_failures other than 0, found 0 (Ray's "
            "default), so a worker's death would end the run; set "
            "FailureConfig(max_failures=...), the number of restarts of the whole run"
        )
    platforms = "tpu,cpu" if scaling.use_tpu else "cuda,cpu" if scaling.use_gpu else "cpu"
    environment = dict(run.worker_runtime_env or {})
    environment["env_vars"] = {"JAX_PLATFORMS": platforms} | environment.get("env_vars", {})
    return JaxTrainer(
        train,
        train_loop_config=dict(config),
        # With neither flag Ray does not initialize JAX; on CPUs either one means JAX_PLATFORMS.
        jax_config=JaxConfig(use_tpu=scaling.use_tpu, use_gpu=not scaling.use_tpu),
        scaling_config=scaling,
        run_config=dataclasses.replace(run, worker_runtime_env=environment),
    )


def _plain(value: object) -> object:
    item = getattr(value, "item", None)
    return value if item is None else item()
