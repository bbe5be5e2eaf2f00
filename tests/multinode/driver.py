"""Commands of raypipe that run one after the other in one process on a node, with actors that stay.

A command of its own takes ten seconds until its actors are up. Here only the first does.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.multinode.cluster import Cluster
from tests.multinode.network import NetworkError, ended


@dataclass(frozen=True)
class Driver:
    """The other end of such a process. Made by `driver`."""

    process: subprocess.Popen[str]

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a command to its end.

        Raises:
            NetworkError: It failed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        words = [str(argument) for argument in arguments]
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        answer = next((line for line in self.process.stdout if line.startswith("[")), None)
        if answer is None:
            raise NetworkError(f"the driver ended:\n{self.process.communicate()[1]}")
        return ended(f"raypipe {' '.join(words)}", subprocess.CompletedProcess(words, *json.loads(answer)))

    def json(self, *arguments: object) -> Any:
        """Run a command with `--json`; return the document."""
        return json.loads(self.run(*arguments, "--json").stdout)


@contextlib.contextmanager
def driver(machines: Cluster) -> Iterator[Driver]:
    """Start such a process on the first node."""
    with machines.start([sys.executable, "-m", "tests.multinode.driver"], stdin=subprocess.PIPE) as process:
        yield Driver(process)


def main() -> None:
    """Run each command that a line of JSON gives; answer with its exit status, output and errors."""
    import ray

    from raypipe.cli import main as raypipe
    from tests.on_ray.actor_pool import ActorPool, runs_take_their_actors_from

    ray.init(log_to_driver=False, logging_level="ERROR")
    with runs_take_their_actors_from(ActorPool()):
        for line in sys.stdin:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = raypipe(json.loads(line))
            sys.stdout.write(json.dumps([status, out.getvalue(), err.getvalue()]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
