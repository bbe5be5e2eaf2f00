"""The recipe for Slurm, in a Slurm cluster of its own on this machine: a job that is told to end is queued again and goes on."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raypipe.cli import main
from tests.on_ray.free_ports import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "cluster_configs" / "slurm" / "train.sbatch"
CONFIG = """
format: raypipe.train/1
model: {{function: "raypipe.models.gpt:gpt", options: {{num_layers: 1, d_model: 16, num_heads: 2, sequence_length: 16}}}}
data: {{path: {data}, sequence_length: 16, num_validation_microbatches: 1}}
schedule: {{name: 1f1b, num_microbatches: 2, microbatch_size: 1, updates_per_window: 5}}
scaling: {{num_devices: 2}}
run: {{name: queued, num_updates: 1000000, storage_path: {runs}}}
"""
SLURM = """
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=2 RealMemory=1000
PartitionName=main Nodes=one Default=YES State=UP
"""


class Slurm:
    """A controller and a node, and the job that runs there."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment

    def ask(self, *command: str) -> str:
        """What a command prints, whether it fails or not."""
        done = subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def wait(self, what: str, holds: Callable[[], bool], *, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"{what} was awaited in vain; the job printed:\n{self.printed()}"
            time.sleep(0.5)

    def printed(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("slurm-*.out"))


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    programs = [shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("slurmctld", "slurmd")]
    if not all(programs):
        pytest.skip("Debian's package slurm-wlm is not installed")
    for name in ("state", "spool", "home"):
        (tmp_path / name).mkdir()
    ports = dict(zip(("controller_port", "node_port"), free_ports(2), strict=True))
    settings = SLURM.format(host=socket.gethostname(), user=getpass.getuser(), folder=tmp_path, **ports)
    (tmp_path / "slurm.conf").write_text(settings)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf"), "HOME": str(tmp_path / "home"), "PATH": path}
    processes: list[subprocess.Popen[bytes]] = []
    with (tmp_path / "daemons.log").open("wb") as log:
        for command in ([str(programs[0]), "-D"], [str(programs[1]), "-D", "-N", "one"]):
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        cluster = Slurm(tmp_path, environment)
        try:
            cluster.wait("a node", lambda: cluster.ask("sinfo", "--noheader", "--format=%T") == "idle")
            yield cluster
        finally:
            cluster.ask("scancel", "--user", getpass.getuser())
            cluster.wait("the end of all jobs", lambda: not cluster.ask("squeue", "--noheader"), timeout_s=60.0)
            for process in reversed(processes):
                process.terminate()
                process.wait(timeout=30)


@pytest.mark.slow
def test_a_job_that_is_told_to_end_is_queued_again_and_goes_on_and_one_that_is_cancelled_is_not(slurm: Slurm) -> None:
    assert main(["data", "prepare", "python-stdlib", "-o", str(slurm.folder / "data.parquet")]) == 0
    (slurm.folder / "config.yaml").write_text(CONFIG.format(data=slurm.folder / "data.parquet", runs=slurm.folder / "runs"))
    options = ["--set", "scaling.num_devices=2"]
    job = slurm.ask("sbatch", "--parsable", "--nodes=1", "--cpus-per-task=2", str(RECIPE), "config.yaml", *options)
    slurm.wait("the first window", lambda: "update 5/" in slurm.printed())
    slurm.ask("scancel", "--batch", "--signal=TERM", job)  # as Slurm does before the end of the time
    slurm.wait("the queue", lambda: slurm.state(job) == "PENDING")
    assert "queued again" in slurm.printed()
    slurm.wait("another start", lambda: _starts_now(slurm, job))
    slurm.wait("going on", lambda: "resumed from" in slurm.printed())
    slurm.ask("scancel", job)
    slurm.wait("the end", lambda: slurm.state(job) == "CANCELLED")
    assert slurm.printed().count("queued again") == 1


def _starts_now(slurm: Slurm, job: str) -> bool:
    # Slurm lets a job that is queued again wait for two minutes.
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    return slurm.state(job) == "RUNNING"
