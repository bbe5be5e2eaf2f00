"""ZB-auto: an order searched for, by stage times and a limit on memory (Qi et al., ICLR 2024, arXiv 2401.10241, section 3).

The search knows `ScheduleRequest.times`, the seconds between devices (`latency_s` and `hops_s`), those for which a message keeps the next
one from its hop (`queues_s`), those of the sums behind a stage's last W (`sums_s`) and the most activations a device may hold
(`max_in_flight`; 2D by default: ZB-2p of the paper; D: ZB-1p). Letters as in `zero_bubble`. Four devices with room for 5 activations each,
updates by stage, F = I = W:

    worker 0   F0 F1 F2 F3 F4 .  .  I0 W0 F5 I1 W1 I2 I3 W2 W3 I4 W4 I5 W5 .
    worker 1   .  F0 F1 F2 F3 .  I0 F4 I1 W0 F5 I2 I3 W1 W2 I4 W3 I5 W4 W5 .
    worker 2   .  .  F0 F1 .  I0 F2 I1 F3 I2 F4 I3 W0 F5 I4 W1 I5 W2 W3 W4 W5
    worker 3   .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

1. Twelve greedy drafts: a worker runs the I or F that has arrived, else a W, else it waits. The paper's may wait instead of
   running a W too long for its gap; here step 3 moves that W, and where messages queue, twelve more drafts wait.
2. 1F1B, ZB-H1 and ZB-H2 where they keep the limit, so that the result is never worse; of the first two also orders in which forwards
   run ahead to hide messages.
3. The best three, improved along their longest path: two neighbours swap, or a W moves to another gap or the end.

If updates wait for all stages (`update_scope` global, the default), the order that ends first wins; else the one with the
shortest longest span (a device's first start to its last end), the time of an update far from the ends and the paper's
cost. Ties go to the fewest activations.

Lower bound: M(F+I+W) + (D-1)F. Without latency ZB-H1 reaches it with room for D activations where M >= D and I <= W <= F+I,
ZB-H2 with room for 2D-1 where M >= 2D-1 and I <= 2W <= F+I. An activation counts from its F to its W; after its I the paper
counts only the part `weight_grad_share`. 32 devices with 96 microbatches take a second or two.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import add

from raypipe.errors import ScheduleError
from raypipe.schedules.builders import synchronous
from raypipe.schedules.families.one_f_one_b import one_f_one_b
from raypipe.schedules.families.zero_bubble import zb_h1, zb_h2
from raypipe.schedules.ir import Op, OpKind, Schedule, UpdateScope
from raypipe.schedules.passes import forwards_ahead
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.spec import ScheduleSpec

_F, _I, _W = _KINDS = OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT

Order = tuple[tuple[OpKind, ...], ...]
"""The kinds of each worker's Ops; Ops of one kind run in the order of their microbatches."""


@dataclass(frozen=True)
class _Task:
    num_microbatches: int
    times: tuple[StageTimes, ...]
    hops_s: tuple[float, ...]
    queues_s: tuple[float, ...]
    sums_s: tuple[float, ...]
    max_in_flight: float
    weight_grad_share: float
    spans: bool  # the longest span of one worker counts first, else the end of all

    @cached_property
    def least_s(self) -> float:
        """The seconds that no order undercuts: of each worker, the way of the first activation to it, its work and its sums."""
        head_s, longest_s = 0.0, 0.0
        for worker, (times, sum_s) in enumerate(zip(self.times, self.sums_s, strict=True)):
            work_s = self.num_microbatches * sum(_seconds(times).values())
            longest_s = max(longest_s, head_s * (not self.spans) + work_s + sum_s)
            head_s += times.forward_s + sum(self.hops_s[worker : worker + 1])
        return longest_s

    @cached_property
    def seconds(self) -> list[dict[OpKind, float]]:
        """The seconds of each worker's Ops."""
        return list(map(_seconds, self.times))


def zb_auto(request: ScheduleRequest) -> Schedule:
    """Return the best order found for the stage times within the limit on activations."""
    request.require_one_chunk("zb-auto")
    request.require_one_pipeline("zb-auto")
    order = _search(_task(request))
    one_update: list[list[Op]] = []
    for stage, kinds in enumerate(order):
        microbatches = {kind: itertools.count() for kind in (_F, _I, _W)}
        one_update.append([Op(kind, stage, next(microbatches[kind])) for kind in kinds])
    return synchronous("zb-auto", request, workers=range(request.num_devices), one_update=one_update)


