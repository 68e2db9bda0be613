"""The executor that hands steps to a cluster of Ray; the only file that imports it."""

import os
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from cgmerge.errors import EnvironmentProblem, MissingExtra
from cgmerge.evals.pipeline.run import Outcome, run_command

_LOST = 70
"""Exit code of a step that Ray could not run, or whose worker was lost."""
_PATIENCE = 10.0
"""Seconds."""


class Ray:
    """Several at a time on the machines of a Ray cluster that share this folder.

    Ray hides accelerators from tasks that ask for none, so that steps of a cluster that has some
    share them evenly: one each, or a part where there are more workers.

    Args:
        address: Of the cluster; None starts one on this machine.
        workers: How many at most; also the CPUs of a cluster that is started.

    Raises:
        MissingExtra: ray is not installed.
        EnvironmentProblem: There is no such cluster.
    """

    def __init__(self, address: str | None, workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtra(
                "the executor `ray` needs the package ray",
                code="ray",
                hint='pip install "cgmerge[ray]", or --executor processes',
            ) from error
        # Who does not name a network is not told on over one.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        here = {} if address else {"num_cpus": workers, "include_dashboard": False}
        try:
            _check_there(address)
            # `local` where RAY_ADDRESS names a cluster that nobody asked for.
            ray.init(address or "local", logging_level="error", log_to_driver=False, **here)
        except (OSError, RuntimeError, ValueError) as error:
            raise EnvironmentProblem(
                f"there is no Ray cluster at {address or 'this machine'}: {_first_line(error)}",
                code="ray",
                hint="see: ray status --address ADDRESS; a cluster with tokens needs the same"
                " RAY_AUTH_MODE=token here; leave --address out for a cluster of this machine",
                found=address,
            ) from error
        self.ray: Any = ray
        share = min(1.0, float(ray.cluster_resources().get("GPU", 0.0)) / workers)
        gpus = {"num_gpus": int(share * 1e4) / 1e4} if share else {}
        self.remote = ray.remote(num_cpus=1, max_retries=0, **gpus)(run_command)
        self.folder = str(Path.cwd())

    def start(self, words: Sequence[str], launcher: Sequence[str]) -> "Future[Outcome]":
        """Hand the command to the cluster; a worker that is lost is a step that failed."""
        task = self.remote.remote(list(words), list(launcher), keep=True, folder=self.folder)
        told: Future[Outcome] = Future()
        lost: tuple[type[BaseException], ...] = (self.ray.exceptions.RayError,)

        def tell(done: "Future[Outcome]") -> None:
            try:
                told.set_result(done.result())
            except lost as error:
                told.set_result(Outcome(_LOST, "", f"Ray: {error}"))
            except BaseException as error:  # noqa: BLE001  (is raised where the result is read)
                told.set_exception(error)

        task.future().add_done_callback(tell)
        return told

    def close(self) -> None:
        """Leave the cluster; one that was started here ends, and with it what still runs."""
        self.ray.shutdown()


def _check_there(address: str | None) -> None:
    """Look for somebody at `HOST:PORT`: where nobody is, Ray ends the whole process a minute later.

    Raises:
        OSError: Nobody answers.
    """
    host, _, port = (address or "").rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
