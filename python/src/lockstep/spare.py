# SPDX-License-Identifier: Apache-2.0
"""The program of a process that waits to become a rank (lockstep run --max-restarts): lockstep and torch are imported, the program is not.

The launcher sends one message over a socket: the rank's variables, its cores, and where its output goes."""

import os
import runpy
import socket
import sys

import lockstep  # noqa: F401  the reason to wait here

_LONGEST = 1 << 20  # bytes of a message


def wait_and_run() -> None:
    """Sleeps until the launcher makes this process a rank, then runs the program of sys.argv[1:]. Ends if the launcher does."""
    channel = socket.socket(fileno=int(os.environ.pop("LOCKSTEP_SPARE_CHANNEL")))
    _set_name("lockstep-spare")
    message, descriptors, _, _ = socket.recv_fds(channel, _LONGEST, 2)
    channel.close()
    if not message:
        os._exit(0)
    _set_name("python")
    variables = dict(each.split("=", 1) for each in message.decode(errors="surrogateescape").split("\0") if each)
    cores = variables.pop("LOCKSTEP_SPARE_CORES", "")
    os.environ.update(variables)
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _run(sys.argv[1:])


def _set_name(name):
    """Sets what ps -o comm shows."""
    with open("/proc/self/comm", "w") as comm:
        comm.write(name)


def _run(command):
    """As Python does: -m MODULE ARGS, or FILE ARGS."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    sys.path[0] = os.path.dirname(os.path.realpath(command[0]))
    runpy.run_path(command[0], run_name="__main__")