_EQUAL = (StageTimes(1.0, 1.0, 1.0),)


def _limit(request: ScheduleRequest) -> float:
    return min(2.0 * request.num_devices if request.max_in_flight is None else request.max_in_flight, request.num_microbatches)


def _task(request: ScheduleRequest) -> _Task:
    limit, share = request.max_in_flight, request.weight_grad_share
    if limit is not None and not limit >= 1:
        raise ScheduleError(f"zb-auto needs room for one stage activation a device, got {limit:g}; use --max-in-flight 1 or more")
    if not 0 <= share <= 1:
        raise ScheduleError(f"zb-auto keeps a share of an activation from I to W, got {share:g}; use --weight-grad-share 0 to 1")
    if len(request.times) not in {0, 1, request.num_devices}:
        raise ScheduleError(
            f"zb-auto has {request.num_devices} stages, got times of {len(request.times)}; use those of each, or one for all"
        )
    hops = {0, request.num_devices - 1}
    if len(request.hops_s) not in hops or len(request.queues_s) not in hops or len(request.sums_s) not in {0, request.num_devices}:
        raise ScheduleError(
            f"zb-auto has {request.num_devices} stages, got seconds of {len(request.hops_s)} hops, {len(request.queues_s)} queues and "
            f"{len(request.sums_s)} sums; use those of each hop and each stage, or none"
        )
    return _Task(
        num_microbatches=request.num_microbatches,
        times=request.times if len(request.times) == request.num_devices else (request.times or _EQUAL) * request.num_devices,
        hops_s=tuple(request.latency_s + hop_s for hop_s in request.hops_s or (0.0,) * (request.num_devices - 1)),
        queues_s=request.queues_s or (0.0,) * (request.num_devices - 1),
        sums_s=request.sums_s or (0.0,) * request.num_devices,
        max_in_flight=_limit(request),
        weight_grad_share=share,
        spans=request.update_scope not in {None, UpdateScope.GLOBAL},
    )


@lru_cache(maxsize=256)  # windows of different lengths repeat one order
def _search(task: _Task) -> Order:
    patience = (False, True) if any(task.queues_s) else (False,)
    manners = itertools.starmap(_Manner, itertools.product((0.5, 0.75, 1.0), (False, True), (True, False), patience))
    orders = dict.fromkeys([*_handcrafted(task), *(_Draft(task, manner).order() for manner in manners)])
    best = heapq.nsmallest(_NUM_POLISHED, orders, key=lambda order: _score(task, _Timing(task, order)))
    return min([*(_polished(task, order) for order in best), *orders], key=lambda order: _preference(task, order))


def _preference(task: _Task, order: Order) -> tuple[float, float, float]:
    first, second = _score(task, _Timing(task, order))
    return first, max(_most_held(task, kinds) for kinds in order), second


_NUM_POLISHED = 3


def _handcrafted(task: _Task) -> Iterator[Order]:
    request = ScheduleRequest(len(task.times), task.num_microbatches)
    for build in (one_f_one_b, zb_h1, zb_h2):
        for ahead in _aheads(task) if build is not zb_h2 else [()]:
            known = forwards_ahead(build(request), ahead) if ahead else build(request)
            order = tuple(
                tuple(
                    kind
                    for slot in program
                    if isinstance(slot, Op) and not slot.kind.per_update
                    for kind in ((_I, _W) if slot.kind is OpKind.BACKWARD else (slot.kind,))
                )
                for program in known.programs
            )
            if all(_fits(task, kinds) for kinds in order):
                yield order


def _aheads(task: _Task) -> Iterator[tuple[int, ...]]:
    """Yield how many forwards each worker may run ahead: none, as many as hide the messages behind it, and more."""
    yield ()
    if not any(task.hops_s) and not any(task.sums_s):
        return
    pace_s = max(sum(_seconds(times).values()) for times in task.times) or 1.0
    tried: dict[tuple[int, ...], None] = {}
    for share, more in itertools.product((0.5, 1.0, 2.0), range(5)):
        of_hops = [more + math.ceil(share * 2 * hop_s / pace_s - _EPSILON) for hop_s in task.hops_s]
        tried[tuple(min(sum(of_hops[worker:]), task.num_microbatches) for worker in range(len(task.times)))] = None
    yield from tried


