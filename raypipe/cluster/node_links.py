"""Measures the links between nodes, and what links share, within a budget: see docs/probing.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from functools import cached_property

from raypipe.actors.measure.flows import WARM_UP_BYTES, Ping, Readings, Stream, exchanges, round_trips
from raypipe.cluster.probe_actors import FlowReadings, ProbeActors
from raypipe.errors import RunError
from raypipe.network.clocks import ClockOffset, from_reference, offset
from raypipe.network.fit import LinkFit, fit
from raypipe.network.probe_budget import Budget, MeasurementBudget
from raypipe.network.rounds import Pair, Round, all_paired_rounds, directed, one_to_all_rounds, tournament
from raypipe.network.sharing import BottleneckSearch, below_their_ends, fastest_of_nodes, rates, shared_when_measured

_STREAM_FACTOR = 4  # streams have failed when they take this many times their planned time one after the other
_MOST_NAMED = 6
_FASTER_ALONE = 1.1  # a link that alone reaches this many times its fitted bandwidth was slowed by others when it was fitted
_MORE = "raise --budget-s or --budget-bytes"

Notice = Callable[[str], None]


class Spending:
    """The budget of a probe, and what it was too small for."""

    def __init__(self, actors: ProbeActors, budget: Budget, notice: Notice) -> None:
        self.budget = budget
        self.notice = notice
        self.notices: list[str] = []
        self._actors = actors
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the probe began."""
        return time.monotonic() - self._began_s

    def allows(self, num_bytes: int, *, for_search: bool = False) -> bool:
        """Return whether a measurement may begin; the search for shared links must leave a part of the budget."""
        budget = self.budget.for_search if for_search else self.budget
        return budget.allows(self.seconds, self._actors.num_bytes + num_bytes)

    def missed(self, text: str) -> None:
        """Record and show what the budget did not allow."""
        self.notices.append(text)
        self.notice(text)


class _BudgetSpentError(Exception): ...


