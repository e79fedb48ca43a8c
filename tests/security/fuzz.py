#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Random bytes, and messages that are valid but for some bytes, to everything at which a running job listens.

    fuzz.py MESSAGES SEED PID [MIB]

Sends to the TCP and Unix sockets that listen in the network of process PID, over and over, until it has sent MESSAGES or the
process has ended. Waits for a socket, at most 30 seconds. Keeps some connections open. Prints how many messages went to
which kind of socket, and by how much the memory of the process and its descendants has grown meanwhile. Exits with 3 if nothing
listened, with 4 if it grew by more than MIB.
"""

import os
import random
import socket
import ssl
import struct
import sys
import time
from collections import Counter

PATIENCE = 30
LOOK_AGAIN_AFTER = 50  # messages: sockets come and go
KEPT_OPEN = 200


def tcp_listeners(pid):
    for table, family, width in (("tcp", socket.AF_INET, 8), ("tcp6", socket.AF_INET6, 32)):
        with open(f"/proc/{pid}/net/{table}") as lines:
            for fields in map(str.split, lines):
                if fields[3] == "0A":
                    address, port = fields[1].split(":")
                    raw = b"".join(struct.pack("<I", int(address[i : i + 8], 16)) for i in range(0, width, 8))
                    yield family, socket.SOCK_STREAM, (socket.inet_ntop(family, raw), int(port, 16))


def unix_listeners(pid):
    with open(f"/proc/{pid}/net/unix") as lines:
        next(lines)  # the names of its columns
        for fields in map(str.split, lines):
            if len(fields) > 7 and int(fields[3], 16) & 0x10000 and "lockstep" in fields[7]:
                path = "\0" + fields[7][1:] if fields[7].startswith("@") else fields[7]
                yield socket.AF_UNIX, int(fields[4], 16), path


def listeners(pid):
    try:
        return [*tcp_listeners(pid), *unix_listeners(pid)]
    except OSError:  # it has ended
        return []


def memory_of(pid):
    try:
        with open(f"/proc/{pid}/statm") as file:
            pages = int(file.read().split()[1])
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return pages * os.sysconf("SC_PAGE_SIZE") + sum(memory_of(int(child)) for child in file.read().split())
    except OSError:
        return 0


def client_hello():
    sent = ssl.MemoryBIO()
    context = ssl.create_default_context()
    try:
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="lockstep").do_handshake()
    except ssl.SSLWantReadError:
        pass
    return sent.read()


def packet(kind, *texts):
    body = struct.pack("<Bq", kind, 0) + b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return struct.pack("<I", len(body)) + body


def valid_messages():
    return [
        packet(1),
        packet(1) + packet(2, b"key", b"value"),
        packet(1) + packet(3, b"key") + packet(7, b"key", b"other"),
        client_hello(),
        b"munge?\n",
        packet(1) + packet(10, b"job/member/x", b"a value") + packet(11, b"job/"),
        struct.pack("<q", 1),  # Gloo's first number
        struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 4711),  # c10d's TCPStore
        b"",
    ]


def mutated(message, random):
    message = bytearray(message)
    for _ in range(random.choice((0, 1, 1, 2, 8))):
        place = random.randrange(len(message) + 1)
        change = random.randrange(4)
        if change == 0:
            message[place:place] = random.randbytes(random.randrange(64))
        elif change == 1:
            del message[place : place + random.randrange(16)]
        elif change == 2 and place < len(message):
            message[place] ^= 1 << random.randrange(8)
        else:
            message[place : place + 4] = random.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\1"))
    return bytes(message)


def send(target, message):
    """The connection, with the message on it; None: refused, or closed meanwhile."""
    family, kind, address = target
    connection = socket.socket(family, kind)
    try:
        connection.settimeout(2)
        connection.connect(address)
        connection.sendall(message)
        return connection
    except OSError:
        connection.close()
        return None


def fuzz(messages, random, pid):
    valid = valid_messages()
    targets, sent, opened = [], Counter(), []
    before, most = None, 0
    deadline = time.monotonic() + PATIENCE
    while sum(sent.values()) < messages and os.path.exists(f"/proc/{pid}/net"):
        if sum(sent.values()) % LOOK_AGAIN_AFTER == 0 or not targets:
            targets = listeners(pid)
            most = max(most, memory_of(pid))
        if not targets:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
            continue
        deadline = time.monotonic() + PATIENCE
        before = before or memory_of(pid)
        target = random.choice(targets)
        message = random.randbytes(random.randrange(300)) if random.random() < 0.3 else mutated(random.choice(valid), random)
        connection = send(target, message)
        sent["unix" if target[0] == socket.AF_UNIX else "tcp"] += 1
        if connection is None:
            targets.remove(target)
        elif random.random() < 0.1:
            opened.append(connection)
        else:
            connection.close()
        if len(opened) > KEPT_OPEN:
            opened.pop(0).close()
    return sent, max(most - (before or 0), 0)


if __name__ == "__main__":
    sent, growth = fuzz(int(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3]))
    print(dict(sent), f"{growth >> 20} MiB more", flush=True)
    most = int(sys.argv[4]) << 20 if len(sys.argv) > 4 else growth
    sys.exit(3 if not sent else 4 if growth > most else 0)
