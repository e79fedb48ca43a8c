// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/c10d_call.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/text.h"
#include "lockstep/collective/calls/call_queue.h"

namespace lockstep {
namespace {

PeerLost peer_lost(const C10dCall& call, const std::exception& cause) {
  return lost_connection(call.operation + " failed", call.here, cause);
}

C10dWork issue_checked(const C10dCall& call, const std::function<C10dWork()>& issue) try {
  return issue_alone(issue);
} catch (const c10::AcceleratorError&) {  // of the GPU, and not about the arguments
  throw;
} catch (const c10::OutOfMemoryError&) {
  throw;
} catch (const c10::Error& error) {  // before anything was sent
  throw UsageError({.what = concat(call.operation, " refused: ", first_line_of(error)),
                    .here = call.here,
                    .likely = "a dtype or a layout that c10d does not exchange"});
} catch (const std::exception& error) {  // of Gloo: the connection is closed already
  throw peer_lost(call, error);
}

class CallUnderWay : public Future {
 public:
  CallUnderWay(C10dCall call, C10dWork work) : call_(std::move(call)), work_(std::move(work)) {}

  void wait(std::optional<Deadline> deadline) override try {
    work_->wait(deadline ? std::max(deadline->left(), milliseconds(1)) : kNoTimeout);
  } catch (const std::exception& error) {
    if (!work_->isCompleted()) throw not_finished_by_deadline(call_.here, call_.operation);
    throw peer_lost(call_, error);
  }
  bool done() override { return work_->isCompleted(); }

 private:
  C10dCall call_;
  C10dWork work_;
};

}  // namespace

// A queue of its own carries the message out: on the thread that waits, or on a worker thread.
class C10dMessages::UnderWay : public Future {
 public:
  explicit UnderWay(C10dMessage message)
      : call_(std::move(message.call)),
        next_(std::move(message.next)),
        first_(issue_checked(call_, message.issue)),
        queue_(call_.here),
        result_(queue_.add([this] { carry_out(); })) {
    if (message.in_background) queue_.hand_to_worker();
  }

  ~UnderWay() override {
    if (begun_ && !settled_) abort();  // the thread ends then
    queue_.close();
  }

  bool settled() const { return settled_; }
  void wait(std::optional<Deadline> deadline) override { result_->wait(deadline); }
  bool done() override { return result_->done(); }
  int source() const override { return first_->sourceRank(); }

  void abort() {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    first_->abort();
    if (second_) second_->abort();
  }

 private:
  void carry_out() {
    begun_ = true;
    const std::shared_ptr<void> at_end(nullptr, [this](void*) { settled_ = true; });
    try {
      wait_for(*first_);
      if (next_) begin_second(next_(*first_));
      if (second_) wait_for(*second_);
      if (call_.finish) call_.finish();
    } catch (const Error&) {  // of next_ and finish
      throw;
    } catch (const std::exception& error) {
      throw peer_lost(call_, error);
    }
  }

  void begin_second(C10dWork work) {
    const std::lock_guard lock(mutex_);
    second_ = std::move(work);
    if (aborted_ && second_) second_->abort();
  }

  static void wait_for(c10d::Work& work) {
    if (!work.wait()) throw std::runtime_error("the connection was closed");
  }

  C10dCall call_;
  std::function<C10dWork(c10d::Work&)> next_;
  std::atomic<bool> begun_{false};
  std::atomic<bool> settled_{false};
  std::mutex mutex_;
  bool aborted_ = false;  // guarded by mutex_, like the next
  C10dWork second_;       // written by the thread that carries the message out
  C10dWork first_;
  CallQueue queue_;
  FuturePtr result_;
};

FuturePtr C10dMessages::start(C10dMessage message) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw peer_lost(message.call, std::runtime_error("the connection was closed"));
  std::erase_if(under_way_, [](const auto& one) { return one->settled(); });
  under_way_.push_back(std::make_shared<UnderWay>(std::move(message)));
  return under_way_.back();
}

void C10dMessages::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (const auto& one : under_way_) one->abort();
}

C10dWork issue_alone(const std::function<C10dWork()>& issue) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return issue();
}

PeerLost lost_connection(const std::string& what, const std::string& here, const std::exception& cause) {
  return PeerLost(
      {.what = concat(what, ": ", first_line_of(cause)),
       .here = here,
       .likely = "another rank died, failed, stopped or waits for others; the launcher there names the first",
       .next = "run again with --resume to go on from the last checkpoint"});
}

FuturePtr start_c10d(C10dCall call, const std::function<C10dWork()>& issue) {
  C10dWork work = issue_checked(call, issue);
  return std::make_shared<CallUnderWay>(std::move(call), std::move(work));
}

StorePtr with_prefix(const StorePtr& store, const std::string& prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

TransportOptions options_of_group(const TransportOptions& options, const std::vector<int>& ranks) {
  TransportOptions mine = options;
  mine.rank = index_of(ranks, options.rank);
  mine.size = to_int(ranks.size());
  mine.describe = concat("rank ", mine.rank, " of a sub-world of ", mine.size, ", ", options.describe);
  return mine;
}

std::string prefix_of_group(int groups_made, const std::vector<int>& ranks) {
  return concat("group/", groups_made, "/", ranks.front());
}

}  // namespace lockstep
