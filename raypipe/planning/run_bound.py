"""A bound for plans in which each worker has one run of consecutive layers: when microbatches come, and when sums can begin.

Its devices divide the rows of each microbatch, as under `1f1b`, `zb-h1`, `zb-h2`, `gpipe` and `list`. The first microbatch has passed all
layers before the run when it comes. The last gradient has come from all layers behind it before any copy of the run can be summed, and
passes all layers before it then. Meanwhile all microbatches are computed, and their tensors pass the ports of the worker.

All ways to give runs to sets of devices are tried at once, by the layers and the devices that are used so far, each with the least
seconds in which that is possible: first from the last layer on, for what is behind a run, then from the first one. The bound is the least
T in which all layers find devices. Devices that can change places count once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe import stopping
from raypipe.planning.problem import Floats, Problem

_MOST_STEPS = 1e8  # Most runs that one T may take, times ends of these.
_WIDER = 1.2  # Of the least T that was impossible, until one is possible.
_CLOSE = 1.003
_NEVER = 1e30  # Seconds for a byte where there is no link; none for no bytes, which infinity is not.

States = NDArray[np.int_]


class PortRates(NamedTuple):
    """Most bytes per second of each member of a worker.

    Attributes:
        out: To all devices that are no members.
        into: From these.
        of_sums: To other members, of one sum.
        border: Of one sum of all members, across the narrowest border between some of them and the others.
        port: To all others.
    """

    out: Floats
    into: Floats
    of_sums: Floats
    border: float
    port: Floats


@dataclass(frozen=True)
class _Worker:
    """Some devices as one worker.

    Attributes:
        counts: Number of its devices of each kind.
        before: The states to which its devices can be added.
        after: Those that come of it.
        seconds: Seconds of F, I and W of a microbatch for the first layers, of the device that takes longest: [part, number of layers].
        out_s: Seconds per byte of a tensor of which each member sends its rows, and the same of what comes, for the slowest member.
        sum_s: Seconds per byte of gradients for a sum; 0 for one device.
        port_s: Seconds per byte of a tensor, and of gradients, that leave the member with the narrowest port.
    """

    before: States
    after: States
    seconds: Floats
    out_s: float
    into_s: float
    sum_s: float
    port_s: tuple[float, float]


class _Run(NamedTuple):
    """Layers of a worker from one on, for each end.

    Attributes:
        forward_s: Of a microbatch.
        input_grad_s: Of a microbatch.
        arrived_s: From the arrival of the first microbatch until all that needs no other worker is done.
        entered_s: From the first byte of it until all gradients have come and the last one has left.
        steps_s: From the arrival until the last microbatch has left.
        hops_s: Of a microbatch behind the run, forth and back.
        returned_s: Of all microbatches, forth and back, without what is behind the run.
        left_s: Of all gradients but one to the worker before, or of all activations from it.
        summed_s: From the last gradient that comes until all is summed; 0 without copies.
    """

    forward_s: Floats
    input_grad_s: Floats
    arrived_s: Floats
    entered_s: Floats
    steps_s: Floats
    hops_s: Floats
    returned_s: Floats
    left_s: float
    summed_s: Floats

    def upto(self, num_ends: int) -> _Run:
        """Return the first ends."""
        parts = {name: value[:num_ends] for name, value in self._asdict().items() if name != "left_s"}
        return self._replace(**parts)


class _Rest(NamedTuple):
    # From an arrival until that gradient leaves, and until the last one does; and the same with the hops forth and back.
    own_s: Floats
    last_s: Floats
    own_with_hops_s: Floats
    last_with_hops_s: Floats


class _Start(NamedTuple):
    # When the first microbatch has left the worker before, and has come; and what the last gradient takes from this worker on.
    left_s: Floats
    arrival_s: Floats
    back_s: Floats


@dataclass(frozen=True)
class RunBound:
    """Bound for one problem, whose layers are a chain.

    Attributes:
        own_s: Seconds of each layer's F, I and W of a microbatch on each device alone: [device, part, layer].
        sums: Bytes of gradients of each layer.
        port_rates: Returns the rates of the members of a worker.
    """

    problem: Problem
    own_s: Floats
    sums: Floats
    port_rates: Callable[[Sequence[int]], PortRates]

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
        pairs, ports = np.ix_(turned, turned), [self.port_rates([device]) for device in (one, other)]
        nodes = np.equal.outer(problem.nodes_of, problem.nodes_of)
        return bool(
            np.array_equal(problem.bandwidth[pairs], problem.bandwidth)
            and np.array_equal(nodes[pairs], nodes)
            and (ports[0].out, ports[0].into) == (ports[1].out, ports[1].into)
        )

    @cached_property
    def _sizes(self) -> States:
        return np.array([len(devices) for devices in self._kinds])

    @cached_property
    def _radix(self) -> States:
        return np.concatenate(([1], np.cumprod(self._sizes + 1)[:-1]))

    @cached_property
    def _states(self) -> States:
        """Numbers of devices of each kind that are used, by the number of the state."""
        numbers = np.arange(int((self._sizes + 1).prod()))
        states: States = numbers[:, None] // self._radix % (self._sizes + 1)
        return states

    @cached_property
    def _others(self) -> States:
        """The state of the devices that a state does not use."""
        others: States = ((self._sizes - self._states) * self._radix).sum(axis=1)
        return others

    @property
    def _num_steps(self) -> float:
        return float(((self._sizes + 1) * (self._sizes + 2) / 2).prod()) * self.problem.num_layers**2

    @cached_property
    def _workers(self) -> list[_Worker]:
        return [worker for counts in self._states[1:] if (worker := self._worker(counts)) is not None]

    def _worker(self, counts: States) -> _Worker | None:
        members = [device for devices, count in zip(self._kinds, counts.tolist(), strict=True) for device in devices[:count]]
        rows = self.problem.rows(members)
        if rows is None:
            return None
        shares = np.array(rows) / self.problem.microbatch_size
        times = self.own_s[members] * shares[:, None, None]
        longest = times[times.sum(axis=(1, 2)).argmax()]
        rates = self.port_rates(members)
        before = np.flatnonzero((self._states + counts <= self._sizes).all(axis=1))
        sum_s = 0.0
        if len(members) > 1:
            # Each number leaves each member once at least, and crosses all borders; members send each number 2 (n - 1) times.
            each_s, all_s = _inverse(min(rates.of_sums.min(), rates.border)), _inverse(rates.of_sums.sum())
            sum_s = max(each_s, 2 * (len(members) - 1) * all_s)
        narrowest = int(rates.port.argmin())
        return _Worker(
            before=before,
            after=before + int((self._radix * counts).sum()),
            seconds=np.concatenate((np.zeros((3, 1)), longest.cumsum(axis=1)), axis=1),
            out_s=max(share * _inverse(rate) for share, rate in zip(shares.tolist(), rates.out, strict=True)),
            into_s=max(share * _inverse(rate) for share, rate in zip(shares.tolist(), rates.into, strict=True)),
            sum_s=sum_s,
            port_s=(float(shares[narrowest]) * _inverse(rates.port[narrowest]), _inverse(rates.port[narrowest])),
        )

    @cached_property
    def _bytes(self) -> Floats:
        """Bytes of a microbatch that cross each border of layers, less what parts of bytes may save; none at the ends."""
        crossing = np.maximum(self.problem.crossing_bytes - self.problem.num_devices, 0.0)
        crossing[[0, -1]] = 0.0
        return crossing

    @cached_property
    def _run(self) -> Callable[[int, int], _Run]:
        return lru_cache(maxsize=None)(self._new_run)

    def _new_run(self, number: int, first: int) -> _Run:
        worker, count = self._workers[number], self.problem.num_microbatches
        forward_s, input_grad_s, weight_grad_s = worker.seconds[:, first + 1 :] - worker.seconds[:, first, None]
        before, behind = float(self._bytes[first]), self._bytes[first + 1 :]
        out_s, into_s = behind * worker.out_s, behind * worker.into_s
        sums = self.sums[first:]
        each_s = np.minimum.accumulate(np.where(sums > 0, np.diff(worker.seconds[2, first:]), math.inf))
        least_weight_grad_s = np.where(np.isfinite(each_s), each_s, 0.0)
        work_s = count * (forward_s + input_grad_s + weight_grad_s)
        # The last Op of all may be an input gradient, behind all sums.
        arrived_s = np.maximum(work_s, work_s - input_grad_s + np.minimum.accumulate(sums) * worker.sum_s)
        arrived_s = np.maximum(arrived_s, forward_s + count * (before + behind) * worker.out_s)
        summed_s = np.zeros(len(sums))
        if worker.sum_s:
            summed_s = least_weight_grad_s + sums.cumsum() * worker.sum_s
            arrived_s = np.maximum(arrived_s, count * (forward_s + least_weight_grad_s) + sums.cumsum() * worker.sum_s)
            per_tensor_s, per_sum_s = worker.port_s
            sent_s = count * (before + behind) * per_tensor_s + sums.cumsum() * per_sum_s
            arrived_s = np.maximum(arrived_s, forward_s + sent_s)
        return _Run(
            forward_s=forward_s,
            input_grad_s=input_grad_s,
            arrived_s=arrived_s,
            entered_s=count * (before + behind) * worker.into_s + input_grad_s,
            steps_s=np.maximum(count * forward_s, forward_s + (count - 1) * np.maximum(out_s, into_s)),
            hops_s=out_s + into_s,
            returned_s=count * (forward_s + input_grad_s),
            left_s=(count - 1) * before * max(worker.out_s, worker.into_s),
            summed_s=summed_s,
        )

    def _is_possible(self, seconds: float) -> bool:
        behind = self._behind(seconds)
        num_layers, shape = self.problem.num_layers, (self.problem.num_layers + 1, len(self._states))
        # Until the first microbatch has passed the layers so far, and until it has left their worker; and from the last gradient that
        # comes to that worker, or leaves the next one, until it has passed these layers.
        done, sent, back, back_sent = (np.full(shape, math.inf) for _ in range(4))
        for table in (done, sent, back, back_sent):
            table[0, 0] = 0.0
        for first in range(num_layers):
            stopping.spend()
            for number, worker in enumerate(self._workers):
                reached = np.isfinite(done[first, worker.before])
                if not reached.any():
                    continue
                origins, targets = worker.before[reached], worker.after[reached]
                so_far_s = done[first, origins]
                start = _Start(
                    so_far_s[:, None],
                    np.maximum(sent[first, origins], so_far_s + self._bytes[first] * worker.into_s)[:, None],
                    np.maximum(back_sent[first, origins], back[first, origins] + self._bytes[first] * worker.out_s)[:, None],
                )
                run = self._run(number, first)
                # The times of a run need not rise with its end where layers are summed in less time than others.
                num_ends = int(np.flatnonzero(start.arrival_s.min() + run.arrived_s <= seconds).max(initial=-1)) + 1
                ends = slice(first + 1, first + 1 + num_ends)
                run = run.upto(num_ends)
                rest = _Rest(*(table[ends][:, self._others[targets]].T for table in behind))
                fits, _, _ = _fits(run, start, rest, seconds)
                hops = self._bytes[ends]
                for table, values in (
                    (done, start.arrival_s + run.forward_s),
                    (sent, start.arrival_s + run.forward_s + hops * worker.out_s),
                    (back, start.back_s + run.input_grad_s),
                    (back_sent, start.back_s + run.input_grad_s + hops * worker.into_s),
                ):
                    table[ends, targets] = np.minimum(table[ends, targets], np.where(fits, values, math.inf).T)
        return bool(np.isfinite(done[num_layers]).any())

    def _behind(self, seconds: float) -> _Rest:
        """Return what the layers from each one on take on the devices of a state, which need not all be used: [first layer, state]."""
        num_layers, shape = self.problem.num_layers, (self.problem.num_layers + 1, len(self._states))
        tables = _Rest(*(np.full(shape, math.inf) for _ in range(4)))
        for table in tables:
            table[num_layers] = 0.0
        start = _Start(*(np.zeros((1, 1)) for _ in range(3)))
        for first in reversed(range(num_layers)):
            stopping.spend()
            for number, worker in enumerate(self._workers):
                run = self._run(number, first)
                num_ends = int(np.flatnonzero(run.arrived_s <= seconds).max(initial=-1)) + 1
                run = run.upto(num_ends)
                rest = _Rest(*(table[first + 1 : first + 1 + num_ends][:, worker.before].T for table in tables))
                fits, own_s, last_s = _fits(run, start, rest, seconds)
                hops_s = self._bytes[first] * (worker.out_s + worker.into_s)
                for table, values in zip(tables, (own_s, last_s, own_s + hops_s, last_s + hops_s), strict=True):
                    least = np.where(fits, values, math.inf).min(axis=1, initial=math.inf)
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


def _fits(run: _Run, start: _Start, rest: _Rest, seconds: float) -> tuple[NDArray[np.bool_], Floats, Floats]:
    """Return which runs are possible, and from the arrival until its own gradient leaves, and until the last one does: [state, end]."""
    trip_s = np.maximum(rest.own_s + run.hops_s, rest.own_with_hops_s)
    # Until all gradients have come: the way of the last one, or the busiest hop's tensors and one way.
    come_s = np.maximum(run.forward_s + np.maximum(rest.last_s + run.hops_s, rest.last_with_hops_s), run.steps_s + trip_s)
    own_s = run.forward_s + run.input_grad_s + trip_s
    last_s = np.maximum(np.maximum(come_s + run.input_grad_s, run.returned_s), own_s + run.left_s)
    fits = start.arrival_s + np.maximum(run.arrived_s, come_s + run.summed_s) <= seconds
    fits &= np.maximum(start.arrival_s + last_s, start.left_s + run.entered_s) + start.back_s <= seconds
    return fits, own_s, last_s


def _inverse(rate: float) -> float:
    return 1 / float(rate) if rate > 0 else _NEVER
