"""What all tests share: golden files, hypothesis settings, and one thread for torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.marks import mark_slow_combinations

GOLDEN = Path(__file__).parent / "golden"

# Shared machines are noisy: no example fails for being slow, the timeout of the whole test catches what hangs. In CI the examples
# are the same at every run, so that a change is never refused for what another change broke.
settings.register_profile(
    "raypipe", deadline=None, derandomize=bool(os.environ.get("CI")), suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("raypipe")

# The tensors of the tests are tiny and several stages compute at once: more threads only fight for the cores. Torch reads this when
# it is imported, also in the processes that tests start; calling torch here would load it for the tests of the pure half.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray's calls start a cluster where none is connected; in tests they raise instead.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Replace `--dist loadgroup`, which this xdist cannot do with this pytest."""
    from tests.scheduler import RayInOneProcess

    return RayInOneProcess(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow_combinations(items)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="rewrite tests/golden from what the code gives now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Returns `check(name, text)`, which compares a text with tests/golden/<name>, or writes it with --regenerate-golden."""
    regenerate = bool(request.config.getoption("--regenerate-golden"))
    command = f"pytest --regenerate-golden '{request.node.nodeid}'"

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if regenerate:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            return
        if not path.exists():
            pytest.fail(f"there is no tests/golden/{name}; make it with: {command}", pytrace=False)
        assert text == path.read_text(encoding="utf-8"), f"not what tests/golden/{name} holds; if the change is meant: {command}"

    return check
