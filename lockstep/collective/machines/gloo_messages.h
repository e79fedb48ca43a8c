// collective/machines/gloo_messages.h: messages between two ranks over c10d's Gloo.
//
// A message begins with a letter, which says how many elements of what dtype it has. Few bytes are in the letter;
// more come after it, and the receiver waits for as many as the letter says: Gloo ends the process when a message is
// longer than expected. A message that does not fit is taken and dropped: its receiver gets MismatchError, its sender
// learns nothing, and the world stays usable.
//
// Flow:    hierarchical_transport.cc -> here -> the network
// Owns:    its share of the connection; messages that nobody waits for
// Threads: one at a time; close() from any
// Ranks:   the two of a message
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "lockstep/collective/c10d/c10d_call.h"
#include "lockstep/collective/machines/machine_link.h"
#include "lockstep/collective/transport.h"

namespace lockstep {

class GlooMessages {
 public:
  // link: whose connection they go over: one between all ranks. bare: without letters. Both sides then have to know
  // the length of each, and what is received can be on its way before anybody waits for it.
  GlooMessages(const HostLink& link, std::string here, bool bare);
  ~GlooMessages();

  // As Transport's. Throw UsageError: a tag above kLargestTag; PeerLost; the receive MismatchError, once waited for.
  FuturePtr send(const torch::Tensor& tensor, int to, int tag);
  // `alone`: goes on also while nobody waits for it.
  FuturePtr receive(const torch::Tensor& tensor, int from, int tag, bool alone);

  // Ends all waits for messages here: PeerLost. The connection itself is its owner's to close.
  void close() { messages_.close(); }

 private:
  static constexpr int kLargestTag = 0x3fffffff;  // those above it are host_link.h's and the second parts'

  FuturePtr start_bare(const char* what, const std::function<C10dWork()>& issue);
  void check_tag(int tag) const;
  int next_tag();

  c10::intrusive_ptr<GlooConnection> gloo_;
  int rank_;
  std::string here_;
  bool bare_;
  std::uint32_t second_parts_ = 0;  // sent so far
  C10dMessages messages_;
};

}  // namespace lockstep
