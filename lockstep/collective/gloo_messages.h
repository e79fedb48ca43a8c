// collective/gloo_messages.h: messages between two ranks over c10d's Gloo.
//
// Flow:    hierarchical_transport.cc -> here -> the network
// Owns:    its share of the connection; messages that nobody waits for
// Threads: one at a time; close() from any
// Ranks:   the two of a message
#pragma once

#include <memory>
#include <string>

#include "lockstep/collective/c10d_call.h"
#include "lockstep/collective/host_link.h"
#include "lockstep/collective/transport.h"

namespace lockstep {

class GlooMessages {
 public:
  GlooMessages(const HostLink& link, std::string here);  // over the same connection: one between all ranks
  ~GlooMessages();

  // As Transport's. Throw UsageError, PeerLost.
  std::shared_ptr<Pending> send(const torch::Tensor& tensor, int to, int tag);
  std::shared_ptr<Pending> receive(const torch::Tensor& tensor, int from, int tag);

  // Ends all waits for messages here: PeerLost. The connection itself is its owner's to close.
  void close() { messages_.close(); }

 private:
  c10::intrusive_ptr<GlooConnection> gloo_;
  std::string here_;
  C10dMessages messages_;
};

}  // namespace lockstep
