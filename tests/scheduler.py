"""Which of several processes runs which tests, for `pytest -n 2 --dist loadgroup`."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

OWN_RAY = ("test_ending.py", "test_job.py")
"""Files of tests/on_ray whose tests start processes that have a Ray of their own."""


class RayInOneProcess(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Give all tests on the shared Ray to one process, those with a Ray of their own one by one, and others by file."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", maxsplit=1)[0]
        if "/on_ray/" not in file:
            return file
        return nodeid if file.endswith(OWN_RAY) else "the shared Ray"
