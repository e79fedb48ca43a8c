# SPDX-License-Identifier: Apache-2.0
"""One run of a comparison: starts `lockstep train`, watches it and ends it. Its ranks may be hosts of their own."""

import json
import os
import re
import socket
import subprocess
import time

from common import COMMAND, SystemError
from metrics import metrics_in

TICK = 0.05  # seconds
BETWEEN_SAMPLES = 0.5, 10  # of memory: least and most
SAMPLING = 0.005  # of a core: to look at all pages of a large process takes long


# ---- Networks


class Namespace:
    """A network with interfaces of its own, which goes with the process that holds it; that one goes with this
    program's end of a pipe."""

    def __init__(self):
        self.holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo made; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if not self.holder.stdout.readline():
            raise SystemError(
                f"no network namespace can be made: {self.holder.stderr.read().strip()}",
                next="run it as root, or as the root of a user namespace: unshare --user --map-root-user lockstep …",
            )
        self.path = f"/proc/{self.holder.pid}/ns/net"

    def command(self, *words):
        return ["nsenter", f"--net={self.path}", *words]

    def shell(self, script):
        done = subprocess.run(self.command("sh", "-e", "-c", script), capture_output=True, text=True)
        if done.returncode:
            raise SystemError(f"setting up a network failed (ip and tc, of Debian's iproute2): {done.stderr.strip()}")
        return done.stdout

    def bytes_sent(self, device):
        """Frames with their headers, as the shaping counts them."""
        return json.loads(self.shell(f"tc -s -j qdisc show dev {device}"))[0]["bytes"]

    def end(self):
        self.holder.kill()
        self.holder.wait()


class Network:
    """Hosts with one link each to a switch, both of whose ends let through so many megabits a second, so that it is
    full duplex. A token bucket that holds a millisecond of data bridges the time until its timer runs; 2 MB is
    about what a switch has for a port."""

    def __init__(self, hosts, megabits):
        rate = int(megabits * 1e6)
        shape = f"tc qdisc add dev {{}} root tbf rate {rate}bit burst {max(4000, rate // 8000)} limit 2000000"
        self.switch, self.hosts = Namespace(), []
        self.switch.shell("ip link add bridge type bridge; ip link set bridge up")
        for i in range(hosts):
            host = Namespace()
            self.hosts.append(host)
            self.switch.shell(
                f"ip link add port{i} type veth peer name eth0 netns {host.path}\n"
                f"ip link set port{i} master bridge up\n" + shape.format(f"port{i}")
            )
            host.shell(
                f"ip link set lo up; ip address add {self.address(i)}/16 dev eth0; ip link set eth0 up; "
                + shape.format("eth0")
            )

    @staticmethod
    def address(host):
        return f"10.77.0.{host + 1}"

    def bytes(self):
        """[(sent, received)] of each host's link"""
        return [(host.bytes_sent("eth0"), self.switch.bytes_sent(f"port{i}")) for i, host in enumerate(self.hosts)]

    def end(self):
        for each in (self.switch, *self.hosts):
            each.end()


def can_shape_links(megabits):
    """Returns why they can't be; None: they can."""
    try:
        Network(2, megabits).end()
    except (SystemError, OSError) as error:
        return getattr(error, "what", error)


def address_for_others():
    """This machine's address by which ranks of several hosts find each other; None: it has none. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # reserved for documentation
            address = probe.getsockname()[0]
            if not address.startswith("127."):
                return address
        except OSError:
            pass
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    return found[0] if len(found) == 1 else None


def reserved_port():
    """Bound without listening: the kernel gives it to nobody else, and rank 0 can still bind it."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("", 0))
    return port


# ---- A run


