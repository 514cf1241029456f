"""Network namespaces as nodes: joined by veth pairs through a bridge, every link shaped in both directions.

A node has its own network, host name, processes, IPC and /dev/shm, so that nothing but the network connects two nodes.
No namespace has a name. The kernel removes a namespace with its last process, and the first process of every namespace
ends with this one, however this one ends: nothing is left behind, and there is nothing to clean up before a run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from benchmarks.rehearsal.links import Counters

INTERFACE = "eth0"
MTU = 1500
BURST = 32 * 1024  # bytes that a shaped link passes at once after a pause
QUEUE = 64 << 20  # bytes that wait at a link: more than TCP has in flight, so that no packet is lost

_PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
_SETTINGS = {
    "ipv4/tcp_congestion_control": "reno",  # others pace packets by estimates of their own
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv6/conf/all/disable_ipv6": "1",  # no router solicitations
}


def missing() -> str | None:
    """What this machine lacks for a rehearsal; None if it has everything."""
    if not sys.platform.startswith("linux"):
        return "Linux is needed"
    absent = {package for name, package in _PROGRAMS.items() if shutil.which(name) is None}
    if absent:
        return f"the programs of {' and '.join(sorted(absent))} are needed"
    if os.geteuid() != 0:
        return "root is needed, to create network namespaces"
    try:
        with Namespace("probe") as probe:
            veth = f"ip link add {INTERFACE} type veth peer name peer"
            probe.configure(veth, "ip link add bridge type bridge", _shape(INTERFACE, 100))
    except RuntimeError as error:
        return f"namespaces with shaped veth links are needed ({' '.join(str(error).split())})"
    return None


def _shape(interface: str, megabits: float) -> str:
    rate = round(megabits * 1e6)
    return f"tc qdisc add dev {interface} root tbf rate {rate}bit burst {BURST} limit {QUEUE}"


class Namespace:
    """The namespaces of one node, or of the switch, with a first process that keeps them."""

    def __init__(self, name: str, hosts: Mapping[str, str] | None = None) -> None:
        lines = "".join(f"{address} {host}\n" for host, address in {"localhost": "127.0.0.1", **(hosts or {})}.items())
        with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file:
            file.write(lines)
            file.flush()
            steps = (
                f"hostname {name}",
                "mount -t tmpfs tmpfs /dev/shm",
                "mount -t tmpfs tmpfs /run",
                f"cp {file.name} /run/hosts",
                "mount --bind /run/hosts /etc/hosts",
                "ip link set lo up",
                "echo ready",
                "exec sleep infinity",
            )
            unshare = [
                "unshare",
                "--net",
                "--mount",
                "--uts",
                "--ipc",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
            ]
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *unshare, "sh", "-c", " && ".join(steps)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends the others
            )  # fmt: skip
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            if self.process.stdout.readline().strip() != "ready":
                self.process.wait()
                raise RuntimeError(self.process.stderr.read() or "unshare failed")
        self.name = name

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def command(self, *words: str) -> list[str]:
        """The command line that runs a command inside."""
        at = f"/proc/{self.process.pid}/ns"
        entered = [f"--{kind}={at}/{kind}" for kind in ("net", "uts", "ipc")]
        entered += [f"--pid={at}/pid_for_children", f"--mount={at}/mnt"]
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", *entered, *words]

    def configure(self, *steps: str) -> str:
        """Run shell commands in this network; other namespaces are known by the pids of their first processes."""
        entered = ["nsenter", f"--net=/proc/{self.process.pid}/ns/net", "sh", "-c", " && ".join(steps)]
        done = subprocess.run(entered, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            raise RuntimeError(f"{done.args[-1]}: {done.stderr.strip()}")
        return done.stdout

    def counters(self) -> Counters:
        """What the link has counted."""
        return Counters.read(INTERFACE, self.configure("cat /proc/net/dev"))

    @property
    def is_running(self) -> bool:
        """Whether its processes may still run."""
        return self.process.poll() is None

    def disconnect(self) -> None:
        """Make the node unreachable: its processes go on."""
        self.configure(f"ip link set {INTERFACE} down")

    def end(self) -> None:
        """Kill everything inside."""
        self.process.kill()
        self.process.communicate()


class Nodes:
    """Some nodes on one switch; `megabits` per second is the speed of each node's link, in each direction."""

    def __init__(self, count: int, megabits: float) -> None:
        self.megabits = megabits
        self.nodes: list[Namespace] = []
        self._stack = ExitStack()
        try:
            self._build(count)
        except BaseException:
            self._stack.close()
            raise

    def _build(self, count: int) -> None:
        addresses = {f"node{i}": f"10.77.0.{i + 1}" for i in range(count)}
        # One packet per segment, so that interfaces count packets as they would be on a wire.
        usual = f"mtu {MTU} gso_max_segs 1 up"
        switch = self._stack.enter_context(Namespace("switch"))
        switch.configure("ip link add bridge type bridge", "ip link set bridge up")
        for name, address in addresses.items():
            node = self._stack.enter_context(Namespace(name, addresses))
            port = f"to-{name}"
            switch.configure(
                f"ip link add {port} type veth peer name {INTERFACE} netns {node.process.pid}",
                f"ip link set {port} master bridge {usual}",
                _shape(port, self.megabits),
            )
            node.configure(
                *(f"(echo {value} > /proc/sys/net/{key} || true) 2> /dev/null" for key, value in _SETTINGS.items()),
                f"ip addr add {address}/24 dev {INTERFACE}",
                f"ip link set {INTERFACE} {usual}",
                _shape(INTERFACE, self.megabits),
            )
            self.nodes.append(node)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def torchrun(self, ranks_per_node: int, words: Sequence[str], logs: Path) -> list[subprocess.Popen[bytes]]:
        """Start a command on every node under torchrun; the output of node i goes to the file `node{i}` in `logs`."""
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self.nodes))]
        agent += ["--nproc-per-node", str(ranks_per_node), "--rdzv-backend", "c10d", "--rdzv-id", "rehearsal"]
        agent += ["--rdzv-endpoint", "node0:29400", *words]
        agents = []
        for node in self.nodes:
            command = node.command(*agent)
            with (logs / node.name).open("wb") as log:
                started = subprocess.Popen(
                    command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
            agents.append(started)
        return agents
