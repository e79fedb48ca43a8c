// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/strategy_schedules.h"

namespace lockstep::plan {

// docs/design/fused-step.md: publish, agree, each rank updates its slice from all gradients.
void ddp_in_memory(Builder& b) {
  b.forward_and_backward();
  update_together(b, 1.0 / b.devices());
}

void update_together(Builder& b, double share) {
  b.meet(b.all_devices());
  for (const int device : b.all_devices()) b.update(device, 0, share);
  b.meet(b.all_devices());
}

// Threads: after each part the scheduling thread hears of all devices and gives them the next.
void devices_with_one_update(Builder& b) {
  b.forward();
  b.meet(b.all_devices());
  b.backward();
  update_together(b, 1.0 / b.devices());
}

// Each device reads its part of all gradients, writes their sum to all, and updates its own replica.
void towers(Builder& b) {
  if (b.choice.update_on_cpu) return devices_with_one_update(b);
  b.forward_and_backward();
  b.meet(b.all_devices());
  for (const int device : b.all_devices()) b.touch(device, 0, "all_reduce", 2 * b.parameter_bytes());
  update_together(b, 1);
}

}  // namespace lockstep::plan
