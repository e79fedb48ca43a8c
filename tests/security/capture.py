#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Listens in on a network interface until SIGTERM, then prints how many bytes it has seen, and how many packets had what
pattern_ranks.cc sends.

    capture.py INTERFACE READY_FILE
"""

import pathlib
import signal
import socket
import struct
import sys

PATTERN = struct.pack("<i", 0x0DDBA11C) * 8
ALL_PROTOCOLS = 3


def main():
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(ALL_PROTOCOLS))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)  # as much as the kernel allows
    link.bind((sys.argv[1], 0))
    link.settimeout(0.1)
    pathlib.Path(sys.argv[2]).touch()
    size = found = 0
    while not ended:
        try:
            packet = link.recv(1 << 17)
        except TimeoutError:
            continue
        size += len(packet)
        found += PATTERN in packet
    print(size, found)


if __name__ == "__main__":
    main()