def _fits(task: _Task, kinds: Sequence[OpKind]) -> bool:
    return _most_held(task, kinds) <= task.max_in_flight + _EPSILON


def _most_held(task: _Task, kinds: Sequence[OpKind]) -> float:
    """Return the most activations held; infinity if F, I, W of a microbatch are out of order."""
    forwards = inputs = weights = 0
    most = 0.0
    for kind in kinds:
        forwards += kind is _F
        inputs += kind is _I
        weights += kind is _W
        if not weights <= inputs <= forwards:
            return math.inf
        most = max(most, forwards - inputs + task.weight_grad_share * (inputs - weights))
    return most


_EPSILON = 1e-9


# Timing


def _seconds(times: StageTimes) -> dict[OpKind, float]:
    return {_F: times.forward_s, _I: times.input_grad_s, _W: times.weight_grad_s}


_Place = tuple[int, int]
"""A worker, and the position of an Op in its program."""


@dataclass(slots=True)
class _Hop:
    """The messages of one kind from a worker to the next or the one before, which leave one behind the other."""

    hop_s: float
    queue_s: float
    free_s: float = 0.0
    cause: _Place = (0, 0)
    arrivals: list[tuple[float, _Place]] = field(default_factory=list)
    """When each message arrives, and the Op that this depends on: its own, or that of an earlier message behind which it waits."""
    num_taken: int = 0

    def send(self, end_s: float, place: _Place) -> None:
        if end_s < self.free_s:
            end_s = self.free_s
        else:
            self.cause = place
        self.free_s = end_s + self.queue_s
        self.arrivals.append((end_s + self.hop_s, self.cause))


def _hops(task: _Task) -> list[_Hop | None]:
    """Return the hops of one direction by the worker behind each; the first worker has none before it, the last one none behind it."""
    return [None, *itertools.starmap(_Hop, zip(task.hops_s, task.queues_s, strict=True)), None]


class _Timing:
    """When each Op starts if each worker starts as soon as it can; `_fits` sees to what an Op needs of its own worker."""

    def __init__(self, task: _Task, order: Order) -> None:
        self.task = task
        self.order = order
        self.starts_s: list[list[float]] = [[] for _ in order]
        self.ends_s = [0.0] * len(order)
        self.causes: list[list[_Place | None]] = [[] for _ in order]
        """For each Op, the one that it waited for last: that before it, or one of another worker."""
        self._forth, self._back = _hops(task), _hops(task)
        self._awaits: list[OpKind | None] = [None] * len(order)
        self._ready = list(range(len(order)))
        while self._ready:
            self._run(self._ready.pop())

    @property
    def hangs(self) -> bool:
        """Whether some worker waits for ever."""
        return any(self._awaits)

    @property
    def spans_s(self) -> list[float]:
        """The seconds of each worker from its first start to its last end."""
        return [end_s - starts_s[0] for starts_s, end_s in zip(self.starts_s, self.ends_s, strict=True)]

    def _run(self, worker: int) -> None:
        kinds, starts_s, causes, seconds = self.order[worker], self.starts_s[worker], self.causes[worker], self.task.seconds[worker]
        forth, back = self._forth, self._back
        hops: dict[OpKind, tuple[_Hop | None, _Hop | None, int]] = {  # From where messages come, where to, and whom they may wake.
            _F: (forth[worker], forth[worker + 1], worker + 1),
            _I: (back[worker + 1], back[worker], worker - 1),
            _W: (None, None, worker),
        }
        awaits = self._awaits
        at_s, cause = self.ends_s[worker], (worker, len(starts_s) - 1) if starts_s else None
        for position in range(len(starts_s), len(kinds)):
            kind = kinds[position]
            source, target, other = hops[kind]
            if source is not None:
                if source.num_taken == len(source.arrivals):
                    awaits[worker] = kind
                    break
                arrival_s, place = source.arrivals[source.num_taken]
                source.num_taken += 1
                if arrival_s > at_s:
                    at_s, cause = arrival_s, place
            starts_s.append(at_s)
            causes.append(cause)
            at_s += seconds[kind]
            cause = worker, position
            if target is not None:
                target.send(at_s, cause)
                if awaits[other] is kind:
                    awaits[other] = None
                    self._ready.append(other)
        self.ends_s[worker] = at_s


