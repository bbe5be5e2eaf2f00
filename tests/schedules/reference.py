"""Oracles that share no rule with the package: a runner of lowered programs and an as-soon-as-possible timing."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from raypipe.schedules.collectives import Await, Collective, CollectiveKind, Start
from raypipe.schedules.ir import Op, OpKind, Schedule, UpdateScope, WeightRule, ops_of
from raypipe.schedules.lower import Compute, DeviceProgram, Direction, Item, Message, Recv, Send

INPUT_GRADIENTS = (OpKind.BACKWARD, OpKind.INPUT_GRADIENT)
GRADIENTS = (OpKind.BACKWARD, OpKind.WEIGHT_GRADIENT)


class WrongRunError(AssertionError):
    """A lowered program hangs, takes a wrong message or computes without its data."""


class _Device:
    """What one device has when its program is at `head`."""

    def __init__(self, schedule: Schedule, program: DeviceProgram, divided: Mapping[tuple[OpKind, int, int, int], set[Op]]) -> None:
        self.schedule = schedule
        self.program = program
        self.divided = divided
        self.head = 0
        self.computed: set[Op] = set()
        self.received: Counter[tuple[Direction, int, int, int, int, int]] = Counter()
        self.updates: Counter[int] = Counter()
        starts = (item.collective for item in program.items if isinstance(item, Start))
        self.published = {collective.stage for collective in starts if collective.kind is CollectiveKind.WEIGHTS}
        self.forward_version: dict[tuple[int, int, int], int] = {}
        self.started: list[Collective] = []
        self.held: deque[Start] = deque()
        self.awaited: set[Collective] = set()

    @property
    def item(self) -> Item | None:
        items = self.program.items
        return items[self.head] if self.head < len(items) else None

    def fail(self, problem: str) -> WrongRunError:
        return WrongRunError(f"device {self.program.device}, item {self.head} ({self.item}): {problem}")

    def receive(self, message: Message) -> None:
        key = (message.direction, message.source, message.target, message.index, message.pipeline, message.part)
        self.received[key] += round((message.rows[1] - message.rows[0]) * 1_000_000)

    def compute(self, item: Compute) -> None:
        for op, version in zip(item.ops, item.versions, strict=True):
            if op.kind is OpKind.UPDATE:
                self.check_update(op, version)
                if op.stage not in self.published:  # else the version is whole when the weights of others have come
                    self.updates[op.stage] = op.index + 1
            else:
                self.check_data(op)
                self.check_version(op, version)
            self.computed.add(op)

    def check_data(self, op: Op) -> None:
        graph = self.schedule.graph
        if op.kind is OpKind.FORWARD:
            for source in graph.predecessors[op.stage]:
                self.check_input(op, Direction.ACTIVATION, source, (OpKind.FORWARD,))
        elif op.kind in INPUT_GRADIENTS:
            self.check_own(op, OpKind.FORWARD)
            for source in graph.successors[op.stage]:
                self.check_input(op, Direction.GRADIENT, source, INPUT_GRADIENTS)
        elif op.kind is OpKind.WEIGHT_GRADIENT:
            self.check_own(op, OpKind.INPUT_GRADIENT)

    def check_own(self, op: Op, kind: OpKind) -> None:
        if not self.computed & self.divided.get((kind, *op[1:4]), set()):
            raise self.fail(f"{op} has no {kind} of its own before it")

    def check_input(self, op: Op, direction: Direction, source: int, kinds: Sequence[OpKind]) -> None:
        made = {one for kind in kinds for one in self.divided.get((kind, source, op.index, op.pipeline), ())}
        if op.part and any(one.part == op.part for one in made):
            made = {one for one in made if one.part == op.part}
        first, end = self.program.rows
        for one in made:
            key = (direction, source, op.stage, op.index, op.pipeline, one.part)
            # A part brings its own rows only.
            share = (end - first) / (len(self.divided[one[:4]]) if one.part else 1)
            if one not in self.computed and abs(self.received[key] - share * 1_000_000) > 10:
                raise self.fail(f"{op} lacks what {one} made")

    def check_version(self, op: Op, version: int) -> None:
        """The letter of each rule, said once more in terms of what this device has done so far."""
        here = (op.stage, op.index, op.pipeline)
        update = op.index // self.schedule.num_microbatches
        newest = self.updates[op.stage]
        if op.kind is OpKind.FORWARD:
            self.forward_version[here] = version
        match self.schedule.weight_rule:
            case _ if self.schedule.forward_only:
                expected = 0
            case WeightRule.FLUSH:
                expected = newest
                if newest != update:
                    raise self.fail(f"{op} of update {update} runs when {newest} updates are done")
            case WeightRule.STASH:
                expected = newest if op.kind is OpKind.FORWARD else self.forward_version[here]
            case WeightRule.DOUBLE_BUFFER:
                expected = max(update - 1, 0)
            case WeightRule.LIVE:
                expected = newest
        if version != expected or version > newest:
            raise self.fail(f"{op} uses version {version}, expected {expected}; newest is {newest}")

    def check_update(self, op: Op, version: int) -> None:
        worker = self.program.worker
        if version != op.index or self.updates[op.stage] != op.index:
            raise self.fail(f"{op} changes version {version} after {self.updates[op.stage]} updates")
        for gradient, place in self.schedule.ops():
            mine = place.worker == worker and gradient.stage == op.stage and gradient.kind in GRADIENTS
            if mine and gradient.index // self.schedule.num_microbatches == op.index and gradient not in self.computed:
                raise self.fail(f"{op} runs before {gradient}")


@dataclass(frozen=True)
class Run:
    """What a run of lowered programs did: for each device, the collectives in the order of their starts."""

    starts: dict[int, list[Collective]]


def run(schedule: Schedule, programs: Sequence[DeviceProgram], seed: int = 0) -> Run:
    """Runs lowered programs to the end, one item of a random device at a time.

    Sends never wait; a Recv takes the next message of its channel, which must be the one that it names; a collective ends
    when all of its members take part in it, each in the order of its program and behind the end of others. Every Compute must
    have its data and the weights that the schedule's rule states.

    Raises:
        WrongRunError: a hang, a wrong message, a message left over, or an Op without what it needs.
    """
    random_ = random.Random(seed)
    divided: dict[tuple[OpKind, int, int, int], set[Op]] = {}
    for op, _ in schedule.ops():
        divided.setdefault(op[:4], set()).add(op)
    devices = {program.device: _Device(schedule, program, divided) for program in programs}
    channels: dict[tuple[int, int], deque[Message]] = {}
    started: dict[Collective, set[int]] = {}
    live = sorted(devices)
    blocked: set[int] = set()
    while live:
        candidates = [number for number in live if number not in blocked]
        if not candidates:
            raise WrongRunError("hang: " + "; ".join(f"device {number} waits at {devices[number].item}" for number in live))
        number = random_.choice(candidates)
        device = devices[number]
        # Some devices run far ahead, others item by item.
        for _ in range(random_.choice((1, 1, 2, 100))):
            item = device.item
            if item is None:
                live.remove(number)
                break
            if not _step(number, device, item, channels, started):
                blocked.add(number)
                break
            if isinstance(item, Start):
                _take_part(devices, started)
            if isinstance(item, Send | Start):
                blocked.clear()
            device.head += 1
    left = [f"{source}->{target}: {len(queue)}" for (source, target), queue in channels.items() if queue]
    if left:
        raise WrongRunError("messages left over: " + ", ".join(left))
    for collective, members in started.items():
        if members != set(collective.devices):
            raise WrongRunError(f"{collective} is started by {sorted(members)}, its members are {collective.devices}")
    return Run({number: device.started for number, device in devices.items()})


def _step(
    number: int,
    device: _Device,
    item: Item,
    channels: dict[tuple[int, int], deque[Message]],
    started: dict[Collective, set[int]],
) -> bool:
    """Runs an item, or returns False where it must wait."""
    match item:
        case Compute():
            device.compute(item)
        case Send():
            channels.setdefault((number, item.device), deque()).append(item.message)
        case Recv():
            queue = channels.get((item.device, number))
            if not queue:
                return False
            if (message := queue.popleft()) != item.message:
                raise device.fail(f"the channel gives {message}")
            device.receive(message)
        case Start():
            _check_start(number, device, item)
            device.started.append(item.collective)
            device.held.append(item)
        case Await():
            if item.collective not in device.started:
                raise device.fail("awaits what it has not started")
            if item.collective in device.awaited:
                raise device.fail("awaits a second time")
            if started.get(item.collective) != set(item.collective.devices):
                return False
            device.awaited.add(item.collective)
            if item.collective.kind is CollectiveKind.WEIGHTS:
                device.updates[item.collective.stage] = item.collective.update + 1
    return True


def _take_part(devices: Mapping[int, _Device], started: dict[Collective, set[int]]) -> None:
    moved = True
    while moved:
        moved = False
        for number, device in devices.items():
            while device.held and all(started.get(other) == set(other.devices) for other in device.held[0].after):
                started.setdefault(device.held.popleft().collective, set()).add(number)
                moved = True


def _check_start(number: int, device: _Device, start: Start) -> None:
    collective = start.collective
    if number not in collective.devices or collective in device.started:
        raise device.fail("starts what it is no member of, or a second time")
    graph = device.schedule.graph
    concerned = graph.ties[collective.stage] if collective.kind.of_tie else range(graph.num_stages)
    if collective.kind is CollectiveKind.STAGE_NORM:
        concerned = (collective.stage,)
    for other in [item.collective for item in device.program.items if isinstance(item, Start)]:
        of_replicas = other.kind is CollectiveKind.GRADIENTS and other.stage in concerned
        same_tie = not collective.kind.of_tie or other.stage == collective.stage
        of_tie = other.kind is CollectiveKind.TIED and same_tie and collective.kind is not CollectiveKind.STAGE_NORM
        comes_before = {CollectiveKind.TIED: of_replicas}.get(collective.kind, collective.kind.is_norm and (of_replicas or of_tie))
        if comes_before and other.update == collective.update and other not in {*start.after, *device.awaited}:
            raise device.fail(f"starts {collective}, but not behind {other}")
    if any(other not in device.started for other in start.after):
        raise device.fail(f"{collective} stands behind what is not started")


def check_one_order(starts: Mapping[int, Sequence[Collective]]) -> None:
    """Raises graphlib.CycleError where devices start collectives in orders that do not fit together."""
    order: TopologicalSorter[Collective] = TopologicalSorter()
    for sequence in starts.values():
        for before, after in itertools.pairwise(sequence):
            order.add(after, before)
    order.prepare()


@dataclass(frozen=True)
class Timing:
    """Start and end of every Op."""

    spans: dict[Op, tuple[float, float]]
    workers: dict[Op, int]

    @property
    def makespan_s(self) -> float:
        """End of the last Op."""
        return max(end for _, end in self.spans.values())

    def span_s(self, worker: int) -> float:
        """From a worker's first start to its last end, computation only."""
        mine = [span for op, span in self.spans.items() if self.workers[op] == worker and not op.kind.per_update]
        return max(end for _, end in mine) - min(start for start, _ in mine)

    def busy_s(self, worker: int) -> float:
        """Seconds that a worker computes; Ops of a slot have one span."""
        return sum(end - start for start, end in {span for op, span in self.spans.items() if self.workers[op] == worker})

    def idle_s(self, worker: int) -> float:
        """Seconds that a worker waits between its first start and its last end."""
        return self.span_s(worker) - self.busy_s(worker)

    @property
    def bubble_rate(self) -> float:
        """Idle share of the longest span, as the zero-bubble paper defines it."""
        workers = sorted(set(self.workers.values()))
        cost = max(map(self.span_s, workers))
        return (cost - max(map(self.busy_s, workers))) / cost

    def update_ends_s(self) -> list[float]:
        """The end of each update on the worker that is last with it."""
        ends: dict[int, float] = {}
        for op, (_, end) in self.spans.items():
            if op.kind is OpKind.UPDATE:
                ends[op.index] = max(ends.get(op.index, 0.0), end)
        return [ends[update] for update in sorted(ends)]


