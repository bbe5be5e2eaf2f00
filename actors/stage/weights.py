"""The stages that a device holds: their layers, their weights in every version needed, gradients and optimizer.

Three rules keep an update from reaching a graph that still needs the weights before it:

* The optimizer works on aliases of the weights (`Parameter(weight.data)`): autograd counts their changes apart, so that
  `live` may write under a graph in flight, and its backward reads what is there then.
* `stash` and `double_buffer` compute with a version's own tensors, through `torch.func.functional_call`. An update moves the
  aliases to fresh memory first, as long as the older version is still to be read.
* Gradients go to the buffer of (stage, update), bound as `.grad` for the Op that writes it.

Where a weight is computed with in a lower precision (`lower`), its tensors are copies that every update writes anew, and not aliases;
their gradients are summed in the precision of what the optimizer steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from raypipe.actors import devices
from raypipe.artifacts.cut import Cut
from raypipe.errors import ConfigError, PlanError, suggestion
from raypipe.model import Batch, Layer, Model
from raypipe.schedules.ir import WeightRule

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of one stage from its weights."""

OPTIMIZER = "optimizer/"
"""What the names of optimizer state begin with in checkpoints; no module can be called so."""

_DRAWING = threading.Lock()
"""Torch's generator belongs to the process: layers that may draw from it, at making or in forward, do so one at a time."""
_BUILT: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The layer that each weight was built for: built twice, it would be stepped in two places of one process, and differ between two."""
_COUNTS = frozenset({"step", "mu_product"})
"""Names of optimizer state that is one number a weight, whatever the weight's shape."""


class RngKey(NamedTuple):
    """What, besides seed and layer, the randomness of a forward depends on.

    Attributes:
        microbatch: counted from the beginning of training.
        first_row: of the rows that are computed here; replicas that share a microbatch draw unlike masks.
    """

    microbatch: int
    first_row: int = 0


