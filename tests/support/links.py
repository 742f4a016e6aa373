"""Links: two hosts on one machine, each a network namespace, and a wire between them that delays, loses and is cut.

The wire is a pair of TUN devices, one in each namespace: what one host sends is read here and written to the other.
So the kernel needs no queueing discipline for it (`netem` is missing in many), only the right to make namespaces.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
ADDRESSES = ("10.77.19.1", "10.77.19.2")


@dataclass(frozen=True)
class Host:
    """A namespace with its own loopback and one interface.

    Attributes:
        name: Of the namespace.
        address: By which the other host finds it.
        interface: What it has there.
    """

    name: str
    address: str
    interface: str

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a program there."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], text=True, **options)

    def processes(self) -> list[int]:
        """Those that are there."""
        listing = subprocess.run(["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True)
        return [int(pid) for pid in listing.stdout.split()]

    def cut(self) -> None:
        """Take its interface down."""
        _ip("netns", "exec", self.name, "ip", "link", "set", self.interface, "down")

    def widen(self, size: int) -> None:
        """Let its interface send packets of so many bytes."""
        _ip("netns", "exec", self.name, "ip", "link", "set", self.interface, "mtu", str(size))

    def mend(self) -> None:
        """Take it up again."""
        _ip("netns", "exec", self.name, "ip", "link", "set", self.interface, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Wire:
    """Carries packets between two devices until it is closed.

    Args:
        ends: File descriptors of the devices.
        delay: Seconds that a packet takes, each way.
        loss: The part of the packets that never arrives.
    """

    def __init__(self, ends: tuple[int, int], *, delay: float, loss: float) -> None:
        self.ends, self.delay, self.loss = ends, delay, loss
        self.carried = self.lost = 0
        self._chance = random.Random(0)
        self._closing, self._close = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._close)
        self._thread.join()
        for end in (*self.ends, self._closing):
            os.close(end)

    def _carry(self) -> None:
        number = itertools.count()
        under_way: list[tuple[float, int, int, bytes]] = []
        while True:
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready = select.select([*self.ends, self._closing], [], [], wait)[0]
            if self._closing in ready:
                return
            for end in ready:
                try:
                    packet = os.read(end, 65536)
                except OSError:  # of an interface that is down
                    time.sleep(0.001)
                    continue
                if self._chance.random() < self.loss:
                    self.lost += 1
                    continue
                other = self.ends[1 - self.ends.index(end)]
                heapq.heappush(under_way, (time.monotonic() + self.delay, next(number), other, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(under_way)
                try:
                    os.write(end, packet)
                    self.carried += 1
                except OSError:  # likewise: it is lost
                    self.lost += 1


@contextmanager
def two_hosts(*, delay: float = 0.0, loss: float = 0.0) -> Iterator[tuple[Host, Host, Wire]]:
    """Two hosts and the wire between them; a test is skipped where they are not permitted, and says why."""
    hosts = [Host(f"muonmesh-{os.getpid()}-{at}", ADDRESSES[at], f"mm{os.getpid()}-{at}") for at in range(2)]
    opened: list[Host] = []
    ends: list[int] = []
    wire: Wire | None = None
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
                opened.append(host)
                end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                ends.append(end)
                fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", host.interface.encode(), IFF_TUN | IFF_NO_PI))
                _ip("link", "set", host.interface, "netns", host.name)
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
                for name in ("lo", host.interface):
                    _ip("-n", host.name, "link", "set", name, "up")
        except FileNotFoundError as error:
            pytest.skip(f"two hosts need {error.filename}, which is not here")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
            pytest.skip(f"network namespaces and TUN devices are not permitted here: {reason}")
        wire = Wire((ends[0], ends[1]), delay=delay, loss=loss)
        yield hosts[0], hosts[1], wire
    finally:
        for host in opened:
            for pid in host.processes():
                os.kill(pid, 9)
        if wire is not None:
            wire.close()
        else:
            for end in ends:
                os.close(end)
        for host in opened:
            subprocess.run(["ip", "netns", "del", host.name], check=True)
