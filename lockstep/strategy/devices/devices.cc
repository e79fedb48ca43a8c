#include "lockstep/devices.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm_dtype.h"
#include "lockstep/error.h"
#include "lockstep/gradient/parallel_for.h"
#include "lockstep/model/parameters.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy/devices/thread_generator.h"

namespace lockstep {
namespace {

constexpr int kSchedulersSpins = 100;  // few: while the scheduling thread spins, a device lacks its core
constexpr std::chrono::milliseconds kLongestSleep{10};

std::string device_name(int index) { return concat("cpu:", index); }

shm::DType dtype_of(const torch::Tensor& tensor) {
  if (const auto dtype = to_shm_dtype(tensor.scalar_type())) return *dtype;
  throw UsageError({.what = concat("tensors of ", c10::toString(tensor.scalar_type()), " can't be exchanged")});
}

}  // namespace

// One device's side; its thread keeps the whole state alive.
struct alignas(64) DeviceSeat {
  shm::Flag done;    // number of the last job that is finished
  shm::Flag exited;  // 1: the thread is about to end
  std::atomic<double> busy{0};
  std::atomic<bool> waits{false};  // for another device
};

class DevicesState {
 public:
  explicit DevicesState(const DevicesOptions& options)
      : options_(options),
        cores_(options.cores.empty() ? usable_cores() : options.cores),
        seats_(static_cast<std::size_t>(options.count)) {
    for (int team = 0; team < options.teams; ++team)
      teams_.push_back(shm::make_thread_group(options.count / options.teams, {.timeout = options.timeout}));
  }

