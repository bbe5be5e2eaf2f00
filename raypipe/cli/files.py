"""What a file of raypipe holds, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raypipe.artifacts import codec, plan, profile, topology, trace
from raypipe.artifacts import schedule as schedule_file
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.errors import FormatError, suggestion
from raypipe.schedules.ir import Schedule

Content = Schedule | Plan | ClusterTopology | ModelProfile | Trace

_LOADERS: Mapping[str, Callable[[str], Content]] = {
    schedule_file.FORMAT: schedule_file.load_schedule,
    plan.FORMAT: Plan.load,
    topology.FORMAT: ClusterTopology.load,
    profile.FORMAT: ModelProfile.load,
    trace.FORMAT: Trace.load,
}


def load(path: str) -> Content:
    """Read a JSON, YAML or CSV file.

    Raises:
        InputError: The file or its content is not valid.
    """
    if path.endswith(".csv"):
        return schedule_file.load_csv(path)
    format_name = codec.read_format(path)
    if format_name not in _LOADERS:
        choices = ", ".join(_LOADERS)
        raise FormatError(path, "format", f"cannot show {format_name!r}{suggestion(format_name, _LOADERS)}; what can be shown: {choices}")
    return _LOADERS[format_name](path)
