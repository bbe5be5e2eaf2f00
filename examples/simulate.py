"""Plans and simulates a model of 24 equal layers on eight devices of two nodes: no GPU, no Ray, no torch."""

from raypipe.artifacts.plan import make_plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.planning.balance import balanced_cut
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.simulator import simulate

profile = ModelProfile.uniform(24, forward_s=0.010, backward_s=0.020, output_bytes=16_000_000)
cluster = ClusterTopology.uniform(8, devices_per_node=4, latency_s=20e-6, bandwidth_bytes_per_s=12.5e9)
devices = tuple(device.name for device in cluster.devices)
for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
    schedule = build(name, ScheduleRequest(num_devices=8, num_microbatches=32))
    plan = make_plan(
        name="24 layers",
        planner="balanced",
        cut=balanced_cut(profile, schedule.num_stages),
        schedule=schedule,
        profile=profile,
        topology=cluster,
        devices=devices,
        microbatch_size=1,
    )
    trace = simulate(plan)
    print(f"{name:6} {trace.makespan_s:.3f} s per update, bubble {trace.bubble_ratio:5.1%}")
