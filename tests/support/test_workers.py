"""The test machinery itself: what it promises about values, errors and hangs."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.on_ranks import on_ranks
from tests.support.workers import Pool, RankFailure

Workers = Callable[[int], Pool]


def _sum_of_ranks(values: list[float], *, scale: float = 1.0) -> tuple[int, torch.Tensor]:
    summand = torch.tensor([values[dist.get_rank()] * scale])
    dist.all_reduce(summand)
    return dist.get_rank(), summand


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_collective_among_all_ranks(workers: Workers, world_size: int) -> None:
    values = [2.0**rank for rank in range(world_size)]
    results = workers(world_size).run(_sum_of_ranks, values, scale=3.0)
    assert [rank for rank, _ in results] == list(range(world_size))
    for _, total in results:
        assert total.item() == 3.0 * sum(values)


def _process_facts() -> tuple[int, int, str, float]:
    return os.getpid(), torch.get_num_threads(), dist.get_backend(), torch.rand(()).item()


def test_ranks_are_processes_of_one_thread_that_stay(workers: Workers) -> None:
    first = workers(2).run(_process_facts)
    assert len({pid for pid, *_ in first} | {os.getpid()}) == 3
    assert [(threads, backend) for _, threads, backend, _ in first] == [(1, "gloo")] * 2
    assert workers(2).run(_process_facts) == first  # same processes, same seed


def _raise_on_rank_1() -> int:
    if dist.get_rank() == 1:
        raise ValueError("momentum of layer 7")
    return dist.get_rank()


def test_an_exception_on_one_rank_fails_the_test_and_names_the_rank(workers: Workers) -> None:
    workers(2).run(_process_facts)
    before = workers(2).pids
    with pytest.raises(RankFailure) as failure:
        workers(2).run(_raise_on_rank_1)
    text = str(failure.value)
    assert "rank 1 of 2 raised" in text
    assert "ValueError: momentum of layer 7" in text
    assert "_raise_on_rank_1" in text  # the traceback's line
    assert "rank 0 of 2" not in text
    assert workers(2).run(_sum_of_ranks, [1.0, 2.0])[0][1].item() == 3.0
    assert workers(2).pids == before  # in step, so nothing had to be started again


class _MeshError(RuntimeError):
    pass


def _raise_differently() -> int:
    if dist.get_rank() == 0:
        raise _MeshError("zero")
    if dist.get_rank() == 1:

        class LocalError(KeyError):
            pass

        time.sleep(0.2)
        raise LocalError("one")
    return 7


def test_expected_errors_come_back_by_rank(workers: Workers) -> None:
    zero, first, two, three = workers(4).run_expecting_errors(_raise_differently)
    assert (zero.rank, zero.error, zero.message) == (0, _MeshError, "zero")
    assert (first.rank, first.error, first.message) == (1, KeyError, "'one'")
    assert 0.2 <= first.seconds < 5.0
    assert (two.error, two.value, three.error, three.value) == (None, 7, None, 7)
    assert workers(4).run(_sum_of_ranks, [1.0] * 4)[3][1].item() == 4.0


def _wait_for_rank_1_in_vain() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        raise ValueError("before the collective")


def test_ranks_left_waiting_by_an_error_are_ended_and_replaced(workers: Workers) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        workers(2).run(_wait_for_rank_1_in_vain, timeout=60.0)
    assert time.monotonic() - begin < 30.0  # not the whole minute
    text = str(failure.value)
    assert "rank 0 of 2 was still running" in text
    assert "_wait_for_rank_1_in_vain" in text  # where rank 0 hangs
    assert "ValueError: before the collective" in text
    assert workers(2).run(_sum_of_ranks, [1.0, 2.0])[0][1].item() == 3.0


def _sleep_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(3600.0)


def test_a_hang_is_ended_within_its_timeout(workers: Workers) -> None:
    workers(2).run(_process_facts)
    before = workers(2).pids
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2 was still running.*_sleep_on_rank_1"):
        workers(2).run(_sleep_on_rank_1, timeout=1.0)
    assert time.monotonic() - begin < 5.0
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid or -1, 0)


def test_the_ranks_work_again_after_the_hang(workers: Workers) -> None:
    assert workers(2).run(_sum_of_ranks, [1.0, 2.0])[0][1].item() == 3.0


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def _one_collective_too_many() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def _read_no_memory_on_rank_1() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


@pytest.mark.slow
def test_a_rank_that_dies_or_falls_out_of_step_is_reported_and_replaced(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.workers.STEP_SECONDS", 3.0)
    with pytest.raises(RankFailure, match="rank 1 of 2 died: exit code 3"):
        workers(2).run(_die_on_rank_1)
    with pytest.raises(RankFailure, match=r"(?s)died: exit code -11.*Segmentation fault.*_read_no_memory"):
        workers(2).run(_read_no_memory_on_rank_1)
    with pytest.raises(RankFailure, match="different collectives"):
        workers(2).run(_one_collective_too_many)
    assert workers(2).run(_sum_of_ranks, [1.0, 2.0])[0][1].item() == 3.0


def _sharded() -> tuple[DTensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    assert isinstance(tensor, DTensor)
    return tensor, tensor.to_local()


def _local_shard() -> torch.Tensor:
    return _sharded()[1]


def test_tensors_come_back_as_plain_copies_and_dtensors_are_refused(workers: Workers) -> None:
    shards = workers(2).run(_local_shard)
    assert torch.equal(torch.cat(shards), torch.arange(5.0))
    assert [type(shard) for shard in shards] == [torch.Tensor] * 2
    with pytest.raises(RankFailure, match=r"return its \.to_local\(\)"):
        workers(2).run(_sharded)


@pytest.mark.parametrize("number", [3])
@on_ranks(2)
def test_a_body_that_every_rank_runs(number: int, tmp_path: Path) -> None:
    assert (dist.get_world_size(), number) == (2, 3)
    assert tmp_path.is_dir()


@on_ranks(2)
def _bodies_that_differ() -> None:
    assert dist.get_rank() + 5 == 5


def test_an_assert_that_fails_on_a_rank_shows_its_values(workers: Workers) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 2 raised[\s\S]*assert \(1 \+ 5\) == 5"):
        _bodies_that_differ(workers=workers)
