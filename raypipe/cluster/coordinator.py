"""The driver's side of a run: connects the stage actors, runs windows, moves layers, replaces lost actors."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.measure.layer_costs import USUAL_EFFORT, Effort, LayerMeasurement
from raypipe.actors.orders import BatchFunction, BuildOrder, ConnectOrder, LayerSize, ModelFunction
from raypipe.actors.stage.gradient_flow import EdgeSpecs, LayerOutput, edge_specs
from raypipe.actors.stage.optimizer_names import OptimizerFunction
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.storage import Storage
from raypipe.cluster.actor_group import POLL_S, Member
from raypipe.cluster.checks import channel_text, on_gpus, shared_channels
from raypipe.cluster.link_monitor import LinkMonitor
from raypipe.cluster.node_clocks import NodeClocks
from raypipe.cluster.slots import DeviceSlot
from raypipe.cluster.spares import Spares
from raypipe.cluster.stage_actors import SAVING, StageActors
from raypipe.cluster.states import States, all_states, arguments, by_layer, export_states, exported_layers, within_reach
from raypipe.cluster.window import WindowResult
from raypipe.communication.patterns import Pattern
from raypipe.communication.ways import Wiring
from raypipe.config import ClusterConfig, OptimizerConfig, Precision, ScalingConfig, Transport
from raypipe.errors import FormatError, RunError
from raypipe.schedules.collectives import Start
from raypipe.schedules.lower import DeviceProgram, Recv

Programs = Mapping[str, Sequence[DeviceProgram]]
Patterns = Mapping[tuple[int, ...], Pattern]
_USUAL = Wiring()
_NUM_NEWEST = 8  # windows, by which the next one is known to be late
_LATE = 2.0  # times the median of these
_LEAST_POLL_S = 0.5
_TAKE_OVER = 5.0  # times `start_timeout_s`, within which an actor must have fetched its layers from other nodes


class Coordinator:
    """One run; its actors end with the `with` block."""

    def __init__(
        self, *, run: str, slots: Sequence[DeviceSlot], stages: Sequence[tuple[int, ...]], scaling: ScalingConfig, cluster: ClusterConfig
    ) -> None:
        self.run = run
        self.transport = scaling.transport
        self.cluster = cluster
        self.channel_text = ""  # how many channels use which transport, once connected
        self._windows: Counter[str] = Counter()
        self._newest_s: dict[str, deque[float]] = {}  # how long the newest windows took, by program
        self._programs: dict[str, tuple[DeviceProgram, ...]] = {}
        self.patterns: dict[tuple[int, ...], Pattern] = {}  # of sums, by members
        self._wiring = _USUAL
        self._epoch = 0
        self._is_closed = False
        self.actors = StageActors(run, slots, stages=stages, scaling=scaling, cluster=cluster)
        self.spares = Spares(self.actors)
        self.links = LinkMonitor(self.actors)
        self.clocks = NodeClocks(self.actors)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def slots(self) -> tuple[DeviceSlot, ...]:
        """Slot of each device."""
        return tuple(member.slot for member in self.actors.members)

    @property
    def device_names(self) -> tuple[str, ...]:
        """Name of each device."""
        return tuple(slot.name for slot in self.slots)

    # Before the first window

    def measure(
        self,
        model: ModelFunction,
        batches: BatchFunction,
        *,
        optimizer: OptimizerConfig,
        seed: int,
        num_devices: int,
        effort: Effort = USUAL_EFFORT,
        precision: Precision = Precision.FLOAT32,
        optimizer_function: OptimizerFunction | None = None,
        notice: Callable[[str], None] = lambda _: None,
        uses_cache: bool = False,
    ) -> list[list[LayerMeasurement]]:
        """Return the costs of layers, by device and layer; the first devices measure at the same time.

        With the cache, layers that an earlier run measured on such a device are not measured again.
        """
        calls = {
            device: member.handle.measure.remote(
                model,
                batches,
                optimizer=optimizer,
                seed=seed,
                effort=effort,
                precision=precision,
                num_at_once=num_devices,
                uses_cache=uses_cache,
                optimizer_function=optimizer_function,
            )
            for device, member in enumerate(self.actors.members[:num_devices])
        }
        task = "measuring layers"
        self.actors.follow(calls, task, notice)
        return list(self.actors.gather(calls, task).values())

    def check_storage(self, folder: Storage) -> None:
        """Refuse a folder that some node cannot write to."""
        self.actors.ask("checking the storage", lambda _, actor: actor.check_storage.remote(folder))

    def build(self, order: BuildOrder | Sequence[BuildOrder]) -> dict[int, LayerSize]:
        """Build the stages from one order for all devices or one for each; return the size of each layer."""
        orders = [order] * len(self.slots) if isinstance(order, BuildOrder) else order
        self.actors.branches = orders[0].branches()
        sizes = self.actors.ask("building layers", lambda device, actor: actor.build.remote(orders[device]))
        return {layer: size for of_device in sizes.values() for layer, size in of_device.items()}

    def connect(self, programs: Programs, cut: Cut, *, wiring: Wiring = _USUAL) -> None:
        """Connect the actors and give them the programs, by name and device."""
        self._programs = {name: tuple(of_devices) for name, of_devices in programs.items()}
        self.patterns, self._wiring = dict(wiring.patterns), wiring
        order, specs, infos = self._connect_order(), self._edge_specs(cut), self.actors.infos
        self.actors.ask(
            "taking programs",
            lambda device, actor: actor.load_programs.remote({name: of_devices[device] for name, of_devices in self._programs.items()}),
        )
        self.actors.ask(
            "connecting",
            lambda device, actor: actor.connect.remote(order, specs, host_ip=infos[device].ip),
            timeout_s=2 * self.cluster.start_timeout_s,
        )
        self.clocks.read()
        self.actors.patience_s = self.cluster.silence_timeout_s

    def use_patterns(self, patterns: Patterns) -> None:
        """Let sums go by other patterns from the next window on, over the same connections."""
        self.patterns |= patterns
        self.actors.ask("taking patterns of sums", lambda _, actor: actor.use_patterns.remote(patterns))

    @property
    def sums_by_pattern(self) -> bool:
        """Whether sums go over connections of raypipe's own, and so by patterns."""
        return self.transport is not Transport.GLOO and not on_gpus(self.actors.infos)

    def _connect_order(self) -> ConnectOrder:
        items = [(one.device, item) for of_devices in self._programs.values() for one in of_devices for item in one.items]
        channels, infos = tuple(sorted({(item.device, device) for device, item in items if isinstance(item, Recv)})), self.actors.infos
        shared = shared_channels(channels, infos=infos, names=self.device_names, transport=self.transport)
        self.channel_text = channel_text(infos, num_channels=len(channels), num_shared=len(shared), transport=self.transport)
        # A run that goes on has started before: a device that cannot be reached now is not only slow to start. But on a GPU it may compile.
        is_quick = self._epoch and not on_gpus(infos)
        timeout_s = self.cluster.silence_timeout_s if is_quick else self.cluster.start_timeout_s
        store = self.actors.open_store()
        return ConnectOrder(
            names=self.device_names,
            channels=channels,
            shared=shared,
            over_tcp=self.transport is not Transport.GLOO,
            nodes=tuple(info.node_id for info in infos),
            groups=tuple(sorted({item.collective.devices for _, item in items if isinstance(item, Start)})),
            patterns=self.patterns,
            wires=self._wiring.wires,
            entrances=self._wiring.entrances,
            store=store,
            prefix=f"{self.run}/{self._epoch}",
            connect_timeout_s=timeout_s,
            message_timeout_s=self.cluster.message_timeout_s,
            number=self._epoch,
        )

    def _edge_specs(self, cut: Cut) -> EdgeSpecs:
        # All actors that hold a stage are asked, so that each prepares its weights.
        outputs: dict[int, tuple[LayerOutput, ...]] = {}
        for stage in range(len(cut.stages)):
            calls = {
                device: member.handle.output_specs.remote(stage, outputs)
                for device, member in enumerate(self.actors.members)
                if stage in member.stages
            }
            answers = self.actors.gather(calls, f"finding the shapes of stage {stage}")
            outputs |= answers[min(answers)]
        return edge_specs(cut, outputs)

    # Windows

    def run_window(
        self, name: str, *, num_updates: int, first_update: int, split: str = "train", skipped: frozenset[int] = frozenset()
    ) -> WindowResult:
        """Run a window of a program on all devices; its `skipped` updates change no weight.

        Raises:
            StageFailedError: An actor died, raised or stopped answering.
            TransportError: Two devices lost each other.
        """
        return self._window(name, "run", num_updates=num_updates, first_update=first_update, split=split, skipped=skipped)

    def nonfinite_layers(self) -> list[tuple[int, str]]:
        """Return stage and name of each layer with a weight that is infinite or no number, in the order of layers."""
        of_devices = self.actors.ask("looking at weights", lambda _, actor: actor.nonfinite_layers.remote())
        found = {layer for of_device in of_devices.values() for layer in of_device}
        return [(stage, name) for _, stage, name in sorted(found)]

    def run_on(self, name: str, batches: BatchSource, *, num_rows: int) -> WindowResult:
        """Run forwards on these rows, `num_rows` a microbatch; the reports have the last layer's outputs."""
        return self._window(name, "run_on", num_updates=1, batches=batches, num_rows=num_rows)

    def num_windows(self, name: str) -> int:
        """Return how many windows of a program have ended well."""
        return self._windows[name]

    def _window(self, name: str, method: str, *, num_updates: int, **arguments: Any) -> WindowResult:
        self.clocks.refresh()
        number, since_s = self._windows[name], time.perf_counter()
        calls = {
            device: getattr(member.handle, method).remote(name, number=number, **arguments)
            for device, member in enumerate(self.actors.members)
        }
        reports = self.actors.gather(calls, f"window {number} of {name}", poll_s=self._poll_s(name))
        wall_s = time.perf_counter() - since_s
        self._windows[name] += 1
        self._newest_s.setdefault(name, deque(maxlen=_NUM_NEWEST)).append(wall_s)
        result = WindowResult(
            reports=tuple(reports.values()),
            wall_s=wall_s,
            name=self.run,
            device_names=self.device_names,
            num_updates=num_updates,
            programs=self._programs[name],
            clock_offsets_s=self.clocks.offsets_s,
        )
        self.links.after_window(result)
        return result

    def _poll_s(self, name: str) -> float:
        """Return after which time a window is late, so that its devices are asked for their state."""
        newest_s = self._newest_s.get(name)
        return min(max(_LATE * statistics.median(newest_s), _LEAST_POLL_S), POLL_S) if newest_s else POLL_S

    # Layers

    def take_snapshot(self) -> None:
        """Let every actor copy its layers into memory."""
        whole, stepped = exported_layers(self.actors)
        parts = by_layer(export_states(self.actors, stepped))
        self.actors.ask(
            "copying layers",
            lambda device, actor: actor.take_snapshot.remote(*arguments(parts, [layer for layer in whole[device] if layer in parts])),
        )

    def write_snapshot(self, folder: Storage) -> dict[Any, Member]:
        """Let the actors write their copies into a folder, beside windows; return Ray's references to the sums of the files of each."""
        return {member.handle.write_snapshot.options(concurrency_group=SAVING).remote(folder): member for member in self.actors.members}

    def load(self, folder: Storage) -> None:
        """Read all layers from a folder."""
        self.actors.ask("loading", lambda _, actor: actor.load.remote(folder))

    def move(
        self,
        devices: Sequence[int],
        stages: Sequence[tuple[int, ...]],
        *,
        order: BuildOrder,
        programs: Programs,
        wiring: Wiring = _USUAL,
        apart: Collection[frozenset[str]] = (),
    ) -> None:
        """Go on with other stages on other devices; layers and optimizer states move through Ray's object stores."""
        self.actors.leaving = frozenset(self.actors.devices) - frozenset(devices)
        states = all_states(self.actors)
        self.actors.assign(devices, stages)
        self.restore(states, order=order, programs=programs, wiring=wiring, apart=apart)
        self.actors.leaving = frozenset()

    def restore(
        self,
        states: States | Storage | None,
        *,
        order: BuildOrder,
        programs: Programs,
        wiring: Wiring = _USUAL,
        apart: Collection[frozenset[str]] = (),
    ) -> None:
        """Build the assigned stages with the states of layers or those in a checkpoint's folder, or as they begin; and connect them.

        `apart` are the ids of nodes that do not reach each other.

        Raises:
            StateLostError: No node has the state of some layer any more.
            FormatError: A file of the checkpoint is missing or damaged.
            RunError: Something else failed.
        """
        try:
            self.build(order)
        except FormatError as error:  # of the training data, for instance; no other state would help
            raise RunError(f"building layers: {error}") from error
        if isinstance(states, Storage):
            self.load(states)
        elif states is not None:
            needed = self.actors.ask("asking for layers", lambda _, actor: actor.needed_layers.remote())
            self.actors.ask(
                "taking layers over",
                lambda device, actor: actor.import_layers.remote(
                    *arguments(within_reach(self.actors, states, device, needed[device], apart=apart), needed[device])
                ),
                # An actor whose layers Ray still fetches tells its status, and never fails.
                timeout_s=_TAKE_OVER * self.cluster.start_timeout_s,
            )
        self._epoch += 1
        self.connect(programs, order.cut, wiring=wiring)

    def replace(self, slots: Mapping[int, DeviceSlot]) -> None:
        """Use spare processes in place of lost actors, by number, in these slots, and new actors where none waits."""
        has_moved = any(slot.node != self.actors.launched[number].slot.node for number, slot in slots.items())
        self.actors.replace(slots, self.spares.take(slots))
        if has_moved:
            self.links = LinkMonitor(self.actors)

    def close(self) -> None:
        """End the actors; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self.spares.close()
            self.actors.kill()
            self.actors.close_store()
