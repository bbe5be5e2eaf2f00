"""Which of several processes runs which tests, for `pytest -n 2 --dist loadgroup`."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

OWN_RAY = ("test_ending.py", "test_job.py")
"""Files of tests/on_ray whose tests start processes that have a Ray of their own."""


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Give the tests of a file to one process, those with a Ray of their own one by one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", maxsplit=1)[0]
        return nodeid if "/on_ray/" in file and file.endswith(OWN_RAY) else file
