"""A Ray cluster for as long as a run lasts: the one there is, or a local one that ends with the run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from raypipe.cluster.signals import also_on_sigterm, put_off
from raypipe.config import ClusterConfig
from raypipe.errors import RunError

_ENVIRONMENT = {
    # Ray lets its workers give way to everything else on the machine; a cluster of one's own is there for the stages.
    "RAY_worker_niceness": "0",
    # The C library gives the memory of activations back to the system after every Op and takes it again page by page, which
    # made a backward of 21 ms take up to 31 ms. With these it keeps what it has: one arena for all threads, not cut back.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": f"{32 << 20}",
    "MALLOC_TRIM_THRESHOLD_": f"{1 << 30}",
    "MALLOC_TOP_PAD_": f"{64 << 20}",
    # Torch's store asks for the name of each address that it connects to, and a lost answer is waited for for five seconds.
    "RES_OPTIONS": "timeout:1",
}
"""Of the processes of a cluster that is started for a run, unless the environment says otherwise."""


@dataclass(frozen=True)
class Session:
    """The cluster that is connected.

    Attributes:
        dashboard_url: of Ray's dashboard; empty where there is none.
        local: whether it was started for this run.
    """

    dashboard_url: str
    local: bool


@contextlib.contextmanager
def session(cluster: ClusterConfig, *, num_devices: int, cpus_per_device: float) -> Iterator[Session]:
    """Connects to the cluster of the configuration, of RAY_ADDRESS, or to a local one started for the run.

    SIGTERM, with which `ray job stop` ends a job, interrupts the run as Ctrl-C does, so that actors and local cluster end.

    Args:
        cluster: which cluster.
        num_devices: places that a local one must have.
        cpus_per_device: that each reserves.

    Raises:
        RunError: the cluster cannot be reached or started.
    """
    address = cluster.resolved_address
    if ray.is_initialized():
        yield Session("", local=False)
        return
    _hide_token_notice()
    options: dict[str, object] = {"log_to_driver": cluster.log_to_driver, "logging_level": logging.WARNING}
    if address is None:
        # A place more than actors: the driver's own tasks must not wait for one.
        num_cpus = max(os.cpu_count() or 1, int(num_devices * cpus_per_device) + 1)
        options |= {"num_cpus": num_cpus, "include_dashboard": cluster.dashboard, "address": "local"}
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    else:
        options["address"] = address
    try:
        with put_off(ray.shutdown):
            context = ray.init(**options)
    except (RayError, ConnectionError, RuntimeError, TimeoutError, ValueError, OSError) as error:
        ray.shutdown()
        where = f"the Ray cluster at {address!r} cannot be reached" if address else "a local Ray cluster cannot be started"
        tokens = ", and that RAY_AUTH_MODE=token is set here if it is where the cluster was started" if address else ""
        raise RunError(f"{where}: {error}; check cluster.address, RAY_ADDRESS and `ray status`{tokens}") from error
    try:
        with also_on_sigterm():  # after ray.init, which sets a handler of its own
            url = context.dashboard_url
            yield Session(f"http://{url}" if url else "", local=address is None)
    finally:
        with put_off():
            ray.shutdown()


def _hide_token_notice() -> None:
    """Keep Ray from warning that its new local cluster asks for a token, which is how it should be."""
    for handler in logging.getLogger("ray").handlers:
        if _is_not_token_notice not in handler.filters:
            handler.addFilter(_is_not_token_notice)


def _is_not_token_notice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Token authentication is enabled")
