"""What Ops take beyond their waits in a rehearsal: what the cores of this machine add, which simulations then know."""

from __future__ import annotations

from raypipe.actors.execution.programs import executable_programs
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import Overheads
from raypipe.artifacts.trace import Trace
from raypipe.profiling.overhead_fit import Observations
from raypipe.simulation.plan_cost import plan_cost, stage_buckets
from raypipe.training.run_schedules import window_of


def ops_overheads(plan: Plan, trace: Trace) -> Overheads:
    """Return them as `raypipe calibrate` fits them; what messages take is left to the links, which a simulation has to know by itself."""
    observations = Observations()
    schedule = window_of(plan.schedule, trace.num_updates)
    observations.add(executable_programs(schedule, plan.placement, stage_buckets(plan.profile, plan.cut)), trace, plan_cost(plan))
    fitted = observations.costs().overheads
    return Overheads(
        forward_s=fitted.forward_s,
        backward_s=fitted.backward_s,
        input_grad_s=fitted.input_grad_s,
        weight_grad_s=fitted.weight_grad_s,
    )
