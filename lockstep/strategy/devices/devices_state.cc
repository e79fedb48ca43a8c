// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/devices/devices_state.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/observe/trace.h"
#include "lockstep/strategy/devices/thread_generator.h"

namespace lockstep {
namespace {

constexpr int kDeviceSpins = 200;
constexpr int kSchedulerSpins = 100;  // few: while the scheduling thread spins, a device lacks its core
constexpr std::chrono::milliseconds kLongestSleep{10};
constexpr std::chrono::milliseconds kLastChance{100};  // for a device that was late to end by itself

std::atomic<int> threads_left_behind{0};

template <class Done>
bool spin_until(int spins, const Done& done) {
  for (int i = 0; i < spins; ++i) {
    if (done()) return true;
    shm::pause();
  }
  return false;
}

// Asleep on `flag`, which is raised or rung after done() has become true. false: not done, and goes_on() was false.
template <class Done, class GoesOn>
bool sleep_until(shm::Flag& flag, std::chrono::nanoseconds longest, const Done& done, const GoesOn& goes_on) {
  while (true) {
    const std::uint32_t seen = flag.load();
    if (done()) return true;
    if (!goes_on()) return false;
    flag.sleep_while(seen, longest);
  }
}

}  // namespace

int Devices::left_behind() { return threads_left_behind.load(); }

DevicesState::DevicesState(const DevicesOptions& options) : options_(options), most_threads_(at::get_num_threads()) {
  if (options_.cores.empty()) options_.cores = usable_cores();
  if (options_.places.empty()) options_.places = even_places(torch::kCPU, count());
  for (std::string& each : names_of(options_.places)) names_.push_back(std::move(each));
  for (int i = 0; i < count(); ++i) seats_.push_back(std::make_unique<DeviceSeat>());
  for (int team = 0; team < options.teams; ++team)
    teams_.push_back(shm::make_thread_group(count() / options.teams, {.timeout = options.timeout}));
  for (int team = 0; team < options.teams; ++team) tables_.emplace_back(to_size(count() / options.teams));
  stoppable_.emplace([this](const std::string& reason) { fail_as_stopped(reason); });
}

// The thread's cores, and its current device. It has a thread for each core, but not more than the thread that made the
// devices (--threads). Every thread works on the default stream of its GPU: devices on the same
// GPU then take turns, and a copy between two GPUs is in the order of all work on both.
void DevicesState::settle(int index) const {
  const DevicePlace& place = options_.places[to_size(index)];
  const CoreSet cores = place.cores.empty() ? cores_of_rank(options_.cores, index, count()) : place.cores;
  pin_this_thread(cores);
  at::set_num_threads(std::min(static_cast<int>(cores.size()), most_threads_));
  if (!place.device.is_cpu()) c10::impl::VirtualGuardImpl(place.device.type()).setDevice(place.device);
}

void DevicesState::serve(int index) {
  try {
    settle(index);
    const ThreadGenerator generator(seed_of(0, index));
    Device device(*this, index);
    for (std::uint32_t job = 1; wait_for_job(job); ++job) {
      do_job(device);
      seat(index).done.raise(job);
      all_done_.ring();
    }
    group(index).leave();
  } catch (...) {
    fail(name(index), std::current_exception());
  }
  if (seat(index).thread.exchange(DeviceSeat::Thread::kEnded) == DeviceSeat::Thread::kLeftBehind) --threads_left_behind;
  all_done_.ring();
}

// An idle device waits as long as its Devices live: their destructor calls stop().
bool DevicesState::wait_for_job(std::uint32_t job) {
  const auto ready = [&] { return stopping_.load(std::memory_order_acquire) || posted_.reached(job); };
  if (!spin_until(kDeviceSpins, ready)) sleep_until(posted_, std::chrono::seconds(1), ready, [] { return true; });
  return !stopping_.load(std::memory_order_acquire);
}

void DevicesState::do_job(Device& device) {
  const trace::Span span("device", device.index());
  const Stopwatch watch;
  try {
    if (!failed()) body_(device);
    wait_for_device(device.where());  // so that a time is that of the work, and one that hangs is named
  } catch (...) {
    fail(device.name(), current_error_on(device.where().str()));
  }
  auto& busy = seat(device.index()).busy;
  busy.store(busy.load(std::memory_order_relaxed) + watch.seconds(), std::memory_order_relaxed);
}

void DevicesState::post(Devices::Body body) {
  throw_if_stopped();
  if (failed())
    throw UsageError({.what = "devices are used after one of them failed",
                      .likely = "an exception of an earlier step was caught and training went on",
                      .next = "make new devices, or resume from a checkpoint"});
  body_ = std::move(body);
  posted_.raise(++jobs_);
}

void DevicesState::wait_for_all() {
  if (!wait_until(Deadline::after(options_.timeout), [this] { return first_at_work() < 0; })) fail_as_late();
  if (failed()) {
    const std::lock_guard lock(mutex_);
    std::rethrow_exception(error_);
  }
  body_ = nullptr;
}

void DevicesState::stop() {
  stopping_.store(true, std::memory_order_release);
  posted_.ring();
}

bool DevicesState::wait_for_end(int index) {
  return wait_until(Deadline::after(late_ ? kLastChance : options_.timeout),
                    [&] { return seat(index).thread.load() == DeviceSeat::Thread::kEnded; });
}

// The thread may end at the same time: whoever comes second takes it off the count.
void DevicesState::leave_behind(int index) {
  ++threads_left_behind;
  auto serves = DeviceSeat::Thread::kServes;
  if (!seat(index).thread.compare_exchange_strong(serves, DeviceSeat::Thread::kLeftBehind)) --threads_left_behind;
}

bool DevicesState::wait_until(const Deadline& deadline, const std::function<bool()>& done) {
  return spin_until(kSchedulerSpins, done) ||
         sleep_until(all_done_, kLongestSleep, done, [&] { return !deadline.passed(); });
}

void DevicesState::wait_on(Device& device, shm::Flag& flag, const std::string& what,
                           const std::function<bool()>& done) {
  if (spin_until(kDeviceSpins, done)) return;
  const Deadline deadline = Deadline::after(options_.timeout);
  const Waiting waiting(seat(device.index()));
  sleep_until(flag, kLongestSleep, done, [&] {  // short: a failure elsewhere does not ring this flag
    throw_if_hopeless(device, deadline, what);
    return true;
  });
}

void DevicesState::throw_if_hopeless(const Device& device, const Deadline& deadline, const std::string& what) {
  if (failed()) throw PeerLost({.what = concat("another device failed while ", device.name(), " waited for ", what)});
  if (deadline.passed()) throw late_error(who_is_late(), concat(device.name(), ", which waits for ", what));
}

// The first error counts. Poisoning the groups makes devices that wait in a collective give up.
void DevicesState::fail(const std::string& who, std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (error_) return;
    error_ = std::move(error);
  }
  failed_.store(true, std::memory_order_release);
  for (auto& team : teams_) team.front()->poison(concat(who, " failed"));
}

