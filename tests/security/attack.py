#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a stranger in the network tries at the port where a job's ranks meet.

    attack.py HOST PORT ATTACK

Speaks the protocol of lockstep/collective/store/packet_stream.h. Exits with 0 if the attack has succeeded, with 3 if it was
refused. Waits for the port, at most 30 seconds.
"""

import os
import socket
import struct
import sys
import time

HELLO, SET, DELETE, DONE = 1, 2, 6, 10
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


def ask(connection, kind, *texts):
    """The kind and number of the answer. Raises OSError if there is none."""
    body = struct.pack("<Bq", kind, 0) + b"".join(struct.pack("<I", len(text)) + text for text in texts)
    connection.sendall(struct.pack("<I", len(body)) + body)
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
    """Hundreds of connections that say nothing. Never a success by itself: the job must go on meanwhile."""
    connections = [connect(host, port) for _ in range(500)]
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
    attacks = {"join": join, "delete": delete, "fill": fill, "replace": replace, "idle": idle, "noise": noise}
    try:
        succeeded = attacks[sys.argv[3]](sys.argv[1], int(sys.argv[2]))
    except (ConnectionError, TimeoutError) as error:
        print(f"{sys.argv[3]}: {error}")
        succeeded = False
    sys.exit(0 if succeeded else 3)
