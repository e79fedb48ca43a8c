#!/usr/bin/env python3
"""All-reduce of float32 between two processes of this machine: lockstep's shared memory beside Gloo, Open MPI and MPICH, in
turn, with the memory limit and the loopback round trip of the same run.

    bench/collectives.py [ROUNDS] [MAX_BYTES]
"""
import os
import socket
import subprocess
import sys
import threading
import time

from common import BIN, LOCKSTEP, ROOT, machine, median, save

RANKS = 2
PEERS = ROOT / "build/bench-peers"
MPI_ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def lines_of(command, **options):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, check=True, text=True, **options)
    return done.stdout.splitlines()


def shared_memory(max_bytes):
    """bytes -> seconds, for arena memory, ordinary memory, and memcpy of as many bytes by every rank."""
    arena, ordinary, copy = {}, {}, {}
    for line in lines_of([BIN / "shm_core", "--ranks", RANKS, "--max-bytes", max_bytes]):
        words = line.split()
        if len(words) == 7 and words[0].isdigit():
            size = int(words[0])
            arena[size], ordinary[size], copy[size] = (float(words[i]) / 1e6 for i in (1, 3, 5))
    return {"lockstep, allocated": arena, "lockstep, ordinary": ordinary, "memcpy": copy}


def table(lines):
    return {int(size): float(seconds) for size, seconds in (line.split()[-2:] for line in lines)}


def gloo(max_bytes):
    return {"Gloo": table(lines_of([LOCKSTEP, "run", "--nproc-per-node", RANKS, "--", BIN / "gloo_all_reduce", max_bytes]))}


def mpi(name, compiler, launcher, max_bytes):
    program = PEERS / f"all_reduce_{compiler.split('.')[1]}"
    if not program.exists():
        PEERS.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, "-std=c++17", "-O2", ROOT / "bench/peers/mpi_all_reduce.cc", "-o", program], check=True)
    return {name: table(lines_of([*launcher, "-np", RANKS, program, max_bytes], env=MPI_ENVIRONMENT))}


def loopback_round_trip():
    """Median seconds of one byte there and back over TCP on loopback: what no socket can go below."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    echo, _ = server.accept()
    for end in (client, echo):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rounds = 500
    threading.Thread(target=lambda: [echo.sendall(echo.recv(1)) for _ in range(rounds)], daemon=True).start()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        client.sendall(b"x")
        client.recv(1)
        times.append(time.perf_counter() - start)
    return median(times)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    max_bytes = int(sys.argv[2]) if len(sys.argv) > 2 else 256 << 20
    print(f"all_reduce of float32, {RANKS} processes; {rounds} rounds in turn\n{machine()}\n")
    found = {}
    for _ in range(rounds):
        for part in (shared_memory(max_bytes), gloo(max_bytes),
                     mpi("Open MPI", "mpicxx.openmpi", ["mpirun.openmpi"], max_bytes),
                     mpi("MPICH", "mpicxx.mpich", ["mpirun.mpich"], max_bytes)):
            for name, sizes in part.items():
                for size, seconds in sizes.items():
                    found.setdefault(name, {}).setdefault(size, []).append(seconds)
    medians = {name: {size: median(values) for size, values in sizes.items()} for name, sizes in found.items()}
    names = ["lockstep, allocated", "lockstep, ordinary", "Gloo", "Open MPI", "MPICH", "memcpy"]
    print("microseconds, medians" + " " * 3 + "".join(f"{name:>21}" for name in names) + "     of limit   GB/s")
    for size in medians["memcpy"]:
        ours = medians["lockstep, allocated"][size]
        row = "".join(f"{medians[name][size] * 1e6:21.2f}" for name in names)
        print(f"{size:>16} bytes  {row}{medians['memcpy'][size] / ours:13.0%}{size / ours / 1e9:7.1f}")
    print(f"\nloopback round trip: {loopback_round_trip() * 1e6:.0f} us")
    save("collectives", {"rounds": rounds, "seconds": medians})


if __name__ == "__main__":
    main()
