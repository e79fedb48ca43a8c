// SPDX-License-Identifier: Apache-2.0
// The processes that write where they must not are children: death tests.
#include "lockstep/base/process/page_guard.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <optional>

namespace lockstep {
namespace {

class Guarded : public ::testing::Test {
 protected:
  // Two pages, with parameters at their beginning, in the middle and at their end.
  const size_t bytes_ = 2 * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  std::byte* const memory_ =
      static_cast<std::byte*>(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const std::vector<PageGuard::Part> parts_ = {
      {"a", memory_, 64}, {"b", memory_ + 64, bytes_ - 128}, {"c", memory_ + bytes_ - 64, 64}};

  void write(size_t at) const { *const_cast<volatile std::byte*>(memory_ + at) = std::byte{1}; }
  ~Guarded() override { ::munmap(memory_, bytes_); }
};
using GuardedDeathTest = Guarded;

TEST_F(GuardedDeathTest, parameter_is_named_by_the_address_that_was_written) {
  const PageGuard guard(PageGuard::Kind::kParameters, parts_);
  EXPECT_DEATH(write(63), "parameter a was written outside step");
  EXPECT_DEATH(write(bytes_ / 2), "parameter b was written outside step");
  EXPECT_DEATH(write(bytes_ - 1), "parameter c was written outside step");
}

TEST_F(GuardedDeathTest, gradient_is_named_and_so_is_the_phase) {
  const PageGuard guard(PageGuard::Kind::kGradients, {{"w", memory_, bytes_}});
  EXPECT_DEATH(write(5), "the gradient of w was written after backward.*\n.*between backward\\(\\) and step\\(\\)");
}

TEST_F(GuardedDeathTest, write_is_passed_on_to_the_handler_that_was_there_before) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process in which no test has installed the handler yet
  EXPECT_EXIT(
      {
        ::signal(SIGSEGV, [](int) { ::_exit(7); });
        const PageGuard guard(PageGuard::Kind::kParameters, parts_);
        write(0);
      },
      ::testing::ExitedWithCode(7), "parameter a was written outside step");
}

TEST_F(GuardedDeathTest, fault_elsewhere_is_passed_on_without_a_message) {
  EXPECT_EXIT(
      {
        ::signal(SIGSEGV, [](int) { ::_exit(7); });
        const PageGuard guard(PageGuard::Kind::kParameters, parts_);
        volatile uintptr_t nowhere = 1;  // not 0: UBSan looks at null pointers itself
        *reinterpret_cast<volatile std::byte*>(nowhere) = std::byte{1};
      },
      ::testing::ExitedWithCode(7), "^$");
}

TEST_F(GuardedDeathTest, memory_is_writable_again_when_its_last_guard_has_gone) {
  std::optional<PageGuard> one, other;
  one.emplace(PageGuard::Kind::kParameters, parts_);
  other.emplace(PageGuard::Kind::kParameters, parts_);
  one.reset();
  EXPECT_DEATH(write(0), "parameter a was written outside step");
  other.reset();
  write(0);
}

// As in a step of two ranks that are threads: whoever ends its write first must not stop the other.
TEST_F(GuardedDeathTest, parameters_are_writable_until_the_last_write_ends) {
  const auto body = [this] {
    ::setenv("LOCKSTEP_CHECK", "1", 1);
    const PageGuard guard(PageGuard::Kind::kParameters, parts_);
    std::optional<ParameterWrite> one(std::in_place);
    std::optional<ParameterWrite> other(std::in_place);
    one.reset();
    write(0);
    other.reset();
    write(bytes_ - 1);
  };
  EXPECT_DEATH(body(), "parameter c was written outside step");
}

}  // namespace
}  // namespace lockstep
