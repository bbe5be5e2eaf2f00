"""The backend of `ray.util.collective`, with another library in the place of cupy's NCCL: that Ray's calls arrive there as they should."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("local_ray")]


class Member:
    """An actor that meets others in a group, with cupy and CUDA replaced in its process."""

    def __init__(self, rank: int, world_size: int, group: str) -> None:
        import ray.util.collective as of_ray

        from raypipe.actors.transport import ray_backend
        from tests.processes.fake_cupy import FakeCuda

        self.library = FakeCuda()
        vars(ray_backend).update(_library=lambda: self.library, nccl_version=lambda: "2.32.3")
        ray_backend.register()
        ray_backend.register()
        of_ray.init_collective_group(world_size, rank, backend=ray_backend.NAME, group_name=group)
        self.group = group

    def calls(self) -> list[tuple[object, ...]]:
        """What the group asked of NCCL, with numbers in place of addresses."""
        import ray.util.collective as of_ray
        import torch
        from ray.util.collective.types import ReduceOp

        ones = torch.ones(4)
        of_ray.allreduce(ones, self.group, ReduceOp.MAX)
        of_ray.broadcast(ones.to(torch.bfloat16), 1, self.group)
        of_ray.reduce(ones, 1, self.group)
        of_ray.allgather([torch.zeros(4), torch.zeros(4)], ones, self.group)
        of_ray.reducescatter(torch.zeros(2), [torch.ones(2), torch.ones(2)], self.group)
        if of_ray.get_rank(self.group) == 0:
            of_ray.send(torch.ones(3, dtype=torch.int64), 1, self.group)
        else:
            of_ray.recv(torch.ones(3, dtype=torch.int64), 0, self.group)
        found: list[tuple[object, ...]] = self.library.nccl.calls
        return found

    def identity(self) -> bytes:
        """The id by which the communicator was made."""
        made: bytes = self.library.nccl.unique_id
        return made

    def leave(self) -> bool:
        """Ends the group; whether its communicator has ended."""
        import ray.util.collective as of_ray

        of_ray.destroy_collective_group(self.group)
        ended: bool = self.library.nccl.destroyed
        return ended


def test_members_meet_and_their_calls_reach_nccl() -> None:
    import ray

    actor = ray.remote(num_cpus=0)(Member)
    members = [actor.remote(rank, 2, "pair") for rank in range(2)]
    first, second = ray.get([member.identity.remote() for member in members], timeout=120)
    assert first == second
    calls = ray.get([member.calls.remote() for member in members], timeout=120)
    common = [
        ("allReduce", 4, "NCCL_FLOAT32", "NCCL_MAX", "stream"),
        ("broadcast", 4, "NCCL_BFLOAT16", 1, "stream"),
        ("reduce", 4, "NCCL_FLOAT32", "NCCL_SUM", 1, "stream"),
        ("allGather", 4, "NCCL_FLOAT32", "stream"),
        ("reduceScatter", 2, "NCCL_FLOAT32", "NCCL_SUM", "stream"),
    ]
    assert calls[0] == [*common, ("send", 3, "NCCL_INT64", 1, "stream")]
    assert calls[1] == [*common, ("recv", 3, "NCCL_INT64", 0, "stream")]
    assert ray.get([member.leave.remote() for member in members], timeout=120) == [True, True]
    for member in members:
        ray.kill(member)
