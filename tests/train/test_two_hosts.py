"""torchrun over two hosts: a wire that delays and loses changes nothing, one that is cut ends both in time."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from muonmesh.tools.cli.checkpoints import checkpoints_of, latest_step
from tests.support import two_levels_worker
from tests.support.kills import begun_like, options
from tests.support.links import Host, two_hosts
from tests.support.runs import COMMAND, copy_texts, losses_of

STEPS = 12
TIMEOUT = 20  # seconds of a collective: beyond what a loaded machine needs for a step
CAUSES = ("did not meet in", "Timed out waiting", "Connection closed", "Connection reset", "does not answer")


def torchrun(hosts: tuple[Host, Host], number: int, per_host: int, *program: str, **how: Any) -> subprocess.Popen[str]:
    """Start the launcher of one of two hosts."""
    host = hosts[number]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_host)]
    command += ["--node-rank", str(number), "--master-addr", hosts[0].address, "--master-port", "29519"]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return host.start(*command, "--local-addr", host.address, *program, env=env, **how)


def start_both(
    hosts: tuple[Host, Host], run: Path, folder: Path, name: str
) -> list[tuple[subprocess.Popen[str], Path]]:
    started = []
    for number in range(2):
        log = folder / f"{name}-{number}.txt"
        with log.open("w") as output:
            program = ("-m", "muonmesh.tools.cli.worker", str(run))
            started.append((torchrun(hosts, number, 1, *program, stdout=output, stderr=output), log))
    return started


@pytest.mark.slow
@pytest.mark.soak
def test_a_wire_that_is_cut_in_a_step_ends_both_hosts_and_the_resumed_run_is_right(tmp_path: Path) -> None:
    """About two minutes."""
    with two_hosts(delay=0.002, loss=0.005) as (first, second, wire):
        text = copy_texts(tmp_path / "text", 12)
        whole, run = tmp_path / "whole", tmp_path / "cut"
        arguments = [*options(whole, text, steps=STEPS, ranks=2), "--timeout", str(TIMEOUT)]
        subprocess.run([*COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL)
        begun_like(whole, run)

        started = start_both((first, second), run, tmp_path, "cut")
        deadline = time.monotonic() + 300
        while (latest_step(checkpoints_of(run, "muon")) or 0) < 3:
            assert all(process.poll() is None for process, _ in started), [log.read_text() for _, log in started]
            assert time.monotonic() < deadline, [log.read_text() for _, log in started]
            time.sleep(0.01)
        second.cut()
        cut = time.monotonic()
        for process, log in started:
            assert process.wait(timeout=300) == 1
            output = log.read_text()
            assert any(cause in output for cause in CAUSES), output
            print(next(line for line in output.splitlines() if any(cause in line for cause in CAUSES)))
        seconds = time.monotonic() - cut
        assert seconds < 5 * TIMEOUT
        assert first.processes() == second.processes() == []
        reached = latest_step(checkpoints_of(run, "muon"))
        assert reached is not None
        assert 3 <= reached < STEPS
        second.mend()

        for process, log in start_both((first, second), run, tmp_path, "resumed"):
            assert process.wait(timeout=300) == 0, log.read_text()
        assert first.processes() == second.processes() == []
        assert losses_of(run) == losses_of(whole), "bit for bit, over a wire that delays and loses"
        assert not (run / "errors").exists()
        assert wire.carried > 1000
        assert wire.lost > 0
        print(f"cut at step {reached}: both ended within {seconds:.1f} s; {wire.carried} packets, {wire.lost} lost")


def stepped_on_hosts(hosts: tuple[Host, Host], folder: Path, machine: int) -> list[dict[str, Any]]:
    """What each of two ranks on each of two hosts writes."""
    file, started = folder / f"{machine}", []
    for number, host in enumerate(hosts):
        program = (two_levels_worker.__file__, str(file), host.interface, str(machine))
        started.append(torchrun(hosts, number, 2, *program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    for process in started:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    return [json.loads(file.with_suffix(f".{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.soak
def test_one_copy_of_the_results_leaves_each_of_two_hosts(tmp_path: Path) -> None:
    """Counted by the kernel at the interfaces, packets and acknowledgements too."""
    with two_hosts() as (first, second, _):
        for host in (first, second):
            host.widen(16000)
        grouped, ungrouped = (stepped_on_hosts((first, second), tmp_path, machine) for machine in (2, 0))
    result = 2 * sum(map(math.prod, two_levels_worker.SHAPES))  # bytes in bf16
    passed, plain = (ranks[0]["left"] + ranks[2]["left"] for ranks in (grouped, ungrouped))
    print(f"left the hosts in a step: {passed:.0f} bytes, {plain:.0f} without passing on; one copy: {result}")
    assert [rank["machine"] for rank in (*grouped, *ungrouped)] == [2] * 4 + [0] * 4
    assert all(rank["weights"] == grouped[0]["weights"] for rank in (*grouped, *ungrouped))
    assert result <= passed <= 1.05 * result
    assert 2 * result <= plain <= 2.1 * result
