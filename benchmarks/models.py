"""The models of the planning benchmark: four measured by PipeDream's authors, and transformers computed from their sizes.

    python benchmarks/models.py [--json FILE]

The measured ones are read from `data/pipedream_profiles` (where they come from: SOURCE.txt there) and made chains. The others are
counted, not measured: operations of the matrix products over a stated speed, bytes as half-precision training keeps them.

Letters: B rows, S positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.profiling.linearize import linearize
from raypipe.profiling.pipedream import read_pipedream

PROFILES = Path(__file__).parent / "data" / "pipedream_profiles"

FLOPS_PER_S = 125e12
"""Operations a second in large matrix products: 40 % of an A100's 312e12 in half precision, as large models are trained at."""
MEMORY_BYTES_PER_S = 1.5e12
"""What a lookup moves in a second: an A100's memory."""
BYTES_PER_NUMBER = 2


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A chain: embedding, blocks, head.

    Counted are matrix products; layer norms, activations and residual sums, which fused kernels hide, are left out. A block's
    backward takes twice its forward, and all products with weights have one half of that for their weights' gradient, while the
    attention's scores have none (Narayanan et al. 2021, arXiv 2104.04473, appendix: 24 B S H^2 + 4 B S^2 H operations forward). Kept are
    its activations but for the scores, which are computed again from their inputs: 16 numbers and 2 bytes of dropout masks
    for each element of [B, S, H], 34 bytes in half precision (Korthikanti et al. 2022, arXiv 2205.05198, section 4).

    Attributes:
        num_blocks: of attention and a network four times as wide.
        hidden: H.
        sequence: S.
        vocabulary: V.
        num_rows: B, of a microbatch.
        head_product: whether the head has a product [H, H] before the logits, as BERT's for masked tokens.
    """

    num_blocks: int
    hidden: int
    sequence: int
    vocabulary: int
    num_rows: int
    head_product: bool = False

    def profile(self, name: str) -> ModelProfile:
        """The profile under a name; embedding and head have weights of their own."""
        return ModelProfile(
            name=name,
            microbatch_size=self.num_rows,
            layers=(self._embedding(), *(self._block(f"block-{number}") for number in range(self.num_blocks)), self._head()),
        )

    @property
    def _elements(self) -> int:
        return self.num_rows * self.sequence * self.hidden

    def _embedding(self) -> LayerProfile:
        # A lookup reads and writes what it passes on; its backward reads gradients and adds them to rows.
        moved_s = self._elements * BYTES_PER_NUMBER / MEMORY_BYTES_PER_S
        return LayerProfile(
            name="embedding",
            forward_s=2 * moved_s,
            backward_s=3 * moved_s,
            weight_grad_s=3 * moved_s,
            output_bytes=self._elements * BYTES_PER_NUMBER,
            saved_bytes=self.num_rows * self.sequence * 8,  # the tokens
            parameter_bytes=(self.vocabulary + self.sequence) * self.hidden * BYTES_PER_NUMBER,
        )

    def _block(self, name: str) -> LayerProfile:
        weight_flops = 24 * self._elements * self.hidden
        score_flops = 4 * self._elements * self.sequence
        return LayerProfile(
            name=name,
            forward_s=(weight_flops + score_flops) / FLOPS_PER_S,
            backward_s=2 * (weight_flops + score_flops) / FLOPS_PER_S,
            weight_grad_s=weight_flops / FLOPS_PER_S,
            output_bytes=self._elements * BYTES_PER_NUMBER,
            saved_bytes=self._elements * (16 * BYTES_PER_NUMBER + 2),
            # Twelve matrices [H, H], nine vectors of biases, two layer norms.
            parameter_bytes=(12 * self.hidden**2 + 13 * self.hidden) * BYTES_PER_NUMBER,
        )

    def _head(self) -> LayerProfile:
        logits = self.num_rows * self.sequence * self.vocabulary
        product = self.hidden if self.head_product else 0
        flops = 2 * self._elements * (self.vocabulary + product)
        return LayerProfile(
            name="head",
            forward_s=flops / FLOPS_PER_S,
            backward_s=2 * flops / FLOPS_PER_S,
            weight_grad_s=flops / FLOPS_PER_S,
            output_bytes=logits * BYTES_PER_NUMBER,
            # The input of each product, and the logits in single precision for the loss.
            saved_bytes=self._elements * BYTES_PER_NUMBER * (2 if self.head_product else 1) + logits * 4,
            parameter_bytes=(self.vocabulary + product + 2) * self.hidden * BYTES_PER_NUMBER,
        )


TRANSFORMERS = {
    "gpt-24": Transformer(num_blocks=24, hidden=1024, sequence=1024, vocabulary=50257, num_rows=8),
    "gpt-96": Transformer(num_blocks=96, hidden=2048, sequence=2048, vocabulary=50257, num_rows=2),
    "bert-large": Transformer(num_blocks=24, hidden=1024, sequence=512, vocabulary=30522, num_rows=16, head_product=True),
    "bert-48": Transformer(num_blocks=48, hidden=1024, sequence=512, vocabulary=30522, num_rows=16, head_product=True),
}
"""GPT-2 medium's sizes, a GPT of 5 thousand million parameters in 98 layers, BERT-large's, and the same with twice the blocks."""

_MEASURED = {"vgg16": (128, 1), "resnet50": (128, 1), "gnmt": (32, 2), "inception_v3": (128, 1)}
"""Rows of a microbatch, and tensors that may cross a cut point: GNMT's decoder hands a small context on beside its state."""


