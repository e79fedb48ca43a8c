// SPDX-License-Identifier: Apache-2.0
#include "lockstep/devices.h"

#include <mutex>
#include <shared_mutex>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/calls/tensor_call.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/sampler.h"
#include "lockstep/step/parallel_for.h"
#include "lockstep/strategy/devices/devices_state.h"
#include "lockstep/strategy/devices/gpu_team.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "lockstep/world.h"

namespace lockstep {
std::string Device::name() const { return state_.name(index_); }

torch::Device Device::where() const { return state_.where(index_); }

void Device::seed(std::uint64_t seed) {
  ThreadGenerator::seed(seed);
  if (!where().is_cpu()) seed_gpu(where(), seed);
}

void Device::all_reduce(const torch::Tensor& tensor, Algorithm algorithm) {
  run({.operation = Operation::kAllReduce, .algorithm = algorithm}, tensor);
}

void Device::reduce(const torch::Tensor& tensor, int root) {
  run({.operation = Operation::kReduce, .root = root}, tensor);
}

void Device::broadcast(const torch::Tensor& tensor, int root) {
  run({.operation = Operation::kBroadcast, .root = root}, tensor);
}

void Device::run(Call call, const torch::Tensor& tensor) {
  require_device(tensor, where(), concat("the tensor given to a collective on ", name()));
  const auto dtype = to_dtype(tensor.scalar_type());
  if (!dtype)
    throw UsageError({.what = concat("tensors of ", c10::toString(tensor.scalar_type()), " can't be exchanged"),
                      .next = "convert them to another dtype"});
  const torch::Tensor flat = dense_view(tensor);
  shm::Group& team = state_.group(index_);
  call.count = to_size(flat.numel());
  call.dtype = *dtype;
  const Waiting waiting(state_.seat(index_));
  if (state_.on_gpus()) return run_between_gpus(team, state_.table(index_), call, flat);
  call.input = flat.const_data_ptr();
  if (call.operation != Operation::kReduce || team.rank() == call.root) call.output = flat.mutable_data_ptr();
  team.run(call);
}

void Device::barrier() {
  const Waiting waiting(state_.seat(index_));
  state_.group(index_).barrier();
}

Devices::Devices(const DevicesOptions& options) {
  if (options.count < 1) throw UsageError({.what = concat(options.count, " devices"), .next = "give at least 1"});
  if (options.teams < 1 || options.count % options.teams != 0)
    throw UsageError(
        {.what = concat(options.count, " devices in ", options.teams, " teams"), .next = "give teams of equal size"});
  if (!options.places.empty() && std::ssize(options.places) != options.count)
    throw UsageError({.what = concat(options.count, " devices at ", options.places.size(), " places"),
                      .next = "give one place per device"});
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

std::vector<std::string> Devices::names() const {
  std::vector<std::string> names;
  for (int i = 0; i < size(); ++i) names.push_back(state_->name(i));
  return names;
}

torch::Device Devices::where(int index) const { return state_->where(index); }

void Devices::run(Body body) { state_->run(std::move(body)); }

// Devices that come late must leave `part` alone once the loop was given up. They hold the lock while they use it, so
// that giving up waits for them.
void Devices::parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                           const std::function<void(std::int64_t, std::int64_t)>& part) {
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

}  // namespace lockstep
