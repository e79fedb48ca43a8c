// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "lockstep/plan/strategy_schedules.h"

namespace lockstep::plan {
namespace {

// Threads: after each part the scheduling thread hears of all devices and gives them the next.
void compute_on_threads(Builder& b) {
  for (const int device : b.all_devices()) b.compute(device, "forward", b.alone(b.samples_of(device)).forward);
  b.meet(b.all_devices(), b.handover());
  for (const int device : b.all_devices()) b.compute(device, "backward", b.alone(b.samples_of(device)).backward);
  b.meet(b.all_devices(), b.handover());
}

}  // namespace

void single(Builder& b) {
  b.forward_and_backward(0);
  b.update(0, 0, 1);
}

// docs/design/fused-step.md: publish, agree, each rank updates its slice from all gradients.
void ddp_in_memory(Builder& b) {
  for (const int device : b.all_devices()) b.forward_and_backward(device);
  b.meet(b.all_devices(), 2 * b.barrier());
  for (const int device : b.all_devices()) b.update(device, 0, 1.0 / b.devices(), b.devices());
  b.meet(b.all_devices(), b.barrier());
}

// One pass over memory on the cores of all devices.
void update_together(Builder& b, int sources) {
  for (const int device : b.all_devices()) b.update(device, 0, 1.0 / b.devices(), sources);
  b.meet(b.all_devices(), b.handover());
}

void towers(Builder& b) {
  compute_on_threads(b);
  if (b.choice().update_on_cpu) return update_together(b, b.devices());
  // Each device reads its part of all gradients and writes it to all: two waits for each parameter.
  const double waits = 2 * b.barrier() * static_cast<double>(b.profile().tensors.size());
  for (const int device : b.all_devices()) b.touch(device, 0, "all_reduce", 2 * b.parameter_bytes());
  b.meet(b.all_devices(), waits + b.handover());
  for (const int device : b.all_devices()) b.update(device, 0, 1);
  b.meet(b.all_devices(), b.handover());
}

// The loss is computed on device 0, over the outputs of all.
void data_parallel(Builder& b) {
  const double loss = b.profile().loss;
  const auto without_loss = [&](double seconds, double samples) { return std::max(0.0, seconds - loss / 2 * samples); };
  for (const int device : b.all_devices()) {
    const double samples = b.samples_of(device);
    b.compute(device, "forward", without_loss(b.alone(samples).forward, samples));
  }
  b.meet(b.all_devices(), b.handover());
  b.touch(0, 0, "gather", 2 * b.profile().output_bytes * static_cast<double>(b.target().batch));
  b.compute(0, "loss", loss * static_cast<double>(b.target().batch));
  b.meet(b.all_devices(), b.handover());
  for (const int device : b.all_devices()) {
    const double samples = b.samples_of(device);
    b.compute(device, "backward", without_loss(b.alone(samples).backward, samples));
  }
  b.meet(b.all_devices(), b.handover());
  update_together(b, b.devices());
}

void store_local(Builder& b) {
  compute_on_threads(b);
  update_together(b, b.devices());
}

}  // namespace lockstep::plan
