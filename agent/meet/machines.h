// SPDX-License-Identifier: Apache-2.0
// agent/meet/machines.h: a launcher's side of a job on several machines that number themselves. A process of its own keeps in touch
// with the others through a store, so that nothing here waits for a network.
//
// Flow:    `lockstep run --rdzv-backend` -> here <-> the process <-> membership_store.h; launcher.h starts the ranks of each epoch
// Owns:    the process
// Threads: one: the launcher's, which calls work() after each poll()
// Ranks:   none; one per machine
//
// docs/design/membership.md says what happens when a launcher is killed or hangs.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/meet/epoch.h"
#include "agent/meet/membership_store.h"
#include "agent/meet/packet_stream.h"
#include "agent/start/events.h"
#include "agent/start/process.h"

namespace lockstep {

class Machines {
 public:
  using OpenStore = std::function<std::unique_ptr<MembershipStore>(const Meeting&, const Deadline&)>;

  // Blocks until enough machines have come and each has its place. Throws what OpenStore throws; RendezvousError: too few machines at
  // the deadline, or the job has begun without this one; UsageError: a job whose name does not fit into a line.
  Machines(const Meeting& meeting, const OpenStore& open);
  ~Machines();  // waits a moment until the others have heard its last words
  Machines& operator=(Machines&&) = delete;

  // For poll(), with the longest wait before the next work().
  std::vector<Event> events() const;
  static milliseconds longest_wait() { return milliseconds(100); }
  void work();  // does not block

  const Epoch& epoch() const { return epoch_; }
  const Member& me() const { return *epoch_.find(id_); }
  int node_rank() const { return epoch_.index_of(id_); }
  std::string job() const { return epoch_.members.front().id; }  // with the epoch's number: no other job has both

  // A newer epoch than the last one taken.
  std::optional<Epoch> take_news();
  // Why this machine can't go on: the others go on without it, can't be reached, or one has ended the job.
  const std::optional<std::string>& end() const { return end_; }

  void want_restart() { tell("restart"); }
  void want_to_leave() { tell("leave"); }
  void finish();  // all ranks here have succeeded
  bool all_done() const { return over_; }
  void end_job(const std::string& why) { tell("end", why); }  // on all machines
  // Lines about machines that are lost, come and go, since the last call.
  std::vector<std::string> take_words() { return std::exchange(words_, {}); }

 private:
  void tell(const std::string& what, const std::string& more = "");
  void hear(const Packet& packet);
  void wait_for_the_beginning();
  void say_goodbye();

  milliseconds beat_;
  PacketStream stream_;
  std::optional<Process> process_{};
  std::string id_{};
  Epoch epoch_{};
  bool has_news_ = false;
  bool has_finished_ = false;  // in this epoch
  bool over_ = false;
  std::optional<std::string> end_{};
  std::vector<std::string> words_{};
  std::chrono::steady_clock::time_point next_beat_{};
};

}  // namespace lockstep