def memory_of(pid):
    """Sums up a process and all that it has started, in bytes; shared pages count once."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            share = re.search(r"^Pss: +(\d+) kB", file.read(), re.MULTILINE)
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = file.read().split()
    except OSError:  # it has ended
        return 0
    return (int(share[1]) * 1024 if share else 0) + sum(map(memory_of, children))


def error_in(output):
    """The first error that lockstep train has written, such as ": UsageError: …". A word in lower case is that of a
    warning."""
    found = re.search(r"^lockstep: ([A-Z].*)", output.read_text(errors="replace"), re.MULTILINE)
    return f": {found[1]}" if found else ""


class Training:
    """The processes of one run, and what is seen of them from outside: `outcome` is for comparison.json."""

    def __init__(self, run, settings, folder, deadline):
        self.run, self.settings, self.folder, self.deadline = run, settings, folder, deadline
        self.began = time.monotonic()
        self.next_sample = self.began
        self.links = None  # steps, and the bytes of each host's link at that time
        self.processes = []
        self.outcome = {"state": "finished", "seconds": 0, "exit_code": 0, "peak_memory_bytes": 0}
        ranks = run.devices + run.contender.servers
        hosts = -(-ranks // settings["ranks_per_host"])
        self.network = Network(hosts, settings["megabits_per_second"]) if settings["links"] == "shaped" else None
        self.port = reserved_port() if settings["links"] == "loopback" else None
        with open(folder / "output.txt", "w") as output:
            for rank in range(1 if settings["links"] == "none" else ranks):
                self.start(rank, ranks, output)

    def start(self, rank, ranks, output):
        """A process that dies with this one."""
        command = ["setpriv", "--pdeathsig", "KILL", COMMAND, "train", *self.run.arguments(self.settings)]
        command += ["--metrics", self.folder / "metrics.jsonl"]
        environment = dict(os.environ)
        host, local_rank = divmod(rank, self.settings["ranks_per_host"])
        if self.network or self.port:
            address, port = (self.network.address(0), 29500) if self.network else (None, self.port.getsockname()[1])
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "GROUP_RANK": host}
            place["LOCAL_WORLD_SIZE"] = min(self.settings["ranks_per_host"], ranks - rank + local_rank)
            place |= {"MASTER_ADDR": address or address_for_others(), "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            environment |= {name: str(value) for name, value in place.items()}
        if self.settings["trace"]:
            command += ["--trace", self.folder / "trace.json"]
        if self.network:
            command = self.network.hosts[host].command(*command)
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        self.processes.append(subprocess.Popen(command, env=environment, start_new_session=True, **streams))

    def watch(self):
        """Blocks until all have ended, or one has failed."""
        try:
            while self.processes and self.outcome["state"] == "finished":
                time.sleep(TICK)
                self.look()
            if self.links and self.outcome["state"] == "finished":
                self.count_links()
        finally:
            self.outcome["seconds"] = time.monotonic() - self.began
            for process in self.processes:
                process.kill()
                process.wait()
            if self.network:
                self.network.end()
            if self.port:
                self.port.close()
        return self.outcome

    def look(self):
        now = time.monotonic()
        for process in list(self.processes):
            if process.poll() is not None:
                self.processes.remove(process)
                self.note_end(process.returncode)
        if now - self.began > self.deadline:
            self.fail(f"it did not end within {self.deadline:.0f} s (--deadline)")
        if now >= self.next_sample:
            busy = time.thread_time()
            memory = sum(memory_of(process.pid) for process in self.processes)
            self.outcome["peak_memory_bytes"] = max(self.outcome["peak_memory_bytes"], memory)
            least, most = BETWEEN_SAMPLES
            self.next_sample = now + min(most, max(least, (time.thread_time() - busy) / SAMPLING))
        if self.network and not self.links and (steps := len(metrics_in(self.folder).steps)):
            self.links = steps, self.network.bytes()

    def note_end(self, code):
        if code < 0:
            self.fail(f"killed by signal {-code}", 128 - code)
        elif code:
            self.fail(f"it ended with exit code {code}{error_in(self.folder / 'output.txt')}", code)

    def fail(self, why, code=0):
        if self.outcome["state"] == "finished":
            self.outcome |= {"state": "failed", "why": why, "exit_code": code}

    def count_links(self):
        """Bytes of a step, of the busiest host in each direction."""
        before, links = self.links
        steps = len(metrics_in(self.folder).steps) - before
        if steps > 0:
            carried = [[(now - then) / steps for now, then in zip(*host)] for host in zip(self.network.bytes(), links)]
            self.outcome["busiest_link_bytes_per_step"] = dict(zip(("sent", "received"), map(max, zip(*carried))))