def _score(task: _Task, timing: _Timing) -> tuple[float, float]:
    if timing.hangs:
        return math.inf, math.inf
    longest_s = max(map(add, timing.spans_s, task.sums_s)), max(map(add, timing.ends_s, task.sums_s))
    figures = [float(f"{seconds:.10g}") for seconds in longest_s]  # rounded: sums of seconds compare
    return (figures[0], figures[1]) if task.spans else (figures[1], figures[0])


# Drafts


@dataclass(frozen=True)
class _Manner:
    ramp: float  # forwards run ahead for this share of the path to the last stage and back
    round_up: bool  # the last of these forwards begins on that path, else it ends there
    input_first: bool  # the input gradient goes before a forward
    patient: bool  # a worker waits rather than run a W that would end behind the next arrival


class _Draft:
    """A greedy order, made by running it: the worker whose next decision is the earliest decides next."""

    def __init__(self, task: _Task, manner: _Manner) -> None:
        self.task = task
        self.manner = manner
        longest_s = max(max(_seconds(times).values()) for times in task.times) or 1.0
        # An Op without duration would have others wait for it in steps of no length.
        self.seconds = [{kind: max(time_s, longest_s / 100) for kind, time_s in _seconds(times).items()} for times in task.times]
        self.most_ahead = self._most_ahead()
        self.kinds: list[list[OpKind]] = [[] for _ in task.times]
        self.counts = [dict.fromkeys(_KINDS, 0) for _ in task.times]
        self.forth, self.back = _hops(task), _hops(task)
        self.now_s = [0.0] * len(task.times)

    def _most_ahead(self) -> list[float]:
        most: list[float] = []
        pace_s = 0.0
        for worker, seconds in enumerate(self.seconds):
            pace_s = max(pace_s, seconds[_F])
            behind = zip(self.task.hops_s[worker:], self.seconds[worker + 1 :], strict=True)
            path_s = sum(later[_F] + later[_I] + 2 * hop_s for hop_s, later in behind)
            number = self.manner.ramp * path_s / pace_s
            most.append(1 + (math.ceil(number - _EPSILON) if self.manner.round_up else math.floor(number + _EPSILON)))
        return most

    def order(self) -> Order:
        queue = [(0.0, worker) for worker in range(len(self.kinds))]
        while queue:
            _, worker = heapq.heappop(queue)
            self._decide(worker)
            if len(self.kinds[worker]) < 3 * self.task.num_microbatches:
                heapq.heappush(queue, (self.now_s[worker], worker))
        return tuple(map(tuple, self.kinds))

    def _decide(self, worker: int) -> None:
        task, now_s = self.task, self.now_s[worker]
        num_forwards, num_inputs, num_weights = self.counts[worker].values()
        num_waiting, num_ahead = num_inputs - num_weights, num_forwards - num_inputs + 1
        forward_s = input_s = math.inf
        full = num_ahead + task.weight_grad_share * num_waiting > task.max_in_flight + _EPSILON
        if num_forwards < task.num_microbatches and num_ahead <= self.most_ahead[worker] and not full:
            forward_s = self._arrival_s(worker, _F)
        if num_inputs < num_forwards:
            input_s = self._arrival_s(worker, _I)
        next_s = min(forward_s, input_s)
        if input_s <= now_s and (self.manner.input_first or forward_s > now_s):
            self._run(worker, _I)
        elif forward_s <= now_s:
            self._run(worker, _F)
        elif num_waiting and not (self.manner.patient and next_s < now_s + self.seconds[worker][_W]):
            self._run(worker, _W)
        else:
            self.now_s[worker] = next_s

    def _arrival_s(self, worker: int, kind: OpKind) -> float:
        neighbour = worker - 1 if kind is _F else worker + 1
        hop, index = self.forth[worker] if kind is _F else self.back[worker + 1], self.counts[worker][kind]
        if hop is None:
            return 0.0
        if index < len(hop.arrivals):
            return hop.arrivals[index][0]
        return max(self.now_s[neighbour] + self.seconds[neighbour][kind], hop.free_s) + hop.hop_s

    def _run(self, worker: int, kind: OpKind) -> None:
        self.now_s[worker] += self.seconds[worker][kind]
        self.kinds[worker].append(kind)
        self.counts[worker][kind] += 1
        hop = self.forth[worker + 1] if kind is _F else self.back[worker] if kind is _I else None
        if hop is not None:
            hop.send(self.now_s[worker], (worker, len(self.kinds[worker]) - 1))


