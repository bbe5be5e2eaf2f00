"""Rows of n-gram tables that an update touches and that the next update which reads its weights touches, too: counted and estimated.

    python benchmarks/reread_rows.py data/python-stdlib.parquet

Counted are updates two apart, as in `pipedream-2bw`; estimates are those of plans, from one microbatch.
"""

from __future__ import annotations

import argparse
import sys
from statistics import fmean

import torch
from rounds import print_table
from torch import Tensor

from raypipe.actors.execution.batches import TokenBatches
from raypipe.artifacts.profile import LayerProfile
from raypipe.data.tokens import TokenDataset
from raypipe.models.ngram_gpt import ngram_gpt

NUM_UPDATES = 8
_ROW_BYTES = 4

Rows = set[tuple[str, int]]


def rows_of(tokens_BT: Tensor) -> Rows:
    """Return the rows of all tables that some tokens look up."""
    looked_up = ngram_gpt().layers[0].looked_up
    return {(name, int(row)) for name, rows in looked_up.items() for row in torch.unique(rows(tokens_BT))}


def counted(path: str, *, size: int, num_microbatches: int) -> dict[str, str]:
    """Return the line of one size of microbatches and updates."""
    source = TokenBatches(TokenDataset(path, sequence_length=128, seed=0, split="train"), size)
    microbatches = [source.batch(number, (0.0, 1.0))["tokens"] for number in range(NUM_UPDATES * num_microbatches)]
    updates = [rows_of(torch.cat(microbatches[at : at + num_microbatches])) for at in range(0, len(microbatches), num_microbatches)]
    halves = [(rows_of(tokens[: size // 2]), rows_of(tokens[size // 2 :])) for tokens in microbatches[:NUM_UPDATES]]
    num_rows = sum(weight.shape[0] for name, weight in ngram_gpt().layers[0].build().named_parameters() if name.startswith("tables"))
    share = fmean(2 * len(one & other) / (len(one) + len(other)) for one, other in halves)
    table = LayerProfile(
        name="table",
        forward_s=0.0,
        backward_s=0.0,
        weight_grad_s=0.0,
        output_bytes=0,
        saved_bytes=0,
        parameter_bytes=_ROW_BYTES * num_rows,
        gradient_rows=round(fmean(len(rows_of(tokens)) for tokens in microbatches[:NUM_UPDATES])),
        looked_up_rows=num_rows,
        looked_up_bytes=_ROW_BYTES * num_rows,
        reread_share=share,
    )
    touched = num_rows - table.untouched_bytes(num_microbatches) / _ROW_BYTES
    return {
        "rows": str(size),
        "microbatches": str(num_microbatches),
        "touched": f"{fmean(map(len, updates)):,.0f}",
        "due": f"{fmean(len(one & other) for one, other in zip(updates, updates[2:], strict=False)):,.0f}",
        "estimated touched": f"{touched:,.0f}",
        "estimated due": f"{touched - table.late_bytes(num_microbatches) / _ROW_BYTES:,.0f}",
        "reread_share": f"{share:.2f}",
    }


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", help="file of tokens")
    path = parser.parse_args().tokens
    print_table("rows of an update", [counted(path, size=size, num_microbatches=count) for size in (8, 32) for count in (1, 4, 16)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
