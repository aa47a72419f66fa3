"""Two machines in one for tests: network namespaces joined by a link that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "link0"


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``ip`` of iproute2."""
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)


def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if shutil.which("ip") is None:
        return "no ip (package iproute2)"
    name = f"probe-{os.getpid()}"
    made = ip("netns", "add", name)
    ip("netns", "del", name)
    return None if made.returncode == 0 else f"ip netns add: {made.stderr.strip()}"


@dataclass(frozen=True)
class Machine:
    """One of the two machines."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """``words`` as a command that runs on this machine."""
        return ["ip", "netns", "exec", self.name, *words]


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Create both and join them; afterwards remove them and all that still runs there."""
    machines = tuple(Machine(f"yolo-{os.getpid()}-{n}", address) for n, address in enumerate(ADDRESSES))
    first, second = machines
    try:
        for machine in machines:
            must("netns", "add", machine.name)
        must("link", "add", INTERFACE, "netns", first.name, "type", "veth", "peer", INTERFACE, "netns", second.name)
        for machine in machines:
            must("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", INTERFACE)
            must("-n", machine.name, "link", "set", INTERFACE, "up")
            must("-n", machine.name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for machine in machines:
            for process in ip("netns", "pids", machine.name).stdout.split():
                subprocess.run(["kill", "-9", process], check=False)
            ip("netns", "del", machine.name)


def must(*arguments: str) -> None:
    """Run ``ip``, which must succeed."""
    done = ip(*arguments)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def cut(machine: Machine) -> None:
    """Cut the link: from now on nothing arrives on either side, and neither is notified."""
    must("-n", machine.name, "link", "set", INTERFACE, "down")