def layer_seed(seed: int, layer: int, draw: RngKey | None = None) -> int:
    """The seed of a layer's weights, or of its randomness for one microbatch: whatever the cut, the same.

    Numbers are mixed by 64-bit products, so that neighbours give unlike seeds.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + layer * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    if draw is not None:
        mixed ^= ((draw.microbatch + 1) * 0xD6E8FEB86659FD93 + draw.first_row * 0xA0761D6478BD642F) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    return mixed >> 1


def build_layer(layer: Layer, *, index: int, seed: int) -> nn.Module:
    """Makes a layer's module from the layer's own seed.

    Raises:
        ConfigError: the user's function failed, or gave no module.
    """
    with _DRAWING:
        torch.manual_seed(layer_seed(seed, index))
        try:
            module = layer.build()
        except Exception as error:
            raise ConfigError(f"layer {layer.name!r} could not be built: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"layer {layer.name!r}: its build function returned {type(module).__name__}, expected a torch.nn.Module")
    for name, weight in module.named_parameters():
        if weight in _BUILT:
            raise ConfigError(
                f"layer {layer.name!r}: its build function returned the weight {name!r}, with which layer {_BUILT[weight]!r} was built "
                "before; make a new one each time, as by copy.deepcopy, and name in the model's ties what layers are to share"
            )
        _BUILT[weight] = layer.name
    return module


def tie_layers(model: Model, layers: Mapping[int, nn.Module], *, seed: int, on: torch.device = devices.CPU) -> None:
    """Makes one parameter of each weight that several of some layers share, with the values that the first layer of its tie begins with.

    That layer is built for them where it is not among these, and given back.

    Raises:
        ConfigError: a layer has no such weight, or those of a tie have different shapes or dtypes.
    """
    for tie, indices in zip(model.ties, model.tied_layers(), strict=True):
        if not any(index in layers for index in indices):
            continue
        index_of = {model.layers[index].name: index for index in indices}
        (name, first_weight), *_ = tie
        first = indices[0]
        source = layers[first] if first in layers else build_layer(model.layers[first], index=first, seed=seed)
        weight = _weight(source, name, first_weight)
        shared = weight
        if first not in layers:
            shared = nn.Parameter(weight.detach().to(on, copy=True), requires_grad=weight.requires_grad)
            _hook(shared, _hooks_of(weight))
        for name, called in tie:
            module = layers.get(index_of[name])
            if module is None:
                continue
            own = _weight(module, name, called)
            if (own.shape, own.dtype) != (weight.shape, weight.dtype):
                raise ConfigError(
                    f"the weight {called!r} of layer {name!r} is {_shape(own)}, but it is tied to {first_weight!r} of layer "
                    f"{tie[0][0]!r}, which is {_shape(weight)}; weights that are tied have one shape and dtype"
                )
            for alias, parameter in list(module.named_parameters(remove_duplicate=False)):
                if parameter is own:
                    holder, _, attribute = alias.rpartition(".")
                    setattr(module.get_submodule(holder), attribute, shared)


def _weight(module: nn.Module, layer: str, name: str) -> nn.Parameter:
    found = dict(module.named_parameters(remove_duplicate=False))
    if name not in found:
        has = ", ".join(found) or "none"
        raise ConfigError(f"layer {layer!r} is tied by its weight {name!r}, but has no such weight{suggestion(name, found)}; it has {has}")
    return found[name]


def _shape(weight: Tensor) -> str:
    return f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"


Outputs = dict[int, tuple[Tensor, ...]]
"""The tensors of layers, by layer index."""


class StageModule(nn.Module):
    """The layers of one stage as one module, from the tensors of layers before it to those of its own that are needed.

    Args:
        model: the whole model's description.
        cut: the layers of all stages.
        stage: the stage.
        seed: of the run.
        on: the device that computes. Layers are built on the CPU and begin with the same weights on all devices.

    Attributes:
        shared: each weight that the stages of its tie share with each other, in the same order on all of them.
        borrowed: by name, the weights that another stage's layer has in its file of a checkpoint.
    """

    def __init__(self, model: Model, cut: Cut, stage: int, *, seed: int, on: torch.device = devices.CPU) -> None:
        super().__init__()
        if cut.ties != model.tied_layers():
            raise PlanError("the cut does not know which layers of the model share weights; make it with ties=model.tied_layers()")
        self.stage = stage
        self.seed = seed
        self.on = on
        self.indices = cut.stages[stage]
        self.names = tuple(layer.name for layer in model.layers)
        self.num_layers = len(model.layers)
        self.specs: dict[int, Layer] = {index: model.layers[index] for index in self.indices}
        self.inputs: dict[int, list[int]] = {index: [source for source, target in cut.edges if target == index] for index in self.indices}
        leaving = {layer for (source, _), layers in cut.crossing.items() if source == stage for layer in layers}
        last = len(model.layers) - 1
        self.kept = tuple(sorted(leaving | ({last} if last in self.indices else set())))
        self.layers = nn.ModuleDict({str(index): build_layer(model.layers[index], index=index, seed=seed).to(on) for index in self.indices})
        tie_layers(model, {index: self.layers[str(index)] for index in self.indices}, seed=seed, on=on)
        self.shared = _shared_weights(model, cut, self, seed=seed) if stage in cut.graph.tie_of else ()
        self.borrowed = _borrowed_weights(model, self)
        self.steps = [(index, self.layers[str(index)], self.inputs[index], self.specs[index].batch) for index in self.indices]
        self.takes_batch = any(spec.batch for spec in self.specs.values())
        _check_state(self)
        # The first layer's outputs of the last forward. In a list: setting an attribute of a module takes microseconds.
        self.first: list[tuple[Tensor, ...]] = [()]

    @property
    def needed_layers(self) -> tuple[int, ...]:
        """The layers whose states a checkpoint must have for this stage: its own, and those that it borrows weights of."""
        return tuple(dict.fromkeys([*self.indices, *(filed.layer for filed in self.borrowed.values())]))

    def forward(self, inputs: Outputs, batch: Batch, draw: RngKey) -> Outputs:
        """The outputs that other stages or the loss take.

        Args:
            inputs: of layers in other stages.
            batch: the fields that the stage's layers name, for these rows.
            draw: for randomness.
        """
        values = dict(inputs)
        with _DRAWING:
            for index, module, sources, fields in self.steps:
                arguments = [tensor for source in sources for tensor in values[source]]
                for field in fields:
                    arguments.append(batch[field])
                self._seed(index, draw)
                result = module(*arguments)
                values[index] = result if isinstance(result, tuple) else (result,)
        self.first[0] = values[self.indices[0]]
        return {index: values[index] for index in self.kept}

    @contextmanager
    def seeded_loss(self, draw: RngKey) -> Iterator[None]:
        """A context for the loss, whose random numbers are those of a layer behind the last."""
        with _DRAWING:
            self._seed(self.num_layers, draw)
            yield

    def _seed(self, layer: int, draw: RngKey) -> None:
        """Lets what is drawn from now on depend on these alone."""
        devices.seed(self.on, layer_seed(self.seed, layer, draw))


def _check_state(module: StageModule) -> None:
    """Sees that a checkpoint will be able to hold the state of a stage's layers: that shows here, and not after days of training.

    Raises:
        ConfigError: it will not.
    """
    for name, value in module.state_dict().items():
        _, index, rest = name.split(".", 2)
        where = f"{rest!r} of layer {module.specs[int(index)].name!r}"
        if rest.rpartition(".")[2] == "_extra_state" or not isinstance(value, Tensor) or value.layout is not torch.strided:
            what = f"a tensor of {value.layout}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"{where} is {what}, and checkpoints hold parameters and dense buffers; register a buffer in its place")
        if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
            raise ConfigError(f"{where} has one number in several places, and could not be loaded again; register its `.clone()`")


class SharedWeight(NamedTuple):
    """A weight that several stages share, as one of them sees it.

    Attributes:
        name: of the parameter; `None` where this stage has none of its copies, or where it takes no gradient.
        numel: its numbers.
        dtype: theirs.
    """

    name: str | None
    numel: int
    dtype: torch.dtype


class FiledWeight(NamedTuple):
    """Where a checkpoint has a weight.

    Attributes:
        layer: by index.
        names: of which the layer's file has one.
    """

    layer: int
    names: tuple[str, ...]


def _members_here(model: Model, module: StageModule, tie: int) -> list[str]:
    """The parameter of a stage that a tie names, under its first name; none where it names none of the stage's."""
    layers = {model.layers[index].name: index for index in module.indices}
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = [module.get_parameter(f"layers.{layers[layer]}.{name}") for layer, name in model.ties[tie] if layer in layers]
    return [first_names[id(parameter)] for parameter in found[:1]]


