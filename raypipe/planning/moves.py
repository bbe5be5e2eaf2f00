"""Random changes of layouts, for local search.

Among many workers, chance seldom finds the device that helps the busiest one and has good links to its ring: there, every second change is
made on purpose (`Moves._relieve`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raypipe import stopping
from raypipe.planning.estimator import Estimator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Devices, Problem

_MOST_BY_CHANCE = 8  # Devices up to which chance finds what helps.
_ON_PURPOSE = 0.5  # Share of the changes with more devices.
_GIVEN_BACK = 0.3  # Share of these changes in which the worker gives up one of its own.
_WORKER_WORK_S = 10e-6  # Of such a change, for each worker.
_NEXT_DEVICES = 4.0  # Rank of the device that is given, by its links, in the mean.


@dataclass(frozen=True)
class Moves:
    """Random changes of layouts of one problem."""

    estimator: Estimator
    schedules: tuple[str, ...]
    estimate_s: Callable[[Layout], float]

    @property
    def problem(self) -> Problem:
        """The problem of the layouts."""
        return self.estimator.problem

    def changed(self, layout: Layout, rng: random.Random) -> Layout | None:
        """Return the layout with one random change; `None` where that is impossible.

        Which forwards run again is left open: other stages may then lack memory.
        """
        layout = layout if layout.recomputed is None else replace(layout, recomputed=None)
        if self.problem.num_devices > _MOST_BY_CHANCE and rng.random() < _ON_PURPOSE:
            return self._relieve(layout, rng)
        change = rng.choices(_CHANGES, cum_weights=_CUMULATIVE)[0]
        return change(self, layout, rng)

    def _relieve(self, layout: Layout, rng: random.Random) -> Layout | None:
        """Give one of the busiest workers a device with good links to its ring, an idle one or one of a worker that is done early."""
        stopping.spend(_WORKER_WORK_S * len(layout.workers))
        ends_s = self.estimator.ends_s(layout)
        busiest = sorted(range(len(ends_s)), key=lambda worker: -ends_s[worker])
        target = busiest[min(int(rng.expovariate(1.0)), len(busiest) - 1)]
        mean_s = sum(ends_s) / len(ends_s)
        giving = [worker for worker, group in enumerate(layout.workers) if len(group) > 1 and ends_s[worker] < mean_s and worker != target]
        devices = np.array([*self._idle(layout), *itertools.chain(*(layout.workers[worker] for worker in giving))], dtype=int)
        if not devices.size:
            return None
        ring = list(layout.workers[target])
        given_back = self._worst(ring, rng) if len(ring) > 1 and rng.random() < _GIVEN_BACK else None
        ring = [member for member in ring if member != given_back]
        there = self.problem.bandwidth[np.array(ring)]
        back = self.problem.bandwidth[:, np.array(ring[1:] + ring[:1])]
        # Each device stands best where the slower of its links to both neighbors is the quickest.
        links = np.minimum(there[:, devices], back[devices].T)
        ranked = np.argsort(-links.max(axis=0), kind="stable")
        chosen = int(ranked[min(int(rng.expovariate(1 / _NEXT_DEVICES)), len(ranked) - 1)])
        device = int(devices[chosen])
        ring.insert(int(links[:, chosen].argmax()) + 1, device)
        left_behind = [] if given_back is None else [given_back]
        workers = [list(itertools.chain(*(left_behind if other == device else [other] for other in group))) for group in layout.workers]
        workers[target] = ring
        return replace(layout, workers=_groups(workers)) if all(map(self.problem.rows, workers)) else None

    def _worst(self, ring: Sequence[int], rng: random.Random) -> int:
        """Return the member of a ring with the least power, or at its slowest link."""
        if rng.random() < 1 / 2:
            return min(ring, key=self.problem.powers.__getitem__)
        hops = zip(ring, [*ring[1:], ring[0]], strict=True)
        return rng.choice(min(hops, key=lambda hop: float(self.problem.bandwidth[hop[0], hop[1]])))

    def _idle(self, layout: Layout) -> list[int]:
        used = {device for group in layout.workers for device in group}
        return [device for device in range(self.problem.num_devices) if device not in used]

    def _shift_cut(self, layout: Layout, rng: random.Random) -> Layout | None:
        if layout.num_stages == 1:
            return None
        at = rng.randrange(1, layout.num_stages)
        cut = layout.cuts[at] + rng.choice((-1, 1))
        if not layout.cuts[at - 1] < cut < layout.cuts[at + 1]:
            return None
        return replace(layout, cuts=(*layout.cuts[:at], cut, *layout.cuts[at + 1 :]))

    def _swap_devices(self, layout: Layout, rng: random.Random) -> Layout | None:
        slots = [(worker, position) for worker, group in enumerate(layout.workers) for position in range(len(group))]
        idle = self._idle(layout)
        workers = [list(group) for group in layout.workers]
        worker, position = rng.choice(slots)
        if idle and rng.random() < len(idle) / self.problem.num_devices:
            workers[worker][position] = rng.choice(idle)
        else:
            other, other_position = rng.choice(slots)
            workers[worker][position], workers[other][other_position] = workers[other][other_position], workers[worker][position]
        return replace(layout, workers=_groups(workers))

    def _move_device(self, layout: Layout, rng: random.Random) -> Layout | None:
        workers = [list(group) for group in layout.workers]
        idle = self._idle(layout)
        shared = [worker for worker, devices in enumerate(workers) if len(devices) > 1]
        if idle and (not shared or rng.random() < 0.3):
            device = rng.choice(idle)
        elif shared:
            group = workers[rng.choice(shared)]
            device = group.pop(rng.randrange(len(group)))
        else:
            return None
        if rng.random() < 0.9:
            target = rng.choice(workers)
            target.insert(rng.randrange(len(target) + 1), device)
        return replace(layout, workers=_groups(workers)) if all(map(self.problem.rows, workers)) else None

    def _place_device(self, layout: Layout, rng: random.Random) -> Layout | None:
        device = rng.randrange(self.problem.num_devices)
        workers = [[other for other in group if other != device] for group in layout.workers]
        target = rng.randrange(len(workers))
        if not all(group or number == target for number, group in enumerate(workers)):
            return None
        candidates = []
        for at in range(len(workers[target]) + 1):
            placed = [*workers[target][:at], device, *workers[target][at:]]
            candidates.append(replace(layout, workers=_groups([*workers[:target], placed, *workers[target + 1 :]])))
        candidates = [candidate for candidate in candidates if candidate != layout and self.problem.rows(candidate.workers[target])]
        return min(candidates, key=self.estimate_s, default=None)

    def _grow_ring(self, layout: Layout, rng: random.Random) -> Layout | None:
        """Insert a path of well linked devices: a single one may have no two good links to the ring."""
        worker = rng.randrange(layout.num_stages)
        ring = list(layout.workers[worker])
        at = rng.randrange(1, len(ring) + 1)
        left = [device for device in range(self.problem.num_devices) if device not in ring]
        path = [ring[at - 1]]
        for _ in range(rng.randint(2, 4)):
            if left:
                left.sort(key=lambda other: -self.problem.bandwidth[path[-1], other])
                path.append(left.pop(min(int(rng.expovariate(1.0)), len(left) - 1)))
        ring[at:at] = path[1:]
        workers = [[device for device in group if device not in ring] for group in layout.workers]
        workers[worker] = ring
        return replace(layout, workers=_groups(workers)) if all(workers) and self.problem.rows(ring) else None

    def _turn_ring(self, layout: Layout, rng: random.Random) -> Layout | None:
        worker = rng.randrange(layout.num_stages)
        group = layout.workers[worker]
        if len(group) < 3:
            return None
        one, other = sorted(rng.sample(range(len(group) + 1), 2))
        turned = (*group[:one], *group[one:other][::-1], *group[other:])
        return replace(layout, workers=(*layout.workers[:worker], turned, *layout.workers[worker + 1 :]))

    def _split_stage(self, layout: Layout, rng: random.Random) -> Layout | None:
        at = rng.randrange(layout.num_stages)
        first, end = layout.cuts[at], layout.cuts[at + 1]
        group, idle = layout.workers[at], self._idle(layout)
        if end - first < 2:
            return None
        if len(group) > 1:
            size = rng.randrange(1, len(group))
            one, other = group[:size], group[size:]
        elif idle:
            one, other = group, (rng.choice(idle),)
        else:
            return None
        cut = rng.randrange(first + 1, end)
        if rng.random() < 0.5:
            one, other = other, one
        return replace(
            layout,
            cuts=(*layout.cuts[: at + 1], cut, *layout.cuts[at + 1 :]),
            workers=(*layout.workers[:at], one, other, *layout.workers[at + 1 :]),
        )

    def _join_stages(self, layout: Layout, rng: random.Random) -> Layout | None:
        if layout.num_stages == 1:
            return None
        at = rng.randrange(layout.num_stages - 1)
        one, other = layout.workers[at], layout.workers[at + 1]
        group = rng.choice((one + other, one, other))
        if self.problem.rows(group) is None:
            return None
        return replace(
            layout, cuts=(*layout.cuts[: at + 1], *layout.cuts[at + 2 :]), workers=(*layout.workers[:at], group, *layout.workers[at + 2 :])
        )

    def _turn_workers(self, layout: Layout, rng: random.Random) -> Layout | None:
        if layout.num_stages == 1:
            return None
        one, other = sorted(rng.sample(range(layout.num_stages + 1), 2))
        return replace(layout, workers=(*layout.workers[:one], *layout.workers[one:other][::-1], *layout.workers[other:]))

    def _mirror(self, layout: Layout, _: random.Random) -> Layout:
        return replace(layout, cuts=tuple(self.problem.num_layers - cut for cut in reversed(layout.cuts)), workers=layout.workers[::-1])

    def _move_worker(self, layout: Layout, rng: random.Random) -> Layout | None:
        workers = list(layout.workers)
        worker = workers.pop(rng.randrange(len(workers)))
        workers.insert(rng.randrange(len(workers) + 1), worker)
        return replace(layout, workers=tuple(workers))

    def _change_order(self, layout: Layout, rng: random.Random) -> Layout | None:
        if layout.order not in self.schedules:
            return None
        order = rng.choice(self.schedules)
        size = layout.num_stages
        return replace(layout, order=order, max_in_flight=rng.choice((None, size, size + 1, 2 * size)) if order == "list" else None)


_CHANGES = (
    Moves._shift_cut,
    Moves._swap_devices,
    Moves._move_device,
    Moves._place_device,
    Moves._grow_ring,
    Moves._turn_ring,
    Moves._split_stage,
    Moves._join_stages,
    Moves._turn_workers,
    Moves._mirror,
    Moves._move_worker,
    Moves._change_order,
)
_WEIGHTS = (4, 4, 3, 1.5, 1, 1, 1, 1, 1, 0.5, 1, 0.5)
_CUMULATIVE = tuple(itertools.accumulate(_WEIGHTS))


def _groups(workers: Sequence[Sequence[int]]) -> tuple[Devices, ...]:
    return tuple(map(tuple, workers))
