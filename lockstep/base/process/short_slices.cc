// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/short_slices.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace lockstep {
namespace {

constexpr uint64_t kShortest = 100'000;  // nanoseconds; the kernel gives no less

// As sched_setattr(2) has it; new C libraries declare it, old ones do not.
struct Attributes {
  uint32_t size = sizeof(Attributes);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0;  // the slice; before Linux 6.12 of other policies only
  uint64_t deadline = 0;
  uint64_t period = 0;
};

}  // namespace

void ask_for_short_slices() {
  Attributes attributes;
  if (::syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;  // somebody chose another one
  attributes.runtime = kShortest;
  ::syscall(SYS_sched_setattr, 0, &attributes,
            0);  // a matter of speed: where it fails, slices are as long as they were
}

}  // namespace lockstep
