// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/short_slices.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <stdexcept>
#include <thread>

namespace lockstep {
namespace {

struct Scheduling {
  int policy;
  int nice;
  uint64_t slice;  // nanoseconds; 0: this kernel has one slice for all
};

Scheduling of_this_thread() {
  struct {  // as sched_getattr(2) has it; C libraries and kernel headers can't both be included
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } known{};
  EXPECT_EQ(::syscall(SYS_sched_getattr, 0, &known, sizeof known, 0), 0);
  return {static_cast<int>(known.policy), known.nice, known.runtime};
}

// Starts a thread that asks for short slices after prepare(), and returns what it then has.
Scheduling after_asking(const auto& prepare) {
  Scheduling found{};
  std::thread([&] {
    prepare();
    ask_for_short_slices();
    found = of_this_thread();
  }).join();
  return found;
}

uint64_t short_slice() {
  const Scheduling usual = of_this_thread();
  return usual.slice == 0 || usual.policy != SCHED_OTHER ? usual.slice : 100'000;
}

TEST(ShortSlices, are_given_where_the_kernel_has_them) {
  EXPECT_EQ(after_asking([] {}).slice, short_slice());
}

TEST(ShortSlices, leave_a_nice_value_and_a_policy_that_somebody_chose) {
  const Scheduling nice = after_asking([] { ASSERT_EQ(::setpriority(PRIO_PROCESS, ::gettid(), 19), 0); });
  EXPECT_EQ(nice.nice, 19);
  const Scheduling batch = after_asking([] {
    const sched_param none{};
    ASSERT_EQ(::sched_setscheduler(0, SCHED_BATCH, &none), 0);
  });
  EXPECT_EQ(batch.policy, SCHED_BATCH);
}

TEST(ShortSlices, are_those_of_threads_that_are_started_with_them_and_not_of_the_caller) {
  const uint64_t before = of_this_thread().slice;
  const uint64_t expected = short_slice();
  const uint64_t found = with_short_slices([] {
    uint64_t of_started = 1;
    std::thread([&] { of_started = of_this_thread().slice; }).join();
    return of_started;
  });
  EXPECT_EQ(found, expected);
  EXPECT_EQ(of_this_thread().slice, before);
  EXPECT_THROW(with_short_slices([]() -> int { throw std::out_of_range("so that it comes through"); }),
               std::out_of_range);
}

}  // namespace
}  // namespace lockstep
