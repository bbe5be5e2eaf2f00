"""Copies that divide the optimizer's state: the weights are those of copies that each have all of it, to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch

from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.state import export_layers, export_stepped, import_layers
from raypipe.communication.patterns import Pattern, direct, ring
from raypipe.communication.shards import Segment
from raypipe.config import Precision
from raypipe.model import Model
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.ir import Schedule, WeightRule
from raypipe.schedules.passes import late_updates, recompute, shard_optimizer
from tests.lookups import COPIES, check_same_bits, pipeline, table_gpt, tied_gpt
from tests.processes.over_tcp import over_tcp
from tests.processes.process_ends import Make, connected, members_of
from tests.processes.transport_contract import gradients


def sharded(schedule: Schedule, *, copies: int, num_pipelines: int) -> Schedule:
    return shard_optimizer(schedule, replicated_workers=range(2) if copies > num_pipelines else ())


def beside(make: Make, prefix: str, name: str, num_pipelines: int, copies: int, **changed: object) -> LocalPipeline:
    """Check the bits of a run with and without a divided optimizer; return the one with it."""
    change: Callable[[Schedule], Schedule] = changed.pop("change", lambda schedule: schedule)  # type: ignore[assignment]
    model = changed.pop("model", table_gpt)()  # type: ignore[operator]
    run = partial(pipeline, model, name, num_pipelines=num_pipelines, copies=copies, **changed)  # type: ignore[arg-type]
    divided = run(change=lambda schedule: sharded(change(schedule), copies=copies, num_pipelines=num_pipelines))
    check_same_bits(over_tcp(divided, make, f"shards-{prefix}"), over_tcp(run(change=change), make, f"whole-{prefix}"))
    return divided


@pytest.mark.parametrize(("name", "num_pipelines", "copies"), COPIES)
def test_copies_that_divide_the_optimizer_have_the_same_weights(make: Make, name: str, num_pipelines: int, copies: int) -> None:
    run = beside(make, f"{name}-{copies}", name, num_pipelines, copies)
    for weights in (weights for device in run.weights for weights in device.values()):
        assert weights.shards is not None
        assert weights.optimizer is not None
        held = {at for at, master in enumerate(weights.masters) if weights.optimizer.state.get(master)}
        assert held == weights.shards.stepped
        assert len(held) < len(weights.masters)
        assert weights.versions.num_versions == 1


@pytest.mark.parametrize(("num_pipelines", "copies"), [(1, 3), (2, 4)])
def test_they_do_so_where_versions_are_stashed(make: Make, num_pipelines: int, copies: int) -> None:
    name = "async-1f1b" if num_pipelines == 1 else "amdp"
    stash = partial(dataclasses.replace, weight_rule=WeightRule.STASH)
    beside(make, f"stash-{name}", name, num_pipelines, copies, change=stash)


@pytest.mark.combined
@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.BF16])
@pytest.mark.parametrize("name", ["1f1b", "pipedream-2bw", "async-1f1b"])
def test_they_do_so_in_lower_precision(make: Make, name: str, precision: Precision, copies: int) -> None:
    beside(make, f"{name}-{precision}-{copies}", name, 1, copies, precision=precision)


@pytest.mark.combined
@pytest.mark.parametrize(("name", "num_pipelines", "copies"), [("1f1b", 1, 3), ("pipedream-2bw", 1, 2), ("chimera", 2, 4)])
@pytest.mark.parametrize(
    ("change", "buckets"),
    [(late_updates, 1), (partial(recompute, stages=(0,)), 1), (lambda schedule: schedule, 3)],
    ids=["late", "recomputed", "in buckets"],
)
def test_they_do_so_in_orders_that_are_changed(
    make: Make, name: str, num_pipelines: int, copies: int, change: Callable[[Schedule], Schedule], buckets: int
) -> None:
    prefix = f"{name}-{copies}-{buckets}-{getattr(change, '__name__', 'recompute')}"
    beside(make, prefix, name, num_pipelines, copies, change=change, buckets=buckets)


@pytest.mark.parametrize(("name", "num_pipelines", "copies"), [("1f1b", 1, 3), ("pipedream-2bw", 1, 2), ("chimera", 2, 4), ("amdp", 2, 2)])
def test_tied_weights_stay_whole(make: Make, name: str, num_pipelines: int, copies: int) -> None:
    run = beside(make, f"tied-{name}-{copies}", name, num_pipelines, copies, model=tied_gpt)
    for weights in (weights for device in run.weights for weights in device.values()):
        assert weights.shards is not None
        tied = {at for at in range(len(weights.masters)) if at not in weights.shared.unshared}
        assert tied <= weights.shards.stepped
        assert not tied.intersection(weights.shards.passed)


def exported(run: LocalPipeline) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """What the first copy of each stage exports, with what the others have of the optimizer's state."""
    found: list[tuple[int, dict[str, torch.Tensor]]] = []
    for program, on_device in zip(run.programs, run.weights, strict=True):
        for stage in program.primary_stages:
            others = [device[stage] for device in run.weights if stage in device and device is not on_device]
            for layer, state in export_layers(on_device[stage]).items():
                parts = [export_stepped(weights).get(layer, {}) for weights in others]
                assert not any(state.keys() & part.keys() for part in parts)
                found.append((layer, dict(state, **{name: tensor for part in parts for name, tensor in part.items()})))
    return found


