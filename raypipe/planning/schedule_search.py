"""raypipe's own planner: local search for one stage per worker, then all other schedules on its best workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain, islice, zip_longest
from typing import NamedTuple

from raypipe import stopping
from raypipe.planning import branches, chunks, hidden_sums, layer_order, own_times
from raypipe.planning.branch_groups import likeness
from raypipe.planning.branch_placement import Layers
from raypipe.planning.device_order import canonical
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, better
from raypipe.planning.extrapolation import MOST_SIMULATED, ShortEvaluator, evaluator_of
from raypipe.planning.hidden_sums import HiddenSumSearch
from raypipe.planning.last_changes import changed_at_last
from raypipe.planning.late import with_hidden_transfers
from raypipe.planning.layout import Layout
from raypipe.planning.levels import node_pipelines
from raypipe.planning.own_time_search import OwnTimeSearch, most_workers
from raypipe.planning.own_times import ORDERS as ORDERS_BY_TIMES
from raypipe.planning.own_times import with_own_times
from raypipe.planning.partition import MOST_UNITS
from raypipe.planning.planners import AUTO, best_of_all, quick_evaluator, starts
from raypipe.planning.problem import Devices, Problem
from raypipe.planning.ramp_cuts import ramped
from raypipe.planning.search import LayoutSearch, SearchBudget
from raypipe.planning.split_order_search import ORDERS as SPLIT_ORDERS
from raypipe.planning.split_order_search import SplitOrderSearch
from raypipe.schedule_registry import overlaps
from raypipe.schedules.families import branch_aware
from raypipe.stopping import SearchStopped

# Schedules of one stage per worker that `auto` tries besides those that the local search chooses from.
_SPLIT_ORDERS = SPLIT_ORDERS[::-1]
ONE_STAGE_ORDERS = ("gpipe", *_SPLIT_ORDERS)
_MARGIN = 1.02
_NUM_BRANCHED = 4  # Most workers on which branches are placed, each in many ways.
_MANY_SIMULATIONS = 100  # With fewer, some orders stand for all.
_MOST_RAMPED = 256  # Most devices for which cuts for the ramp, and orders by own times, are worth their time.
_MOST_DIVIDED = 64  # Most devices for which a search for divided stages is worth its time.
_MOST_IN_OWN_ORDER = 4_096  # Microbatches of all workers for which the order of one layout is worth its time.
_NUM_RAMPED = 16  # Layouts of an order with split backwards whose later workers get less work.
_NUM_CLIMBED = 3  # Kinds of orders with several stages or pipelines whose cuts are improved.
_LEAST_STEPS = 3  # Of the search for forwards ahead, however small the budget.
_SLACK = 1.05  # Error of the rank of schedules with a split backward.
# Shares of the work that is left: of consecutive layers, and of that of the plans of others, and of cuts for the ramp in each order of one
# stage a worker; of the best layout, divided; of several stages or pipelines; of branches.
_LISTS_SHARE = 0.75
_OTHERS_SHARE = 0.2
_RAMPED_SHARE = 0.5
_OWN_TIMES_SHARE = 0.4
_DIVIDED_AT_LAST_SHARE = 0.25
_SPLIT_ORDERS_SHARE = 0.8
_SEVERAL_SHARE = 0.6
_BRANCHES_SHARE = 0.8
_NEAR = 1.25  # Times the best layout within which layouts of other kinds are improved, where simulations take long.


class _Shares(NamedTuple):
    """Shares of the work that is left: of one stage a worker with whole backwards; of other orders of one stage; of divided stages."""

    whole: float
    one_stage: float
    hidden_sums: float


_USUAL, _MANY_WORKERS = _Shares(0.5, 0.6, 0.4), _Shares(0.25, 0.8, 0.6)
"""Pipelines of many workers fill slowly, so that split backwards are seldom behind. Beyond `_MOST_RAMPED` devices the start takes most."""


def searched(evaluator: LayoutEvaluator, schedule: str, budget: SearchBudget) -> Evaluation | None:
    """Return the best layout of raypipe's own search, which never is slower than a baseline.

    Devices are numbered independently of their names, so that equal clusters get equal plans.
    """
    sorted_problem, numbers = canonical(evaluator.problem)
    _, *others = layer_order.lists(sorted_problem)
    search = _Search.of(evaluator, sorted_problem, schedule, budget)
    on_others = [(_Search.of(evaluator, layer_order.listed(sorted_problem, layers), schedule, budget), layers) for layers in others]
    try:
        found = _Found()
        with stopping.part(work_s=budget.work_s):
            found = _found_sorted(search, on_others, schedule)
        best_sorted = search.decided(found)
        best = None if best_sorted is None else evaluator.simulate(best_sorted.layout.renumbered(numbers))
        best = best_of_all(evaluator, schedule, best)
    except SearchStopped:
        evaluator.stopped = True
        best = evaluator.best_so_far
        own = tuple(range(sorted_problem.num_layers))
        for each, layers in ((search, own), *on_others):
            for seen in (each.exact.best_so_far, each.evaluator.best_so_far):
                if seen is not None and (best is None or seen.rank < best.rank):
                    layout = seen.layout if layers == own else seen.layout.relisted(layers)
                    best = better(best, evaluator.simulate_at_last(layout.renumbered(numbers)))
    return best


def _found_sorted(search: _Search, on_others: Sequence[tuple[_Search, Layers]], schedule: str) -> _Found:
    """Return the best layouts; each part of the search ends with what it has once its share of the work is done."""
    found = _Found()
    with stopping.part(share=_LISTS_SHARE if schedule == AUTO else 1.0):
        with stopping.part(share=1 / (1 + len(on_others))):
            found = search.on_list()
        for number, (on_other, layers) in enumerate(on_others):
            with stopping.part(share=1 / (len(on_others) - number)):
                found = found.joined(search.of_list(on_other.on_list(), layers))
    if schedule in {AUTO, branch_aware.NAME}:
        with stopping.part(share=_BRANCHES_SHARE):
            found = found.joined(search.on_branches(found.workers))
    if isinstance(search.evaluator, ShortEvaluator):
        near = _near(found.certain, found.others)
        found = replace(found, certain=near(found.certain), others=near(found.others))
    with stopping.part(share=1 / 2):
        found = replace(found, certain=search.hidden(found.certain))
    with stopping.part():
        found = replace(found, others=search.hidden(found.others))
    with stopping.part():
        found = search.changed_at_last(found)
    return found


def _near(*found: Evaluation | None) -> Callable[[Evaluation | None], Evaluation | None]:
    """Return a function that returns layouts that are not far behind the best of these, and `None` for others."""
    best = reduce(better, found, None)

    def near(evaluation: Evaluation | None) -> Evaluation | None:
        if best is None or evaluation is None:
            return evaluation
        return evaluation if evaluation.missing_bytes <= best.missing_bytes and evaluation.loss_s <= _NEAR * best.loss_s else None

    return near


@dataclass(frozen=True)
class _Found:
    """Best layouts: one whose prediction is certain, and of the other orders; and the workers of the best ones."""

    certain: Evaluation | None = None
    others: Evaluation | None = None
    workers: tuple[tuple[Devices, ...], ...] = ()

    @property
    def best(self) -> Evaluation | None:
        if self.certain is None or self.others is None:
            return self.certain or self.others
        # Split backwards and several stages per worker cost more than predicted: they must be ahead by more than the error of predictions.
        ahead = (self.others.missing_bytes, self.others.loss_s * _MARGIN) < self.certain.rank
        return self.others if ahead else self.certain

    def joined(self, more: _Found) -> _Found:
        in_turns = (workers for turn in zip_longest(self.workers, more.workers) for workers in turn if workers is not None)
        return _Found(better(self.certain, more.certain), better(self.others, more.others), tuple(dict.fromkeys(in_turns)))


@dataclass(frozen=True)
class _Search:
    """Search over the layouts of one list of layers; `evaluator` may extrapolate short updates, `exact` does not."""

    exact: LayoutEvaluator
    evaluator: LayoutEvaluator
    schedule: str
    budget: SearchBudget

    @classmethod
    def of(cls, evaluator: LayoutEvaluator, problem: Problem, schedule: str, budget: SearchBudget) -> _Search:
        exact = evaluator_of(problem, evaluator.schedules, on_evaluated=evaluator.on_evaluated)
        return cls(exact, quick_evaluator(exact, schedule) or exact, schedule, budget)

    def on_list(self) -> _Found:
        """Return the best layouts whose stages are consecutive in the list."""
        evaluator, schedule, budget = self.evaluator, self.schedule, self.budget
        few = evaluator.problem.num_devices <= MOST_UNITS
        shares = _MANY_WORKERS if _MOST_DIVIDED < evaluator.problem.num_devices <= _MOST_RAMPED else _USUAL
        # Other schedules hold more or fewer activations: which forwards run again is left open.
        begin: list[Layout] = []
        with stopping.part(share=_OTHERS_SHARE):
            begin += starts(evaluator, schedule) if few else ()
        overlapping = asynchronous_orders(evaluator.problem, schedule)
        several = [order for order in chunks.ORDERS if schedule in {AUTO, order}]
        single = ("1f1b", "list") if several or overlapping else (schedule,)
        search = LayoutSearch(evaluator, single, budget, begin)
        best: Evaluation | None = None
        with stopping.part(share=shares.whole if several or overlapping else 1.0):
            best = search.run()
        if not several and not overlapping:
            return _Found(best)
        tops = search.best_layouts(max(budget.num_simulations // 30, 1))
        one_each = (tuple((device,) for group in top.workers for device in group) for top in tops)
        workers = list(dict.fromkeys([*one_each, *(top.workers for top in tops)]))
        others: Evaluation | None = None
        with stopping.part(share=shares.one_stage if several or overlapping else 1.0):
            others = self._of_one_stage(search, best) if schedule == AUTO else None
        with stopping.part(share=shares.hidden_sums):
            others = better(others, self._of_hidden_sums(search, best, others) if schedule == AUTO else None)
        # More pipelines have more sums, which late updates may hide: each number is compared with its transfers hidden.
        best_of: dict[tuple[str, int], Evaluation | None] = {}
        with stopping.part(share=_SEVERAL_SHARE):
            for layout in self._of_several(several, overlapping, workers, tops):
                key = (layout.order, layout.num_pipelines)
                best_of[key] = better(best_of.get(key), evaluator.simulate(layout))
        ranked = sorted((evaluation for evaluation in best_of.values() if evaluation is not None), key=lambda evaluation: evaluation.rank)
        if isinstance(evaluator, ShortEvaluator) and schedule == AUTO:
            ranked = list(filter(_near(best, others), ranked))
        if ranked:
            others = better(others, ranked[0])
        with stopping.part():
            for evaluation in ranked[:_NUM_CLIMBED] if schedule == AUTO and not overlapping else ranked:
                others = better(others, with_hidden_transfers(evaluator, self._climbed(evaluation.layout), most_steps=_LEAST_STEPS))
        # Single stages stand for a schedule that is asked for by name only as a way to its workers.
        return _Found(best if schedule == AUTO else None, others, tuple(workers))

    def of_list(self, found: _Found, layers: Layers) -> _Found:
        """Simulate in the own list what was found in another."""

        def in_own(evaluation: Evaluation | None) -> Evaluation | None:
            return None if evaluation is None else self.evaluator.simulate(evaluation.layout.relisted(layers))

        return _Found(in_own(found.certain), in_own(found.others), found.workers)

    def _of_hidden_sums(self, search: LayoutSearch, *found: Evaluation | None) -> Evaluation | None:
        """Return the best layout whose stages are divided, so that sums hide behind weight gradients."""
        best = reduce(better, found, None)
        limit_s = math.inf if best is None or best.missing_bytes else best.loss_s
        if self.evaluator.problem.num_devices <= _MOST_DIVIDED:
            begin = [each.layout for each in found if each is not None]
            begin += search.best_layouts(max(self.budget.num_simulations // 20, 1))
            effort = self.budget.num_simulations / SearchBudget.num_simulations
            return HiddenSumSearch(self.evaluator, effort, limit_s=limit_s).best(begin)
        # Where estimates take long, the best layout found is divided in its order, and no other.
        if best is None or not best.layout.has_estimate:
            return None
        order = best.layout.order if best.layout.order in hidden_sums.ORDERS else _SPLIT_ORDERS[-1]
        return HiddenSumSearch(self.evaluator, 0.0, limit_s=limit_s, orders=(order,)).best([best.layout])

    def _of_one_stage(self, search: LayoutSearch, certain: Evaluation | None) -> Evaluation | None:
        """Return the best layout in other orders of one stage for each worker."""
        num_simulations = self.budget.num_simulations
        # With few simulations, only the orders that are fastest if memory allows them.
        orders = ONE_STAGE_ORDERS if num_simulations >= _MANY_SIMULATIONS else _SPLIT_ORDERS
        of_orders: list[list[Evaluation]] = [[] for _ in orders]
        # Orders of more workers take long to search for: there, layouts are searched for that suit known orders.
        problem, num_workers = self.evaluator.problem, 0 if certain is None else len(certain.layout.workers)
        of_own_times = problem.num_devices <= _MOST_RAMPED and num_workers <= most_workers(problem)
        own = (OwnTimeSearch if of_own_times else SplitOrderSearch)(self.evaluator, num_simulations / SearchBudget.num_simulations)
        with stopping.part(share=1 - (_OWN_TIMES_SHARE if of_own_times else _SPLIT_ORDERS_SHARE)):
            for number, order in enumerate(orders):
                with stopping.part(share=1 / (len(orders) - number)):
                    self._of_order(search, order, of_orders[number])
        evaluated = list(chain.from_iterable(of_orders))
        with stopping.part():
            self._of_own_times(search, own, certain, evaluated)
        return reduce(better, evaluated, None)

    def _of_own_times(
        self, search: LayoutSearch, own_search: OwnTimeSearch, certain: Evaluation | None, evaluated: list[Evaluation]
    ) -> None:
        """Add layouts in orders that are searched for by their times, and in `zb-h1` with forwards ahead."""
        begin = [each.layout for each in (*([] if certain is None else [certain]), *evaluated)]
        begin += search.split_layouts(max(self.budget.num_simulations // 8, 2))
        own: list[Evaluation] = []
        with stopping.part(share=1 - _OWN_TIMES_SHARE):
            own_search.run(begin, own)
        evaluated += own
        # Where sums share ports with messages, forwards ahead of a known order are often better than the order searched for.
        for each in (certain, *own[:1]):
            if each is not None and each.layout.has_estimate and each.layout.num_stages > 1:
                plain = Layout(each.layout.cuts, each.layout.workers, _SPLIT_ORDERS[0])
                known = with_hidden_transfers(self.evaluator, self.evaluator.simulate(plain), most_steps=_LEAST_STEPS)
                evaluated += [] if known is None else [known]
        # Of many workers, the best layout alone gets an order of its own.
        best = min(own, key=lambda each: each.rank, default=None)
        if best is None or best.layout.order in ORDERS_BY_TIMES:
            return
        if len(best.layout.workers) * self.evaluator.problem.num_microbatches <= _MOST_IN_OWN_ORDER:
            in_own_order = own_times.simulated(self.evaluator, Layout(best.layout.cuts, best.layout.workers))
            evaluated += [] if in_own_order is None else [in_own_order]

    def _of_order(self, search: LayoutSearch, order: str, evaluated: list[Evaluation]) -> None:
        """Add layouts of one order to those that were evaluated, the best of which are improved."""
        num_tops = max(self.budget.num_simulations // 8, 1)
        is_split = order in _SPLIT_ORDERS
        tops = search.best_layouts(num_tops)
        if is_split:
            tops += search.split_layouts(max(num_tops, 2))
            tops += node_pipelines(self.evaluator.estimator, orders=(order,), divide=False)
        self._evaluate((replace(top, order=order, max_in_flight=None) for top in dict.fromkeys(tops)), evaluated)
        is_ramped = is_split and self.evaluator.problem.num_devices <= _MOST_RAMPED
        evaluated.sort(key=lambda one: one.rank)
        if is_ramped:
            with stopping.part(share=_RAMPED_SHARE):
                self._evaluate_ramped(evaluated[: min(_NUM_RAMPED, num_tops)], evaluated)
        if evaluated:
            begin = evaluated if is_ramped else evaluated[:1]  # Without other cuts the best one alone is improved.
            seconds = search.split_s if is_split else None
            evaluated.append(search.improved(begin, self.budget.num_simulations // 4 - 1, seconds=seconds, slack=_SLACK))
            if is_ramped:
                self._evaluate_ramped(evaluated[-1:], evaluated)

    def _evaluate_ramped(self, begin: Sequence[Evaluation], evaluated: list[Evaluation]) -> None:
        for evaluation in begin:
            self._evaluate(ramped(self.evaluator.estimator, evaluation.layout), evaluated)

    def _evaluate(self, layouts: Iterable[Layout], evaluated: list[Evaluation]) -> None:
        """Simulate layouts one by one, so that none is lost where the work of a part is done."""
        for layout in layouts:
            if (evaluation := self.evaluator.simulate(layout)) is not None:
                evaluated.append(evaluation)

    def _of_several(
        self, several: Sequence[str], overlapping: Sequence[str], workers: Sequence[tuple[Devices, ...]], tops: Sequence[Layout]
    ) -> Iterator[Layout]:
        evaluator, most = self.evaluator, max(self.budget.num_simulations // 3, 1)
        # Orders in which several workers take the loss may have no replicas there.
        flushed_workers = workers if evaluator.problem.profile.loss_couples_rows else [top.workers for top in tops]
        on_chains = [order for order in several if order != branch_aware.NAME]
        if isinstance(evaluator, ShortEvaluator) and evaluator.merges and self.schedule == AUTO:
            on_chains = [order for order in on_chains if order in chunks.ONE_PIPELINE]  # Others are simulated device by device.
        yield from islice(
            (layout for order in on_chains for group in flushed_workers for layout in chunks.layouts(evaluator, group, order)), most
        )
        # Without a flush a long pipeline has no bubble, so that devices need not be replicas for its sake: all workers are tried.
        rows = [chain.from_iterable(map(partial(chunks.layouts, evaluator, order=order), workers)) for order in overlapping]
        # In turns, so that each order is tried on the best workers even where not all are.
        yield from islice((layout for turn in zip_longest(*rows) for layout in turn if layout is not None), most)

    def on_branches(self, workers: tuple[tuple[Devices, ...], ...]) -> _Found:
        """Return the best layouts whose stages are of one branch each."""
        best: dict[bool, Evaluation | None] = {True: None, False: None}
        with stopping.part():
            for layout in self._of_branches(workers):
                certain = self.schedule == AUTO and _is_certain(layout)
                best[certain] = better(best[certain], self._climbed(layout))
        return _Found(best[True], best[False])

    def _of_branches(self, workers: tuple[tuple[Devices, ...], ...]) -> Iterator[Layout]:
        """Yield layouts on the first of these workers, devices that are alike once, and on groups of neighbors among the devices."""
        most = max(min(self.budget.num_simulations // 30, _NUM_BRANCHED), 1)
        different = {likeness(self.evaluator.problem, each): each for each in reversed(workers[:most])}
        for group in reversed(different.values()):
            yield from branches.layouts(self.evaluator, group)
        if workers:
            yield from branches.replicated_layouts(self.evaluator, tuple(chain.from_iterable(workers[0])))

    def hidden(self, evaluation: Evaluation | None) -> Evaluation | None:
        """Return a layout in an order for its own times, with its transfers hidden."""
        evaluation = with_own_times(self.evaluator, evaluation)
        return with_hidden_transfers(self.evaluator, evaluation, most_steps=max(self.budget.num_simulations // 30, _LEAST_STEPS))

    def changed_at_last(self, found: _Found) -> _Found:
        """Change the best layout, where whole updates are simulated and the order is open."""
        best = found.best
        if best is None or isinstance(self.evaluator, ShortEvaluator) or self.schedule != AUTO:
            return found
        effort = self.budget.num_simulations / SearchBudget.num_simulations
        changed = changed_at_last(self.evaluator, best, effort=effort)
        if changed is not best:
            with stopping.part():
                changed = self.hidden(changed) or changed
        found = replace(found, certain=changed) if best is found.certain else replace(found, others=changed)
        divided: Evaluation | None = None
        with stopping.part(share=_DIVIDED_AT_LAST_SHARE):
            divided = HiddenSumSearch(self.evaluator).near(changed.layout)
        if divided is not None and better(found.others, divided) is divided:
            found = replace(found, others=changed_at_last(self.evaluator, divided, effort=effort))
        return found

    def decided(self, found: _Found) -> Evaluation | None:
        """Return the best layout as whole updates, device by device; on many devices only one layout is simulated so."""
        seen = self.evaluator.best_so_far if self.schedule == AUTO else None  # by a part that ended early
        problem = self.exact.problem
        if not isinstance(self.evaluator, ShortEvaluator):
            return found.joined(_Found(others=seen)).best
        if problem.num_microbatches * problem.num_devices > MOST_SIMULATED:
            return self.evaluator.decided(found.joined(_Found(others=seen)).best, self.exact)
        # Each by itself: what is extrapolated too well shall not stand before another.
        certain, others, seen = (self.evaluator.decided(each, self.exact) for each in (found.certain, found.others, seen))
        return _Found(certain, better(others, seen)).best

    def _climbed(self, layout: Layout) -> Evaluation | None:
        # Each step simulates two layouts for each cut.
        most_steps = self.budget.num_simulations // max(30, 2 * layout.num_stages)
        return climbed(self.evaluator, self.evaluator.simulate(layout), most_steps=most_steps)


def _is_certain(layout: Layout) -> bool:
    """Return whether branches have one stage that takes time on each worker, and whole backwards."""
    assert layout.branches is not None, "a layout of branches"
    line = layout.branches.search.line
    busy = [worker for worker, times in zip(line.pipelines[0], line.times, strict=True) if times.forward_s + times.backward_s]
    return not line.splits and len(busy) == len(set(busy))


def asynchronous_orders(problem: Problem, schedule: str) -> tuple[str, ...]:
    """Return the schedules whose updates overlap that may be chosen."""
    if schedule == AUTO:
        return chunks.ASYNCHRONOUS if problem.staleness.allow_delay else ()
    return (schedule,) if overlaps(schedule) else ()


def climbed(
    evaluator: LayoutEvaluator,
    evaluation: Evaluation | None,
    *,
    most_steps: int,
    neighbors: Callable[[Layout], Iterator[Layout]] = chunks.neighbors,
) -> Evaluation | None:
    """Apply the best of the neighboring changes as long as the simulator finds it better."""
    best = evaluation
    with stopping.part():
        for _ in range(most_steps if evaluation is not None else 0):
            assert evaluation is not None, "there is a layout to begin with"
            # Which forwards run again is left open: other stages may lack memory after a change.
            for layout in neighbors(replace(evaluation.layout, recomputed=None)):
                best = better(best, evaluator.simulate(layout))
            if best is evaluation:
                break
            evaluation = best
    return best
