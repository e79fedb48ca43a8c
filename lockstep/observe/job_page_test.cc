// SPDX-License-Identifier: Apache-2.0
#include "lockstep/observe/job_page.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/observe/phase_scope.h"
#include "lockstep/observe/trace.h"
#include "tests/support.h"

namespace lockstep {
namespace {

constexpr int64_t kHour = int64_t{3600} * 1'000'000'000;

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
                    []() -> int {
                      observe::begin_step(17);
                      observe::enter(Phase::kForward);
                      observe::finish_step(32, 0.5);
                      const observe::WaitScope wait(4711, 1);
                      ::_exit(0);
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
                      observe::enter(Phase::kForward);
                      std::this_thread::sleep_for(kNap);
                      {
                        const PhaseScope validating(Phase::kValidating);
                        const observe::WaitScope wait(kAnyPeer, -1);
                        std::this_thread::sleep_for(2 * kNap);
                      }
                      observe::enter(Phase::kOwnCode);
                      return 0;
                    }),
            0);
  const RankRecord& record = page.record(0);
  const auto in = [&](Phase phase) { return std::chrono::nanoseconds(record.ns_in_phase[static_cast<size_t>(phase)]); };
  EXPECT_GE(in(Phase::kForward), kNap);
  EXPECT_LT(in(Phase::kForward), std::chrono::seconds(10));
  EXPECT_GE(in(Phase::kValidating), 2 * kNap);
  const int64_t waited = record.ns_waited[static_cast<size_t>(Phase::kValidating)];
  EXPECT_GE(std::chrono::nanoseconds(waited), 2 * kNap);
  EXPECT_LE(waited, in(Phase::kValidating).count());
}

TEST(JobPage, a_process_that_a_rank_starts_does_not_write_for_it) {
  const JobPage page({.ranks = 1});
  EXPECT_EQ(in_rank(page, 0,
                    [] {
                      observe::begin_step(1);
                      const pid_t helper = ::fork();  // as a loader's worker
                      if (helper == 0) {
                        observe::begin_step(2);
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
                        observe::begin_step(step);
                        return 0;
                      }),
              0);
  EXPECT_EQ(page.record(0).step, 2);
}

TEST(JobPage, without_a_launcher_publishing_does_nothing) {
  const JobPage page({.ranks = 1});
  EXPECT_EQ(in_rank(page, 7,
                    [] {
                      observe::begin_step(1);
                      const PhaseScope forward(Phase::kForward);
                      return observe::record().step == 1 ? 0 : 1;
                    }),
            0);
  EXPECT_EQ(page.record(0).pid, 0);
}

// `what` in a child that no launcher has started.
int alone(const std::function<int()>& what) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::unsetenv("LOCKSTEP_PAGE");
    ::_exit(what());
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::optional<JobPage> page_among_descriptors() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    if (std::error_code gone; std::filesystem::read_symlink(entry, gone).string().starts_with("/memfd:lockstep-page"))
      return JobPage::open(entry.path());
  return {};
}

TEST(JobPage, a_rank_that_no_launcher_has_started_makes_a_page_of_its_own) {
  EXPECT_EQ(alone([] {
              observe::begin_step(7);
              const std::optional<JobPage> page = page_among_descriptors();
              return page && page->record(0).step == 7 && page->record(0).pid == ::getpid() ? 0 : 1;
            }),
            0);
}

TEST(JobPage, ranks_that_no_launcher_has_numbered_get_their_number_where_they_meet) {
  EXPECT_EQ(alone([] {
              observe::meets({.rank = 2, .world_size = 3, .job = "ours"});
              observe::meets({.rank = 0, .world_size = 2, .job = "a part of it"});
              const std::optional<JobPage> page = page_among_descriptors();
              return page && page->header().world_size == 3 && page->header().job.data() == std::string("ours") &&
                             page->record(0).job_rank == 2
                         ? 0
                         : 1;
            }),
            0);
}

