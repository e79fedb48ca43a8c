#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a stranger in the network tries at the port where a job's ranks meet.

    attack.py HOST PORT ATTACK

Speaks the protocol of lockstep/collective/store/packet_stream.h. Exits with 0 if the attack has succeeded, with 3 if it was
refused. Waits for the port, at most 30 seconds.
"""

import os
import resource
import socket
import struct
import sys
import time

HELLO, SET, GET, ADD, DELETE, DONE = 1, 2, 3, 4, 6, 10
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


def preamble(host, port):
    """A number as Gloo's connections begin with it, and the beginning of a TCPStore's. Never a success by itself."""
    for number in struct.pack("<q", 1), struct.pack("<q", -1), struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 4711):
        try:
            connect(host, port).sendall(number)
        except OSError:
            pass
    return False


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


def idle(host, port):
    """Thousands of connections that say nothing. Never a success by itself: the job must go on meanwhile."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    connections = [connect(host, port) for _ in range(3000)]
    time.sleep(2)
    return not connections


def noise(host, port):
    """Random bytes. Never a success by itself either."""
    for _ in range(300):
        try:
            connect(host, port).sendall(os.urandom(1 + os.urandom(1)[0]))
        except OSError:
            pass
    return False


if __name__ == "__main__":
    attacks = {each.__name__: each for each in (join, read, delete, replay, fill, replace, preamble, idle, noise)}
    try:
        succeeded = attacks[sys.argv[3]](sys.argv[1], int(sys.argv[2]))
    except (ConnectionError, TimeoutError) as error:
        print(f"{sys.argv[3]}: {error}")
        succeeded = False
    sys.exit(0 if succeeded else 3)
