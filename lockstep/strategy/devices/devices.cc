// SPDX-License-Identifier: Apache-2.0
#include "lockstep/devices.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>

#include "lockstep/base/log.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/calls/tensor_call.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/collective/shm/memory/flag.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/observe/trace.h"
#include "lockstep/sampler.h"
#include "lockstep/step/parallel_for.h"
#include "lockstep/strategy/devices/devices_state.h"
#include "lockstep/strategy/devices/gpu_team.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "lockstep/world.h"

namespace lockstep {
std::string Device::name() const { return state_.name(index_); }

torch::Device Device::where() const { return state_.where(index_); }

void Device::seed(uint64_t seed) {
  ThreadGenerator::seed(seed);
  if (!where().is_cpu()) seed_gpu(where(), seed);
}

void Device::all_reduce(const Tensor& tensor, Algorithm algorithm) {
  run({.operation = Operation::kAllReduce, .algorithm = algorithm}, tensor);
}

void Device::reduce(const Tensor& tensor, int root) { run({.operation = Operation::kReduce, .root = root}, tensor); }

void Device::broadcast(const Tensor& tensor, int root) {
  run({.operation = Operation::kBroadcast, .root = root}, tensor);
}

void Device::run(Call call, const Tensor& tensor) {
  require_device(tensor, where(), concat("the tensor given to a collective on ", name()));
  const auto dtype = to_dtype(tensor.scalar_type());
  if (!dtype)
    throw UsageError({.what = concat("tensors of ", c10::toString(tensor.scalar_type()), " can't be exchanged"),
                      .next = "convert them to another dtype"});
  const Tensor flat = dense_view(tensor);
  shm::Group& group = state_.group(index_);
  call.count = to_size(flat.numel());
  call.dtype = *dtype;
  const Waiting waiting(state_.seat(index_));
  if (state_.on_gpus()) return run_between_gpus(group, state_.table(), call, flat);
  call.input = flat.const_data_ptr();
  if (call.operation != Operation::kReduce || group.rank() == call.root) call.output = flat.mutable_data_ptr();
  group.run(call);
}

void Device::barrier() {
  const Waiting waiting(state_.seat(index_));
  state_.group(index_).barrier();
}

Devices::Devices(const DevicesOptions& options) {
  require(options.count >= 1, concat(options.count, " devices"), "give at least 1");
  require(options.places.empty() || std::ssize(options.places) == options.count,
          concat(options.count, " devices at ", options.places.size(), " places"), "give one place per device");
  for (const DevicePlace& place : options.places)
    if (!place.device.is_cpu()) require_gpus(place.device.index());
  state_ = std::make_shared<DevicesState>(options);
  for (int i = 0; i < options.count; ++i) threads_.emplace_back([state = state_, i] { state->serve(i); });
}

Devices::~Devices() {
  if (!state_->process.is_here()) {  // a forked child has none of the threads
    leave_to_parent(threads_);
    return;
  }
  state_->stop();
  int index = 0;
  for (std::thread& thread : threads_) {
    if (state_->wait_for_end(index)) {
      thread.join();
    } else {
      log_warning(concat("device ", state_->name(index), " is still at work and is left behind"));
      state_->leave_behind(index);
      thread.detach();
    }
    ++index;
  }
}

std::vector<std::string> Devices::names() const { return state_->names(); }

torch::Device Devices::where(int index) const { return state_->where(index); }

void Devices::run(Body body) { state_->run(std::move(body)); }

// Devices that come late must leave `part` alone once the loop was given up. They hold the lock while they use it, so
// that giving up waits for them.
void Devices::parallel_for(int64_t begin, int64_t end, int64_t grain,
                           const std::function<void(int64_t, int64_t)>& part) {
  struct Loop {
    std::shared_mutex mutex;
    bool given_up = false;
  };
  const auto loop = std::make_shared<Loop>();
  try {
    run([begin, count = end - begin, grain, part, devices = size(), loop](Device& device) {
      const std::shared_lock lock(loop->mutex);
      if (loop->given_up) return;
      const Range mine = even_part(count, device.index(), devices);
      on_own_cores(begin + mine.begin, begin + mine.end, grain, part);
    });
  } catch (...) {
    const std::unique_lock lock(loop->mutex);
    loop->given_up = true;
    throw;
  }
}

std::vector<double> Devices::busy_seconds() const {
  std::vector<double> seconds;
  for (int i = 0; i < size(); ++i) seconds.push_back(state_->busy_seconds(i));
  return seconds;
}

// ---- The signals between the scheduling thread and the devices

namespace {

constexpr milliseconds kLastChance{100};  // for a device that was late to end by itself

std::atomic<int> threads_left_behind{0};

// Waits for a moment before a thread sleeps: waking it takes longer than a short job.
template <class Done>
void spin_until(int spins, const Done& done) {
  for (int i = 0; i < spins && !done(); ++i) shm::pause();
}

}  // namespace

int Devices::left_behind() { return threads_left_behind.load(); }

DevicesState::DevicesState(const DevicesOptions& options)
    : options_(options),
      most_threads_(at::get_num_threads()),
      seats_(to_size(options.count)),
      groups_(shm::make_thread_group(options.count, {.timeout = options.timeout})),
      table_(to_size(options.count)) {
  if (options_.cores.empty()) options_.cores = usable_cores();
  if (options_.places.empty()) options_.places = even_places(torch::kCPU, count());
  names_ = names_of(options_.places);
  stoppable_.emplace([this](const std::string& reason) {
    fail("stop()", std::make_exception_ptr(PeerLost({.what = concat("the devices were stopped: ", reason)})));
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  });
}

// The thread's cores, and its current device. It has a thread for each core, but not more than the thread that made the
// devices (--threads).
void DevicesState::settle(int index) const {
  const DevicePlace& place = options_.places[to_size(index)];
  const CoreSet cores = place.cores.empty() ? cores_of_rank(options_.cores, index, count()) : place.cores;
  pin_this_thread(cores);
  at::set_num_threads(std::min(to_int(cores.size()), most_threads_));
  if (!place.device.is_cpu()) c10::impl::VirtualGuardImpl(place.device.type()).setDevice(place.device);
}

void DevicesState::serve(int index) {
  try {
    settle(index);
    const ThreadGenerator generator(mix_seed(0, index));
    Device device(*this, index);
    while (wait_for_job(index)) do_job(device);
    group(index).leave();
  } catch (...) {
    fail(name(index), std::current_exception());
  }
  const std::lock_guard lock(mutex_);
  if (std::exchange(seat(index).thread, DeviceSeat::Thread::kEnded) == DeviceSeat::Thread::kLeftBehind)
    --threads_left_behind;
  done_.notify_all();
}

// An idle device waits as long as its Devices live: their destructor calls stop().
bool DevicesState::wait_for_job(int index) {
  const auto is_posted = [&] { return stopping_ || seat(index).done < jobs_; };
  spin_until(200, is_posted);
  std::unique_lock lock(mutex_);
  posted_.wait(lock, is_posted);
  return !stopping_;
}

// body_ does not change until all devices are done with it, and never again if one is left behind.
void DevicesState::do_job(Device& device) {
  const trace::Span span("device", device.index());
  const Stopwatch watch;
  try {
    if (!failed()) body_(device);
    wait_for_device(device.where());  // so that a time is that of the work, and one that hangs is named
  } catch (...) {
    fail(device.name(), current_error_on(device.where().str()));
  }
  std::unique_lock lock(mutex_);
  seat(device.index()).busy += watch.seconds();
  ++seat(device.index()).done;
  const bool was_last = --at_work_ == 0;
  lock.unlock();
  if (was_last) done_.notify_all();
}

void DevicesState::run(Devices::Body body) {
  std::unique_lock lock(mutex_);
  if (stopped_) std::rethrow_exception(error_);
  if (error_)
    throw UsageError({.what = "devices were used after one of them failed",
                      .next = "make new devices, or resume from a checkpoint"});
  body_ = std::move(body);
  at_work_ = count();
  ++jobs_;
  lock.unlock();
  posted_.notify_all();
  const auto is_done = [this] { return at_work_ == 0; };
  spin_until(100, is_done);  // few: while the scheduling thread spins, a device lacks its core
  lock.lock();
  if (!done_.wait_for(lock, Deadline::after(options_.timeout).left(), is_done)) {
    late_ = true;
    const int late = who_is_late();
    lock.unlock();
    fail(name(late), std::make_exception_ptr(late_error(late, "the scheduling thread")));
    lock.lock();
  }
  if (error_) std::rethrow_exception(error_);
  body_ = nullptr;
}

void DevicesState::stop() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  posted_.notify_all();
}