def _shared_weights(model: Model, cut: Cut, module: StageModule, *, seed: int) -> tuple[SharedWeight, ...]:
    found: list[SharedWeight] = []
    for number in cut.parted_ties:
        if here := _members_here(model, module, number):
            weight = module.get_parameter(here[0])
            found.append(SharedWeight(here[0] if weight.requires_grad else None, weight.numel(), weight.dtype))
        else:
            (layer, name), first = model.ties[number][0], cut.ties[number][0]
            elsewhere = _weight(build_layer(model.layers[first], index=first, seed=seed), layer, name)
            found.append(SharedWeight(None, elsewhere.numel(), elsewhere.dtype))
    return tuple(found)


def _borrowed_weights(model: Model, module: StageModule) -> dict[str, FiledWeight]:
    """A weight that is tied is in the file of the first layer of the model that has it, whatever the cut."""
    found: dict[str, FiledWeight] = {}
    for number, (tie, layers) in enumerate(zip(model.ties, model.tied_layers(), strict=True)):
        filed = min(layers)
        if filed not in module.indices:
            names = tuple(name for layer, name in tie if layer == model.layers[filed].name)
            found |= dict.fromkeys(_members_here(model, module, number), FiledWeight(filed, names))
    return found


@dataclass
class _Version:
    """The tensors that Ops of one version compute with, by the module's own names."""

    leaves: dict[str, Tensor]

    def __post_init__(self) -> None:
        self.places = _places(self.leaves.values())


def _places(tensors: Iterable[Tensor]) -> list[int]:
    """Where tensors lie in memory."""
    return [tensor.data_ptr() for tensor in tensors]


