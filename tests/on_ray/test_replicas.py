"""Plans on Ray actors: workers of several devices, unequal shares, orders from files; held against the unsplit model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.artifacts.plan import Plan
from raypipe.config import ClusterConfig, DataConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig, Transport
from raypipe.data.prepare import prepare
from raypipe.data.tokens import TokenDataset
from raypipe.errors import ConfigError, PlanError
from raypipe.models.gpt import gpt
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule
from raypipe.schedules.passes import recompute
from raypipe.schedules.request import ScheduleRequest
from raypipe.training.trainer import Trainer
from tests.actors.oracles import NUM_ROWS, RandomRows, Trained, train_unsplit
from tests.on_ray.plans import in_turn, lab, plan_of, profile_of, this_node
from tests.schedules.handwritten import divided, pipedream_2bw

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("shared_actors")]

NUM_LAYERS = 6
NUM_UPDATES = 10
NUM_MICROBATCHES = 4
RATE = 1e-2
NORM = 0.5
HALVES, THIRDS = (0.5, 0.5), (1 / 3, 1 / 6, 1 / 2)


def rows(split: str) -> RandomRows:
    assert split in {"train", "validation"}
    return RandomRows()


def small_plan(shares: Sequence[Sequence[float]], schedule: Schedule, *, microbatch_size: int = NUM_ROWS) -> Plan:
    node = this_node()
    profile = profile_of(mlp(num_layers=NUM_LAYERS, dtype="float64"), RandomRows().batch(0, (0.0, 1.0)))
    small, larger = divmod(NUM_LAYERS, schedule.num_stages)
    sizes = [small + (stage < larger) for stage in range(schedule.num_stages)]
    num_devices = sum(map(len, shares))
    return plan_of(profile, lab({node: num_devices}), schedule, in_turn(node, shares), sizes=sizes, microbatch_size=microbatch_size)


def trainer(folder: Path, plan: Plan, *, num_updates: int = NUM_UPDATES, transport: Transport = Transport.AUTO, **other: object) -> Trainer:
    folder.mkdir(exist_ok=True)
    plan.save(folder / "plan.json")
    return Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": NUM_LAYERS, "dtype": "float64"} | dict(other),
        batches=rows,
        schedule_config=ScheduleConfig(updates_per_window=3),
        optimizer_config=OptimizerConfig(
            learning_rate=RATE, final_learning_rate=RATE, warmup_updates=0, beta2=0.999, weight_decay=0.01, max_grad_norm=NORM
        ),
        scaling_config=ScalingConfig(transport=transport),
        cluster_config=ClusterConfig(message_timeout_s=60.0),
        run_config=RunConfig(name="test", storage_path=str(folder / "runs"), num_updates=num_updates),
        plan=str(folder / "plan.json"),
    )


@pytest.fixture(scope="module")
def unsplit() -> Trained:
    torch.set_num_threads(1)
    return train_unsplit(
        mlp(num_layers=NUM_LAYERS, dtype="float64"),
        RandomRows(),
        num_updates=NUM_UPDATES,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=RATE,
        max_grad_norm=NORM,
        decay_matrices_only=0.01,
    )


def check_weights(checkpoint: Checkpoint, unsplit: Trained) -> None:
    for index, weights in enumerate(unsplit.layers):
        saved = checkpoint.load_layer(index)
        assert torch.allclose(saved["linear.weight"], weights[0], rtol=0, atol=1e-10)
        assert torch.allclose(saved["linear.bias"], weights[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("transport", [Transport.SHM, Transport.GLOO])
def test_replicas_that_work_on_parts_of_a_whole_loss_equal_the_unsplit_model(
    tmp_path: Path, unsplit: Trained, transport: Transport
) -> None:
    schedule = recompute(divided(build("zb-h1", ScheduleRequest(2, NUM_MICROBATCHES)), {0: 3}), (0,))
    result = trainer(tmp_path, small_plan((HALVES, (1.0,)), schedule), transport=transport).fit()
    assert result.losses == pytest.approx(unsplit.losses, abs=1e-10)
    check_weights(result.checkpoint, unsplit)


@pytest.mark.parametrize(
    ("name", "shares", "transport"),
    [
        pytest.param("1f1b", (HALVES, THIRDS), Transport.SHM, id="2-to-3-through-shared-memory"),
        pytest.param("1f1b", (HALVES, THIRDS), Transport.GLOO, id="2-to-3-over-gloo"),
        pytest.param("1f1b", (THIRDS, (1.0,)), Transport.SHM, id="3-to-1-through-shared-memory"),
        pytest.param("zb-h1", ((1.0,), (2 / 3, 1 / 3), (1.0,)), Transport.GLOO, id="1-to-2-to-1-over-gloo"),
        pytest.param("gpipe", (HALVES,), Transport.SHM, id="one-stage-of-two-devices"),
        pytest.param("1f1b", (HALVES, THIRDS), Transport.TCP, id="2-to-3-with-sums-over-tcp"),
        pytest.param("list", (HALVES, (1.0,)), Transport.SHM, id="the-list-order"),
    ],
)
def test_replicated_workers_equal_the_unsplit_model(
    tmp_path: Path, unsplit: Trained, name: str, shares: tuple[tuple[float, ...], ...], transport: Transport
) -> None:
    schedule = build(name, ScheduleRequest(len(shares), NUM_MICROBATCHES))
    result = trainer(tmp_path, small_plan(shares, schedule), transport=transport).fit()
    assert result.losses == pytest.approx(unsplit.losses, abs=1e-10)
    check_weights(result.checkpoint, unsplit)
    files = sorted(path.name for path in Path(result.checkpoint.path).iterdir())
    assert files == ["checkpoint.json", *(f"layer-{index:04d}-layer-{index}.safetensors" for index in range(NUM_LAYERS))]
    assert [figure.name for figure in result.figures[:2]] == ["update time", "bubble"]
    assert result.plan.devices == tuple(f"{this_node()}/{number}" for number in range(sum(map(len, shares))))


@pytest.mark.parametrize(("name", "replicas"), [("1f1b", 2), ("pipedream-2bw", 2), ("amdp-auto", 2)])
def test_a_schedule_by_name_takes_replicas(tmp_path: Path, unsplit: Trained, name: str, replicas: int) -> None:
    result = Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": NUM_LAYERS, "dtype": "float64"},
        batches=rows,
        schedule_config=ScheduleConfig(name=name, updates_per_window=5, num_microbatches=NUM_MICROBATCHES, microbatch_size=NUM_ROWS),
        optimizer_config=OptimizerConfig(
            learning_rate=RATE, final_learning_rate=RATE, warmup_updates=0, beta2=0.999, weight_decay=0.01, max_grad_norm=NORM
        ),
        scaling_config=ScalingConfig(num_devices=4, replicas=replicas),
        run_config=RunConfig(name="test", storage_path=str(tmp_path / "runs"), num_updates=NUM_UPDATES),
    ).fit()
    assert [[replica.share for replica in worker] for worker in result.plan.workers] == [[0.5, 0.5]] * 2
    node = this_node()
    assert [[replica.device for replica in worker] for worker in result.plan.workers] == [
        [f"{node}/0", f"{node}/1"],
        [f"{node}/2", f"{node}/3"],
    ]
    if name == "1f1b":
        assert result.losses == pytest.approx(unsplit.losses, abs=1e-10)
        check_weights(result.checkpoint, unsplit)
    else:  # late gradients
        assert result.losses[0] == pytest.approx(unsplit.losses[0], abs=1e-10)
        assert result.losses[-1] < result.losses[0]


def test_replicas_that_run_forwards_again_equal_the_unsplit_model(tmp_path: Path, unsplit: Trained) -> None:
    schedule = recompute(build("zb-h1", ScheduleRequest(2, NUM_MICROBATCHES)), (0, 1))
    result = trainer(tmp_path, small_plan((HALVES, THIRDS), schedule)).fit()
    assert result.losses == pytest.approx(unsplit.losses, abs=1e-10)
    check_weights(result.checkpoint, unsplit)


def test_a_run_goes_on_from_one_plan_with_another(tmp_path: Path, unsplit: Trained) -> None:
    first = trainer(tmp_path, small_plan((HALVES, THIRDS), build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES))), num_updates=4).fit()
    other = small_plan(((1.0,), (1.0,), HALVES), build("zb-h1", ScheduleRequest(3, NUM_MICROBATCHES)))
    second = trainer(tmp_path, other).fit(resume=True)
    assert second.path == first.path
    assert first.losses + second.losses == pytest.approx(unsplit.losses, abs=1e-10)
    check_weights(second.checkpoint, unsplit)


def test_the_evaluation_of_replicas_weighs_their_rows(tmp_path: Path) -> None:
    losses = []
    for name, shares in (("one", ((1.0,),)), ("several", ((1 / 6, 5 / 6), (1 / 3, 2 / 3)))):
        plan = small_plan(shares, build("1f1b", ScheduleRequest(len(shares), NUM_MICROBATCHES)))
        losses.append(trainer(tmp_path / name, plan, num_updates=2).fit().validation_losses)
    assert [update for update, _ in losses[0]] == [0, 2]
    assert [loss for _, loss in losses[1]] == pytest.approx([loss for _, loss in losses[0]], abs=1e-12)


def test_what_a_run_was_given_is_what_its_plan_says(tmp_path: Path) -> None:
    plan = small_plan((HALVES, (1.0,)), build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES)))
    run = trainer(tmp_path, plan)
    assert run.config.schedule.microbatch_size == NUM_ROWS
    assert run.config.schedule.num_microbatches == NUM_MICROBATCHES
    assert run.config.scaling.num_devices == 3


def test_layers_can_be_measured_again_without_changing_the_plan(tmp_path: Path) -> None:
    plan = small_plan(((1.0,), (1.0,)), build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES)))
    run = trainer(tmp_path, plan, num_updates=3)
    run.config = dataclasses.replace(run.config, scaling=dataclasses.replace(run.config.scaling, measure_layers=True))
    result = run.fit()
    assert result.plan.profile != plan.profile
    assert result.plan.stages == plan.stages
    assert Plan.load(Path(result.path) / "plan.json").profile == result.plan.profile


# Refusals


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("name", "zb-h1", "schedule.name is zb-h1, the plan .* has 1f1b"),
        ("num_microbatches", 3, "schedule.num_microbatches is 3, the plan .* has 4"),
        ("microbatch_size", 5, "schedule.microbatch_size is 5, the plan .* has 6"),
        ("num_chunks", 2, "schedule.num_chunks is 2, the plan .* decides that"),
    ],
)
def test_a_schedule_of_the_configuration_that_is_not_the_plans_is_refused(tmp_path: Path, key: str, value: object, problem: str) -> None:
    plan = small_plan(((1.0,), (1.0,)), build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES)))
    plan.save(tmp_path / "plan.json")
    config = dataclasses.replace(ScheduleConfig(), **{key: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=problem):
        Trainer("raypipe.models.mlp:mlp", batches=rows, schedule_config=config, plan=str(tmp_path / "plan.json"))


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("num_devices", 3, "scaling.num_devices is 3, the plan .* has 2"),
        ("layers_per_stage", (2, 4), r"scaling.layers_per_stage is \(2, 4\), the plan .* decides that"),
        ("topology", "lab.yaml", "scaling.topology is lab.yaml, the plan .* decides that"),
    ],
)
def test_a_scale_of_the_configuration_that_is_not_the_plans_is_refused(tmp_path: Path, key: str, value: object, problem: str) -> None:
    plan = small_plan(((1.0,), (1.0,)), build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES)))
    plan.save(tmp_path / "plan.json")
    config = dataclasses.replace(ScalingConfig(), **{key: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=problem):
        Trainer("raypipe.models.mlp:mlp", batches=rows, scaling_config=config, plan=str(tmp_path / "plan.json"))


def test_a_plan_for_another_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    plan = small_plan(((1.0,), (1.0,)), build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES)))
    with pytest.raises(PlanError, match="the model has 7 layers, the plan's profile 6: it is a plan for another model"):
        trainer(tmp_path, plan, num_layers=7).fit()
    renamed = dataclasses.replace(
        plan.profile, layers=(*plan.profile.layers[:-1], dataclasses.replace(plan.profile.layers[-1], name="head"))
    )
    stages = (*plan.stages[:-1], (*plan.stages[-1][:-1], "head"))
    other = dataclasses.replace(plan, profile=renamed, stages=stages, profile_digest=renamed.digest)
    with pytest.raises(PlanError, match="layer 5 of the model is 'layer-5', that of the plan's profile 'head'"):
        trainer(tmp_path, other).fit()
    assert not (tmp_path / "runs").exists()


def test_weights_of_another_size_than_profiled_are_refused(tmp_path: Path) -> None:
    plan = small_plan(((1.0,), (1.0,)), build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES)))
    with pytest.raises(PlanError, match="layer 'layer-0' has 1088 bytes of weights, the plan's profile says 2176"):
        trainer(tmp_path, plan, dtype="float32").fit()


def test_shares_that_are_no_whole_rows_are_refused_with_shares_that_would_work(tmp_path: Path) -> None:
    plan = small_plan(((0.4, 0.6), (1.0,)), build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES)))
    with pytest.raises(PlanError, match=r"worker 0: the shares 0\.4, 0\.6 of 6 rows .* the nearest that work: 2/6, 4/6"):
        trainer(tmp_path, plan).fit()


def test_a_plan_for_gpus_is_not_trained_on_cpus(tmp_path: Path) -> None:
    plan = small_plan(((1.0,), (1.0,)), build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES)))
    node = plan.topology.nodes[0]
    gpus = dataclasses.replace(node, devices=tuple(dataclasses.replace(device, kind="h200") for device in node.devices))
    topology = dataclasses.replace(plan.topology, nodes=(gpus,))
    with pytest.raises(PlanError, match=r"is GPU \(kind 'h200'\) number 1 of its node, node .* has 0"):
        trainer(tmp_path, dataclasses.replace(plan, topology=topology, topology_digest=topology.digest)).fit()


def test_an_order_of_several_updates_runs_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    plan = small_plan(((1.0,),) * 3, pipedream_2bw(3, NUM_MICROBATCHES, 5))
    with pytest.raises(ConfigError, match="is of 5 updates, which run as a whole, not in a window of 2"):
        trainer_of_several(tmp_path, plan, num_updates=7).fit()
    assert len(trainer_of_several(tmp_path, plan, num_updates=10).fit().losses) == 10
    assert len(trainer_of_several(tmp_path, plan, num_updates=7, synchronous_updates=2).fit().losses) == 7


def trainer_of_several(folder: Path, plan: Plan, *, num_updates: int, synchronous_updates: int = 0) -> Trainer:
    plan.save(folder / "plan.json")
    return Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": NUM_LAYERS, "dtype": "float64"},
        batches=rows,
        schedule_config=ScheduleConfig(synchronous_updates=synchronous_updates),
        run_config=RunConfig(name="several", storage_path=str(folder / "runs"), num_updates=num_updates),
        plan=str(folder / "plan.json"),
    )


# A model of text


def test_the_gpt_with_replicated_stages_gives_the_losses_and_the_text_of_one_process(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.mkdir()
    for number in range(40):
        (source / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    tokens = tmp_path / "tokens.parquet"
    prepare(str(source), output=tokens, validation_fraction=0.2)
    options = {"num_layers": 2, "d_model": 64, "sequence_length": 64}
    read = torch.from_numpy(TokenDataset(str(tokens), sequence_length=64, seed=0, split="train").rows(0, 4))
    profile = profile_of(gpt(**options), {"tokens": read[:, :-1].contiguous(), "targets": read[:, 1:].contiguous()})  # type: ignore[arg-type]
    node = this_node()
    runs = []
    for name, shares, sizes in (("one", ((1.0,),), (4,)), ("several", ((0.25, 0.75), (0.5, 0.25, 0.25)), (2, 2))):
        plan = plan_of(
            profile,
            lab({node: 5}),
            build("1f1b", ScheduleRequest(len(shares), 2)),
            in_turn(node, shares),
            sizes=sizes,
            microbatch_size=4,
        )
        plan.save(tmp_path / f"{name}.json")
        runs.append(
            Trainer(
                "raypipe.models.gpt:gpt",
                model_options=options,
                data_config=DataConfig(path=str(tokens), sequence_length=64, num_validation_microbatches=2),
                schedule_config=ScheduleConfig(updates_per_window=2),
                run_config=RunConfig(name=name, storage_path=str(tmp_path / "runs"), num_updates=4, sample_bytes=4, sample_prompt="the "),
                plan=str(tmp_path / f"{name}.json"),
            ).fit()
        )
    one, several = runs
    assert several.losses == pytest.approx(one.losses, abs=1e-4)
    assert [loss for _, loss in several.validation_losses] == pytest.approx([loss for _, loss in one.validation_losses], abs=1e-4)
    assert several.sample == one.sample