TEST(JobPage, ranks_that_are_threads_may_meet_at_the_same_time) {
  EXPECT_EQ(alone([] {
              std::vector<std::thread> ranks;
              for (int rank = 0; rank < 4; ++rank)
                ranks.emplace_back([rank] { observe::meets({.rank = rank, .world_size = 4, .job = "ours"}); });
              for (std::thread& rank : ranks) rank.join();
              const std::optional<JobPage> page = page_among_descriptors();
              return page && page->header().world_size == 4 && page->header().job.data() == std::string("ours") ? 0 : 1;
            }),
            0);
}

TEST(JobPage, a_forked_child_of_such_a_rank_is_not_a_rank) {
  EXPECT_EQ(alone([] {
              observe::begin_step(1);
              const std::optional<JobPage> page = page_among_descriptors();
              const pid_t helper = ::fork();
              if (helper == 0) {
                observe::begin_step(2);
                ::_exit(0);
              }
              ::waitpid(helper, nullptr, 0);
              return page && page->record(0).step == 1 ? 0 : 1;
            }),
            0);
}

// Waits for `peer`. Adds to `least` and `most` what the wait has taken, measured inside it and around it.
void wait_for_a_moment(int peer, int64_t& least, int64_t& most) {
  const int64_t before = trace::now();
  {
    const observe::WaitScope wait(peer, peer);
    const int64_t begin = trace::now();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    least += trace::now() - begin;
  }
  most += trace::now() - before;
}

TEST(JobPage, says_for_whom_a_rank_has_waited_and_for_how_long) {
  const JobPage page({.ranks = 1});
  EXPECT_EQ(in_rank(page, 0,
                    [&page] {
                      std::array<int64_t, 2> least{}, most{};
                      for (const int peer : {0, 1, 0}) wait_for_a_moment(4711 + peer, least.at(peer), most.at(peer));
                      for (int peer = 1; peer < 200; ++peer) {  // more than there is room for
                        const observe::WaitScope wait(peer, peer);
                      }
                      const auto is_right = [&](int peer) {
                        const auto& sum = page.record(0).waited_for[peer];
                        return sum.pid == 4711 + peer && least.at(peer) <= sum.ns && sum.ns <= most.at(peer);
                      };
                      return is_right(0) && is_right(1) ? 0 : 1;
                    }),
            0);
}

TEST(JobPage, time_after_a_wait_that_an_error_has_ended_is_not_waiting) {
  const JobPage page({.ranks = 1});
  EXPECT_EQ(in_rank(page, 0,
                    [] {
                      try {
                        const observe::WaitScope wait(4711, 1);
                        throw PeerLost({.what = "the other rank died"});
                      } catch (const PeerLost&) {
                      }
                      const observe::WaitScope of_a_thread(kOwnThread, 1);
                      std::this_thread::sleep_for(std::chrono::milliseconds(10));
                      return 0;
                    }),
            0);
  EXPECT_EQ(page.record(0).wait_since, 0);
  for (const auto& waited : page.record(0).ns_waited) EXPECT_LT(waited, 10'000'000);
}

// A rank of `page` that records as `lockstep trace` asks it to; what it recorded in steps 1 and 2 of 4.
trace::Recording record_two_steps(const JobPage& page) {
  TraceRecord& order = page.record(0).trace;
  for (int step = 0; step < 4; ++step) {
    if (step == 1) order.until = trace::now() + kHour;
    if (step == 3) order.until = trace::now();
    observe::begin_step(step);
    const trace::Span span("step", step);
  }
  return trace::parse(read_file(concat("/proc/self/fd/", order.fd.load())), "the ring");
}

TEST(JobPage, a_rank_records_from_step_to_step_while_it_is_asked_to) {
  const JobPage page({.ranks = 1});
  EXPECT_EQ(in_rank(page, 0,
                    [&] {
                      for (int again = 0; again < 2; ++again) {
                        const trace::Recording recording = record_two_steps(page);
                        const bool right = recording.events.size() == 2 && recording.events[0].number == 1 &&
                                           recording.events[1].number == 2 && !trace::is_open();
                        if (!right) return 1;
                      }
                      return page.record(0).trace.until == 0 && page.record(0).trace.ended > page.record(0).trace.began
                                 ? 0
                                 : 2;
                    }),
            0);
}