@pytest.mark.parametrize("model", [table_gpt, tied_gpt])
def test_the_optimizers_state_is_exported_whole_and_goes_on_at_another_number_of_copies(make: Make, model: Callable[[], Model]) -> None:
    prefix = model.__name__
    run = beside(make, f"export-{prefix}", "1f1b", 1, 3, model=model)
    states = dict(exported(run))
    whole = pipeline(model(), "1f1b", num_pipelines=1, copies=3)
    over_tcp(whole, make, f"export-whole-{prefix}")
    for layer, state in exported(whole):
        assert states[layer].keys() == state.keys()
        assert all(torch.equal(states[layer][name], tensor) for name, tensor in state.items())
    # Two copies that hold all of the state and divide it in their first window, and two that do not.
    change = partial(sharded, copies=2, num_pipelines=1)
    run_of_two = partial(pipeline, model(), "1f1b", num_pipelines=1, copies=2)
    resumed = [run_of_two(change=change), run_of_two()]
    for each in resumed:
        for weights in (weights for device in each.weights for weights in device.values()):
            import_layers(weights, {layer: states[layer] for layer in weights.module.needed_layers})
    divided, plain = (over_tcp(each, make, f"resumed-{number}-{prefix}") for number, each in enumerate(resumed))
    check_same_bits(divided, plain)


@pytest.mark.parametrize("pattern", [ring((0, 2, 1, 3)), direct(range(4)), Pattern(((0, 1), (2, 3)))], ids=str)
def test_owners_get_the_bits_of_a_whole_sum_whatever_the_pattern(make: Make, pattern: Pattern) -> None:
    ends = connected(make, 4, patterns={(0, 1, 2, 3): pattern}, **members_of(4))
    everybody = (0, 1, 2, 3)
    torch.manual_seed(0)
    tensors = [torch.randn(10_007) for _ in everybody]
    whole = [end.start(gradients(everybody), tensor.clone()) for end, tensor in zip(ends, tensors, strict=True)]
    expected = [part.wait() for part in whole]
    owners = ends[0].slice_owners(everybody)
    segments = tuple(map(Segment, (2000, 5600, 5601, 10_007), owners))
    parts = [end.start(gradients(everybody, update=1), tensor, segments=segments) for end, tensor in zip(ends, tensors, strict=True)]
    start = 0
    totals = [part.wait() for part in parts]
    for end, owner in segments:
        assert owner is not None
        assert torch.equal(totals[owner][start:end], expected[0][start:end])
        start = end


@pytest.mark.parametrize("count", [2, 3, 4])
def test_sums_to_owners_and_their_weights_take_the_bytes_of_a_whole_sum(make: Make, count: int) -> None:
    """That is 2 (n - 1) / n of the vector a member, but for where a border of weights is not that of a slice."""
    everybody, numel, off = tuple(range(count)), 12_000, 100
    ends = connected(make, count, **members_of(count))
    segments = tuple(
        Segment(numel // count * (number + 1) + off * (number < count - 1), owner)
        for number, owner in enumerate(ends[0].slice_owners(everybody))
    )

    def bytes_of(collective: Collective, segments: tuple[Segment, ...] = ()) -> list[int]:
        pending = [end.start(collective, torch.ones(numel), segments=segments) for end in ends]
        for part in pending:
            part.wait()
        for end in ends:
            end.close_window()
        return [sum(chunk.num_bytes for chunk in end.departures if chunk.collective == collective) for end in ends]

    whole = bytes_of(gradients(everybody))
    parts = bytes_of(gradients(everybody, update=1), segments)
    weights = bytes_of(dataclasses.replace(gradients(everybody, update=2), kind=CollectiveKind.WEIGHTS), segments)
    assert whole == [4 * 2 * (count - 1) * numel // count] * count
    for of_whole, *of_member in zip(whole, parts, weights, strict=True):
        assert abs(sum(of_member) - of_whole) <= 2 * 4 * off
    # Of two members, each sends what the other one owns, and then what it owns.
    assert count > 2 or all(sum(of_member) == numel * 4 for of_member in zip(parts, weights, strict=True))
