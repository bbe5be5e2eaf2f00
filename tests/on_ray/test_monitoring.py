"""The dashboard's queries against a real Prometheus that scrapes a run, and `raypipe top` beside it."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypipe.actors.measure import metrics
from raypipe.artifacts.trace import Dimension
from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import Run, Window
from raypipe.cli.top import _document, _screen
from raypipe.errors import UnknownNameError
from raypipe.network.chunks import LinkUse
from tests.on_ray.test_training import NUM_UPDATES, TELLS_MEMORY, trainer
from tests.told import telling

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("local_ray")]

DASHBOARD = Path(__file__).parents[2] / "cluster_configs" / "grafana.json"


def queries() -> dict[str, str]:
    """The dashboard's queries as Grafana sends them, with the panel that each stands in."""
    found = {target["expr"]: panel["title"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]}
    return {query.replace("$run", ".*").replace("$__rate_interval", "1m"): title for query, title in found.items()}


def exported() -> set[str]:
    """The names of all metrics of raypipe, as Ray exports them."""
    gauges = {f"ray_raypipe_{name}" for name in metrics.RunGauge}
    counters = {f"ray_raypipe_{name}_total" for name in metrics.RunCounter}
    text = Path(metrics.__file__).read_text()
    literal = {f"ray_{part}" for part in text.split('"') if part.startswith("raypipe_") and "{" not in part}
    return gauges | counters | literal


def test_every_metric_is_on_the_dashboard_and_every_one_there_exists() -> None:
    text = " ".join(queries())
    words = {word for word in text.replace("{", " ").replace("(", " ").split() if word.startswith("ray_raypipe_")}
    assert words == exported()


class Prometheus:
    """A Prometheus of Debian's that scrapes one address every second."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def ask(self, query: str) -> list[float]:
        """The values that a query has now."""
        address = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(address, timeout=10) as answer:
            result = json.loads(answer.read())["data"]["result"]
        return [float(one["value"][1]) for one in result]


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    import ray  # heavy

    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Debian's package prometheus is not installed")
    node = ray.nodes()[0]
    config = tmp_path / "prometheus.yml"
    target = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
    jobs = f"{{job_name: ray, static_configs: [{{targets: ['{target}']}}]}}"
    config.write_text(f"global: {{scrape_interval: 1s}}\nscrape_configs: [{jobs}]\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        server = Prometheus(process, port)
        deadline = time.monotonic() + 60
        while True:
            try:
                server.ask("up")
                break
            except OSError:
                assert process.poll() is None, "Prometheus ended"
                assert time.monotonic() < deadline, "Prometheus does not answer"
                time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=30)


class Watcher(Callback):
    """Holds a run between its windows until all queries have answers."""

    required = True

    def __init__(self, prometheus: Prometheus) -> None:
        self.prometheus = prometheus
        # The rows of this run have no tokens.
        self.missing = {query: title for query, title in queries().items() if "tokens_per_second" not in query}
        if not TELLS_MEMORY:
            self.missing = {query: title for query, title in self.missing.items() if "memory" not in query}
        self.run = ""
        self.tops: list[dict[str, Any]] = []
        self.text = ""

    def on_window(self, run: Run, window: Window) -> None:
        from raypipe.cli.screen import console
        from raypipe.cluster.watching import RunWatch  # loads Ray

        watch = RunWatch("test")
        assert watch.run == RunWatch(watch.run).run
        with pytest.raises(UnknownNameError):
            RunWatch("tes")
        devices = watch.look()
        self.run = watch.run
        self.tops.append(_document(watch.run, devices))
        with (screen := console(plain=True)).capture() as captured:
            screen.print(_screen(watch.run, devices))
        self.text = captured.get()
        links = metrics.LinkMetrics(run=watch.run)  # one node has none
        links.record_uses({("a", "b"): LinkUse(busy_ratio=0.5, queued_bytes=1, num_bytes={Dimension.MESSAGE: 2})})
        for gauge, value in ((links._bandwidth, 1e9), (links._age, 2.0), (links._changes, 1.0)):
            gauge.set(value, {"source": "a", "target": "b"})
        if window.update < 14:  # rates need a window behind them
            return
        # While it is held, the driver does not take note of a checkpoint that is complete: it does so before the last window.
        is_last = window.update == NUM_UPDATES
        deadline = time.monotonic() + 120
        while any(is_last or "checkpoint" not in query for query in self.missing) and time.monotonic() < deadline:
            for query in list(self.missing):
                values = self.prometheus.ask(query)
                if values and all(map(math.isfinite, values)):
                    del self.missing[query]
            time.sleep(1)


def test_every_query_of_the_dashboard_has_data_while_a_run_goes_on(tmp_path: Path, prometheus: Prometheus) -> None:
    watcher = Watcher(prometheus)
    started = trainer(tmp_path, devices=2, checkpoint_every=7)
    started.config = replace(started.config, run=replace(started.config.run, evaluate_every=7))
    telling(started, watcher).fit()
    assert watcher.missing == {}
    # Prometheus itself shows a series that has gone for no time: it is stale at the next scrape.
    deadline = time.monotonic() + 60
    while (left := prometheus.ask('{__name__=~"ray_raypipe_.*",device=~".+"}')) and time.monotonic() < deadline:
        time.sleep(1)
    assert not left, "the series of actors end with them"
    top = watcher.tops[-1]
    assert [device["stages"] for device in top["devices"]] == ["0", "1"]
    assert not any(device["computes"] for device in top["devices"]), "they wait while the driver is held"
    assert all(device["device"] in watcher.text for device in top["devices"])