def durations(forward_s: float, input_grad_s: float, weight_grad_s: float) -> Callable[[Op], float]:
    """Equal stages: F, I and W as given, B the sum of the last two, the rest nothing."""
    times = {
        OpKind.FORWARD: forward_s,
        OpKind.INPUT_GRADIENT: input_grad_s,
        OpKind.WEIGHT_GRADIENT: weight_grad_s,
        OpKind.BACKWARD: input_grad_s + weight_grad_s,
    }
    return lambda op: times.get(op.kind, 0.0)


def asap(schedule: Schedule, duration_s: Callable[[Op], float], latency_s: float = 0.0) -> Timing:
    """Times of an order in which each worker starts its next slot as soon as it can.

    Knows F, B, I, W and U. A part of P takes 1/P of its whole, a slot as long as its Ops one after the other; copies of a stage
    wait for each other's gradients, whose sum takes no time. Latency is a pure delay on every dependency between workers.
    """
    workers = {op: place.worker for op, place in schedule.ops()}
    divided: dict[tuple[OpKind, int, int, int], list[Op]] = {}
    for op in workers:
        divided.setdefault(op[:4], []).append(op)
    spans: dict[Op, tuple[float, float]] = {}
    heads = [0] * schedule.num_workers
    free_s = [0.0] * schedule.num_workers
    moved = True
    while moved:
        moved = False
        for worker, program in enumerate(schedule.programs):
            while heads[worker] < len(program):
                ops = ops_of(program[heads[worker]])
                needs = [need for op in ops for need in _needs(schedule, op, divided)]
                if any(need not in spans for need in needs):
                    break
                ready_s = [spans[need][1] + (latency_s if workers[need] != worker else 0.0) for need in needs]
                start_s = max([free_s[worker], *ready_s])
                free_s[worker] = start_s + sum(duration_s(op) / len(divided[op[:4]]) for op in ops)
                spans |= dict.fromkeys(ops, (start_s, free_s[worker]))
                heads[worker] += 1
                moved = True
    if len(spans) != len(workers):
        raise WrongRunError("the order hangs")
    return Timing(spans, workers)