  int count() const { return options_.count; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  DeviceSeat& seat(int index) { return seats_[static_cast<std::size_t>(index)]; }
  shm::Group& group(int index) {
    const auto teams = static_cast<int>(teams_.size());
    return teams_[static_cast<std::size_t>(index % teams)][static_cast<std::size_t>(index / teams)];
  }
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // What a device's thread does from its start to its end.
  void serve(int index) {
    try {
      const CoreSet mine = cores_of_rank(cores_, index, count());
      pin_this_thread(mine);
      at::set_num_threads(static_cast<int>(mine.size()));
      ThreadGenerator generator(seed_of(0, index));
      Device device(*this, index, generator);
      for (std::uint32_t job = 1; wait_for_job(job); ++job) {
        do_job(device);
        seat(index).done.raise(job);
        all_done_.ring();
      }
      group(index).leave();
    } catch (...) {
      fail(index, std::current_exception());
    }
    seat(index).exited.raise(1);
    all_done_.ring();
  }

  void post(Devices::Body body) {
    require_usable();
    body_ = std::move(body);
    posted_.raise(++jobs_);
  }

  void wait_for_all() {
    const Deadline deadline = Deadline::after(timeout());
    if (!wait(deadline, [this] { return first_at_work() < 0; })) fail_as_late();
    if (failed()) std::rethrow_exception(error());
    body_ = nullptr;
  }

  void stop() {
    stopping_.store(true, std::memory_order_release);
    posted_.ring();
  }

  // True once the thread is about to end; false at the deadline.
  bool wait_for_exit(int index) {
    return wait(Deadline::after(late_ ? std::chrono::milliseconds(100) : timeout()),
                [&] { return seat(index).exited.load() == 1; });
  }

  // The one to blame for a wait that was too long: the first at work that does not wait for another one. -1: none is
  // at work.
  int who_is_late() {
    for (int i = 0; i < count(); ++i)
      if (!seat(i).done.reached(jobs_) && !seat(i).waits.load(std::memory_order_relaxed)) return i;
    return first_at_work();
  }

  PeerLost late_error(int late, const std::string& here) const {
    return PeerLost({.what = concat("device ", device_name(late), " is not done within ",
                                    human_seconds(std::chrono::duration<double>(timeout()).count())),
                     .here = here,
                     .likely = "a function of the task that hangs, or a step that takes longer than that",
                     .next = "look at the task's functions, or give a longer --timeout"});
  }

  // The first error stays; everybody who waits for another device hears of it.
  void fail(int index, std::exception_ptr error) {
    {
      const std::lock_guard lock(mutex_);
      if (error_) return;
      error_ = std::move(error);
    }
    failed_.store(true, std::memory_order_release);
    for (auto& team : teams_) team.front().poison(concat(device_name(index), " failed"));
  }

 private:
  // Idle devices wait for as long as their owner lives, which ends them in any case: its destructor says so.
  bool wait_for_job(std::uint32_t job) {
    const auto called = [&] { return posted_.reached(job) || stopping_.load(std::memory_order_acquire); };
    for (int i = 0; i < Device::kSpins && !called(); ++i) shm::pause();
    while (true) {
      const std::uint32_t seen = posted_.load();
      if (stopping_.load(std::memory_order_acquire)) return false;
      if (posted_.reached(job)) return true;
      posted_.sleep_while(seen, std::chrono::seconds(1));
    }
  }

  void do_job(Device& device) {
    const Stopwatch watch;
    try {
      if (!failed()) body_(device);
    } catch (...) {
      fail(device.index(), std::current_exception());
    }
    auto& busy = seat(device.index()).busy;
    busy.store(busy.load(std::memory_order_relaxed) + watch.seconds(), std::memory_order_relaxed);
  }

  template <class Done>
  bool wait(const Deadline& deadline, const Done& done) {
    for (int i = 0; i < kSchedulersSpins; ++i) {
      if (done()) return true;
      shm::pause();
    }
    while (true) {
      const std::uint32_t seen = all_done_.load();
      if (done()) return true;
      if (deadline.passed()) return false;
      all_done_.sleep_while(seen, kLongestSleep);
    }
  }

  int first_at_work() {
    for (int i = 0; i < count(); ++i)
      if (!seat(i).done.reached(jobs_)) return i;
    return -1;
  }

  void fail_as_late() {
    const int late = who_is_late();
    if (late < 0) return;  // the last one came to its end just now
    late_ = true;
    fail(late, std::make_exception_ptr(late_error(late, "the scheduling thread")));
  }

  std::exception_ptr error() {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  void require_usable() {
    if (failed())
      throw UsageError({.what = "devices are used after one of them failed",
                        .likely = "an exception of a step before was caught and training went on",
                        .next = "make new devices, or resume from a checkpoint"});
  }

  DevicesOptions options_;
  CoreSet cores_;
  std::vector<DeviceSeat> seats_;
  std::vector<std::vector<shm::Group>> teams_;
  Devices::Body body_;
  std::uint32_t jobs_ = 0;
  shm::Flag posted_;
  shm::Flag all_done_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> failed_{false};
  bool late_ = false;
  std::mutex mutex_;
  std::exception_ptr error_;
};

int Device::count() const { return state_.count(); }
std::string Device::name() const { return device_name(index_); }
Deadline Device::deadline_of_wait() const { return Deadline::after(state_.timeout()); }
void Device::seed(std::uint64_t seed) { generator_.seed(seed); }

void Device::throw_if_hopeless(const Deadline& deadline, const std::string& what) const {
  if (state_.failed()) throw PeerLost({.what = concat("another device failed while ", name(), " waited for ", what)});
  if (deadline.passed()) throw state_.late_error(state_.who_is_late(), concat(name(), ", which waits for ", what));
}

Device::Waiting::Waiting(const Device& device) : device_(device) {
  device.state_.seat(device.index_).waits.store(true, std::memory_order_relaxed);
}
Device::Waiting::~Waiting() {  // who gives up is not late either
  if (std::uncaught_exceptions() == 0)
    device_.state_.seat(device_.index_).waits.store(false, std::memory_order_relaxed);
}

void Device::all_reduce(const torch::Tensor& tensor, shm::Algorithm algorithm) {
  const torch::Tensor flat = dense_view(tensor);
  const Waiting waiting(*this);
  state_.group(index_).all_reduce({.input = flat.const_data_ptr(),
                                   .output = flat.mutable_data_ptr(),
                                   .count = static_cast<std::size_t>(flat.numel()),
                                   .dtype = dtype_of(flat),
                                   .algorithm = algorithm});
}

void Device::reduce(const torch::Tensor& tensor, int root) {
  const torch::Tensor flat = dense_view(tensor);
  const Waiting waiting(*this);
  shm::Group& team = state_.group(index_);
  team.reduce({.input = flat.const_data_ptr(),
               .output = team.rank() == root ? flat.mutable_data_ptr() : nullptr,
               .count = static_cast<std::size_t>(flat.numel()),
               .dtype = dtype_of(flat),
               .root = root});
}

void Device::broadcast(const torch::Tensor& tensor, int root) {
  const torch::Tensor flat = dense_view(tensor);
  const Waiting waiting(*this);
  state_.group(index_).broadcast({.data = flat.mutable_data_ptr(),
                                  .count = static_cast<std::size_t>(flat.numel()),
                                  .dtype = dtype_of(flat),
                                  .root = root});
}

void Device::barrier() {
  const Waiting waiting(*this);
  state_.group(index_).barrier();
}

Devices::Devices(const DevicesOptions& options) {
  if (options.count < 1) throw UsageError({.what = concat(options.count, " devices"), .next = "give at least 1"});
  if (options.teams < 1 || options.count % options.teams != 0)
    throw UsageError({.what = concat(options.count, " devices in ", options.teams, " teams")});
  state_ = std::make_shared<DevicesState>(options);
  for (int i = 0; i < options.count; ++i) threads_.emplace_back([state = state_, i] { state->serve(i); });
}

namespace {

// A device's thread that is left behind uses static objects, such as libtorch's operators, to the very end: if it is
// still at work then, the program ends without destroying them.
void outlive_statics(const std::shared_ptr<DevicesState>& state, int index) {
  using Left = std::pair<std::weak_ptr<DevicesState>, int>;
  const auto end_at_once = [](int status, void* given) {
    const std::unique_ptr<Left> left(static_cast<Left*>(given));
    const auto devices = left->first.lock();
    if (!devices || devices->seat(left->second).exited.load() == 1) return;
    std::fflush(nullptr);
    ::_exit(status);
  };
  ::on_exit(end_at_once, new Left(state, index));
}

}  // namespace

Devices::~Devices() {
  state_->stop();
  for (int i = 0; i < size(); ++i) {
    std::thread& thread = threads_[static_cast<std::size_t>(i)];
    if (state_->wait_for_exit(i)) {
      thread.join();
    } else {
      log_warning(concat("device ", device_name(i), " is still at work and is left behind"));
      outlive_statics(state_, i);
      thread.detach();
    }
  }
}

std::vector<std::string> Devices::names() const {
  std::vector<std::string> names;
  for (int i = 0; i < size(); ++i) names.push_back(device_name(i));
  return names;
}

void Devices::run(Body body) {
  state_->post(std::move(body));
  state_->wait_for_all();
}

void Devices::run_on(int index, const Body& body) {
  run([index, body](Device& device) {
    if (device.index() == index) body(device);
  });
}

namespace {

// Either a device sees that the loop is given up, or it is waited for.
struct Loop {
  struct Inside {
    explicit Inside(Loop& of) : loop(of) { ++loop.inside; }
    ~Inside() { --loop.inside; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
    Loop& loop;
  };
  std::atomic<int> inside{0};
  std::atomic<bool> given_up{false};
};

}  // namespace

void Devices::parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                           const std::function<void(std::int64_t, std::int64_t)>& part) {
  const auto loop = std::make_shared<Loop>();
  try {
    run([begin, count = end - begin, grain, part, devices = size(), loop](Device& device) {
      const Loop::Inside inside(*loop);
      if (loop->given_up) return;
      const Range mine = even_part(count, device.index(), devices);
      on_own_cores(begin + mine.begin, begin + mine.end, grain, part);
    });
  } catch (...) {
    loop->given_up = true;
    while (loop->inside > 0) std::this_thread::yield();
    throw;
  }
}

std::vector<double> Devices::busy_seconds() const {
  std::vector<double> seconds;
  for (int i = 0; i < size(); ++i) seconds.push_back(state_->seat(i).busy.load(std::memory_order_relaxed));
  return seconds;
}

}  // namespace lockstep
