// lockstep/devices.h: the devices of one process, each with a thread of its own: 1 + N threads, as in S4.
//
// Flow:    one scheduling thread (the caller's) -> run() -> the same function on every device -> back
// Owns:    N threads, each pinned to a disjoint set of cores: cpu:0 ... cpu:N-1
// Threads: Devices from one thread; a Device only on its own
// Ranks:   inside one process; between processes there is World
//
// Signals are atomics: a waiting thread spins for a moment, then sleeps in a futex until it is woken. A device says
// that it is done after it has finished with everything that it was given.
//
// What goes wrong: the first exception of any device ends all of them. Those that wait for another device, in a
// collective or in Device::wait, leave with PeerLost within 100 ms; those that compute end when their function does;
// then run() throws the first exception. A device that is not done within the timeout, and does not wait for another
// one, is named in a PeerLost. Afterwards the devices are of no more use.
//
// A function that never returns can't be ended from inside a process: its thread is left behind, and what it uses
// must be its own (captured by value). A program that ends while such a thread is at work ends without destroying its
// static objects: the thread may use them.
#pragma once

#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/collective/shm/memory/flag.h"
#include "lockstep/collective_types.h"
#include "lockstep/cores.h"
#include "lockstep/deadline.h"

namespace lockstep {

class DevicesState;
class ThreadGenerator;

struct DevicesOptions {
  int count = 1;
  CoreSet cores = {};  // to be shared out; empty: all that this process may use
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  int teams = 1;  // collectives are between the devices of a team: device i belongs to team i % teams
};

// What a function that runs on a device has of it. Collectives are calls of all devices of a team, in the same order;
// tensors: dense, the same shape, strides and dtype on all of them, and are read and written where they lie. They throw
// PeerLost (another device failed or is too late) and MismatchError (devices that call different things).
class Device {
 public:
  int index() const { return index_; }
  int count() const;
  std::string name() const;  // "cpu:1"
  torch::Device where() const { return torch::kCPU; }

  // Sum over the team, on all of its devices. central is S0's: onto the first device, then back to all. `root` counts
  // within the team.
  void all_reduce(const torch::Tensor& tensor, shm::Algorithm algorithm = shm::Algorithm::kDirect);
  void reduce(const torch::Tensor& tensor, int root = 0);  // the sum on `root`; the others keep theirs
  void broadcast(const torch::Tensor& tensor, int root = 0);
  void barrier();

  // What dropout draws from on this device begins anew. seed_of(seed, index()) gives each device a sequence of its own.
  void seed(std::uint64_t seed);
  ThreadGenerator& generator() { return generator_; }

  // Blocks until done(); `flag` is raised or rung when that may have become so. Throws PeerLost: another device failed,
  // or the timeout is over (`what`: what is waited for).
  template <class Done>
  void wait(shm::Flag& flag, const std::string& what, const Done& done) {
    for (int i = 0; i < kSpins; ++i) {
      if (done()) return;
      shm::pause();
    }
    const Deadline deadline = deadline_of_wait();
    const Waiting waiting(*this);
    while (true) {
      const std::uint32_t seen = flag.load();
      if (done()) return;
      throw_if_hopeless(deadline, what);
      flag.sleep_while(seen, kLongestSleep);
    }
  }

 private:
  friend class DevicesState;
  Device(DevicesState& state, int index, ThreadGenerator& generator)
      : state_(state), index_(index), generator_(generator) {}

  // While this lives the device waits for others: it is not the one that is late.
  class Waiting {
   public:
    explicit Waiting(const Device& device);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    const Device& device_;
  };

  Deadline deadline_of_wait() const;
  void throw_if_hopeless(const Deadline& deadline, const std::string& what) const;

  static constexpr int kSpins = 200;
  static constexpr std::chrono::milliseconds kLongestSleep{10};

  DevicesState& state_;
  int index_;
  ThreadGenerator& generator_;
};

class Devices {
 public:
  using Body = std::function<void(Device&)>;

  explicit Devices(const DevicesOptions& options);  // throws UsageError, SystemError
  ~Devices();                                       // ends the threads; a function under way comes to its end first
  Devices(const Devices&) = delete;
  Devices& operator=(const Devices&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }
  std::vector<std::string> names() const;
  torch::Device where(int) const { return torch::kCPU; }

  // `body` on every device at the same time. Blocks until all are done. Throws what the first device threw, PeerLost.
  void run(Body body);

  // Only on that device; the others rest.
  void run_on(int index, const Body& body);

  // Calls part(first, last) for pieces of [begin, end), one on each device, which spreads it over its cores in steps
  // of at least `grain`. Blocks until none is at work on it any more, also after the timeout: so `part` may use what
  // belongs to the caller, and has to come to its end by itself. Throws as run() does.
  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& part);

  // Seconds that each device has spent in bodies since the start.
  std::vector<double> busy_seconds() const;

 private:
  std::shared_ptr<DevicesState> state_;
  std::vector<std::thread> threads_;
};

// devices.parallel_for, as what it is given to takes it. `devices` has to outlive it.
inline auto on_all(Devices& devices) {
  return [&devices](std::int64_t begin, std::int64_t end, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& part) {
    devices.parallel_for(begin, end, grain, part);
  };
}

}  // namespace lockstep
