"""torchrun over two hosts: a wire that delays and loses changes nothing, one that is cut ends both in time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muonmesh.cli.checkpoints import checkpoints_of, latest_step
from tests.kills import COMMAND, begun_like, learn_from, losses, options
from tests.links import Host, two_hosts

STEPS = 12
TIMEOUT = 20  # seconds of a collective: beyond what a loaded machine needs for a step
CAUSES = ("did not meet in", "Timed out waiting", "Connection closed", "Connection reset", "does not answer")


def torchrun(host: Host, number: int, first: Host, run: Path, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--node-rank", str(number), "--master-addr", first.address, "--master-port", "29519"]
    command += ["--local-addr", host.address, "-m", "muonmesh.cli.worker", str(run)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": host.interface, "MUONMESH_TIMEOUT": str(TIMEOUT)}
    with log.open("w") as output:
        return host.start(*command, env=env, stdout=output, stderr=output)


def both(hosts: tuple[Host, Host], run: Path, folder: Path, name: str) -> list[tuple[subprocess.Popen[str], Path]]:
    logs = [folder / f"{name}-{number}.txt" for number in range(2)]
    return [(torchrun(host, n, hosts[0], run, log), log) for n, (host, log) in enumerate(zip(hosts, logs, strict=True))]


@pytest.mark.slow
@pytest.mark.soak
def test_a_wire_that_is_cut_in_a_step_ends_both_hosts_and_the_resumed_run_is_right(tmp_path: Path) -> None:
    """About two minutes."""
    with two_hosts(delay=0.002, loss=0.005) as (one, other, wire):
        text = learn_from(tmp_path)
        whole, run = tmp_path / "whole", tmp_path / "cut"
        subprocess.run([*COMMAND, *options(whole, text, steps=STEPS, ranks=2)], check=True, stdout=subprocess.DEVNULL)
        begun_like(whole, run)

        started = both((one, other), run, tmp_path, "cut")
        deadline = time.monotonic() + 300
        while (latest_step(checkpoints_of(run, "muon")) or 0) < 3:
            assert all(process.poll() is None for process, _ in started), [log.read_text() for _, log in started]
            assert time.monotonic() < deadline, [log.read_text() for _, log in started]
            time.sleep(0.01)
        other.cut()
        cut = time.monotonic()
        for process, log in started:
            assert process.wait(timeout=300) == 1
            told = log.read_text()
            assert any(cause in told for cause in CAUSES), told
            print(next(line for line in told.splitlines() if any(cause in line for cause in CAUSES)))
        seconds = time.monotonic() - cut
        assert seconds < 5 * TIMEOUT
        assert one.processes() == other.processes() == []
        reached = latest_step(checkpoints_of(run, "muon"))
        assert reached is not None
        assert 3 <= reached < STEPS
        other.mend()

        for process, log in both((one, other), run, tmp_path, "resumed"):
            assert process.wait(timeout=300) == 0, log.read_text()
        assert one.processes() == other.processes() == []
        assert losses(run) == losses(whole), "bit for bit, over a wire that delays and loses"
        assert not (run / "errors").exists()
        assert wire.carried > 1000
        assert wire.lost > 0
        print(f"cut at step {reached}: both ended within {seconds:.1f} s; {wire.carried} packets, {wire.lost} lost")
