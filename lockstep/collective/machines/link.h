// SPDX-License-Identifier: Apache-2.0
// collective/machines/link.h: moves bytes between this rank and its peers over c10d's Gloo. The peers are one rank of
// each machine, or all ranks.
//
// Flow:    all_reduce.cc and the other collectives -> here -> the network
// Owns:    its connections, and a thread that watches one of them. Memory given to a transfer stays the caller's, and
//          must stay until the transfer was waited for or forgotten
// Threads: one at a time; close() from any
// Ranks:   what one peer sends in some order the other receives in that order, with the same sizes
//
// Note [Who watches whom]
// When a connection breaks, Gloo ends the transfers that are still queued, but neither a receive of which some bytes
// have arrived nor a send of which some have left: these run into their timeout. So each machine keeps a receive of one
// byte from the next machine pending. It fails when that machine is lost; this machine then closes all its connections,
// which the machine before it notices in turn, and so on around the ring. A machine that leaves in good order sends the
// byte.
//
// A transfer that runs into its timeout makes Gloo close all connections of this machine, so the pending receive fails
// too. That says nothing about the next machine: the caller that waited for the transfer reports the peer that did not
// answer. The link tells the two cases apart by the clock: it notes when each wait ends at the latest.
//
// Note [Signatures]
// Each machine sends the signature of its call to the next one (docs/design/hierarchy.md#disagreement). Data does not wait
// for that, but waits for data come after it: where signatures differ tags do too, and such data never comes. The ranks of
// one machine compare through shared memory (MachineCollective::run_inside).
//
// A call starts the receive of the next call's signature before anything else: the machine before need not wait until
// this one makes that call. It is always pending, also when the machine before leaves; forget() or the destructor drops
// it. Word of it that reaches a closed connection makes the kernel there drop what it still had to send. So it goes out
// before word of the receives of data, which that machine needs before it can send and leave.
#pragma once

#include <thread>

#include "lockstep/collective/c10d/c10d_call.h"

namespace lockstep {

class GlooConnection;

class GlooLink {
 public:
  // Numbers of sends and receives that were started. The link holds them until they were waited for, or forgotten.
  using Transfers = std::vector<uint64_t>;

  // `options`: rank is this rank's number among the peers, size their number. `names`: what errors call the peers.
  // Blocks until all are connected. Throws RendezvousError.
  GlooLink(const StorePtr& store, TransportOptions options, std::vector<std::string> names);
  ~GlooLink();
  GlooLink& operator=(GlooLink&&) = delete;

  // From now on, until the destructor returns: when the next machine is lost or closes its connections, this link
  // closes its own and calls `on_loss` once, on a thread of its own.
  using OnLoss = std::function<void(const std::exception_ptr&)>;
  void watch(OnLoss on_loss);

  // This machine leaves in good order: the others do not take that for a loss, and this one reports none any more.
  void leave();

  void set_timeout(milliseconds timeout);  // of every wait() from now on

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }

  // The peers in the order in which to turn to them: the next one first, so that not all send to one at the same time.
  const std::vector<int>& peers() const { return peers_; }
  const c10::intrusive_ptr<GlooConnection>& connection() const { return gloo_; }
  std::shared_ptr<GlooNetwork> network() const;

  // Transfers that are started from now on belong to a call with this signature.
  void begin(const Signature& mine);

  // begin(), and sends the signature, 24 bytes, to the next machine. Does not block. See Note [Signatures].
  void begin_check(const Signature& mine);

  // Blocks until the signature of the machine before has arrived. Throws MismatchError, PeerLost.
  void check();

  // check(), and blocks until the next machine has this one's.
  void finish_check();

  // Start a transfer and add it to `transfers`. Do not block. No bytes: nothing is started. The two sides start those of
  // lane 0 in the same order, and those of lane 1.
  void send(int peer, const std::byte* data, size_t bytes, Transfers& transfers, int lane = 0);
  void receive(int peer, std::byte* data, size_t bytes, Transfers& transfers, int lane = 0);

  // Blocks until all of them are done, and clears them. Throws PeerLost: a peer is gone, or did not answer before the
  // timeout; or what close() was given.
  void wait(Transfers& transfers);

  // After close(): Gloo no longer touches the memory of any transfer.
  void forget();

  // Ends all waits here, with `reason`, and those of the peers.
  void close(std::exception_ptr reason);

 private:
  using Issue = std::function<C10dWork()>;
  struct Transfer {
    int peer = 0;
    C10dWork work;
  };

  C10dWork issue(int peer, const Issue& transfer);
  void start(int peer, Transfers& transfers, const Issue& transfer);
  void wait_for(uint64_t number);
  void expect_signature(size_t turn);
  void start_send(int peer, const std::byte* data, size_t bytes, Transfers& transfers, int tag);
  void start_receive(int peer, std::byte* data, size_t bytes, Transfers& transfers, int tag);
  bool failed_on_purpose();
  int next() const { return (rank() + 1) % size(); }
  int previous() const { return (rank() + size() - 1) % size(); }
  PeerLost lost(int peer, const std::exception& trouble) const;

  TransportOptions options_;
  IntVector<std::string> names_;
  std::vector<int> peers_;
  c10::intrusive_ptr<GlooConnection> gloo_;
  int tag_;                            // of the call under way
  Signature mine_;                     // of this machine
  Transfers leaving_;                  // mine_
  std::array<Signature, 2> previous_;  // of the machine before, of calls in turn
  std::array<Transfers, 2> arriving_;  // previous_
  size_t turn_ = 0;                    // of the call under way, in these two
  bool checked_ = false;               // in the call under way
  std::atomic<bool> left_ = false;
  std::mutex mutex_;  // guards the next five, and options_.timeout
  bool timed_out_ = false;
  std::optional<Deadline> wait_ends_;  // of the wait under way
  std::exception_ptr closed_;
  uint64_t started_ = 0;
  std::map<uint64_t, Transfer> under_way_;
  std::byte goodbye_{};  // from the next machine
  C10dWork watched_;
  std::jthread watcher_;
};

}  // namespace lockstep
