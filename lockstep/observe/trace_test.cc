// SPDX-License-Identifier: Apache-2.0
#include "lockstep/observe/trace.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <set>
#include <thread>

#include "lockstep/base/files/file.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using testing::TempFolder;

class Trace : public ::testing::Test {
 protected:
  void open(size_t spans, const trace::Process& process = {}) {
    trace::open(folder / "ring", process, spans);
    trace::record(true);
  }
  trace::Recording recorded() const { return trace::parse(read_file(folder / "ring"), "the ring"); }
  void TearDown() override { trace::close(); }
  TempFolder folder;
};

TEST_F(Trace, has_each_span_with_its_number_bytes_and_thread) {
  open(8);
  {
    const trace::Span outer("step", 17);
    std::thread([] {
      const trace::Span other([] { return trace::Event{.name = "a name that has more letters than fit", .bytes = 5}; });
    }).join();
  }
  const auto spans = recorded().events;
  ASSERT_EQ(spans.size(), 2U);  // in the order of their ends
  EXPECT_EQ(spans[0].name.text(), "a name that has more letters th");
  EXPECT_EQ(spans[0].number, -1);
  EXPECT_EQ(spans[0].bytes, 5);
  EXPECT_EQ(spans[1].name.text(), "step");
  EXPECT_EQ(spans[1].number, 17);
  EXPECT_EQ(spans[1].bytes, -1);
  EXPECT_NE(spans[0].thread, spans[1].thread);
  EXPECT_LE(spans[1].begin, spans[0].begin);
  EXPECT_LE(spans[0].begin, spans[0].end);
  EXPECT_LE(spans[0].end, spans[1].end);
}

TEST_F(Trace, records_nothing_while_it_is_off) {
  open(8);
  trace::record(false);
  { const trace::Span off("off"); }
  bool asked = false;
  {
    const trace::Span off([&] { return asked = true, trace::Event{}; });
  }
  EXPECT_FALSE(asked);
  EXPECT_TRUE(recorded().events.empty());
}

TEST_F(Trace, keeps_the_last_spans_and_counts_the_others) {
  open(8);
  for (int i = 0; i < 21; ++i) const trace::Span span("span", i);
  const auto found = recorded();
  EXPECT_EQ(found.lost, 13);
  ASSERT_EQ(found.events.size(), 8U);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(found.events[static_cast<unsigned>(i)].number, 13 + i);
}

TEST_F(Trace, has_counters_flows_and_spans_that_were_measured_elsewhere) {
  open(8);
  trace::count("queue", 3);
  const int64_t begin = trace::now_if_recording();
  trace::write(begin, [] {
    return trace::Event{.name = "receive", .kind = trace::Kind::kBackward, .flow = 77, .arrives = true};
  });
  trace::write(0, [] { return trace::Event{.name = "began while nothing was recorded"}; });
  const auto spans = recorded().events;
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0].kind, trace::Kind::kCounter);
  EXPECT_EQ(spans[0].name.text(), "queue");
  EXPECT_EQ(spans[0].number, 3);
  EXPECT_EQ(spans[1].kind, trace::Kind::kBackward);
  EXPECT_EQ(spans[1].begin, begin);
  EXPECT_EQ(spans[1].flow, 77U);
  EXPECT_TRUE(spans[1].arrives);
}

TEST_F(Trace, counts_memory_at_most_every_10_ms) {
  open(1 << 10);
  const int64_t begin = trace::now();
  for (int i = 0; i < 100; ++i) trace::count_memory();
  const int64_t took = trace::now() - begin;
  const auto spans = recorded().events;
  ASSERT_GE(spans.size(), 1U);
  EXPECT_LE(spans.size(), static_cast<unsigned>(took / 10'000'000 + 1));
  EXPECT_EQ(spans[0].name.text(), "memory");
  EXPECT_GT(spans[0].number, 1 << 20);
}

TEST_F(Trace, is_one_in_a_process) {
  open(8);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { open(8); }), "a second trace in this process"));
}

TEST_F(Trace, takes_spans_of_many_threads_at_once) {
  constexpr int kThreads = 4, kEach = 1000;
  open(kThreads * kEach);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([t] {
      for (int i = 0; i < kEach; ++i) const trace::Span span("span", t * kEach + i);
    });
  for (std::thread& thread : threads) thread.join();
  std::set<int64_t> numbers;
  for (const auto& span : recorded().events) numbers.insert(span.number);
  EXPECT_EQ(numbers.size(), static_cast<unsigned>(kThreads * kEach));
}

TEST_F(Trace, survives_its_process) {
  const pid_t child = ::fork();
  if (child == 0) {
    open(8, {.rank = 3});
    { const trace::Span span("last words"); }
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  const auto found = recorded();
  EXPECT_EQ(found.process.rank, 3);
  EXPECT_EQ(found.process.finished, 0);
  ASSERT_EQ(found.events.size(), 1U);
  EXPECT_EQ(found.events[0].name.text(), "last words");
}

// A clock an hour behind that loses 50 us per second.
TEST_F(Trace, brings_times_to_the_clock_of_rank_0) {
  constexpr int64_t kHour = 3'600'000'000'000, kSecond = 1'000'000'000;
  const int64_t start = trace::now();
  const trace::ClockOffset at_start{start, kHour}, at_end{start + 100 * kSecond, kHour + 100 * 50'000};
  open(8, {.clock = {at_start, at_start}});
  { const trace::Span span("now"); }
  trace::finish(at_end);
  const auto span = recorded().events.at(0);
  const int64_t end = trace::now();
  EXPECT_GE(span.begin, start + kHour);
  EXPECT_LE(span.end, end + kHour + (end - start) * 50 / 1'000'000 + 1);
}

TEST_F(Trace, refuses_what_is_not_a_ring) {
  open(8);
  const std::string whole = trace::content();
  const auto message = [](const std::string& content) {
    return message_of<DataError>([&] { trace::parse(content, "file"); });
  };
  EXPECT_TRUE(contains(message(whole.substr(0, whole.size() - 1)), "file is cut off"));
  EXPECT_TRUE(contains(message(whole.substr(0, 20)), "file is too short for a trace"));
  EXPECT_TRUE(contains(message(std::string(whole.size(), 'x')), "another version"));
}

}  // namespace
}  // namespace lockstep
