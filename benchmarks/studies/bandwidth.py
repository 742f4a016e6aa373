"""Bandwidth: hosts on one machine, each with an interface of a given bandwidth.

On the loopback device a transfer is copying, done by the cores that should compute meanwhile. Between machines it is
the network that works, and the cores hardly do. So each rank gets a network namespace with a virtual Ethernet device
whose sending end lets a given number of bits through a second (the kernel's token bucket filter, `tbf`), and all are
plugged into one switch (a bridge). That needs Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LOOPBACK = "lo"
SETTINGS = ("net.ipv4.tcp_slow_start_after_idle=0", "net.ipv4.tcp_wmem=4096 65536 262144")
"""Full speed from the first packet of a step on, and no more data waiting at the device than it sends in milliseconds:
behind megabytes the other direction's acknowledgements would wait too."""


@dataclass(frozen=True)
class Host:
    """Where a rank runs.

    Attributes:
        address: By which the others find it.
        interface: What it has there.
        prefix: Put before a command to run it there.
    """

    address: str
    interface: str
    prefix: tuple[str, ...] = ()


@contextmanager
def hosts(count: int, megabits: float | None) -> Iterator[list[Host]]:
    """Hosts that send at most so many megabits a second each; None: all on the loopback device.

    Raises:
        RuntimeError: the machine does not permit it.
    """
    if megabits is None:
        yield [Host("127.0.0.1", LOOPBACK)] * count
        return
    names = [f"muonmesh-bench-{os.getpid()}-{number}" for number in range(count + 1)]
    switch, *others = names
    namespaces: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            namespaces.append(name)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        machines = []
        for number, name in enumerate(others):
            port, address = f"port{number}", f"10.78.23.{number + 1}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "wire", "netns", name)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            for device in (LOOPBACK, "wire"):
                _ip("-n", name, "link", "set", device, "up")
            for setting in SETTINGS:
                _run("ip", "netns", "exec", name, "sysctl", "-qw", setting)
            limit = ("tbf", "rate", f"{megabits}mbit", "burst", "128kb", "latency", "10s")
            _run("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", *limit)
            machines.append(Host(address, "wire", ("ip", "netns", "exec", name)))
        yield machines
    finally:
        for name in namespaces:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(f"links of a given bandwidth need {command[0]!r}, which is not here") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"links of a given bandwidth: {' '.join(command)}: {error.stderr.strip()}") from error
