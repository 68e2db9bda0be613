"""The executor for Ray against a stand-in: what it asks for, and what becomes of lost workers."""

import os
import socket
import sys
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace

import pytest

from cgmerge.errors import EnvironmentProblem, MissingExtra
from cgmerge.evals.pipeline import cluster
from cgmerge.evals.pipeline.run import Outcome


class RayError(Exception):
    """What Ray raises for a task whose worker is gone."""


class StandIn(ModuleType):
    """`ray` as far as the executor knows it; tasks are done at once, by `answer`."""

    def __init__(self, gpus=0.0, refuse=None):
        super().__init__("ray")
        self.gpus, self.refuse = gpus, refuse
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.inits, self.asked, self.calls, self.down = [], {}, [], 0
        self.answer = lambda: Outcome(0, "{}")

    def init(self, address, **options):
        if self.refuse:
            raise self.refuse
        self.inits.append((address, options))

    def cluster_resources(self):
        return {"CPU": 2.0, **({"GPU": self.gpus} if self.gpus else {})}

    def remote(self, **options):
        self.asked = options
        return lambda _function: SimpleNamespace(remote=self._task)

    def _task(self, *words, **options):
        self.calls.append((words, options))
        future = Future()
        try:
            future.set_result(self.answer())
        except (RayError, OSError) as error:
            future.set_exception(error)
        return SimpleNamespace(future=lambda: future)

    def shutdown(self):
        self.down += 1


def there(place, _patience):
    """Somebody answers at `head`, and nowhere else."""
    if place != ("head", 6379):
        raise ConnectionRefusedError(111, "Connection refused")
    return SimpleNamespace(close=lambda: None)


@pytest.fixture
def ray(monkeypatch):
    def use(**options):
        made = StandIn(**options)
        monkeypatch.setitem(sys.modules, "ray", made)
        monkeypatch.setattr(socket, "create_connection", there)
        monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "as before")
        monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
        return made

    return use


def test_a_cluster_of_ones_own_is_asked_for_nothing_else(ray, tmp_path, monkeypatch):
    made = ray()
    monkeypatch.chdir(tmp_path)
    executor = cluster.Ray(None, 3)
    ((address, options),) = made.inits
    assert address == "local"  # whatever RAY_ADDRESS says
    assert (options["num_cpus"], options["include_dashboard"]) == (3, False)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert executor.start(["eval", "x"], []).result() == Outcome(0, "{}")
    assert made.calls == [((["eval", "x"], []), {"keep": True, "folder": str(tmp_path)})]
    executor.close()
    assert made.down == 1


def test_a_cluster_that_is_there_keeps_its_size(ray):
    made = ray()
    cluster.Ray("head:6379", 3)
    ((address, options),) = made.inits
    assert address == "head:6379"
    assert "num_cpus" not in options


@pytest.mark.parametrize(
    ("gpus", "workers", "share"), [(0.0, 2, None), (8.0, 8, 1.0), (8.0, 2, 1.0), (1.0, 3, 0.3333)]
)
def test_steps_share_accelerators(ray, gpus, workers, share):
    made = ray(gpus=gpus)
    cluster.Ray("head:6379", workers)
    assert made.asked.get("num_gpus") == share
    assert (share or 0) * workers <= max(gpus, 0)


def test_a_lost_worker_is_a_failed_step(ray):
    made = ray()

    def lost():
        raise RayError("The worker died\nand a page of advice")

    made.answer = lost
    found = cluster.Ray(None, 1).start(["train"], []).result()
    assert (found.code, found.stdout) == (70, "")
    assert found.stderr == "Ray: The worker died\nand a page of advice"


def test_what_is_no_loss_is_raised(ray):
    made = ray()

    def broken():
        raise FileNotFoundError("accelerate")

    made.answer = broken
    with pytest.raises(FileNotFoundError):
        cluster.Ray(None, 1).start(["train"], ["accelerate"]).result()


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError, ValueError])
def test_no_cluster_is_named(ray, kind):
    ray(refuse=kind("Could not find any running Ray instance.\nmore"))
    with pytest.raises(EnvironmentProblem) as error:
        cluster.Ray("head:6379", 2)
    assert error.value.code == "environment.ray"
    assert error.value.exit_code == 4
    assert "at head:6379: Could not find any running Ray instance." in error.value.message
    assert "more" not in error.value.message.splitlines()


@pytest.mark.parametrize("address", ["nowhere:6379", "ray://head:10001"])
def test_where_nobody_answers_ray_is_not_asked(ray, address):
    made = ray()
    with pytest.raises(EnvironmentProblem, match="Connection refused") as error:
        cluster.Ray(address, 2)
    assert error.value.details["found"] == address
    assert made.inits == []
    cluster.Ray("auto", 2)  # Ray looks itself
    assert [address for address, _ in made.inits] == ["auto"]


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra) as error:
        cluster.Ray(None, 2)
    assert 'pip install "cgmerge[ray]"' in error.value.hint
