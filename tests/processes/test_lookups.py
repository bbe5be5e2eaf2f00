"""Rows of gradients over TCP: the sums of three and four members add in an order that depends on places."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypipe.actors.transport.protocol import Places
from raypipe.communication import policy
from raypipe.communication.policy import Communication
from raypipe.schedules.passes import late_updates
from tests.lookups import COPIES, Outcome, check_same_bits, dense, pipeline, table_gpt
from tests.processes.over_tcp import over_tcp
from tests.processes.process_ends import Make
from tests.processes.transport_contract import gradients, together


@pytest.mark.parametrize(("name", "num_pipelines", "copies"), COPIES)
def test_rows_give_the_bits_of_whole_gradients(make: Make, name: str, num_pipelines: int, copies: int) -> None:
    rows, whole = (
        over_tcp(pipeline(model, name, num_pipelines=num_pipelines, copies=copies), make, prefix)
        for model, prefix in ((table_gpt(), f"rows-{name}-{copies}"), (dense(table_gpt()), f"whole-{name}-{copies}"))
    )
    check_same_bits(rows, whole)
    assert max(rows.sum_bytes) < min(whole.sum_bytes)


@pytest.mark.parametrize("copies", [2, 3])
def test_rows_give_the_bits_of_whole_gradients_in_buckets(make: Make, copies: int) -> None:
    rows, whole = (
        over_tcp(pipeline(model, "1f1b", num_pipelines=1, copies=copies, buckets=3), make, prefix)
        for model, prefix in ((table_gpt(), f"bucket-rows-{copies}"), (dense(table_gpt()), f"bucket-whole-{copies}"))
    )
    check_same_bits(rows, whole)
    assert sum(rows.sum_bytes) < sum(whole.sum_bytes)


@pytest.mark.combined
@pytest.mark.parametrize("copies", [2, 3, 4])
@pytest.mark.parametrize(
    ("least_bytes", "communication", "buckets"),
    [(1001, Communication(chunk_s=1e-15), 1), (1, Communication(chunk_s=100.0), 3), (1, Communication(scheduled=False), 1)],
    ids=["odd", "huge", "unscheduled"],
)
def test_late_rows_give_the_bits_of_rows_that_are_due_together(
    make: Make, monkeypatch: pytest.MonkeyPatch, copies: int, least_bytes: int, communication: Communication, buckets: int
) -> None:
    monkeypatch.setattr(policy, "LEAST_CHUNK_BYTES", least_bytes)

    def found(*late_rows: int) -> Outcome:
        run = pipeline(
            table_gpt(),
            "pipedream-2bw",
            num_pipelines=1,
            copies=copies,
            num_updates=4,
            buckets=buckets,
            late_rows=late_rows,
            max_grad_norm=None,
            change=late_updates,
        )
        assert any(program.has_late_rows for program in run.programs) == bool(late_rows)
        return over_tcp(run, make, f"late-{copies}-{least_bytes}-{communication}-{late_rows}", communication=communication)

    check_same_bits(found(0), found())


@pytest.mark.parametrize("num_members", [2, 3, 4])
@pytest.mark.parametrize("numel", [100, 10_007])
def test_a_part_of_a_tensor_is_added_as_in_the_whole_tensor(make: Make, num_members: int, numel: int) -> None:
    everybody = tuple(range(num_members))
    changed: dict[str, Any] = {"names": ("alpha", "beta", "gamma", "delta"), "groups": [everybody], "channels": [(0, 1)]}
    ends = [make(device, num_members, **changed) for device in everybody]
    together(*(end.connect for end in ends))
    torch.manual_seed(0)
    # Taken numbers crowd in the middle, where whole slices of the tensor may have none.
    taken = torch.arange(numel // 2, numel // 2 + numel // 10)
    tensors = [torch.zeros(numel).index_copy(0, taken, torch.randn(len(taken))) for _ in everybody]
    parts = [tensor[taken] for tensor in tensors]
    places = Places(numel, lambda place: int(torch.searchsorted(taken, place)))
    whole = [end.start(gradients(everybody), tensor) for end, tensor in zip(ends, tensors, strict=True)]
    rows = [end.start(gradients(everybody, update=1), part, places=places) for end, part in zip(ends, parts, strict=True)]
    for of_whole, of_rows in zip(whole, rows, strict=True):
        assert torch.equal(of_rows.wait(), of_whole.wait()[taken])
