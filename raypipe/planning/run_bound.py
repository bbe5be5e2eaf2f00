"""A bound for plans of one pipeline in which each worker has one run of layers: when microbatches come, and when sums can begin.

The devices of a worker divide the rows of each microbatch by `Problem.rows`, as under `1f1b`, `zb-h1`, `zb-h2`, `gpipe` and `list`. The
first microbatch has passed all layers before a run when it comes. The last gradient has come from all layers behind it before any copy
of the run can be summed, and passes all layers before it then. Meanwhile all microbatches are computed, and their tensors pass the ports
of the worker.

Members of a worker may differ, and one waits only for rows of its own. What is passed on from worker to worker is that of the member
with the least; what ends at a member is its own.

All ways to give runs to sets of devices are tried at once, by the layers and the devices that are used so far, each with the least
seconds in which that is possible: first from the last layer on, for what is behind a run, then from the first one. The bound is the least
T in which all layers find devices. Devices that can change places count once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe import stopping
from raypipe.planning.capacities import Capacities, PortRates
from raypipe.planning.problem import Floats, Problem

_MOST_STEPS = 1e8  # Most runs that one T may take, times ends of these.
_WIDER = 1.25  # Of the least T that was impossible, until one is possible.
_CLOSE = 1.003
_WORK_S = 1e-4  # For the runs of a worker from one layer on.
_NEVER = 1e30  # Seconds for a byte where there is no link; finite, so that no bytes take no time.
_EXACT = 1 + 1e-9

States = NDArray[np.int_]


@dataclass(frozen=True)
class Worker:
    """Some devices as one worker.

    Attributes:
        before: The states to which its devices can be added.
        after: Those that come of it.
        members: Its devices.
        shares: The least part of the rows that each member has.
        even_share: The part that some member has at least, where all are equally fast; 0 where they are not.
    """

    before: States
    after: States
    members: list[int]
    shares: Floats
    even_share: float
    rates: PortRates

    @property
    def into_s(self) -> float:
        """Seconds per byte of a tensor until all of its rows have come to some member."""
        return min(float(share) * inverse(rate) for share, rate in zip(self.shares, self.rates.into, strict=True))


class Run(NamedTuple):
    """Layers of a worker from one on, for each end.

    Attributes:
        forward_s: Of a microbatch, of some member.
        input_grad_s: Of a microbatch, of some member.
        arrived_s: From the arrival of the first microbatch until all that needs no other worker is done.
        entered_s: From the first byte of the first microbatch until all gradients have come, and the last one has been computed.
        steps_s: From the arrival until the last microbatch has left some member.
        hop_s: Of a gradient that comes back to some member.
        passed_s: Of all microbatches, forth and back, of some member.
        returned_s: The same of the member with the most.
        left_s: Of all gradients but one to the worker before, or of all activations from it.
        summed_s: From the last gradient that comes until all is summed; 0 without copies.
    """

    forward_s: Floats
    input_grad_s: Floats
    arrived_s: Floats
    entered_s: Floats
    steps_s: Floats
    hop_s: Floats
    passed_s: Floats
    returned_s: Floats
    left_s: float
    summed_s: Floats

    def upto(self, num_ends: int) -> Run:
        """Return the first ends."""
        parts = {name: value[:num_ends] for name, value in self._asdict().items() if name != "left_s"}
        return self._replace(**parts)


class _Rest(NamedTuple):
    """From the end of a forward until its own gradient leaves the next worker, and until the last one does."""

    own_s: Floats
    last_s: Floats


class _Start(NamedTuple):
    """When the first microbatch has left the worker before, when it has come, and what the last gradient takes from this worker on."""

    left_s: Floats
    arrival_s: Floats
    back_s: Floats


@dataclass(frozen=True)
class RunBound:
    """Bound for one problem, whose layers are a chain.

    Attributes:
        own_s: Seconds of each layer's F, I and W of a microbatch on each device alone: [device, part, layer].
        sums: Bytes of gradients of each layer.
        capacities: What links carry.
    """

    problem: Problem
    own_s: Floats
    sums: Floats
    capacities: Capacities

    @cached_property
    def _kinds(self) -> list[list[int]]:
        """Devices that can change places without any difference."""
        kinds: list[list[int]] = []
        for device in range(self.problem.num_devices):
            for kind in kinds:
                if self._are_alike(kind[0], device):
                    kind.append(device)
                    break
            else:
                kinds.append([device])
        return kinds

    def _are_alike(self, one: int, other: int) -> bool:
        problem = self.problem
        if not np.array_equal(self.own_s[one], self.own_s[other]):
            return False
        turned = np.arange(problem.num_devices)
        turned[[one, other]] = other, one
        pairs, ports = np.ix_(turned, turned), [self.capacities.of_members([device]) for device in (one, other)]
        nodes = np.equal.outer(problem.nodes_of, problem.nodes_of)
        return bool(
            np.array_equal(problem.bandwidth[pairs], problem.bandwidth)
            and np.array_equal(nodes[pairs], nodes)
            and np.array_equal(self.capacities.are_apart[pairs], self.capacities.are_apart)
            and (ports[0].out, ports[0].into) == (ports[1].out, ports[1].into)
        )

    @cached_property
    def _sizes(self) -> States:
        return np.array([len(devices) for devices in self._kinds])

    @cached_property
    def _radix(self) -> States:
        return np.concatenate(([1], np.cumprod(self._sizes + 1)[:-1]))

    @cached_property
    def states(self) -> States:
        """Numbers of devices of each kind that are used, by the number of the state."""
        numbers = np.arange(int((self._sizes + 1).prod()))
        states: States = numbers[:, None] // self._radix % (self._sizes + 1)
        return states

    @cached_property
    def _others(self) -> States:
        """The state of the devices that a state does not use."""
        others: States = ((self._sizes - self.states) * self._radix).sum(axis=1)
        return others

    @property
    def _num_steps(self) -> float:
        return float(((self._sizes + 1) * (self._sizes + 2) / 2).prod()) * self.problem.num_layers**2

    @cached_property
    def workers(self) -> list[Worker]:
        """Sets of devices that may be one worker, of those that can change places the first ones."""
        return [worker for counts in self.states[1:] if (worker := self._worker(counts)) is not None]

    def _worker(self, counts: States) -> Worker | None:  # `None` for more devices than rows
        members = [device for devices, count in zip(self._kinds, counts.tolist(), strict=True) for device in devices[:count]]
        num_rows, count = self.problem.microbatch_size, len(members)
        if self.problem.rows(members) is None:
            return None
        are_equal = all(np.array_equal(self.own_s[member], self.own_s[members[0]]) for member in members)
        before = np.flatnonzero((self.states + counts <= self._sizes).all(axis=1))
        return Worker(
            before=before,
            after=before + int((self._radix * counts).sum()),
            members=members,
            shares=np.array([num_rows // count if are_equal else self._fewest(members, member) for member in members]) / num_rows,
            even_share=math.ceil(num_rows / count) / num_rows if are_equal else 0.0,
            rates=self.capacities.of_members(members),
        )

    def _fewest(self, members: list[int], member: int) -> int:
        """Return the fewest rows of a member: others have those that may be either's, and it gives back those that are too many."""
        others = [other for other in members if other != member]
        last, first = self.problem.rows([*others, member]), self.problem.rows([member, *others])
        assert last is not None, "there are as many rows as members"
        assert first is not None, "there are as many rows as members"
        return min(last[-1], first[0])

    def least_share(self, count: int) -> float:
        """Return the least part of the rows that a member of a worker of so many devices has; 0 where there is none."""
        return min((float(worker.shares.min()) for worker in self.workers if len(worker.members) == count), default=0.0)

    @cached_property
    def crossing(self) -> Floats:
        """Bytes of a microbatch that cross each border of layers, less what parts of bytes may save; none at the ends."""
        crossing = np.maximum(self.problem.crossing_bytes - self.problem.num_devices, 0.0)
        crossing[[0, -1]] = 0.0
        return crossing

    @cached_property
    def run(self) -> Callable[[int, int], Run]:
        """Function from the number of a worker and a first layer to runs from there on."""
        return lru_cache(maxsize=None)(self._new_run)

    def _new_run(self, number: int, first: int) -> Run:
        worker, count = self.workers[number], self.problem.num_microbatches
        rates, shares = worker.rates, worker.shares[:, None]
        # By member and end.
        whole = self.own_s[worker.members, :, first:].cumsum(axis=2)
        forward_s, input_grad_s, weight_grad_s = (whole * shares[:, None]).transpose(1, 0, 2)
        before, behind = float(self.crossing[first]), self.crossing[first + 1 :]
        out_s, into_s = (shares * np.array([[inverse(rate)] for rate in of_members]) for of_members in (rates.out, rates.into))
        both = count * (before + behind)
        arrived_s = np.maximum(count * longest(worker, whole.sum(axis=1)), (forward_s + both * out_s).max(axis=0))
        summed_s = np.zeros_like(behind)
        if len(worker.members) > 1:
            sums = self.sums[first:]
            in_all = sums.cumsum()
            one_s, all_s, port_s = (np.array([[inverse(rate)] for rate in each]) for each in (rates.of_sum, rates.of_sums, rates.port))
            # Members send each number 2 (n - 1) times, and once at least across each border.
            together_s = in_all * max(inverse(rates.border), 2 * (len(worker.members) - 1) * inverse(rates.of_sums.sum()))
            least_s = np.where(sums > 0, self.own_s[worker.members, 2, first:] * shares, math.inf)
            least_s = np.minimum.accumulate(least_s, axis=1)
            least_s = np.where(np.isfinite(least_s), least_s, 0.0)
            for ended_s in (
                (count * (forward_s + input_grad_s + weight_grad_s) + np.minimum.accumulate(sums) * one_s).max(axis=0),
                (count * (forward_s + least_s) + in_all * all_s).max(axis=0),
                count * (longest(worker, whole[:, 0]) + least_s.min(axis=0)) + in_all * all_s.min(),
                (count * (forward_s + least_s)).min(axis=0) + together_s,
                (forward_s + both * shares * port_s + in_all * port_s).max(axis=0),
            ):
                arrived_s = np.maximum(arrived_s, ended_s)
            summed_s = np.maximum((least_s + in_all * all_s).max(axis=0), least_s.min(axis=0) + together_s)
        return Run(
            forward_s=forward_s.min(axis=0),
            input_grad_s=input_grad_s.min(axis=0),
            arrived_s=arrived_s,
            entered_s=(both * into_s + input_grad_s).max(axis=0),
            steps_s=np.maximum(count * forward_s, forward_s + (count - 1) * behind * np.maximum(out_s, into_s)).min(axis=0),
            hop_s=behind * worker.into_s,
            passed_s=count * (forward_s + input_grad_s).min(axis=0),
            returned_s=count * longest(worker, whole[:, :2].sum(axis=1)),
            left_s=(count - 1) * before * float(np.maximum(out_s, into_s).min()),
            summed_s=summed_s,
        )

    def _is_possible(self, seconds: float) -> bool:
        seconds *= _EXACT
        behind = self._behind(seconds)
        num_layers, shape = self.problem.num_layers, (self.problem.num_layers + 1, len(self.states))
        # Until the first microbatch has passed the layers so far; and from a gradient that leaves the next worker until it has passed them.
        done, back = (np.full(shape, math.inf) for _ in range(2))
        done[0, 0] = back[0, 0] = 0.0
        for first in range(num_layers):
            stopping.spend(_WORK_S * len(self.workers))
            for number, worker in enumerate(self.workers):
                reached = np.isfinite(done[first, worker.before])
                if not reached.any():
                    continue
                origins, targets = worker.before[reached], worker.after[reached]
                so_far_s = done[first, origins][:, None]
                start = _Start(so_far_s, so_far_s + self.crossing[first] * worker.into_s, back[first, origins][:, None])
                run = self.run(number, first)
                # The times of a run need not rise with its end where layers are summed in less time than others.
                num_ends = int(np.flatnonzero(start.arrival_s.min() + run.arrived_s <= seconds).max(initial=-1)) + 1
                ends = slice(first + 1, first + 1 + num_ends)
                run = run.upto(num_ends)
                fits, _, _ = _fits(run, start, _Rest(*(table[ends][:, self._others[targets]].T for table in behind)), seconds)
                for table, values in (
                    (done, start.arrival_s + run.forward_s),
                    (back, start.back_s + run.input_grad_s + run.hop_s),
                ):
                    table[ends, targets] = np.minimum(table[ends, targets], np.where(fits, values, math.inf).T)
        return bool(np.isfinite(done[num_layers]).any())

    def _behind(self, seconds: float) -> _Rest:
        """Return what the layers from each one on take on the devices of a state, which need not all be used: [first layer, state]."""
        num_layers, shape = self.problem.num_layers, (self.problem.num_layers + 1, len(self.states))
        tables = _Rest(*(np.full(shape, math.inf) for _ in range(2)))
        for table in tables:
            table[num_layers] = 0.0
        start = _Start(*(np.zeros((1, 1)) for _ in range(3)))
        for first in reversed(range(num_layers)):
            stopping.spend(_WORK_S * len(self.workers))
            for number, worker in enumerate(self.workers):
                run = self.run(number, first)
                num_ends = int(np.flatnonzero(run.arrived_s <= seconds).max(initial=-1)) + 1
                run = run.upto(num_ends)
                rest = _Rest(*(table[first + 1 : first + 1 + num_ends][:, worker.before].T for table in tables))
                fits, own_s, last_s = _fits(run, start, rest, seconds)
                for table, values in zip(tables, (own_s, last_s), strict=True):
                    least = np.where(fits, values + self.crossing[first] * worker.into_s, math.inf).min(axis=1, initial=math.inf)
                    table[first, worker.after] = np.minimum(table[first, worker.after], least)
        return tables

    def least_s(self, at_least_s: float) -> float | None:
        """Return the seconds within which no such plan is possible, given some; `None` where devices are of too many kinds."""
        if self._num_steps > _MOST_STEPS:
            return None
        if not at_least_s or self._is_possible(at_least_s):
            return at_least_s
        low, high = at_least_s, at_least_s * _WIDER
        while not self._is_possible(high):
            low, high = high, high * _WIDER
        while high > low * _CLOSE:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self._is_possible(middle) else (middle, high)
        return low


