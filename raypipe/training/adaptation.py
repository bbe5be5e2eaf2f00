"""Switches a run to another plan between windows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from raypipe.actors.orders import BuildOrder
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.window import WindowResult
from raypipe.planning.replanning import Decision
from raypipe.training.adaptive import AdaptiveStrategy
from raypipe.training.record import RunRecord

_LOG = logging.getLogger("raypipe.training.adaptation")


class Adaptation:
    """Switches of a run; every decision is a line of `adaptation.jsonl`."""

    def __init__(
        self, strategy: AdaptiveStrategy, coordinator: Coordinator, record: RunRecord, *, build_order: Callable[[], BuildOrder]
    ) -> None:
        self.strategy = strategy
        self.coordinator = coordinator
        self.record = record
        self.build_order = build_order

    def after_window(self, result: WindowResult, *, update: int, updates_left: int) -> None:
        """Decide after a window whether to switch, and switch."""
        strategy = self.strategy
        since = time.perf_counter()
        decision = strategy.after_window(result, self.coordinator.links.estimate, updates_left=updates_left)
        if decision is None:
            return
        _LOG.info("update %d: %s", update, decision.text)
        topology = strategy.state.topology
        line: dict[str, Any] = {
            "update": update,
            "switch": decision.switch,
            "text": decision.text,
            "gain": decision.gain,
            "update_s": result.trace.makespan_s / result.num_updates,
            "predicted_s": decision.predicted_s,
            "links_bytes_per_s": {f"{link.source} -> {link.target}": link.bandwidth_bytes_per_s for link in topology.links},
            "speeds": {device.name: device.speed for device in topology.devices},
            "decided_s": time.perf_counter() - since,
        }
        if names := self._leave_out_dead(decision):
            text = f"no switch ({decision.text}): {' and '.join(names)} is dead or silent, and is left out from now on"
            line |= {"switch": False, "text": text}
            self._notice(update, text)
        try:
            if line["switch"]:
                self._switch(decision, update)
                line["took_s"] = strategy.policy.switch_s
        finally:  # a switch that fails is recorded, too
            self.record.folder.add_decision(line)

    def _leave_out_dead(self, decision: Decision) -> list[str]:
        # Unused devices that a switch needs; a device in use fails with its own message.
        if not decision.switch:
            return []
        idle = set(self.strategy.devices_of(decision.choice)).difference(self.strategy.devices)
        dead = self.coordinator.actors.dead(sorted(idle)) if idle else []
        return self.strategy.leave_out(dead) if dead else []

    def _switch(self, decision: Decision, update: int) -> None:
        self._notice(update, decision.text)
        strategy, folder = self.strategy, self.record.folder
        before, since = strategy.plan, time.perf_counter()
        strategy.adopt(decision.choice)
        self.coordinator.move(strategy.devices, strategy.stages, order=self.build_order(), programs=strategy.programs())
        strategy.policy.adopt(decision.choice, took_s=time.perf_counter() - since)
        before.save(folder.file(f"plan-until-update-{update:06d}.json"))
        self.record.phases[-1].save(folder, until=update)
        self.record.begin_phase(strategy, f"update {update}: {decision.text}")

    def _notice(self, update: int, text: str) -> None:
        self.record.listener.notice(f"update {update}: {text}")
