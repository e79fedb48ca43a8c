// collective/machines/machine_link.h: bytes between machines: this rank and its counterparts, over c10d's Gloo. Counterparts are
// one rank of each machine, or all ranks.
//
// Flow:    host_collectives.cc, host_parts.cc, host_exchange.cc -> here -> the network
// Owns:    its connections, a thread that watches one of them. Memory given to a transfer stays the caller's, until
//          the transfer was waited for
// Threads: one at a time; close() from any
// Ranks:   between two counterparts, what one sends in some order the other receives in that order and size
//
// Note [Who watches whom]
// When a connection breaks, Gloo ends the transfers that wait for their turn, but neither a receive of which some bytes
// have arrived nor a send of which some have left: these run into their timeout. So each machine keeps a receive of one
// byte from the next machine waiting. It ends when that one is lost; all connections are closed then, which the machine
// before notices in turn, and so on around. Who leaves in good order sends the byte.
//
// A transfer that runs into its timeout makes Gloo close all connections of this machine, so that receive ends too. It
// says nothing about the next machine: whoever waited for the transfer reports the machine that did not answer.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/collective/transport.h"
#include "lockstep/error.h"

namespace lockstep {

class GlooConnection;

class HostLink {
 public:
  // A send or receive that was started.
  struct Transfer {
    int node = 0;
    c10::intrusive_ptr<c10d::Work> work;
  };
  using Transfers = std::vector<Transfer>;

  // `options`: rank is the number of this counterpart, size that of all; `noun`: what one is called in messages.
  // Blocks until all are connected. Throws RendezvousError.
  HostLink(const c10::intrusive_ptr<c10d::Store>& store, TransportOptions options, std::string noun = "machine");
  ~HostLink();
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;

  // From now on `on_loss` is called, on a thread of this link, when the next machine is lost or has closed its
  // connections; it closes these, too. Once. Until the destructor returns.
  using OnLoss = std::function<void(const std::exception_ptr&)>;
  void watch(OnLoss on_loss);

  // This machine is done in good order: its leaving is no loss, and from now on nothing is one to it.
  void leave();

  int node() const { return options_.rank; }
  int nodes() const { return options_.size; }

  // The others in the order in which to turn to them: this one + 1, + 2, ... around, so that not all send to one at a
  // time.
  std::vector<int> others() const;
  const c10::intrusive_ptr<GlooConnection>& connection() const { return gloo_; }

  // From now on transfers meet only those that a counterpart starts on the same topic. So what may not fit together
  // is never brought together, and the checks of host_check.h need not come before the data.
  void set_topic(std::uint32_t topic) { topic_ = topic; }

  // Start a transfer and note it in `transfers`. Nothing is transferred where there are no bytes.
  void send(int node, const std::byte* data, std::size_t bytes, Transfers& transfers);
  void receive(int node, std::byte* data, std::size_t bytes, Transfers& transfers);

  // Blocks until all of them are done, and forgets them. Throws PeerLost: a counterpart is gone, the timeout; what
  // close() was given.
  void wait(Transfers& transfers);

  // After an error, and once `transfers` are forgotten: their memory is no longer touched.
  void forget();

  // Ends all waits here, with `reason`, and those of the counterparts.
  void close(std::exception_ptr reason);

 private:
  void start(int node, const std::function<c10::intrusive_ptr<c10d::Work>()>& issue, Transfers& transfers);
  void wait_for(const Transfer& transfer);
  void watch_next(const OnLoss& on_loss);
  bool is_leaving();
  PeerLost lost(int node, const std::string& trouble) const;
  [[noreturn]] void throw_lost(int node, const std::string& trouble);

  TransportOptions options_;
  std::string noun_;
  std::uint32_t topic_ = 0;
  c10::intrusive_ptr<GlooConnection> gloo_;
  std::mutex mutex_;
  bool leaving_ = false;  // guarded by mutex_, like the next
  std::exception_ptr closed_;
  std::vector<c10::intrusive_ptr<c10d::Work>> under_way_;
  std::byte farewell_{};  // from the next machine
  c10::intrusive_ptr<c10d::Work> watched_;
  std::thread watcher_;
};

}  // namespace lockstep
