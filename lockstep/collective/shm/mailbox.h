// collective/shm/mailbox.h: send and receive between two ranks of a group.
//
// Between each two ranks lie four letters. A sender fills a free one and rings the receiver's bell; the receiver looks
// for its tag among the letters that are there, oldest first, takes the data, answers, and rings the sender's bell.
//
//   up to 832 bytes       in the letter itself: the sender is done at once
//   an arena, or threads  the letter says where: the receiver copies from there
//   other memory          a few chunks in turn in the sender's arena: it fills while the receiver empties
//
// A Transfer is a send or receive under way, written as steps that never block: so one thread can have many of them in
// hand, and a receive that waits does not hold up a send.
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
#include "lockstep/collective/shm/work.h"

namespace lockstep::shm {

class Transfer {
 public:
  virtual ~Transfer() = default;
  // Goes as far as it can without waiting; true once it is done. Throws MismatchError.
  virtual bool progress() = 0;
  virtual int peer() const = 0;  // kAnyRank: nobody in particular
  virtual std::string describe() const = 0;
  virtual bool holds_up(const Transfer&) const { return false; }  // a later one that must not overtake this one

  int source = kAnyRank;  // of a receive that is done
};

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
