"""Plan and simulate a model of 24 equal layers on two nodes of four devices: no GPU, no Ray, no torch."""

import raypipe

profile = raypipe.ModelProfile.uniform(24, forward_s=0.010, backward_s=0.020, output_bytes=16_000_000)
cluster = raypipe.ClusterTopology.uniform(8, devices_per_node=4, latency_s=20e-6, bandwidth_bytes_per_s=12.5e9)
for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
    plan = raypipe.plan(profile, cluster, num_microbatches=32, schedule=schedule, effort=0.1)
    trace = raypipe.simulate(plan)
    print(f"{schedule:6} {trace.makespan_s:.3f} s per update, bubble {trace.bubble_ratio:5.1%}")
