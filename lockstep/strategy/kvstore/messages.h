// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/messages.h: the messages between the clients of a store and its servers.
//
// A client (a worker, or the first server) sends a request: a header of fixed size, then its payload. The server replies.
// One request at a time; both sides know every length before it is sent. With
// kPushPull the values go in parts, both ways at the same time: the new values of a part come back as soon as all
// workers have pushed it.
//
//   request      payload                                     reply
//   kInit        the keys; from the first worker: values    ReplyHeader
//                of the server's slices
//   kOptimizer   the UpdateOptions (lockstep/kvstore.h)      ReplyHeader
//   kPush        which slices have a value; their values     ReplyHeader
//   kPushPull    the same, values in parts                   values of the slices in the same parts
//   kPull                                                    ReplyHeader; values of the slices
//   kPullRows    numbers of rows                             the rows
//   kDelays                                                  Delays (lockstep/kvstore.h)
//   kState                                                   per slice: the optimizer's state and the value
//   kAlive                                                   none
//   kGoodbye                                                 none
//
// Values are a region of the server's block (key_plan.h), or with 2-bit compression two bits per element, slice by
// slice, each slice filled up to a whole number of 32-bit words.
//
// A server checks everything that arrives before it uses it (MismatchError: then the sender is lost).
//
// Threads: values
// Ranks:   client and server run the same program: structs are sent as raw bytes
#pragma once

#include <cstdint>

#include "lockstep/base/sockets/received.h"
#include "lockstep/kvstore.h"
#include "lockstep/strategy/kvstore/key_plan.h"
#include "lockstep/strategy/kvstore/link.h"

namespace lockstep {

enum class Request : int64_t {
  kInit,
  kOptimizer,
  kPush,
  kPushPull,
  kPull,
  kPullRows,
  kDelays,
  kState,
  kAlive,
  kGoodbye
};

struct RequestHeader {
  Request request = Request::kGoodbye;
  SliceRange slices{};   // of this server
  int64_t count = 0;     // kInit: keys; kPullRows: rows; kState: pushes of every worker to wait for
  int64_t bytes = 0;     // kPullRows: of a row; kInit: the elements from which a key is split
  bool trained = false;  // there are trained keys among them
  // kPush, kPushPull:
  PushOptions push{};
  int64_t devices = 1;    // that computed the values
  double threshold = 0;   // of 2-bit values; 0: values as they are
  bool stopping = false;  // this is the worker's last push: it was asked to stop
};

struct ReplyHeader {};

// Sends a request that has no payload and no reply (link.cc). Does nothing for a server that is lost.
void tell(const StoreLink& server, Request request);

// Checks of what a server receives, before it is used. Throw MismatchError. compressed: values may have two bits.
void check(const Received& sender, const RequestHeader& request, const BlockLayout& layout, bool compressed);
void check(const Received& sender, const std::vector<Key>& keys);
void check(const Received& sender, const UpdateOptions& options);

}  // namespace lockstep
