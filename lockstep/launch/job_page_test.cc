// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/job_page.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <functional>
#include <thread>

#include "lockstep/base/file.h"
#include "lockstep/error.h"
#include "lockstep/launch/own_progress.h"
#include "tests/support.h"

namespace lockstep {
namespace {

// `what` in a child with these variables, as a launcher starts a rank; its exit code.
int in_rank(const JobPage& page, int seat, const std::function<int()>& what) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setenv("LOCKSTEP_PAGE", page.address(seat).c_str(), 1);
    ::_exit(what());
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(JobPage, shows_others_what_a_rank_does) {
  const JobPage page({.ranks = 3, .world_size = 6});
  page.begin(2, 5, 1);
  EXPECT_EQ(in_rank(page, 2,
                    [] {
                      own_progress::begin_step(17);
                      own_progress::enter(Phase::kForward);
                      own_progress::waits_for(4711);
                      own_progress::finish_step(32, 0.5);
                      return 0;
                    }),
            0);
  const JobPage seen = JobPage::open(page.path());
  EXPECT_EQ(seen.header().world_size, 6);
  const RankRecord& record = seen.record(2);
  EXPECT_NE(record.pid, 0);
  EXPECT_EQ(record.job_rank, 5);
  EXPECT_EQ(record.step, 17);
  EXPECT_EQ(record.phase, Phase::kForward);
  EXPECT_EQ(record.waits_for, 4711);
  EXPECT_NE(record.wait_since, 0);
  EXPECT_EQ(record.samples, 32);
  EXPECT_EQ(record.loss, 0.5);
  EXPECT_EQ(seen.record(1).pid, 0);
}

TEST(JobPage, sums_up_the_time_in_each_phase) {
  const JobPage page({.ranks = 1});
  constexpr auto kNap = std::chrono::milliseconds(20);
  EXPECT_EQ(in_rank(page, 0,
                    [&] {
                      own_progress::enter(Phase::kForward);
                      std::this_thread::sleep_for(kNap);
                      {
                        const own_progress::During validating(Phase::kValidating);
                        own_progress::waits_for(kAnyPeer);
                        std::this_thread::sleep_for(2 * kNap);
                        own_progress::waits_no_more();
                      }
                      own_progress::enter(Phase::kOwnCode);
                      return 0;
                    }),
            0);
  const RankRecord& record = page.record(0);
  const auto in = [&](Phase phase) {
    return std::chrono::nanoseconds(record.ns_in_phase[static_cast<std::size_t>(phase)]);
  };
  EXPECT_GE(in(Phase::kForward), kNap);
  EXPECT_LT(in(Phase::kForward), std::chrono::seconds(10));
  EXPECT_GE(in(Phase::kValidating), 2 * kNap);
  EXPECT_GE(std::chrono::nanoseconds(record.ns_waited), 2 * kNap);
  EXPECT_LE(record.ns_waited, in(Phase::kValidating).count());
}

TEST(JobPage, a_process_that_a_rank_starts_does_not_write_for_it) {
  const JobPage page({.ranks = 1});
  EXPECT_EQ(in_rank(page, 0,
                    [] {
                      own_progress::begin_step(1);
                      const pid_t helper = ::fork();  // as a loader's worker
                      if (helper == 0) {
                        own_progress::begin_step(2);
                        ::_exit(0);
                      }
                      ::waitpid(helper, nullptr, 0);
                      return 0;
                    }),
            0);
  EXPECT_EQ(page.record(0).step, 1);
}

TEST(JobPage, another_process_takes_the_record_of_one_that_has_ended) {
  const JobPage page({.ranks = 1});
  for (const int step : {1, 2})
    EXPECT_EQ(in_rank(page, 0,
                      [&] {
                        own_progress::begin_step(step);
                        return 0;
                      }),
              0);
  EXPECT_EQ(page.record(0).step, 2);
}

TEST(JobPage, without_a_launcher_publishing_does_nothing) {
  const JobPage page({.ranks = 1});
  EXPECT_EQ(in_rank(page, 7,
                    [] {
                      own_progress::begin_step(1);
                      const own_progress::During forward(Phase::kForward);
                      return own_progress::record().step == 1 ? 0 : 1;
                    }),
            0);
  EXPECT_EQ(page.record(0).pid, 0);
}

TEST(JobPage, refuses_what_is_no_page) {
  const testing::TempFolder folder;
  EXPECT_THROW(JobPage::open(folder.file("none")), SystemError);
  write_file(folder.file("text"), std::string(1000, 'x'));
  EXPECT_THROW(JobPage::open(folder.file("text")), DataError);
  JobPageHeader header{.ranks = 1000};
  write_file(folder.file("short"), {reinterpret_cast<const char*>(&header), sizeof header});
  EXPECT_THROW(JobPage::open(folder.file("short")), DataError);
  const JobPage page(JobPageHeader{.version = JobPageHeader::kVersion + 1, .ranks = 1});
  EXPECT_THROW(JobPage::open(page.path()), DataError);
}

}  // namespace
}  // namespace lockstep
