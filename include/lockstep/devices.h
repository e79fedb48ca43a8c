// SPDX-License-Identifier: Apache-2.0
// lockstep/devices.h: the devices of one process. A device is a set of cores, or a GPU, with a thread of its own.
//
//   scheduling thread (the caller's) --run(body)--> body on N device threads at the same time --> back to the caller
//
// Flow:    towers, data_parallel, averaging, pipeline, kvstore -> here -> a model's forward, backward and update
// Owns:    N threads, each pinned to its own cores: cpu:0 ... cpu:N-1; where devices are GPUs, each thread has one as
//          its current device, and works on that GPU's default stream
// Threads: call Devices from one thread; use a Device only on its own thread
// Ranks:   inside one process; World connects processes
//
// Failures. The first exception on any device ends the step on all of them: devices that wait for another one (in a
// collective) throw PeerLost at once, devices that compute go on until their function returns. Then run() throws
// the first exception. A device that is not done within the timeout is named in a PeerLost; devices that only wait for
// it are not blamed. After a failure these Devices can't be used again.
//
// Functions that never return. A thread can't be ended from outside, so ~Devices logs a warning and leaves it running.
// Functions must own what they use (capture by value), because it outlives the caller. It also uses static objects,
// such as libtorch's operators, so main() must not return while it runs: if Devices::left_behind() is not 0, end the
// program with std::_Exit(). lockstep::run() does so; a training loop of your own has to do it itself.
#pragma once

#include <memory>
#include <thread>

#include "lockstep/collective_types.h"
#include "lockstep/deadline.h"
#include "lockstep/device_place.h"

namespace lockstep {

class DevicesState;
struct Call;

struct DevicesOptions {
  int count = 1;
  CoreSet cores = {};  // to be divided among the devices; empty: all cores that this process may use
  milliseconds timeout = kDefaultTimeout;
  std::vector<DevicePlace> places{};  // one for each of `count`; empty: cores
};

// The device that a function runs on. Collectives are called by all devices, in the same
// order, with dense tensors of the same shape, strides and dtype, which are read and written in place. They block until
// all are done, and throw PeerLost (another device failed or is late) or MismatchError (different calls).
class Device {
 public:
  int index() const { return index_; }
  std::string name() const;     // "cpu:1", "cuda:1"
  torch::Device where() const;  // what its tensors belong to: cpu, or a GPU, which is the thread's current device

  // The sum over the devices, on all of them.
  void all_reduce(const torch::Tensor& tensor, Algorithm algorithm = Algorithm::kDirect);
  void reduce(const torch::Tensor& tensor, int root = 0);  // the sum on `root`; the others keep their values
  void broadcast(const torch::Tensor& tensor, int root = 0);
  void barrier();

  // Restarts the random numbers that dropout draws on this device (lockstep/strategy/devices/thread_generator.h).
  void seed(uint64_t seed);

 private:
  friend class DevicesState;
  Device(DevicesState& state, int index) : state_(state), index_(index) {}
  void run(Call call, const torch::Tensor& tensor);

  DevicesState& state_;
  int index_;
};

class Devices {
 public:
  using Body = std::function<void(Device&)>;

  explicit Devices(const DevicesOptions& options);  // throws UsageError, SystemError
  ~Devices();  // ends the threads. Blocks until running functions return, at most for the timeout
  Devices& operator=(Devices&&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }
  std::vector<std::string> names() const;
  torch::Device where(int index) const;  // of device `index`
  bool on_gpus() const { return !where(0).is_cpu(); }

  // Runs `body` on every device at the same time. Blocks until all are done, GPUs with all that was put on their
  // streams, or the timeout has passed. Throws the first exception of any device; PeerLost.
  void run(Body body);

  // Divides [begin, end) among the devices, which call part(first, last) on their cores for pieces of at least `grain`.
  // Blocks until every call of `part` has returned, even after the timeout: `part` may use the caller's variables, and
  // must return. Throws as run() does.
  void parallel_for(int64_t begin, int64_t end, int64_t grain, const std::function<void(int64_t, int64_t)>& part);

  // Seconds that each device has spent in bodies since it was made.
  std::vector<double> busy_seconds() const;

  // Threads of this process that outlived their Devices and are still running. 0 unless a function hangs.
  static int left_behind();

 private:
  std::shared_ptr<DevicesState> state_;
  std::vector<std::thread> threads_;
};

// Adapts Devices::parallel_for to what an optimizer runs its loops with. `devices` must outlive it.
inline auto on_all(Devices& devices) { return std::bind_front(&Devices::parallel_for, &devices); }

}  // namespace lockstep
