// SPDX-License-Identifier: Apache-2.0
// strategy/devices/devices_state.h: the signals between the scheduling thread and the threads of its devices.
//
//   post        body_ = the job, then posted_.raise(k)    a device that sees k sees the body
//   do_job      body_(device), then done.raise(k) of its seat, then all_done_.ring()
//   wait        the scheduling thread sleeps on all_done_ until every seat's `done` has reached k: then it sees
//               everything that the bodies have written
//
// raise() and ring() are releases, load() and reached() acquires (collective/shm/memory/flag.h). No wake-up is lost: who
// waits reads the flag, then looks at the condition, then sleeps only while the flag is what it read; who signals
// changes the condition first, then the flag.
//
// Owns:    a seat and a place in a thread group per device. Every device thread keeps it alive
// Threads: post, wait_for_all, stop, leave_behind: the scheduling thread. serve: a device's. The rest: any
// Ranks:   inside one process
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/base/int_vector.h"
#include "lockstep/base/own_process.h"
#include "lockstep/base/stoppable.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/memory/flag.h"
#include "lockstep/deadline.h"
#include "lockstep/devices.h"
#include "lockstep/error.h"

namespace lockstep {

// One device's side of the signals, on cache lines of its own.
struct alignas(64) DeviceSeat {
  enum class Thread { kServes, kEnded, kLeftBehind };

  shm::Flag done;  // number of the last job that is finished
  std::atomic<Thread> thread{Thread::kServes};
  std::atomic<double> busy{0};
  std::atomic<bool> waits{false};  // for another device
};

class DevicesState {
 public:
  explicit DevicesState(const DevicesOptions& options);

  static DevicesState& of(Device& device) { return device.state_; }

  const OwnProcess process;  // that has the threads

  DeviceSeat& seat(int index) { return *seats_[index]; }
  // "cpu:1"; and its place.
  const std::string& name(int index) const { return names_[index]; }
  torch::Device where(int index) const { return options_.places[static_cast<std::size_t>(index)].device; }
  bool on_gpus() const { return !where(0).is_cpu(); }

  // What the GPUs of a team show each other (gpu_team.h).
  std::vector<torch::Tensor>& table(int index) { return tables_[index % tables_.size()]; }

  shm::Group& group(int index) { return *teams_[index % teams_.size()][index / teams_.size()]; }

  // What a device's thread does from its start to its end.
  void serve(int index);

  void post(Devices::Body body);  // throws UsageError: a device has failed before; what stop() has left
  void wait_for_all();            // throws the first exception of a device; PeerLost
  void stop();
  bool wait_for_end(int index);  // of the device's thread; false: it is still running at the deadline
  void leave_behind(int index);  // counts the thread in Devices::left_behind() until it ends

  // How a function on one device waits for a signal from another: blocks until done(). Whoever makes it true raises or
  // rings `flag` afterwards. Throws PeerLost: another device failed, or the timeout has passed; `what` names what is
  // waited for.
  void wait_on(Device& device, shm::Flag& flag, const std::string& what, const std::function<bool()>& done);

 private:
  void settle(int index) const;
  void do_job(Device& device);
  bool wait_for_job(std::uint32_t job);
  bool wait_until(const Deadline& deadline, const std::function<bool()>& done);
  void fail(const std::string& who, std::exception_ptr error);
  void fail_as_late();
  void fail_as_stopped(const std::string& reason);
  void throw_if_hopeless(const Device& device, const Deadline& deadline, const std::string& what);
  PeerLost late_error(int late, const std::string& here) const;
  int first_at_work();
  int who_is_late();
  int count() const { return options_.count; }
  void throw_if_stopped();
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  DevicesOptions options_;
  int most_threads_;  // of each device
  IntVector<std::unique_ptr<DeviceSeat>> seats_;
  IntVector<std::string> names_;
  IntVector<IntVector<shm::GroupPtr>> teams_;
  IntVector<std::vector<torch::Tensor>> tables_;  // of each team
  Devices::Body body_;
  std::uint32_t jobs_ = 0;  // posted so far
  shm::Flag posted_;        // number of the last job
  shm::Flag all_done_;      // rung whenever a device has finished a job, or its thread
  std::atomic<bool> stopping_{false};
  std::atomic<bool> failed_{false};
  bool late_ = false;  // a device was late: its thread is not waited for again
  std::mutex mutex_;   // of error_
  std::exception_ptr error_;
  bool stopped_ = false;                // guarded by mutex_
  std::optional<Stoppable> stoppable_;  // the last member
};

// While this lives, the device waits for others: it is not the one that is late. An exception that leaves the wait
// keeps the mark, because whoever gave up waiting is not late either.
class Waiting {
 public:
  explicit Waiting(DeviceSeat& seat) : seat_(seat) { seat_.waits.store(true, std::memory_order_relaxed); }
  ~Waiting() {
    if (std::uncaught_exceptions() == 0) seat_.waits.store(false, std::memory_order_relaxed);
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  DeviceSeat& seat_;
};

}  // namespace lockstep