class Weights:
    """The weights of one stage in every version that is still to be read, their gradients and their optimizer.

    Args:
        module: the stage.
        optimizer: makes the optimizer.
        rule: how a backward finds its weights.

    Attributes:
        rule: as given.
        versioned: whether Ops compute with a version's own tensors rather than with the module's.
    """

    def __init__(self, module: StageModule, *, optimizer: Optimizer, rule: WeightRule) -> None:
        self.module = module
        self.on = module.on
        self.rule = rule
        self.versioned = rule in {WeightRule.STASH, WeightRule.DOUBLE_BUFFER}
        self.names = [name for name, weight in module.named_parameters() if weight.requires_grad]
        own = dict(module.named_parameters())
        self._hooks = [_hooks_of(own[name]) for name in self.names]
        self.masters = [nn.Parameter(own[name].data) for name in self.names]
        self._shared = [(self.names.index(weight.name) if weight.name else None, weight) for weight in module.shared]
        shared = {position for position, _ in self._shared}
        self._unshared = [position for position in range(len(self.names)) if position not in shared]
        self.optimizer = optimizer(self.masters) if self.masters else None
        self.newest = 0
        self._own: list[Tensor] = [own[name] for name in self.names]
        self._dtypes = [master.dtype for master in self.masters]
        self._lowered: list[tuple[Tensor, Tensor]] = []
        self._versions = {0: _Version(dict(zip(self.names, self._own, strict=True)))}
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._bound: tuple[int, int] | None = None
        self._places = _places(self._own)
        if self.versioned:
            self._versions[0] = _Version(self._leaves())

    @property
    def num_versions(self) -> int:
        """Copies of the weights held now."""
        return len(self._versions)

    @property
    def low_precision_bytes(self) -> int:
        """Bytes of one version's copies in a lower precision."""
        return sum(copy.nbytes for _, copy in self._lowered)

    def lower(self, names: Collection[str], dtype: torch.dtype) -> None:
        """Computes from now on with copies of these weights in another precision. Between windows only.

        Graphs of forwards hold the copies themselves, and updates write through `.data`: `live` reads in its backward what is there then.
        """
        assert len(self._versions) == 1, "weights are lowered between windows only"
        self._dtypes = [dtype if name in names else now for name, now in zip(self.names, self._dtypes, strict=True)]
        self._lowered = []
        for own, master, to in zip(self._own, self.masters, self._dtypes, strict=True):
            if to != master.dtype:
                own.data = master.data.to(to)
                own.grad_dtype = master.dtype
                self._lowered.append((master, own))
        self._places = _places(self._own)
        self._bring(self.newest)

    def _leaves(self) -> dict[str, Tensor]:
        leaves: dict[str, Tensor] = {}
        for name, master, dtype, hooks in zip(self.names, self.masters, self._dtypes, self._hooks, strict=True):
            leaf = leaves[name] = master.data.requires_grad_() if dtype == master.dtype else _copy(master, dtype)
            _hook(leaf, hooks)
        return leaves

    def begin_window(self) -> None:
        """Counts versions anew: what is newest becomes version 0."""
        assert len(self._versions) == 1, f"versions {sorted(self._versions)} of the last window are left over"
        assert not self._gradients, f"gradients of updates {sorted(self._gradients)} of the last window are left over"
        self._versions = {0: next(iter(self._versions.values()))}
        self.newest = 0
        self._bound = None

    def run(self, version: int, inputs: Outputs, batch: Batch, draw: RngKey) -> Outputs:
        """The stage's forward with one version of its weights."""
        if not self.versioned:
            return self.module.forward(inputs, batch, draw)  # nobody hooks into a stage's module: its call would only take time
        outputs: Outputs = torch.func.functional_call(self.module, self._versions[version].leaves, (inputs, batch, draw))
        return outputs

    def parameters(self, version: int) -> list[Tensor]:
        """The tensors that a forward with this version computed with."""
        return list(self._versions[version].leaves.values()) if self.versioned else self._own

    def bind(self, version: int, update: int) -> list[Tensor]:
        """Makes the `.grad` of a version's tensors the gradient buffer of an update; returns these tensors."""
        key = (version if self.versioned else 0, update)
        if self._bound != key:
            self.unbind()
            buffer = self._gradients.setdefault(update, [None] * len(self.names))
            for leaf, gradient in zip(self.parameters(version), buffer, strict=True):
                leaf.grad = gradient
            self._bound = key
        return self.parameters(version)

    def unbind(self) -> None:
        """Puts the bound `.grad` back into its buffer."""
        if self._bound is None:
            return
        version, update = self._bound
        leaves = self.parameters(version)
        self._gradients[update] = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        self._bound = None

    def gradients(self, update: int) -> list[Tensor | None]:
        """The gradient buffer of an update, in the order of `names`."""
        self.unbind()
        return self._gradients.setdefault(update, [None] * len(self.names))

    def flat_gradients(self, update: int) -> Tensor:
        """The gradient buffer of an update as one vector, for a reduction; from then on it lies there alone.

        At its end stands for each weight a 1 where it has a gradient and a 0 where it has none, and zeros in its place.
        """
        gradients = self.gradients(update)
        parts = [
            (torch.zeros_like(master) if gradient is None else gradient).reshape(-1)
            for gradient, master in zip(gradients, self.masters, strict=True)
        ]
        there = [gradient is not None for gradient in gradients]
        # Made on the device: the host would wait until it had sent them.
        yes, no = (torch.full((1,), value, dtype=parts[0].dtype if parts else None, device=self.on) for value in (1.0, 0.0))
        flat = torch.cat([*parts, *(yes if has else no for has in there)]) if parts else no[:0]
        self._lay_gradients(update, flat, there)
        return flat

    def set_flat_gradients(self, update: int, flat: Tensor) -> None:
        """Replaces the gradient buffer of an update by the parts of a sum of such vectors; what has no gradient anywhere has none."""
        there = [gradient is not None for gradient in self.gradients(update)]
        if not all(there):  # only then: to read what others have, the host waits for the device
            there = [bool(count) for count in flat[len(flat) - len(there) :].tolist()]
        self._lay_gradients(update, flat, there)

    def _lay_gradients(self, update: int, flat: Tensor, there: Sequence[bool]) -> None:
        *parts, _ = torch.split(flat, [*(master.numel() for master in self.masters), len(self.masters)])
        self._gradients[update] = [
            _laid_as(master, part) if has else None for part, master, has in zip(parts, self.masters, there, strict=True)
        ]

    def shared_gradients(self, update: int) -> Tensor:
        """What this stage brings to the sum of the gradients of all weights that its tie shares, as one vector.

        At its end stands for each weight a 1 where it has a gradient and a 0 where it has none, and zeros in its place.
        """
        gradients = self.gradients(update)
        parts: list[Tensor] = []
        there: list[Tensor] = []
        for position, weight in self._shared:
            gradient = None if position is None else gradients[position]
            there.append(torch.full((1,), float(gradient is not None), dtype=weight.dtype, device=self.on))
            if gradient is None:
                gradient = torch.zeros(weight.numel, dtype=weight.dtype, device=self.on)
            parts.append(gradient.reshape(-1))
        return torch.cat([*parts, *there])

    def shared_squared_norm(self, shared: Tensor) -> Tensor:
        """The sum of the squares of the gradients in a sum of such vectors, in float64."""
        return squared_norm([shared[: len(shared) - len(self._shared)]])

    def squared_norm(self, update: int) -> Tensor:
        """The sum of the squares of an update's gradients, in float64; those of weights that stages share are left out."""
        gradients = self.gradients(update)
        return squared_norm([gradient for position in self._unshared if (gradient := gradients[position]) is not None], on=self.on)

    def update(self, update: int, *, scale: float | Tensor, learning_rate: float, keep_old: bool, shared: Tensor | None = None) -> None:
        """Makes version `update + 1` from version `update`.

        Args:
            update: its number in the window; its gradients are used and given back.
            scale: factor for the gradients, for clipping.
            learning_rate: of this update.
            keep_old: whether version `update` is still to be read.
            shared: the sum of what all stages of its tie brought, clipped; takes the place of this stage's own.
        """
        gradients = self.gradients(update)
        del self._gradients[update]
        if shared is not None:
            *parts, there = torch.split(shared, [*(weight.numel for _, weight in self._shared), len(self._shared)])
            for number, ((position, _), part) in enumerate(zip(self._shared, parts, strict=True)):
                # Only then: to read what others have, the host waits for the device.
                if position is not None and (gradients[position] is not None or bool(there[number])):
                    gradients[position] = _laid_as(self.masters[position], part)
        if self.versioned and keep_old:
            self._move()
        if self.optimizer is not None:
            # Whether a scale that the device works out is 1 is not known here yet.
            for position in self._unshared if isinstance(scale, Tensor) or scale != 1.0 else ():
                if (own := gradients[position]) is not None:
                    own.mul_(scale)
            for master, gradient in zip(self.masters, gradients, strict=True):
                master.grad = gradient
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            for master in self.masters:
                master.grad = None
        self._bring(update + 1)
        if self.versioned and not keep_old:
            self._drop(update)

    def _move(self) -> None:
        """Moves what the optimizer steps to fresh memory, where that is what a version computes with.

        The module's own weights come along, which would else hold the oldest version's for the whole window.
        """
        for master, own, dtype in zip(self.masters, self._own, self._dtypes, strict=True):
            if master.dtype == dtype:
                master.data = own.data = master.data.clone()
        self._places = _places(self._own)

    def _bring(self, version: int) -> None:
        if self.versioned:
            self._versions[version] = _Version(self._leaves())
        else:
            for master, copy in self._lowered:
                copy.data.copy_(master.data)
        self.newest = version

    def drop_gradients(self, update: int) -> None:
        """Drops the gradient buffer of an update."""
        self.unbind()
        self._gradients.pop(update, None)

    def receive(self, update: int, flat: Tensor) -> None:
        """Takes the version that another replica made from an update's gradients, and drops this one's share of them."""
        self.drop_gradients(update)
        sizes = [master.numel() for master in self.masters]
        if self.versioned:
            self._move()
        with torch.no_grad():
            for part, master in zip(torch.split(flat, sizes), self.masters, strict=True):
                master.copy_(part.view_as(master))
        self._bring(update + 1)

    def flat(self) -> Tensor:
        """The newest weights as one vector."""
        parts = [master.detach().reshape(-1) for master in self.masters]
        return torch.cat(parts) if parts else torch.zeros(0, device=self.on)

    def release(self, version: int) -> None:
        """Gives back a version after its last reader, unless it is the newest."""
        if self.versioned and version != self.newest:
            self._drop(version)

    def _drop(self, version: int) -> None:
        if self._bound is not None and self._bound[0] == version:
            self.unbind()
        dropped = self._versions.pop(version, None)
        if dropped is not None:
            self._check(dropped.leaves.values(), dropped.places)

    def end_window(self) -> None:
        """Makes the module's own weights the newest version, for evaluation and checkpoints."""
        self.check_in_place()
        for version in [version for version in self._versions if self.versioned and version != self.newest]:
            del self._versions[version]
        if self.versioned:
            for own, leaf in zip(self._own, self.parameters(self.newest), strict=True):
                own.data = leaf.data
            self._places = _places(self._own)
        assert not any(gradient is not None for buffer in self._gradients.values() for gradient in buffer), (
            f"stage {self.module.stage} has gradients left of updates {sorted(self._gradients)}"
        )
        self._gradients.clear()

    def check_in_place(self) -> None:
        """Sees that layers compute with what updates write.

        Raises:
            ConfigError: a layer has put other memory in a weight's place.
        """
        self._check(self._own, self._places)
        for version in self._versions.values() if self.versioned else ():
            self._check(version.leaves.values(), version.places)

    def _check(self, weights: Iterable[Tensor], places: Sequence[int]) -> None:
        for name, now, before in zip(self.names, _places(weights), places, strict=True):
            if now != before:
                _, index, rest = name.split(".", 2)
                raise ConfigError(
                    f"layer {self.module.specs[int(index)].name!r} has put another tensor in the place of its weight {rest!r}, where no "
                    "update would reach it; write in place, `weight.data.copy_(...)`"
                )

    def state(self) -> dict[int, dict[str, Tensor]]:
        """For each layer, its weights, buffers and optimizer state by name, such as `weight` and `optimizer/exp_avg/weight`.

        Of several names for the same memory the first is kept; what is borrowed is in the state of another stage.
        """
        found: dict[int, dict[str, Tensor]] = {index: {} for index in self.module.indices}
        borrowed = self.module.borrowed
        for name, tensor in without_aliases(self.module).items():
            _, index, rest = name.split(".", 2)
            if name not in borrowed:
                found[int(index)][rest] = tensor
        for name, master in zip(self.names, self.masters, strict=True):
            if name in borrowed:
                continue
            _, index, rest = name.split(".", 2)
            found[int(index)][rest] = master.data
            state = self.optimizer.state.get(master, {}) if self.optimizer is not None else {}
            for key, value in state.items():
                found[int(index)][f"{OPTIMIZER}{key}/{rest}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return found

    def load_state(self, layers: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Takes what `state` gave, for exactly these layers and with what they borrow.

        Raises:
            ConfigError: a tensor is missing, unknown or of another shape.
        """
        assert len(self._versions) == 1, "weights are loaded between windows only"
        own = without_aliases(self.module)
        by_name = dict(zip(self.names, self.masters, strict=True))
        for index, tensors in layers.items():
            wanted = {name.split(".", 2)[2] for name in own if name.split(".", 2)[1] == str(index)}
            given = {name for name in tensors if not name.startswith(OPTIMIZER)}
            if wanted != given:
                raise ConfigError(
                    f"checkpoint of layer {index}: missing {sorted(wanted - given)}, unknown {sorted(given - wanted)}; "
                    "was it made by another model?"
                )
            for rest, tensor in tensors.items():
                self._load_one(f"layers.{index}.{rest}" if rest in given else rest, index, tensor, own, by_name)
        self._bring(self.newest)

    def _load_one(self, name: str, index: int, tensor: Tensor, own: Mapping[str, Tensor], by_name: Mapping[str, nn.Parameter]) -> None:
        if not name.startswith(OPTIMIZER):
            if own[name].shape != tensor.shape:
                raise ConfigError(f"checkpoint of {name}: has shape {tuple(tensor.shape)}, the model {tuple(own[name].shape)}")
            with torch.no_grad():
                (by_name[name].data if name in by_name else own[name]).copy_(tensor)
            return
        key, rest = name.removeprefix(OPTIMIZER).split("/", 1)
        master = by_name.get(f"layers.{index}.{rest}")
        if f"layers.{index}.{rest}" in own and master is None:
            return  # it is frozen now
        if master is None or self.optimizer is None:
            raise ConfigError(f"checkpoint of layer {index} has {name!r}, but the model has no such weight")
        # Counts of steps stay where the host reads them, unless the optimizer's one kernel does.
        on_host = key in _COUNTS and not self.optimizer.defaults.get("fused")
        loaded = tensor.to("cpu" if on_host else master.device, copy=True)
        laid_out = key not in _COUNTS and tensor.shape == master.shape
        self.optimizer.state[master][key] = _laid_as(master, loaded, dtype=tensor.dtype) if laid_out else loaded


def squared_norm(gradients: list[Tensor], *, on: torch.device = devices.CPU) -> Tensor:
    """The sum of the squares of some gradients, in float64; a zero on a device where there are none."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=on)
    if not gradients[0].is_cpu:
        return torch.nn.utils.get_total_norm(gradients).double().square()  # in few kernels
    # Norms per tensor in their own precision, squares and their sum in double: large models must not overflow.
    return torch.stack([torch.linalg.vector_norm(gradient).double() for gradient in gradients]).square().sum()


def _laid_as(weight: Tensor, values: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers in the weight's shape, dtype and order of memory: kernels of optimizers pair them with its own by memory alone."""
    shaped = values.view_as(weight).to(dtype or weight.dtype)
    return shaped if weight.is_contiguous() else torch.empty_like(weight, dtype=shaped.dtype, requires_grad=False).copy_(shaped)


@dataclass(frozen=True)
class _Hooks:
    """What a weight's maker has hooked to it.

    Attributes:
        on_gradient: `Tensor.register_hook`.
        when_summed: `Tensor.register_post_accumulate_grad_hook`.
    """

    on_gradient: tuple[Callable[[Tensor], Tensor | None], ...]
    when_summed: tuple[Callable[[Tensor], None], ...]


def _hooks_of(weight: Tensor) -> _Hooks:
    # Torch has no other way to ask.
    return _Hooks(tuple((weight._backward_hooks or {}).values()), tuple((weight._post_accumulate_grad_hooks or {}).values()))


def _hook(weight: Tensor, hooks: _Hooks) -> None:
    for on_gradient in hooks.on_gradient:
        weight.register_hook(on_gradient)  # type: ignore[no-untyped-call]
    for when_summed in hooks.when_summed:
        weight.register_post_accumulate_grad_hook(when_summed)  # type: ignore[no-untyped-call]


def _copy(master: Tensor, dtype: torch.dtype) -> Tensor:
    """A leaf of another precision, whose gradients are summed in that of the weight."""
    leaf = master.data.to(dtype).requires_grad_()
    leaf.grad_dtype = master.dtype
    return leaf


def without_aliases(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module, each weight under the first of its names, each buffer under the first that it has in a layer.

    Args:
        module: of layers, whose states' names begin with a number, or `layers.` and a number.
    """
    seen: set[tuple[str, int, tuple[int, ...]]] = set()
    found: dict[str, Tensor] = {}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for name, tensor in module.state_dict().items():
        # What a model ties is said; buffers that layers have in common are found by nobody else, whatever the cut.
        layer = name.removeprefix("layers.").partition(".")[0] if name in buffers else ""
        key = (layer, tensor.data_ptr(), tuple(tensor.shape))
        if not tensor.numel() or key not in seen:
            found[name] = tensor
            seen.add(key)
    return found
