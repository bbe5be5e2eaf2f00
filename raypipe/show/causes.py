"""The causes of idle time in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from raypipe.analysis.idle import Cause, Culprit, Division, Root
from raypipe.show.devices import device_labels, device_words
from raypipe.units import ratio

_WORDS: Mapping[Cause, tuple[str, str]] = {
    Cause.COMPUTE: ("computing", "an Op runs"),
    Cause.WARM_UP: ("warm-up", "its first Op has not begun"),
    Cause.ACTIVATION: ("activation: sender computes", "it waits for an activation whose sender has not finished"),
    Cause.ACTIVATION_TRANSFER: ("activation: on its way", "it waits for an activation that is on its way"),
    Cause.GRADIENT: ("gradient: sender computes", "it waits for a gradient whose sender has not finished"),
    Cause.GRADIENT_TRANSFER: ("gradient: on its way", "it waits for a gradient that is on its way"),
    Cause.OTHER_BRANCH: ("another branch: it computes", "what it waits for needs an Op of another branch, which has not finished"),
    Cause.COLLECTIVE: ("collective: others compute", "it waits for a norm or sum to which another device has not brought its part"),
    Cause.COLLECTIVE_TRANSFER: ("collective: on its way", "it waits for a norm or sum to which all have brought their parts"),
    Cause.DATA: ("data", "it waits for rows of the data, which have not been read"),
    Cause.OVERHEAD: ("overhead", "no span explains it: the framework, or the machine"),
    Cause.DRAIN: ("drain", "it is done and others are not"),
}
NAMES: Mapping[Cause, str] = {cause: name for cause, (name, _) in _WORDS.items()}
MEANINGS: Mapping[Cause, str] = {cause: meaning for cause, (_, meaning) in _WORDS.items()}

_MOST_CULPRITS = 3
_LEAST_SHARE = 0.05


def findings(division: Division) -> Iterator[str]:
    """Yield what holds devices up; nothing where no device waits."""
    total_s = sum(culprit.wait_s for culprit in division.culprits)
    if not total_s:
        return
    named = [
        f"{_culprit_words(division, culprit)}, {ratio(culprit.wait_s / total_s)}"
        for culprit in division.culprits[:_MOST_CULPRITS]
        if culprit.wait_s / total_s >= _LEAST_SHARE
    ]
    roots = f"They trace back to {'; '.join(named)}." if named else "No device or link holds up the others much more than any other."
    share = total_s / (division.trace.makespan_s * len(division.trace.devices))
    yield f"Waits between warm-up and drain take {ratio(share)} of all device time. {roots}"


def _culprit_words(division: Division, culprit: Culprit) -> str:
    labels = device_labels(division.trace.devices, division.stages)
    match culprit.root, culprit.device, culprit.sender:
        case Root.WORK, int(device), _:
            return f"{device_words(division.trace.devices, division.stages)[device]} at work"
        case Root.DATA, int(device), _:
            return f"rows of the data for {device_words(division.trace.devices, division.stages)[device]}"
        case Root.MESSAGE, int(device), int(sender):
            return f"messages on their way from {labels[sender]} to {labels[device]}"
        case Root.MESSAGE, int(device), None:
            return f"messages on their way to {labels[device]}"
        case _:
            return "collectives on their way"