class NodeLinks:
    """The links between the nodes of a cluster, as far as they are measured; `missing` pairs do not reach each other."""

    def __init__(
        self,
        actors: ProbeActors,
        spending: Spending,
        measurements: MeasurementBudget,
        classes: Sequence[Hashable],
        *,
        missing: Collection[Pair] = (),
    ) -> None:
        self.actors = actors
        self.spending = spending
        self.measurements = measurements
        self.missing = {pair for one in missing for pair in (one, one[::-1])}
        self.matchings = self.linked(tournament(classes))
        self.rounds = [pairs for matching in self.matchings for pairs in directed(matching)]
        self.pattern = Ping(measurements.ping_s, measurements.ping_bytes)
        self.fits: dict[Pair, LinkFit] = {}
        self.clocks: dict[Pair, ClockOffset] = {}  # target against source
        self.search = BottleneckSearch(self._joint_rates)
        self.usable = True  # until a flow fails, in which nodes may still wait

    def linked(self, rounds: Sequence[Round]) -> list[Round]:
        """Return rounds without missing pairs."""
        left = (tuple(pair for pair in pairs if pair not in self.missing) for pairs in rounds)
        return [pairs for pairs in left if pairs]

    @cached_property
    def _offsets_s(self) -> dict[int, float]:
        return {node: clock.offset_s for node, clock in from_reference(self.clocks, reference=0).items()}

    def ping(self, pairs: Round, pattern: Ping) -> FlowReadings:
        """Ping pairs of nodes at the same time."""
        return self.actors.run_between_nodes(dict.fromkeys(pairs, pattern))

    def measure(self) -> None:
        """Ping every pair in rounds, more than once if time allows, as a pause of a machine makes its links look slower.

        Raises:
            RunError: There was no time to measure every pair, or a link carries nothing.
        """
        num_needed = self.measurements.rounds.tournament
        self.spending.notice(f"{num_needed} rounds for the links between {self.actors.num_nodes} nodes")
        for number, pairs in enumerate(self.rounds * self.measurements.looks):
            if self.spending.seconds > self.spending.budget.seconds:
                if number >= num_needed:
                    return
                raise RunError(
                    f"after {self.spending.budget.seconds:g} s only {number} of {num_needed} rounds between the nodes are done; "
                    "raise --budget-s, or see what else the nodes are doing"
                )
            for pair, (source, target) in self.ping(pairs, self.pattern).items():
                self._fit(pair, source)
                clock = offset(exchanges(source, target))
                self.clocks[pair] = min(clock, self.clocks.get(pair, clock), key=lambda one: one.residual_s)

    def _fit(self, pair: Pair, readings: Readings) -> None:
        # The faster fit counts: whatever disturbs a measurement makes the link look slower.
        link = fit(round_trips(readings), link=self.actors.link_text(pair))
        self.fits[pair] = max(link, self.fits.get(pair, link), key=lambda one: one.bandwidth_bytes_per_s)

    # What links share

    def look_for_sharing(self) -> None:
        """Look for bottlenecks that links share, then measure again the links that others slowed."""
        if not self.fits:
            return
        rounds = self.measurements.rounds
        if apart := [node for node in range(self.actors.num_nodes) if node not in self._offsets_s]:
            named = ", ".join(self.actors.names[node] for node in apart)
            self.spending.missed(
                f"shared links were not looked for: no links lead from {self.actors.names[0]} to {named} to compare clocks"
            )
            self._measure_again()
            return
        fastest = max(link.bandwidth_bytes_per_s for link in self.fits.values())
        if not self.measurements.tells_sharing_of(fastest):
            self.spending.missed(f"shared links were not looked for: the budget is too small; {_MORE}")
        else:
            self.spending.notice(f"{rounds.paired + rounds.one_to_all} rounds for what links share")
            self._search()
        self._measure_again()

    def _search(self) -> None:
        num_nodes = self.actors.num_nodes
        try:
            self.search.run(all_paired_rounds(self.matchings, num_nodes), self.linked(one_to_all_rounds(num_nodes)))
        except _BudgetSpentError:
            problem, remedy = "the budget was spent", _MORE
        except RunError as error:
            self.usable = False
            problem, remedy = str(error), "probe again"
        else:
            return
        if self.search.forget_limits_of_nodes():
            problem += "; limits of single nodes were left out, since some nodes would have theirs and others not"
        self.spending.missed(f"not all shared links were looked for: {problem}; {remedy}")

    def _joint_rates(self, pairs: Round) -> dict[Pair, float]:
        bandwidths = {pair: link.bandwidth_bytes_per_s for pair, link in self.fits.items()}
        streams_s = self.measurements.streams_s(pairs, bandwidths)
        patterns = {
            pair: Stream.lasting(streams_s[pair], bytes_per_s=bandwidths[pair], most_bytes=self.measurements.stream_bytes) for pair in pairs
        }
        if not self.spending.allows(sum(pattern.num_bytes for pattern in patterns.values()), for_search=True):
            raise _BudgetSpentError
        # Whatever the links share carries at least what each of them carries alone.
        at_most_s = sum(patterns[pair].num_bytes / bandwidths[pair] for pair in pairs)
        arrivals: dict[Pair, list[tuple[float, int]]] = {}
        for pair, (_, target) in self.actors.run_between_nodes(patterns, limit_s=_STREAM_FACTOR * at_most_s).items():
            ahead_s = self._offsets_s[pair[1]]
            arrivals[pair] = [(at_s - ahead_s, size) for at_s, size in zip(target.first_s, target.sizes_bytes, strict=True)]
        return rates(arrivals, warm_up_bytes=WARM_UP_BYTES)

    # Links that were slowed by others

    def _measure_again(self) -> None:
        # Those that lost most first. A link that there is no time for gets the rate of its streams, if any.
        slowed = self._slowed()
        while slowed and self.usable and self.spending.allows(self.pattern.most_bytes):
            pair = slowed.pop(0)
            self._fit(pair, self.ping((pair,), self.pattern)[pair][0])
        for pair in slowed:
            rate = self.search.alone.get(pair, 0.0)
            if rate > self.fits[pair].bandwidth_bytes_per_s:
                self.fits[pair] = replace(self.fits[pair], bandwidth_bytes_per_s=rate)
        if slowed := [pair for pair in slowed if pair not in self.search.alone]:
            named, left = ", ".join(map(self.actors.link_text, slowed[:_MOST_NAMED])), len(slowed) - _MOST_NAMED
            more = f" and {left} more" if left > 0 else ""
            self.spending.missed(f"links that were measured while others were may carry more than was seen: {named}{more}; {_MORE}")

    def _slowed(self) -> list[Pair]:
        # Includes pairs that others may have slowed where the search did not get there.
        fitted = {pair: link.bandwidth_bytes_per_s for pair, link in self.fits.items()}
        slowed = shared_when_measured(self.rounds, fitted, self.search.bottlenecks)
        slowed |= {pair for pair, rate in self.search.alone.items() if rate > _FASTER_ALONE * fitted[pair]}
        with_others = {pair for pairs in self.rounds if len(pairs) > 1 for pair in pairs}
        slowed |= (below_their_ends(fitted) & with_others) - self.search.alone.keys()
        leaving, entering = fastest_of_nodes(fitted)
        return sorted(slowed, key=lambda pair: (fitted[pair] / min(leaving[pair[0]], entering[pair[1]]), pair))
