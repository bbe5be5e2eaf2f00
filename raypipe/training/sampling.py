"""Text that a model of bytes generates at the end of a run."""

from __future__ import annotations

import torch

from raypipe.actors.execution.batches import FixedBatch
from raypipe.cluster.coordinator import Coordinator
from raypipe.config import RunConfig

_SENTINEL = 0  # the byte that ends a document and pads short contexts
_TEMPERATURE = 0.7


def sampled_text(coordinator: Coordinator, run: RunConfig, *, length: int, num_rows: int) -> str:
    """Return `run.sample_bytes` bytes of text behind its prompt, each from the `length` bytes before it.

    Devices that share the rows of a microbatch need one each, `num_rows` together; all rows are the same.
    """
    generator = torch.Generator().manual_seed(run.seed)
    prompt = run.sample_prompt.encode()
    tokens = list(prompt or [_SENTINEL])
    for _ in range(run.sample_bytes):
        context = tokens[-length:]
        # The model is causal: padding after the context changes nothing.
        rows = torch.tensor([context + [_SENTINEL] * (length - len(context))]).expand(num_rows, -1)
        result = coordinator.run_on("predict", FixedBatch({"tokens": rows, "targets": rows}), num_rows=num_rows)
        logits_v = next(report.outputs[0] for report in result.reports if report.outputs)[0, len(context) - 1]
        probabilities = torch.softmax(logits_v.double() / _TEMPERATURE, dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(tokens if prompt else tokens[1:]).decode(errors="replace")