bool DevicesState::wait_for_end(int index) {
  std::unique_lock lock(mutex_);
  return done_.wait_for(lock, Deadline::after(late_ ? kLastChance : options_.timeout).left(),
                        [&] { return seat(index).thread == DeviceSeat::Thread::kEnded; });
}

// The thread may have ended in the meantime.
void DevicesState::leave_behind(int index) {
  const std::lock_guard lock(mutex_);
  if (seat(index).thread == DeviceSeat::Thread::kEnded) return;
  seat(index).thread = DeviceSeat::Thread::kLeftBehind;
  ++threads_left_behind;
}

void DevicesState::wait_on(Device& device, const std::string& what, const std::function<bool()>& done) {
  std::unique_lock lock(mutex_);
  if (done()) return;
  const Waiting waiting(seat(device.index()));
  changed_.wait_for(lock, Deadline::after(options_.timeout).left(), [&] { return done() || error_; });
  if (done()) return;
  if (error_) throw PeerLost({.what = concat("another device failed while ", device.name(), " waited for ", what)});
  throw late_error(who_is_late(), concat(device.name(), ", which waits for ", what));
}

// The first error counts. Poisoning the group makes devices that wait in a collective give up.
void DevicesState::fail(const std::string& who, std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (error_) return;
    error_ = std::move(error);
  }
  changed_.notify_all();
  groups_.front()->poison(concat(who, " failed"));
}

bool DevicesState::failed() {
  const std::lock_guard lock(mutex_);
  return error_ != nullptr;
}

double DevicesState::busy_seconds(int index) {
  const std::lock_guard lock(mutex_);
  return seat(index).busy;
}

PeerLost DevicesState::late_error(int late, const std::string& here) const {
  return PeerLost({.what = concat("device ", name(late), " is not done within ", human_seconds(options_.timeout)),
                   .here = here,
                   .likely = "a function of the task that hangs, or a step that takes longer than that",
                   .next = "look at the task's functions, or give a longer --timeout"});
}

// The one to blame for a wait that took too long: the first device at work that does not wait for another one; else the
// first at work.
int DevicesState::who_is_late() {
  int late = -1;
  for (int i = count() - 1; i >= 0; --i)
    if (seat(i).done < jobs_ && (late < 0 || !seat(i).waits || seat(late).waits)) late = i;
  return late;
}

}  // namespace lockstep
