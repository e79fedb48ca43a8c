#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""More idle connections than a rank has descriptors for, all at once.

    crowd.py HOST PORT

Exits with 0 if they were made within seconds, with 3 if not.
"""

import errno
import resource
import select
import socket
import sys
import time

CONNECTIONS = 1000
ENOUGH = 100


def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    poll = select.poll()
    under_way = {}
    for _ in range(CONNECTIONS):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((sys.argv[1], int(sys.argv[2])))
        under_way[connection.fileno()] = connection
        poll.register(connection, select.POLLOUT)
    made, deadline = [], time.monotonic() + 3
    while under_way and time.monotonic() < deadline:
        for number, _ in poll.poll(100):
            poll.unregister(number)
            connection = under_way.pop(number)
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNRESET):
                made.append(connection)  # and keep it open; reset: made, and then the rank has died
    return len(made) > ENOUGH


if __name__ == "__main__":
    sys.exit(0 if main() else 3)
