"""The modules of a pipeline's layers: a transformers model in which the modules of all other layers are passed by.

Every layer runs the forward of the model itself, so masks, rotary embeddings, scalings and the head are the model's own::

    whole model         embed_tokens -> layers.0 -> layers.1 -> layers.2 -> norm -> lm_head
    layer "block-1"     (identity)   -> (entry)  -> layers.1 -> (passes) -> (identity)

What the model computes before its first block is thrown away, and the input of the layer enters in its place. Of a model of several
towers, a layer runs the forward of its own tower, and the head that of the whole model, which both inputs enter.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.errors import ConfigError
from raypipe.models.huggingface.lora import Lora
from raypipe.models.huggingface.parts import HEAD, Parts, Tower
from raypipe.models.huggingface.source import Source, library

IMAGE = "pixel_values"
"""Field of images [rows, channels, height, width], which the embedding alone takes."""
FIELDS = ("tokens", "input_ids", "attention_mask", "position_ids", "token_type_ids")
"""Fields of a batch that a model of texts takes if the batch has them; `tokens` are `input_ids` of token files."""


_PICKS_TOKENS = "ForSequenceClassification"
"""In the name of a model whose head looks at the tokens to find the last one of a row."""


class _Absent(nn.Module):
    """A module of another layer: returns its first argument, and answers for the attributes that the model reads of it.

    Args:
        original: The module itself, on the device `meta`.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original  # no child, so that its weights are none of this layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original" not in self.__dict__:
                raise
            return getattr(self.__dict__["original"], name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return arguments[0] if arguments else next(value for value in keywords.values() if value is not None)


class _AbsentEmbedding(_Absent):
    """An embedding of another layer, whose output is thrown away: returns what enters behind it, which has the right shape.

    Args:
        entry: What enters the first block, if anything does.
    """

    def __init__(self, original: nn.Module, entry: Sequence[Tensor]) -> None:
        super().__init__(original)
        self.__dict__["entry"] = entry

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.__dict__["entry"][0]


class _Constants:
    """Rotary frequencies and the like, which stay as exact as they were computed, whatever precision the rest is in."""

    def __init__(self, model: Any) -> None:
        self._exact: dict[tuple[nn.Module, str], tuple[Tensor, int]] = {}
        for name, buffer in model.named_non_persistent_buffers():
            owner, _, attribute = name.rpartition(".")
            if buffer.is_floating_point():
                self._exact[model.get_submodule(owner), attribute] = buffer.detach().clone(), buffer._version

    def restore(self) -> None:
        """Give back their values to constants that were cast or written to; a model may replace them by others."""
        for (owner, name), (exact, version) in self._exact.items():
            buffer = getattr(owner, name)
            if buffer.dtype != exact.dtype or buffer._version != version:
                buffer.data = exact.to(buffer.device, copy=True)
                self._exact[owner, name] = exact, buffer._version


class HuggingFaceLayer(nn.Module):
    """One layer of a transformers model; its weights have the names that they have in the whole model.

    Args:
        model: The model, in which modules of other layers are absent.
        parts: Which modules belong to which layer.
        layer: Name of the layer.
    """

    def __init__(self, model: Any, parts: Parts, layer: str) -> None:
        super().__init__()
        # The whole model is no child, so that names have no prefix; its children are, and are the very same modules.
        self.__dict__["whole"] = model
        self.tower = parts.tower_of(layer)
        self.layer = layer
        self.own = tuple(name for name, owner in parts.modules() if owner == layer)
        for name, child in model.named_children():
            self.add_module(name, child)
        for name in parts.weights if layer == HEAD else ():
            self.register_parameter(name, getattr(model, name))
        self._towers: Sequence[Tower] = parts.towers if self.tower is None else (self.tower,)
        self.is_embedding = self.tower is not None and layer == self.tower.layers[0]
        for tower in () if self.is_embedding else self._towers:
            first = model.get_submodule(f"{tower.blocks}.0")
            first.register_forward_pre_hook(partial(_enter, model.entries[tower.base]), with_kwargs=True)
        self._takes = frozenset(inspect.signature(self._run().forward).parameters)
        self._constants = _Constants(model)

    def _run(self) -> Any:
        """Return the model whose forward this layer runs."""
        whole = self.__dict__["whole"]
        return whole if self.tower is None else getattr(whole, self.tower.base)

    def cost_structure(self) -> object:
        """Return what layers of one cost have in common: their own modules, and not where in the model these stand."""
        whole = self.__dict__["whole"]
        part = "embedding" if self.is_embedding else HEAD if self.tower is None else "block"
        own = [getattr(whole, name) for name in self._parameters] + [whole.get_submodule(name) for name in self.own]
        return (type(whole).__qualname__, part, [tower.base for tower in self._towers], whole.config, own)

    def train(self, mode: bool = True) -> HuggingFaceLayer:
        """Set the mode of the model, too."""
        self.__dict__["whole"].training = mode
        super().train(mode)
        return self

    def forward(self, *inputs: Tensor, **fields: Tensor) -> Tensor:
        """Return the layer's output: hidden states [rows, positions, width], or of the head logits [rows, ...]."""
        self._constants.restore()
        if "tokens" in fields:
            fields = {"input_ids": fields["tokens"]} | {name: field for name, field in fields.items() if name != "tokens"}
        if self.is_embedding:
            if not {"input_ids", IMAGE} & fields.keys():
                raise ConfigError("the batch has neither the field 'input_ids' nor 'tokens'; a transformers model reads one of them")
            hidden: Tensor = self._run()(**fields).last_hidden_state
            return hidden
        entries = self.__dict__["whole"].entries
        for tower, tensor in zip(self._towers, inputs, strict=True):
            entries[tower.base][:] = [tensor]
        result = self._run()(**self._given(inputs, fields))
        for entry in entries.values():
            entry.clear()
        if self.tower is not None:
            output: Tensor = result.last_hidden_state
        else:
            output = result.logits if len(self._towers) == 1 else result.logits_per_text
        return output

    def _given(self, inputs: Sequence[Tensor], fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of the forward; embeddings are passed by, so that any tensor of the right shape serves for an image."""
        given = dict(fields)
        reads_tokens = self.tower is None and _PICKS_TOKENS in type(self.__dict__["whole"]).__name__
        if "inputs_embeds" in self._takes and not (reads_tokens and "input_ids" in fields):
            given.pop("input_ids", None)
            return given | {"inputs_embeds": inputs[0]}
        return given | ({IMAGE: inputs[-1]} if IMAGE in self._takes else {})


def _enter(entry: list[Tensor], _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
    if arguments:
        return (entry[0], *arguments[1:]), keywords
    return arguments, keywords | {"hidden_states": entry[0]}


@dataclass(frozen=True, eq=False)
class LayerMaker:
    """Makes the module of a layer by its name, with its weights.

    Only the weights of this layer are read, by the loader of transformers. The whole model is made once, on the device `meta`: each layer's
    model is a copy of it in which the modules of other layers are absent.

    Attributes:
        kind: Class of the whole model.
        config: Its configuration.
        parts: Which modules belong to which layer.
        source: Where the weights are; `None` for random ones from torch's generator.
        dtype: Type of the weights.
        lora: Adapters to add.
    """

    kind: Any
    config: Any
    parts: Parts
    source: Source | None
    dtype: torch.dtype
    lora: Lora | None
    _wholes: dict[tuple[bool, torch.dtype], Any] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what another process can make itself."""
        return self.__dict__ | {"_wholes": {}}

    def __call__(self, layer: str) -> nn.Module:
        """Return a new module.

        Raises:
            ConfigError: Weights are missing or of another shape.
        """
        kind, source = self.kind, self.source
        is_sketch = torch.get_default_device().type == "meta"  # only names and shapes are asked for

        def init(model: Any, config: Any) -> None:  # transformers calls it on the device `meta`
            key = is_sketch, torch.get_default_dtype()
            if key not in self._wholes:
                self._wholes[key] = kind(config)
            _become_part(model, self._wholes[key], self.parts, layer)

        options: dict[str, Any] = {"state_dict": {}} if source is None else {"revision": source.revision, "ignore_mismatched_sizes": True}
        partly: Any = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__init__": init})
        if is_sketch:
            model = partly(self.config).to(self.dtype)
            if self.lora is not None:
                self.lora.insert(model)
            return HuggingFaceLayer(model, self.parts, layer)
        with quiet(library()):
            model, info = partly.from_pretrained(
                None if source is None else source.name, config=self.config, dtype=self.dtype, output_loading_info=True, **options
            )
        if source is not None:
            _check_loaded(info, layer, source, tied=model.absent_ties)
        if self.lora is not None:
            self.lora.insert(model)
        return HuggingFaceLayer(model, self.parts, layer)


def _become_part(model: Any, whole: Any, parts: Parts, layer: str) -> None:
    """Make a bare model a copy of the whole one in which the modules of other layers are absent."""
    entries: dict[str, list[Tensor]] = {tower.base: [] for tower in parts.towers}
    copies: dict[int, Any] = {id(whole): model}
    for name, owner in parts.modules():
        if owner != layer:
            original = whole.get_submodule(name)
            copies[id(original)] = _absent(original, parts.tower_of(owner), owner, entries)
    model.__dict__.update(copy.deepcopy(whole.__dict__, copies))
    model.__dict__["entries"] = entries
    if layer != HEAD:
        for name in parts.weights:
            del model._parameters[name]
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = model.all_tied_weights_keys
    model.all_tied_weights_keys = {target: origin for target, origin in ties.items() if {target, origin} <= names}
    model.absent_ties = {target for target, origin in ties.items() if origin not in names}


def _absent(original: nn.Module, tower: Tower | None, owner: str, entries: Mapping[str, Sequence[Tensor]]) -> nn.Module:
    if tower is not None and owner == tower.layers[0]:
        return _AbsentEmbedding(original, entries[tower.base])
    return _Absent(original)


def _check_loaded(info: Mapping[str, Any], layer: str, source: Source, *, tied: Collection[str]) -> None:
    # A weight that is tied to one of another layer takes that one's values.
    missing = sorted(name for name in info["missing_keys"] if name not in tied)
    if missing:
        raise ConfigError(
            f"hf:{source.path} has no weights for {missing[0]!r} ({len(missing)} of layer {layer!r} are missing); are its files complete, "
            "and of this model? Set model.options.weights to random to train from scratch"
        )
    if info["mismatched_keys"]:
        name, there, here = min(info["mismatched_keys"])
        raise ConfigError(
            f"hf:{source.path} has {name!r} in the shape {list(there)}, but its configuration asks for {list(here)}; check "
            "model.options.config"
        )


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers from telling, for every layer, that the weights of others are not used."""
    logging = transformers.utils.logging
    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()
