// collective/shm/mailbox.h: send and receive between two ranks of a group.
//
// What travels how is transfer.h's; here is who makes them go on: the caller, where nothing else is under way, else a
// thread that takes a step of each in turn and sleeps while none can.
//
// Owns:    the transfers under way; one thread, once a transfer was started without blocking
// Threads: one at a time may call; any may wait for what was started
// Ranks:   the two that are named; no order with respect to collectives
#pragma once

#include <condition_variable>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/group_state.h"
#include "lockstep/collective/shm/transfer.h"
#include "lockstep/collective/shm/work.h"

namespace lockstep::shm {

class Mailbox final : public Narrator {
 public:
  Mailbox(GroupState& group, std::chrono::milliseconds timeout);
  ~Mailbox();  // gives up what is under way

  void set_timeout(std::chrono::milliseconds timeout);

  void send(const Send& call);
  int receive(const Receive& call);
  std::shared_ptr<WorkState> start(const Send& call);
  std::shared_ptr<WorkState> start(const Receive& call);
  void drain() const;  // returns once nothing is under way

  std::string here() const override;
  std::string everyone() const override { return group_.everyone(); }

 private:
  struct Item {
    std::unique_ptr<Transfer> transfer;
    std::shared_ptr<WorkState> state;
    Deadline deadline;
  };

  std::unique_ptr<Transfer> make(const Send& call);
  std::unique_ptr<Transfer> make(const Receive& call);
  int finish_now(std::unique_ptr<Transfer> transfer);
  std::shared_ptr<WorkState> enqueue(std::unique_ptr<Transfer> transfer);
  Flag& bell() const { return group_.area().progress(group_.rank()).bell; }
  int machine_rank_of(const Transfer& transfer) const;

  void work();
  bool begin_round();
  bool progress_all();
  bool step(Item& item);
  void fail_all(const std::exception_ptr& error);

  GroupState& group_;
  std::chrono::milliseconds timeout_;
  Waiter waiter_;
  int waiting_for_ = kNobody;
  std::vector<std::uint32_t> sent_;  // letters so far, to each rank
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::list<Item> items_;  // in the order in which they were started
  std::string doing_;      // guarded by mutex_
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lockstep::shm