# Local improvement


def _polished(task: _Task, order: Order) -> Order:
    timing = _Timing(task, order)
    assert not timing.hangs, "drafts and known orders do not hang"
    score = _score(task, timing)
    num_left = _MOST_MOVED_OPS // (3 * task.num_microbatches * len(order))
    moves = _moves(task, order, timing)
    while num_left and score[0] > task.least_s * (1 + _EPSILON) and (move := next(moves, None)):
        num_left -= 1
        worker, kinds = move
        changed = (*order[:worker], kinds, *order[worker + 1 :])
        timing = _Timing(task, changed)
        if (better := _score(task, timing)) < score:
            order, score = changed, better
            moves = _moves(task, order, timing)
    return order


_MOST_MOVED_OPS = 500_000


def _moves(task: _Task, order: Order, timing: _Timing) -> Iterator[tuple[int, tuple[OpKind, ...]]]:
    lengths = list(map(add, timing.spans_s if task.spans else timing.ends_s, task.sums_s))
    worker = lengths.index(max(lengths))
    cause: _Place | None = (worker, len(order[worker]) - 1)
    while cause is not None:
        worker, position = cause
        kinds = order[worker]
        cause = timing.causes[worker][position]
        tried = []
        if position and cause == (worker, position - 1) and kinds[position] is not kinds[position - 1]:
            tried.append((*kinds[: position - 1], kinds[position], kinds[position - 1], *kinds[position + 1 :]))
        if kinds[position] is _W:
            starts_s = timing.starts_s[worker]
            seconds = task.seconds[worker]
            without = (*kinds[:position], *kinds[position + 1 :])
            gaps = [
                later
                for later in range(1, len(kinds))
                if starts_s[later] - starts_s[later - 1] - seconds[kinds[later - 1]] > seconds[_W] / 4
            ]
            before = [gap for gap in gaps if gap < position][-1:]
            behind = [gap - 1 for gap in gaps if gap > position + 1][:1]
            tried += [(*without[:gap], _W, *without[gap:]) for gap in (*before, *behind, len(without))]
        yield from ((worker, other) for other in tried if _fits(task, other))


def _makespan_s(request: ScheduleRequest, times: StageTimes) -> float | None:
    # Known only where one of the known orders is as good as an order can be.
    forward_s, input_grad_s, weight_grad_s = times.forward_s, times.input_grad_s, times.weight_grad_s
    task = _task(request)
    if {*(request.times or _EQUAL)} != {times} or any(task.hops_s) or any(task.sums_s) or task.spans:
        return None
    ramp, most = request.num_devices - 1, min(request.num_microbatches, _limit(request))
    for depth in (1, 2):
        if most > depth * ramp and input_grad_s <= depth * weight_grad_s <= forward_s + input_grad_s:
            return request.num_microbatches * (forward_s + input_grad_s + weight_grad_s) + ramp * forward_s
    if most == request.num_microbatches <= ramp and forward_s == input_grad_s == weight_grad_s:
        return (2 * (ramp + request.num_microbatches) + 1) * forward_s
    return None


def _peak_in_flight(request: ScheduleRequest, _: int) -> int:
    share = request.weight_grad_share
    return min(request.num_microbatches, math.floor(_limit(request) / share + _EPSILON) if share else request.num_microbatches)


SPEC = ScheduleSpec(
    name="zb-auto",
    build=zb_auto,
    title="searched for, by stage times and a limit on memory",
    paper="Qi et al., ICLR 2024, arXiv 2401.10241",
    bubble="the least found",
    memory="2D, or --max-in-flight",
    mismatch="0",
    delay="0",
    makespan_s=_makespan_s,
    peak_in_flight=_peak_in_flight,
)