def _needs(schedule: Schedule, op: Op, divided: Mapping[tuple[OpKind, int, int, int], Sequence[Op]]) -> list[Op]:
    def there(kinds: Sequence[OpKind], stages: Sequence[int]) -> list[Op]:
        found: list[Op] = []
        for stage in stages:
            for kind in kinds:
                made = divided.get((kind, stage, op.index, op.pipeline), ())
                found += [one for one in made if one.part == op.part] or made
        return found

    match op.kind:
        case OpKind.FORWARD:
            return there([OpKind.FORWARD], schedule.graph.predecessors[op.stage])
        case OpKind.BACKWARD | OpKind.INPUT_GRADIENT:
            return there([OpKind.FORWARD], [op.stage]) + there(INPUT_GRADIENTS, schedule.graph.successors[op.stage])
        case OpKind.WEIGHT_GRADIENT:
            return there([OpKind.INPUT_GRADIENT], [op.stage])
        case _:
            stages = {op.stage, *(stage for tie in schedule.graph.ties if op.stage in tie for stage in tie)}
            if schedule.update_scope is UpdateScope.GLOBAL:
                stages = set(range(schedule.num_stages))
            first = op.index * schedule.num_microbatches
            return [
                one
                for kind in GRADIENTS
                for stage in stages
                for index in range(first, first + schedule.num_microbatches)
                for pipeline in range(len(schedule.pipelines))
                for one in divided.get((kind, stage, index, pipeline), ())
            ]
