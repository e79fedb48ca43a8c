// SPDX-License-Identifier: Apache-2.0
// collective/machines/gloo_messages.h: messages between two ranks over c10d's Gloo.
//
// A message begins with a header, which says how many elements of what dtype it has. Small data travels in the header's
// transfer; larger data follows in a second one, for which the receiver posts as many bytes as the header says: Gloo
// ends the process when a message is longer than expected. A receiver whose tensor does not fit drops the data and gets
// MismatchError; the sender learns nothing, and the world stays usable.
//
// Flow:    hierarchy.cc -> here -> the network
// Owns:    its share of the connection; messages that nobody waits for
// Threads: any
// Ranks:   the two of a message
#pragma once

#include "lockstep/collective/machines/link.h"

namespace lockstep {

class GlooMessages {
 public:
  // `link`: of all ranks; messages go over its connection. Without `headers` both sides must know the length of each
  // message, and what is received may arrive before anybody waits for it.
  GlooMessages(const GlooLink& link, std::string here, bool headers);
  ~GlooMessages();

  // As Transport's. Throw UsageError: a tag above kLargestTag; PeerLost; the receive MismatchError, once waited for.
  // They hold the tensor until the message is done. `in_background`: a receive goes on also while nobody waits for it,
  // for the price of a thread.
  FuturePtr send(const TensorCall& call);
  FuturePtr receive(const TensorCall& call, bool in_background);

  void set_timeout(milliseconds timeout);  // of messages that are waited for from now on

  // Ends all waits for messages here: PeerLost. The connection itself is its owner's to close.
  void close() { messages_.close(); }

 private:
  static constexpr int64_t kLargestTag = 0x3fffffff;  // larger ones are link.h's and the second transfers'

  int tag_of(const Call& call) const;
  int next_tag();

  c10::intrusive_ptr<GlooConnection> gloo_;
  int rank_;
  std::string here_;
  bool headers_;
  std::atomic<uint32_t> second_transfers_ = 0;  // sent so far
  C10dMessages messages_;
};

}  // namespace lockstep