void DevicesState::fail_as_late() {
  const int late = who_is_late();
  if (late < 0) return;  // the last one has just finished
  late_ = true;
  fail(name(late), std::make_exception_ptr(late_error(late, "the scheduling thread")));
}

void DevicesState::fail_as_stopped(const std::string& reason) {
  fail("stop()", std::make_exception_ptr(PeerLost({.what = concat("the devices were stopped: ", reason)})));
  const std::lock_guard lock(mutex_);
  stopped_ = true;
}

void DevicesState::throw_if_stopped() {
  const std::lock_guard lock(mutex_);
  if (stopped_) std::rethrow_exception(error_);
}

PeerLost DevicesState::late_error(int late, const std::string& here) const {
  return PeerLost({.what = concat("device ", name(late), " is not done within ",
                                  human_seconds(std::chrono::duration<double>(options_.timeout).count())),
                   .here = here,
                   .likely = "a function of the task that hangs, or a step that takes longer than that",
                   .next = "look at the task's functions, or give a longer --timeout"});
}

// -1: none.
int DevicesState::first_at_work() {
  for (int i = 0; i < count(); ++i)
    if (!seat(i).done.reached(jobs_)) return i;
  return -1;
}

// Who is to blame for a wait that took too long: the first device at work that does not wait for another one.
int DevicesState::who_is_late() {
  for (int i = 0; i < count(); ++i)
    if (!seat(i).done.reached(jobs_) && !seat(i).waits.load(std::memory_order_relaxed)) return i;
  return first_at_work();
}

}  // namespace lockstep
