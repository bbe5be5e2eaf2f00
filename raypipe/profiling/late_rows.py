"""Which profiles may let some rows of looked-up weights be summed and stepped behind others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from raypipe.actors.stage.optimizer_names import OptimizerFunction
from raypipe.actors.stage.optimizers import late_rows_refusal
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.config import OptimizerConfig


def with_rows_of(
    profile: ModelProfile, optimizer: OptimizerConfig, notice: Callable[[str], None], *, function: OptimizerFunction | None = None
) -> ModelProfile:
    """Return a profile as it holds for an optimizer: without what says that rows may be late, where all must be stepped together."""
    reason = late_rows_refusal(optimizer, function=function)
    if not reason or all(layer.reread_share is None for layer in profile.layers):
        return profile
    notice(f"all rows that an update looks up are due at once: {reason}")
    return dataclasses.replace(profile, layers=tuple(dataclasses.replace(layer, reread_share=None) for layer in profile.layers))


def with_plan_rows_of(
    plan: Plan, optimizer: OptimizerConfig, notice: Callable[[str], None], *, function: OptimizerFunction | None = None
) -> Plan:
    """Return a plan with its profile as it holds for an optimizer."""
    profile = with_rows_of(plan.profile, optimizer, notice, function=function)
    return plan if profile is plan.profile else dataclasses.replace(plan, profile=profile, profile_digest=profile.digest)
