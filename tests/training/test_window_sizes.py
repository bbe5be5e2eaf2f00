"""Where windows end."""

from raypipe.config import DataConfig, ModelConfig, RunConfig, ScheduleConfig, TrainConfig
from raypipe.training.window_sizes import window_size, window_sizes


def config(*, num_updates: int = 20, evaluate_every: int = 0, synchronous_updates: int = 0) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(function="raypipe.models.gpt:gpt"),
        data=DataConfig(path="tokens.parquet"),
        schedule=ScheduleConfig(updates_per_window=8, synchronous_updates=synchronous_updates),
        run=RunConfig(num_updates=num_updates, evaluate_every=evaluate_every),
    )


def windows(config: TrainConfig, first: int = 0) -> list[int]:
    sizes = []
    while first < config.run.num_updates:
        sizes.append(window_size(config, first))
        first += sizes[-1]
    return sizes


def test_a_window_ends_behind_its_updates_an_evaluation_or_the_run() -> None:
    assert windows(config()) == [8, 8, 4]
    assert windows(config(evaluate_every=5)) == [5, 5, 5, 5]
    assert window_sizes(config(), 0) == {4, 8}


def test_each_synchronous_update_has_a_window_of_its_own() -> None:
    assert windows(config(synchronous_updates=3)) == [1, 1, 1, 8, 8, 1]
    assert windows(config(synchronous_updates=3, evaluate_every=5)) == [1, 1, 1, 2, 5, 5, 5]
    assert window_sizes(config(synchronous_updates=3), 0) == {1, 8}


def test_a_run_that_is_resumed_counts_its_synchronous_updates_from_its_first() -> None:
    assert windows(config(synchronous_updates=5), first=3) == [1, 1, 8, 7]
    assert windows(config(synchronous_updates=5), first=5) == [8, 7]


def test_a_run_may_end_before_its_last_synchronous_update() -> None:
    assert windows(config(num_updates=3, synchronous_updates=5)) == [1, 1, 1]
