// SPDX-License-Identifier: Apache-2.0
// strategy/devices/devices_state.h: the signals between the scheduling thread and the threads of its devices. One mutex
// guards them all:
//
//   run()     sets the job and counts it, rings posted_, and waits until every seat has done as many jobs
//   serve()   waits for a job that its seat has not done, runs it, counts it, and rings done_
//   change()  changes what another device waits for in wait_on(), and rings changed_
//
// Owns:    a seat and a place in a thread group per device. Every device thread keeps it alive
// Threads: run, stop, wait_for_end, leave_behind: the scheduling thread. serve: a device's. The rest: any
// Ranks:   inside one process
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/base/process/own_process.h"
#include "lockstep/base/process/stoppable.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/devices.h"
#include "lockstep/error.h"
#include "lockstep/named_tensor.h"

namespace lockstep {

struct DeviceSeat {
  enum class Thread { kServes, kEnded, kLeftBehind };

  uint64_t done = 0;  // jobs
  Thread thread = Thread::kServes;
  double busy = 0;                 // seconds
  std::atomic<bool> waits{false};  // for another device; not guarded by the mutex
};

class DevicesState {
 public:
  explicit DevicesState(const DevicesOptions& options);

  static DevicesState& of(Device& device) { return device.state_; }

  const OwnProcess process;  // that has the threads

  const std::string& name(int index) const { return names_[index]; }  // "cpu:1"
  const std::vector<std::string>& names() const { return names_; }
  torch::Device where(int index) const { return options_.places[to_size(index)].device; }
  bool on_gpus() const { return !where(0).is_cpu(); }
  double busy_seconds(int index);

  Tensors& table() { return table_; }  // the tensors that GPUs show each other (gpu_team.h)
  shm::Group& group(int index) { return *groups_[index]; }
  DeviceSeat& seat(int index) { return seats_[to_size(index)]; }

  // The body of a device's thread.
  void serve(int index);

  // Throws the first exception of a device; PeerLost; UsageError: a device has failed before; what stop() has left.
  void run(Devices::Body body);
  void stop();
  bool wait_for_end(int index);  // of the device's thread; false: it is still running at the deadline
  void leave_behind(int index);  // counts the thread in Devices::left_behind() until it ends

  // Blocks a function on one device until done(), which another device makes true in change(). `what` names what is
  // waited for. Throws PeerLost: another device failed, or the timeout has passed.
  void wait_on(Device& device, const std::string& what, const std::function<bool()>& done);
  template <class Change>
  void change(const Change& change) {
    {
      const std::lock_guard lock(mutex_);
      change();
    }
    changed_.notify_all();
  }

 private:
  void settle(int index) const;
  bool wait_for_job(int index);
  void do_job(Device& device);
  void fail(const std::string& who, std::exception_ptr error);
  PeerLost late_error(int late, const std::string& here) const;
  int who_is_late();
  int count() const { return options_.count; }
  bool failed();

  DevicesOptions options_;
  int most_threads_;  // of each device
  std::vector<DeviceSeat> seats_;
  IntVector<std::string> names_;
  IntVector<shm::GroupPtr> groups_;  // each device's side
  Tensors table_;

  std::mutex mutex_;  // of what follows, and of the seats
  std::condition_variable posted_, done_, changed_;
  Devices::Body body_;
  std::atomic<uint64_t> jobs_{0};  // posted so far
  std::atomic<int> at_work_{0};    // devices that have not done the last job
  std::atomic<bool> stopping_{false};
  bool late_ = false;  // a device was late: its thread is not waited for again
  std::exception_ptr error_;
  bool stopped_ = false;                // by stop() of lockstep/stop.h
  std::optional<Stoppable> stoppable_;  // the last member
};

// While this lives, the device waits for others: it is not the one that is late. An exception that leaves the wait
// keeps the mark, because whoever gave up waiting is not late either.
class Waiting {
 public:
  explicit Waiting(DeviceSeat& seat) : seat_(seat) { seat_.waits = true; }
  ~Waiting() {
    if (std::uncaught_exceptions() == 0) seat_.waits = false;
  }
  Waiting& operator=(Waiting&&) = delete;

 private:
  DeviceSeat& seat_;
};

}  // namespace lockstep
