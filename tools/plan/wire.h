// SPDX-License-Identifier: Apache-2.0
// tools/plan/wire.h: the bytes that a message between machines puts on their links. Constants of the protocols that carry it:
//
//   Gloo       the receiver says that it is ready (48 bytes back); then come a header (48) and the data
//   TLS 1.3    each of the three in records of up to 16 KiB, and 22 bytes more in each: header 5, type 1, tag 16
//   TCP, IP    segments of up to 1448 bytes: Ethernet's 1500 less IPv4's header (20), TCP's (20) and its timestamps (12)
//   Ethernet   14 bytes before each
//
// Every second segment of the data is acknowledged by one without data, as RFC 5681 asks for. A receiver that puts segments
// together before it looks at them sends fewer: up to 2.2 % less goes back than this says.
//
// Threads: pure functions
// Ranks:   no communication; no torch
#pragma once

namespace lockstep::plan {

struct MessageBytes {
  double there = 0;  // from the sender to the receiver
  double back = 0;
};

MessageBytes bytes_on_wire(double bytes);  // of a message of so many bytes

}  // namespace lockstep::plan
