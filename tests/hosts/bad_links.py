#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A switch with bad links: frames come late, in another order, twice or never. netem does that in a kernel that has it.

    bad_links.py TAP... [--delay 20:50] [--duplicate 0.15] [--drop 0.015] [--seed 1]

Makes a network card per TAP, which the caller gives to a host. Each frame from one card to another is delayed on its own, by
that many milliseconds, so later ones overtake it. Ends with SIGTERM, and says then how many frames had which fate.
"""
import argparse
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
BROADCAST = 0x01  # a bit of a receiver's first byte


def make_card(name):
    card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(card, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return card


class Switch:
    def __init__(self, cards, options):
        self.cards, self.options, self.random = cards, options, random.Random(options.seed)
        self.least, self.most = (float(part) / 1000 for part in options.delay.split(":"))
        self.card_of = {}  # by address
        self.late = []  # a heap: when, number, receivers, frame
        self.delivered = dict.fromkeys(cards, -1)  # highest number
        self.fates = dict.fromkeys(("sent", "dropped", "duplicated", "overtaken"), 0)

    def take(self, card, frame):
        receiver, sender = frame[:6], frame[6:12]
        self.card_of[sender] = card
        known = self.card_of.get(receiver) if not receiver[0] & BROADCAST else None
        for other in [known] if known is not None else self.cards:
            if other != card:
                self.send(other, frame)

    def send(self, card, frame):
        self.fates["sent"] += 1
        if self.random.random() < self.options.drop:
            self.fates["dropped"] += 1
            return
        copies = 1 + (self.random.random() < self.options.duplicate)
        self.fates["duplicated"] += copies - 1
        for _ in range(copies):
            when = time.monotonic() + self.random.uniform(self.least, self.most)
            heapq.heappush(self.late, (when, self.fates["sent"], card, frame))

    def deliver(self):
        while self.late and self.late[0][0] <= time.monotonic():
            _, number, card, frame = heapq.heappop(self.late)
            self.fates["overtaken"] += number < self.delivered[card]
            self.delivered[card] = max(self.delivered[card], number)
            try:
                os.write(card, frame)
            except OSError:
                pass  # a card that is switched off

    def run(self):
        poll = select.poll()
        for card in self.cards:
            poll.register(card, select.POLLIN)
        while True:
            wait = max(self.late[0][0] - time.monotonic(), 0) * 1000 if self.late else None
            for card, _ in poll.poll(wait):
                try:
                    self.take(card, os.read(card, 65536))
                except OSError:
                    pass
            self.deliver()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cards", nargs="+", metavar="TAP")
    parser.add_argument("--delay", default="20:50", metavar="LEAST:MOST")
    parser.add_argument("--duplicate", type=float, default=0.15)
    parser.add_argument("--drop", type=float, default=0.015)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    switch = Switch([make_card(name) for name in options.cards], options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        switch.run()
    finally:
        print(*(f"{count} {fate}" for fate, count in switch.fates.items()), sep=", ", flush=True)


main()