def models() -> dict[str, ModelProfile]:
    """The profiles by name, all chains."""
    return {name: make() for name, make in makers().items()}


def makers() -> dict[str, Callable[[], ModelProfile]]:
    """For each name, what makes the profile: those who want one model need not make all."""
    found: dict[str, Callable[[], ModelProfile]] = {name: partial(chain_of, name) for name in _MEASURED}
    return found | {name: partial(sizes.profile, name) for name, sizes in TRANSFORMERS.items()}


def graph_of(name: str) -> ModelProfile:
    """The DAG that PipeDream's authors measured."""
    return read_pipedream(PROFILES / f"{name}.graph.txt", microbatch_size=_MEASURED[name][0])


def chain_of(name: str) -> ModelProfile:
    """The same as a chain."""
    return linearize(graph_of(name), max_tensors=_MEASURED[name][1]).profile


def main() -> None:
    """Prints what the models cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    figures = {
        name: {
            "num_layers": model.num_layers,
            "num_rows": model.microbatch_size,
            "forward_s": sum(layer.forward_s for layer in model.layers),
            "backward_s": sum(layer.backward_s for layer in model.layers),
            "longest_layer_s": max(layer.forward_s + layer.backward_s for layer in model.layers),
            "parameter_bytes": sum(layer.parameter_bytes for layer in model.layers),
            "saved_bytes": sum(layer.saved_bytes for layer in model.layers),
            "smallest_cut_bytes": min(layer.output_bytes for layer in model.layers[:-1]),
            "largest_cut_bytes": max(layer.output_bytes for layer in model.layers[:-1]),
        }
        for name, model in models().items()
    }
    print(f"{'model':14}{'layers':>7}{'rows':>6}{'F ms':>9}{'B ms':>9}{'longest':>9}{'weights MB':>12}{'kept MB':>10}{'cuts MB':>16}")
    for name, of_model in figures.items():
        times = "".join(f"{of_model[key] * 1e3:9.1f}" for key in ("forward_s", "backward_s", "longest_layer_s"))
        sizes = f"{of_model['parameter_bytes'] / 1e6:12.1f}{of_model['saved_bytes'] / 1e6:10.0f}"
        cuts = f"{of_model['smallest_cut_bytes'] / 1e6:.3g}..{of_model['largest_cut_bytes'] / 1e6:.4g}"
        print(f"{name:14}{of_model['num_layers']:7}{of_model['num_rows']:6}{times}{sizes}{cuts:>16}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
