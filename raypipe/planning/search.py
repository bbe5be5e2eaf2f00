"""raypipe's own planner: exact programs over several device orders, then local search; the simulator has the last word.

1. For each device order worth trying (`order.orders`), the dynamic program gives the contiguous plans between the least busy
   bottleneck and the shortest way of a microbatch (`partition.least_sum` under rising limits).
2. Simulated annealing from the best of them changes devices, replication, cuts and order of Ops, evaluation by the estimate.
3. The best estimates are simulated, in every order of Ops asked for, and what is best is improved further, evaluation by the simulator.

Everything is deterministic: equal problems give equal plans.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from raypipe.planning.device_order import orders
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.partition import MOST_UNITS, Partition
from raypipe.planning.problem import Group, Problem

_LIMITS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
"""Of the busiest stage or channel, over the least possible."""
_FEW_LIMITS = 4
"""Of these limits, every so many where there are more devices than the dynamic program takes one by one."""
_ORDERS_OF_MANY = ("rdo", "tree")
"""Orders of the devices that are tried there."""
_NUM_RANDOM = 24
"""Orders at random, and up to how many devices they are tried."""
_MOST_FOR_RANDOM = 16
_TEMPERATURE = 0.2
"""By how much worse a change may be on average at first."""
_POOL = 6
"""Simulated layouts around which the search goes on."""


@dataclass(frozen=True)
class Budget:
    """How hard to search.

    Attributes:
        num_estimates: layouts whose estimate the annealing looks at.
        num_simulations: layouts that are simulated.
        num_starts: from how many of the exact programs' plans the annealing starts.
    """

    num_estimates: int = 24_000
    num_simulations: int = 240
    num_starts: int = 12

    @classmethod
    def usual(cls, num_devices: int, *, effort: float = 1.0) -> Budget:
        """The same up to 64 devices; fewer layouts beyond, since each takes longer.

        Args:
            num_devices: of the cluster.
            effort: how much more or less than usual.
        """
        many = max(num_devices / 64, 1.0)
        return cls(
            num_estimates=max(round(cls.num_estimates * effort / many**1.5), 1),
            num_simulations=max(round(cls.num_simulations * effort / many**2), 3),
        )


@dataclass
class Search:
    """One search.

    Attributes:
        evaluator: of the problem.
        schedules: names of orders of one stage a worker that may be chosen.
        budget: how hard.
        others: layouts of other planners to begin with, too; simulated besides the budget.
    """

    evaluator: LayoutEvaluator
    schedules: tuple[str, ...] = ("1f1b", "list")
    budget: Budget = Budget()
    others: Sequence[Layout] = ()
    _estimates: dict[Layout, float] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """What is planned."""
        return self.evaluator.problem

    def run(self) -> Evaluation | None:
        """The best plan found; `None` where none could be laid out at all. What lacks memory is returned only if all do."""
        for layout in self.starts():
            self.estimate_s(layout)
        if not self._estimates:
            return None
        rng = random.Random(0)
        starts = self.best_layouts(self.budget.num_starts)
        for start in starts:
            self._anneal(start, rng, self.budget.num_estimates // len(starts))
        return self._simulate()

    def starts(self) -> Iterator[Layout]:
        """What the dynamic programs and other planners find."""
        for layout in self.others:
            yield layout if layout.order in self.schedules else replace(layout, order=self.schedules[0])
        few = self.problem.num_devices > MOST_UNITS
        for name, order in (*orders(self.problem), *self._random_orders()):
            if few and name not in _ORDERS_OF_MANY:
                continue
            partition = Partition(self.evaluator.estimator, order)
            # The schedule says what fits; where all fits, and where there is much to do, one stands for the others.
            for schedule in self.schedules if partition.limited and not few else self.schedules[:1]:
                least_s = partition.least_limit_s(schedule)
                if math.isfinite(least_s):
                    for factor in _LIMITS[::_FEW_LIMITS] if few else _LIMITS:
                        for found in partition.least_sum(least_s * factor * (1 + 1e-9), schedule):
                            yield found.layout
                            for other in self.schedules:
                                if other != schedule:
                                    yield replace(found.layout, order=other)

    def _random_orders(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Where the network has no structure that orders could follow, and an exact program takes little time: some at random."""
        rng = random.Random(2)
        num_devices = self.problem.num_devices
        if num_devices <= _MOST_FOR_RANDOM:
            for _ in range(_NUM_RANDOM):
                yield "random", tuple(rng.sample(range(num_devices), num_devices))

    def estimate_s(self, layout: Layout) -> float:
        """The estimate; infinite where memory is short."""
        found = self._estimates.get(layout)
        if found is None:
            found = math.inf if self.evaluator.estimator.missing_bytes(layout) > 0 else self.evaluator.estimator.estimate_s(layout)
            self._estimates[layout] = found
        return found

    def best_layouts(self, count: int) -> list[Layout]:
        """The best estimates that differ in their workers."""
        return _different(sorted(self._estimates, key=lambda layout: (self._estimates[layout], str(layout))), count)

    # Annealing

    def _anneal(self, start: Layout, rng: random.Random, num_steps: int) -> None:
        """Changes one thing after the other; what is worse is kept ever more rarely. The estimates seen are remembered."""
        current, current_s = start, self.estimate_s(start)
        best, best_s = current, current_s
        for step in range(num_steps):
            temperature = _TEMPERATURE * (1 - step / num_steps) ** 2
            changed = self.changed(current, rng)
            if changed is None:
                continue
            changed_s = self.estimate_s(changed)
            if changed_s <= current_s * (1 + temperature * rng.expovariate(1.0)):
                current, current_s = changed, changed_s
                if current_s < best_s:
                    best, best_s = current, current_s
            elif step % 500 == 499:
                current, current_s = best, best_s

    def changed(self, layout: Layout, rng: random.Random) -> Layout | None:
        """The layout with one thing changed at random; `None` where that thing cannot be changed.

        Which forwards are run again is left open: the stages that a simulated layout names may be others after a change.
        """
        change = rng.choices(_CHANGES, weights=_WEIGHTS)[0]
        return change(self, replace(layout, recomputed=None), rng)

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
        places = [(worker, position) for worker, group in enumerate(layout.workers) for position in range(len(group))]
        idle = self._idle(layout)
        workers = [list(group) for group in layout.workers]
        worker, position = rng.choice(places)
        if idle and rng.random() < len(idle) / self.problem.num_devices:
            workers[worker][position] = rng.choice(idle)
        else:
            other, there = rng.choice(places)
            workers[worker][position], workers[other][there] = workers[other][there], workers[worker][position]
        return replace(layout, workers=_groups(workers))

    def _move_device(self, layout: Layout, rng: random.Random) -> Layout | None:
        """A device from one worker, or idle, to another worker, or idle."""
        workers = [list(group) for group in layout.workers]
        idle = self._idle(layout)
        givers = [worker for worker, group in enumerate(workers) if len(group) > 1]
        if idle and (not givers or rng.random() < 0.3):
            device = rng.choice(idle)
        elif givers:
            giver = workers[rng.choice(givers)]
            device = giver.pop(rng.randrange(len(giver)))
        else:
            return None
        if rng.random() < 0.9:
            taker = rng.choice(workers)
            taker.insert(rng.randrange(len(taker) + 1), device)
        return replace(layout, workers=_groups(workers)) if all(map(self.problem.rows, workers)) else None

    def _place_device(self, layout: Layout, rng: random.Random) -> Layout | None:
        """A device, idle or not, to where in a worker's ring it is estimated best."""
        device = rng.randrange(self.problem.num_devices)
        workers = [[other for other in group if other != device] for group in layout.workers]
        taker = rng.randrange(len(workers))
        if not all(group or number == taker for number, group in enumerate(workers)):
            return None
        ways = []
        for at in range(len(workers[taker]) + 1):
            placed = [*workers[taker][:at], device, *workers[taker][at:]]
            ways.append(replace(layout, workers=_groups([*workers[:taker], placed, *workers[taker + 1 :]])))
        ways = [way for way in ways if way != layout and self.problem.rows(way.workers[taker])]
        return min(ways, key=self.estimate_s, default=None)

    def _grow_ring(self, layout: Layout, rng: random.Random) -> Layout | None:
        """Two or more devices, each well linked to the last, into a worker's ring: one alone may find no two good links in it."""
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
        """Some consecutive devices of a worker, the other way round."""
        worker = rng.randrange(layout.num_stages)
        group = layout.workers[worker]
        if len(group) < 3:
            return None
        one, other = sorted(rng.sample(range(len(group) + 1), 2))
        turned = (*group[:one], *group[one:other][::-1], *group[other:])
        return replace(layout, workers=(*layout.workers[:worker], turned, *layout.workers[worker + 1 :]))

    def _split_stage(self, layout: Layout, rng: random.Random) -> Layout | None:
        """A stage becomes two, the second on some of its devices or on an idle one."""
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
        """Two neighbouring stages become one, on the devices of both or of one."""
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
        """Some consecutive workers, the other way round."""
        if layout.num_stages == 1:
            return None
        one, other = sorted(rng.sample(range(layout.num_stages + 1), 2))
        return replace(layout, workers=(*layout.workers[:one], *layout.workers[one:other][::-1], *layout.workers[other:]))

    def _mirror(self, layout: Layout, _: random.Random) -> Layout:
        """The whole pipeline the other way round, with as many layers on each worker as far as they last."""
        return replace(layout, cuts=tuple(self.problem.num_layers - cut for cut in reversed(layout.cuts)), workers=layout.workers[::-1])

    def _move_worker(self, layout: Layout, rng: random.Random) -> Layout | None:
        """A worker to another place in the pipeline."""
        workers = list(layout.workers)
        worker = workers.pop(rng.randrange(len(workers)))
        workers.insert(rng.randrange(len(workers) + 1), worker)
        return replace(layout, workers=tuple(workers))

    def _change_order(self, layout: Layout, rng: random.Random) -> Layout | None:
        """Another order of Ops, or another limit on its activations."""
        if layout.order not in self.schedules:
            return None
        order = rng.choice(self.schedules)
        size = layout.num_stages
        return replace(layout, order=order, max_in_flight=rng.choice((None, size, size + 1, 2 * size)) if order == "list" else None)

    # Simulating

    def _simulate(self) -> Evaluation | None:
        """Simulates the best estimates in all orders and what other planners found, then what lies around the best."""
        found: dict[Layout, Evaluation] = {}
        ranked = sorted(self._estimates, key=lambda layout: (self._estimates[layout], str(layout)))
        most = self.budget.num_simulations // 2
        variants = [layout for layout in self.others if layout.order in self.schedules]
        most += len(variants)
        for layout in ranked[:most]:
            variants += [layout if layout.order == order else replace(layout, order=order, max_in_flight=None) for order in self.schedules]
        for variant in variants:
            if variant not in found and len(found) < most and (evaluation := self.evaluator.simulate(variant)) is not None:
                found[variant] = evaluation
        if not found:
            return None
        return self.improved(found.values(), self.budget.num_simulations - len(found))

    def improved(self, begin: Iterable[Evaluation], num_simulations: int, *, slack: float = 1.0) -> Evaluation:
        """The best of so many simulated layouts around the best ones so far.

        Args:
            begin: what was simulated already; at least one.
            num_simulations: at most.
            slack: what is estimated to take longer than the best times this is not simulated; more than 1 for orders that are
                faster than estimated.
        """
        rng = random.Random(1)
        pool = sorted(begin, key=lambda evaluation: (evaluation.rank, str(evaluation.layout)))
        seen = {replace(evaluation.layout, recomputed=None) for evaluation in pool}
        pool = pool[:_POOL]
        for _ in range(20 * num_simulations):
            if num_simulations <= 0:
                break
            # Mostly around the best; around others too, since the best may lie in a narrow valley.
            changed = self.changed(pool[min(int(rng.expovariate(1.0)), len(pool) - 1)].layout, rng)
            if changed is None or changed in seen or self.estimate_s(changed) >= pool[-1].update_s * slack:
                continue
            seen.add(changed)
            num_simulations -= 1
            if (evaluation := self.evaluator.simulate(changed)) is not None:
                pool = sorted((*pool, evaluation), key=lambda evaluation: evaluation.rank)[:_POOL]
        return pool[0]


_CHANGES = (
    Search._shift_cut,
    Search._swap_devices,
    Search._move_device,
    Search._place_device,
    Search._grow_ring,
    Search._turn_ring,
    Search._split_stage,
    Search._join_stages,
    Search._turn_workers,
    Search._mirror,
    Search._move_worker,
    Search._change_order,
)
_WEIGHTS = (4, 4, 3, 1.5, 1, 1, 1, 1, 1, 0.5, 1, 0.5)


def _groups(workers: Sequence[Sequence[int]]) -> tuple[Group, ...]:
    return tuple(map(tuple, workers))


def _different(layouts: Sequence[Layout], count: int) -> list[Layout]:
    """The first ones that differ in their workers."""
    found: dict[tuple[Group, ...], Layout] = {}
    for layout in layouts:
        found.setdefault(layout.workers, layout)
        if len(found) == count:
            break
    return list(found.values())
