"""MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from raypipe.callbacks.base import Callback
from raypipe.callbacks.catalogue import require
from raypipe.callbacks.events import End, Evaluation, Run, Window
from raypipe.errors import ConfigError

_TRACKING_URI = "MLFLOW_TRACKING_URI"
_ALLOW_FOLDERS = "MLFLOW_ALLOW_FILE_STORE"
_REFUSED = re.compile(r"[^\w./ -]+")  # in the name of a metric
_MOST_METRICS = 1_000  # that MLflow takes in one call
_LONGEST_VALUE = 6000  # characters of a parameter


class MLflow(Callback):
    """Logs all figures of a run, and its configuration, to MLflow; the step is the number of the update.

    Args:
        experiment: Experiment of the run.
        tracking_uri: URI of a server; of a database, which needs the package `mlflow`; or a folder, which needs
            `MLFLOW_ALLOW_FILE_STORE=true` in the environment. Left out for `MLFLOW_TRACKING_URI`, else for MLflow's own choice.

    Raises:
        ConfigError: The package `mlflow` (or `mlflow-skinny`) is not installed, or does not serve the URI.
    """

    def __init__(self, *, experiment: str = "raypipe", tracking_uri: str | None = None) -> None:
        require("mlflow", "mlflow", callback="mlflow")
        self._experiment, self._tracking_uri = experiment, tracking_uri
        self._client: Any = None
        self._id = ""

    def on_start(self, run: Run) -> None:
        """See `Callback`; refuses a URI that the installed package does not serve."""
        # These take seconds to load.
        from mlflow.exceptions import MlflowException  # noqa: PLC0415
        from mlflow.tracking import MlflowClient, get_tracking_uri  # noqa: PLC0415
        from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException  # noqa: PLC0415

        scheme = urlsplit(self._tracking_uri or get_tracking_uri()).scheme
        try:
            client = MlflowClient(tracking_uri=self._tracking_uri)
            known = client.get_experiment_by_name(self._experiment)
        except UnsupportedModelRegistryStoreURIException:
            raise _refused(f"does not serve URIs of {scheme!r}", "for a database install the whole of mlflow: pip install mlflow") from None
        except MlflowException as error:
            if _ALLOW_FOLDERS not in str(error):
                raise
            raise _refused("serves a folder only where it is told to", f"set {_ALLOW_FOLDERS}=true in the environment") from None
        experiment_id = client.create_experiment(self._experiment) if known is None else known.experiment_id
        self._id = client.create_run(experiment_id, run_name=run.name).info.run_id
        self._client = client
        for name, value in _flat(run.settings()):
            client.log_param(self._id, name, str(value)[:_LONGEST_VALUE])

    def on_window(self, run: Run, window: Window) -> None:
        """See `Callback`."""
        from mlflow.entities import Metric  # noqa: PLC0415

        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now_ms, update.number)
            for update in window.updates[:-1]
            for name, value in (("loss", update.loss), ("grad_norm", update.grad_norm), ("learning_rate", update.learning_rate))
            if value is not None
        ]
        figures = window.figures().items()
        metrics += [Metric(_REFUSED.sub("_", name.replace(" -> ", " to ")), value, now_ms, window.update) for name, value in figures]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST_METRICS])

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """See `Callback`."""
        self._client.log_metric(self._id, "validation_loss", evaluation.loss, step=evaluation.update)

    def on_end(self, run: Run, end: End) -> None:
        """See `Callback`."""
        self._finish("FINISHED" if end.error is None else "KILLED" if isinstance(end.error, KeyboardInterrupt) else "FAILED")

    def close(self) -> None:
        """See `Callback`."""
        if self._client is not None:
            self._finish("FAILED")

    def _finish(self, status: str) -> None:
        client, self._client = self._client, None
        client.set_terminated(self._id, status=status)


def _refused(problem: str, remedy: str) -> ConfigError:
    # Without the URI, which may hold a password.
    return ConfigError(
        f"the callback 'mlflow': the installed mlflow {problem}; set the option tracking_uri, or {_TRACKING_URI}, to a server's URI, such "
        f"as http://127.0.0.1:5000, or {remedy}"
    )


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, value
