"""The weights of a stage by the names that a user knows: `layer.weight`, such as `block-0.mlp_in.weight`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn

from raypipe.actors.stage.module import StageModule

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class NamedWeights(list[tuple[str, nn.Parameter]]):
    """Full names and weights, as torch's optimizers take them.

    A weight that several layers share has its name in the first of them, on every stage.

    Attributes:
        outer: Names of the weights that are not between the layers of a model: tables that are looked up, the weights of the last layer,
            and those that layers share.
    """

    def __init__(self, weights: Iterable[tuple[str, nn.Parameter]], *, outer: Collection[str] = ()) -> None:
        super().__init__(weights)
        self.outer = frozenset(outer)


def named_weights(module: StageModule, names: Sequence[str], masters: Sequence[nn.Parameter]) -> NamedWeights:
    """Return the trained weights of a stage; `names` are those in the module, `masters` the tensors that its optimizer steps."""
    full = full_names(module, names)
    tables = _tables({f"layers.{index}": layer for index, layer in module.layers.items()})
    tables |= {f"layers.{index}.{weight}" for index, layer in module.specs.items() for weight in layer.looked_up}
    last = f"layers.{module.num_layers - 1}."
    outer = [full[name] for name in names if name in tables or name in module.tied or name.startswith(last)]
    return NamedWeights(zip(full.values(), masters, strict=True), outer=outer)


def full_names(module: StageModule, names: Sequence[str]) -> dict[str, str]:
    """Return the full name of each weight, by its name in the module."""
    return {name: module.tied.get(name) or _full_name(module, name) for name in names}


def _full_name(module: StageModule, name: str) -> str:
    _, index, rest = name.split(".", 2)
    return f"{module.names[int(index)]}.{rest}"


def _tables(layers: Mapping[str, nn.Module]) -> set[str]:
    return {
        ".".join(filter(None, (layer, path, "weight")))
        for layer, root in layers.items()
        for path, part in root.named_modules()
        if isinstance(part, _EMBEDDINGS)
    }
