#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a stranger in the network tries at the port where a job's ranks meet.

    attack.py HOST PORT ATTACK
    attack.py HOST PORT FLOOD FILE

Speaks the protocol of agent/meet/packet_stream.h. Exits with 0 if the attack has succeeded, with 3 if it was
refused. Waits for the port, at most 30 seconds. A flood goes on until FILE exists; it makes FILE.FLOOD when it is at its
height, and exits with 3 if it got that far. Whether the job goes on meanwhile is for the caller to see.
"""

import os
import pathlib
import resource
import select
import socket
import struct
import sys
import time

HELLO, SET, GET, ADD, DELETE, DONE = 1, 2, 3, 4, 6, 12
PATIENCE = 30


def connect(host, port):
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((host, port), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def packet(kind, *texts, number=0):
    body = struct.pack("<Bq", kind, number) + b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return struct.pack("<I", len(body)) + body


def ask(connection, kind, *texts):
    """The kind and number of the answer. Raises OSError if there is none."""
    return say(connection, packet(kind, *texts))


def say(connection, message):
    """The kind and number of the first answer. Raises OSError if there is none."""
    connection.sendall(message)
    answer = b""
    while len(answer) < 4 or len(answer) < 4 + struct.unpack_from("<I", answer)[0]:
        part = connection.recv(65536)
        if not part:
            raise ConnectionError("closed")
        answer += part
        if len(answer) >= 4 and struct.unpack_from("<I", answer)[0] > 1 << 24:
            raise ConnectionError("no answer of a store")
    return struct.unpack_from("<Bq", answer, 4)


def join(host, port):
    return ask(connect(host, port), HELLO)[0] == DONE


def delete(host, port):
    """A key that rank 0 has set by now, or sets in a moment."""
    for _ in range(100):
        connection = connect(host, port)
        ask(connection, HELLO)
        if ask(connection, DELETE, b"rank/0/1") == (DONE, 1):
            return True
        time.sleep(0.02)
    return False


def read(host, port):
    """Who rank 0 is."""
    connection = connect(host, port)
    ask(connection, HELLO)
    for _ in range(100):
        if ask(connection, GET, b"rank/0/1")[0] == DONE:
            return True
        time.sleep(0.02)
    return False


def replay(host, port):
    """What rank 1 of an old job has said, byte by byte."""
    said = packet(HELLO) + packet(ADD, b"rank/1/", number=1) + packet(SET, b"rank/1/1", b"pid 1 on n2")
    said += packet(SET, b"lockstep/connection/1/machine/1", b"an old machine")
    return say(connect(host, port), said)[0] == DONE


def fill(host, port):
    """16 MiB of what nobody has asked for."""
    connection = connect(host, port)
    ask(connection, HELLO)
    return all(ask(connection, SET, b"junk%d" % i, bytes(1 << 20))[0] == DONE for i in range(16))


def replace(host, port):
    """Where rank 1 is."""
    connection = connect(host, port)
    ask(connection, HELLO)
    return ask(connection, SET, b"lockstep/connection/1/machine/1", b"a stranger")[0] == DONE


def preamble(connect):
    """Numbers as Gloo's connections begin with them, and the beginning of a TCPStore's."""
    for number in struct.pack("<q", 1), struct.pack("<q", -1), struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 4711):
        connect().sendall(number)


def noise(connect):
    """Random bytes."""
    connect().sendall(os.urandom(1 + os.urandom(1)[0]))


IDLE = []  # connections of idle(), among which are some that have been closed


def idle(connect):
    """Thousands of connections that say nothing. Those that are closed are made anew."""
    IDLE.append(connect())
    if len(IDLE) > FLOODS[idle]:
        poll = select.poll()
        for connection in IDLE:
            poll.register(connection, select.POLLIN)
        closed = {fd for fd, _ in poll.poll(100)}
        IDLE[:] = [connection for connection in IDLE if connection.fileno() not in closed]


FLOODS = {preamble: 100, noise: 300, idle: 3000}  # how often each has happened at its height


def flood(attack, host, port, over):
    """Whether it came to its height before the end. The job stops listening when all its ranks have come."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    count = 0
    while not over.exists():
        try:
            attack(lambda: socket.create_connection((host, port), timeout=5))
            count += 1
        except OSError:
            time.sleep(0.001)
        if count == FLOODS[attack]:
            pathlib.Path(f"{over}.{attack.__name__}").touch()
    return count >= FLOODS[attack]


def main():
    host, port, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if len(sys.argv) > 4:
        return 3 if flood({each.__name__: each for each in FLOODS}[name], host, port, pathlib.Path(sys.argv[4])) else 1
    attacks = {each.__name__: each for each in (join, read, delete, replay, fill, replace)}
    try:
        return 0 if attacks[name](host, port) else 3
    except (ConnectionError, TimeoutError) as error:
        print(f"{name}: {error}")
        return 3


if __name__ == "__main__":
    sys.exit(main())
