"""A part of one of this machine's cores for all processes of a node, by a control group of the kernel.

    group = CoreGroup("node0", core=0, share=0.5, stack=stack)   # goes with the stack, behind all processes in it
    subprocess.Popen([*group.enter, "python", "-c", "..."])      # a process in it, and whatever it starts

What one node computes then takes nothing from another one, as on machines of their own with one slower core each.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_S = 0.002
"""Within which a node gets its share. A process of the lowest priority may use it up, for which others wait: so it is short."""
_LEAST_QUOTA_US = 1000  # of the kernel
_REMOVED_S = 10.0


def why_no_cores() -> str | None:
    """The reason why nodes cannot have a part of a core each; `None` where they can. Makes a group and removes it."""
    try:
        with contextlib.ExitStack() as stack:
            CoreGroup(f"raypipe-{os.getpid()}", core=0, share=0.5, stack=stack)
    except OSError as error:
        return f"no control groups of the cpu controller below {_ROOT}: {error}"
    return None


class CoreGroup:
    """A control group whose processes have a part of one core together.

    Attributes:
        enter: the beginning of a command that runs in it.

    Raises:
        OSError: the kernel refuses the group; names the file.
        ValueError: the share is not above 0 and at most 1.
    """

    def __init__(self, name: str, *, core: int, share: float, stack: contextlib.ExitStack) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"a node's part of a core must be above 0 and at most 1, got {share}")
        quota_us = max(round(share * _PERIOD_S * 1e6), _LEAST_QUOTA_US)
        period_us = round(quota_us / share)
        if (_ROOT / "cpu").is_dir():
            folder = _ROOT / "cpu" / name
            limits = {"cpu.cfs_period_us": f"{period_us}", "cpu.cfs_quota_us": f"{quota_us}"}
        else:
            folder = _ROOT / name
            (_ROOT / "cgroup.subtree_control").write_text("+cpu")
            limits = {"cpu.max": f"{quota_us} {period_us}"}
        folder.mkdir()
        stack.callback(_remove, folder)
        for file, value in limits.items():
            (folder / file).write_text(value)
        # On one core: on two at the same time, a process of the lowest priority would use up the share beside the others.
        self.enter = ["sh", "-ec", f'echo 0 > {folder}/cgroup.procs; exec "$@"', "sh", "taskset", "--cpu-list", str(core)]


def _remove(folder: Path) -> None:
    """Removes a group as soon as the kernel has taken the last process out of it."""
    deadline = time.monotonic() + _REMOVED_S
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