// The program takes no further step, and `what` it does instead.
TEST(JobPage, a_trace_ends_although_no_step_comes) {
  const auto record = [] { const trace::Span span("too late"); };
  const auto enter_a_phase = [] { observe::enter(Phase::kForward); };
  for (const auto& what : {std::function<void()>(record), std::function<void()>(enter_a_phase)}) {
    const JobPage page({.ranks = 1});
    EXPECT_EQ(in_rank(page, 0,
                      [&] {
                        static int recording_more = 0;
                        trace::record_more = [](bool on) { recording_more += on ? 1 : -1; };
                        TraceRecord& order = page.record(0).trace;
                        order.until = trace::now() + kHour;
                        observe::begin_step(1);
                        { const trace::Span span("in time"); }
                        order.until = trace::now() - kHour;  // as somebody who was killed has left it
                        what();
                        if (trace::recording || recording_more != 0 || order.ended < order.began) return 1;
                        const auto ring =
                            trace::parse(read_file(concat("/proc/self/fd/", order.fd.load())), "the ring");
                        return ring.events.size() == 1 && ring.events[0].name.text() == "in time" ? 0 : 2;
                      }),
              0);
  }
}

// A long step that began in time is in the trace as a whole.
TEST(JobPage, a_trace_goes_on_to_the_next_step) {
  const JobPage page({.ranks = 1});
  EXPECT_EQ(in_rank(page, 0,
                    [&] {
                      TraceRecord& order = page.record(0).trace;
                      order.until = trace::now() + kHour;
                      observe::begin_step(1);
                      order.until = trace::now();
                      observe::enter(Phase::kForward);
                      { const trace::Span span("the rest of the step"); }
                      if (!trace::recording) return 1;
                      observe::begin_step(2);
                      return trace::recording ? 2 : 0;
                    }),
            0);
}

// One that is forked in the midst of the order, and becomes a rank of its own.
TEST(JobPage, a_forked_child_of_a_traced_rank_is_traced_apart) {
  static const JobPage* page = nullptr;
  static int child_failed = -1;
  const JobPage both({.ranks = 2});
  page = &both;
  const auto become_rank_1 = [] {
    TraceRecord& order = page->record(1).trace;
    if (trace::recording || trace::is_open()) return 1;
    order.until = trace::now() + kHour;
    observe::begin_step(1);
    if (order.began == 0) return 2;
    { const trace::Span span("of the child"); }
    const auto ring = trace::parse(read_file(concat("/proc/self/fd/", order.fd.load())), "the ring");
    return ring.events.size() == 1 && ring.process.pid == ::getpid() ? 0 : 3;
  };
  static const std::function<int()> child = become_rank_1;
  EXPECT_EQ(in_rank(both, 0,
                    [&] {
                      trace::record_more = [](bool on) {
                        trace::record_more = nullptr;
                        if (on) child_failed = in_rank(*page, 1, child);
                      };
                      TraceRecord& order = page->record(0).trace;
                      order.until = trace::now() + kHour;
                      observe::begin_step(1);
                      if (child_failed != 0) return 10 + child_failed;
                      const auto ring = trace::parse(read_file(concat("/proc/self/fd/", order.fd.load())), "the ring");
                      return ring.events.empty() && ring.process.pid == ::getpid() ? 0 : 1;
                    }),
            0);
}

TEST(JobPage, a_rank_that_is_traced_already_refuses) {
  const JobPage page({.ranks = 1});
  const testing::TempFolder folder;
  EXPECT_EQ(in_rank(page, 0,
                    [&] {
                      TraceRecord& order = page.record(0).trace;
                      trace::open(folder.file("ring"), {}, 10);
                      order.until = trace::now() + kHour;
                      observe::begin_step(1);
                      if (order.refused == 0 || order.began != 0) return 1;
                      trace::close();
                      order.until = trace::now() + kHour;
                      observe::begin_step(2);
                      if (trace::is_open()) return 3;            // who asks whether to open() may
                      trace::open(folder.file("ring"), {}, 10);  // its own comes first, and ends the other
                      return order.began != 0 && (trace::leave_memory(), trace::is_open()) ? 0 : 2;
                    }),
            0);
}

TEST(JobPage, refuses_what_is_not_a_page) {
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