def _fits(run: Run, start: _Start, rest: _Rest, seconds: float) -> tuple[NDArray[np.bool_], Floats, Floats]:
    """Return which runs are possible, and from the arrival until its own gradient leaves, and until the last one does: [state, end]."""
    trip_s = rest.own_s + run.hop_s
    # Until all gradients have come: the way of the last one, or the busiest hop's tensors and one way.
    come_s = np.maximum(run.forward_s + rest.last_s + run.hop_s, run.steps_s + trip_s)
    own_s = run.forward_s + run.input_grad_s + trip_s
    last_s = np.maximum(np.maximum(come_s + run.input_grad_s, run.passed_s), own_s + run.left_s)
    fits = start.arrival_s + np.maximum(run.arrived_s, come_s + run.summed_s) <= seconds
    returned_s = start.arrival_s + np.maximum(last_s, run.returned_s)
    fits &= np.maximum(returned_s, start.left_s + run.entered_s) + start.back_s <= seconds
    return fits, own_s, last_s


def longest(worker: Worker, times: Floats) -> Floats:
    """Return what the member with the most takes at least, of times of all rows: [member, ...]."""
    if worker.even_share:
        even: Floats = times[0] * worker.even_share
        return even
    divided: Floats = 1 / (1 / np.maximum(times, 1e-300)).sum(axis=0)
    return divided


def inverse(rate: float) -> float:
    """Return the seconds of a byte."""
    return 1 / float(rate) if rate > 0 else _NEVER
