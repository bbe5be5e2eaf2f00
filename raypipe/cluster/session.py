"""Connects to a Ray cluster, or starts a local one, for as long as a run lasts."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from raypipe.cluster.signals import also_on_sigterm, put_off
from raypipe.config import ClusterConfig
from raypipe.errors import RunError

_ENVIRONMENT = {
    # Ray's workers have a low priority otherwise.
    "RAY_worker_niceness": "0",
    # By default, the C library returns the memory of activations to the system after every Op and allocates it again page by page:
    # a backward of 21 ms took up to 31 ms. With these it keeps its memory, in one arena for all threads.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": f"{32 << 20}",
    "MALLOC_TRIM_THRESHOLD_": f"{1 << 30}",
    "MALLOC_TOP_PAD_": f"{64 << 20}",
}
"""Environment of a local cluster's processes, unless set already."""
_ANSWER_S = 20.0


@dataclass(frozen=True)
class Session:
    """The connected cluster; `local` if it was started for this run."""

    dashboard_url: str
    local: bool


@contextlib.contextmanager
def session(cluster: ClusterConfig, *, num_devices: int, cpus_per_device: float) -> Iterator[Session]:
    """Connect to the cluster of the configuration or of RAY_ADDRESS, or start a local one with enough CPUs for the devices.

    SIGTERM, with which `ray job stop` ends a job, interrupts the run as Ctrl-C does, so that actors and a local cluster end.
    """
    address = cluster.resolved_address
    if ray.is_initialized():
        yield Session("", local=False)
        return
    _hide_token_notice()
    options: dict[str, object] = {"log_to_driver": cluster.log_to_driver, "logging_level": logging.WARNING}
    if address is None:
        # One CPU more, so that the driver's tasks need not wait for an actor.
        num_cpus = max(os.cpu_count() or 1, int(num_devices * cpus_per_device) + 1)
        options |= {"num_cpus": num_cpus, "include_dashboard": cluster.dashboard, "address": "local"}
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    else:
        _check_answers(address)
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


def _check_answers(address: str) -> None:
    # Ray asks a host that does not answer for minutes, and ends for no signal meanwhile.
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or "/" in host:
        return  # `auto`, or ray://
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"the Ray cluster at {address!r} cannot be reached: {error or type(error).__name__}; check cluster.address, RAY_ADDRESS and "
            "`ray status`"
        ) from error


def _hide_token_notice() -> None:
    # Ray warns that its new local cluster asks for a token, which is how it should be.
    for handler in logging.getLogger("ray").handlers:
        if _is_not_token_notice not in handler.filters:
            handler.addFilter(_is_not_token_notice)


def _is_not_token_notice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Token authentication is enabled")
