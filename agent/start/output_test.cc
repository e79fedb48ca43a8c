// SPDX-License-Identifier: Apache-2.0
#include "agent/start/output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <termios.h>

#include <array>
#include <cstdlib>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "tests/launch/child.h"

namespace lockstep {
namespace {

using Lines = std::vector<std::string>;

Lines lines_of(const Lines& pieces) {
  Lines lines;
  LineSplitter splitter;
  const auto keep = [&lines](std::string_view line) { lines.emplace_back(line); };
  for (const std::string& piece : pieces) splitter.feed(piece, keep);
  splitter.finish(keep);
  return lines;
}

TEST(LineSplitter, finds_lines_however_the_stream_is_cut) {
  EXPECT_EQ(lines_of({"a\nb", "c", "\n", "\n", "d"}), (Lines{"a", "bc", "", "d"}));
  EXPECT_EQ(lines_of({"a\n"}), Lines{"a"});
  EXPECT_EQ(lines_of({"", ""}), Lines{});
}

TEST(LineSplitter, passes_on_every_byte) {
  const std::string bytes("\0\xff\r\x1b", 4);
  EXPECT_EQ(lines_of({bytes + "\n" + bytes}), (Lines{bytes, bytes}));
}

TEST(LineSplitter, bounds_the_length_of_a_line) {
  const std::string longest(kLongestLine, 'x');
  EXPECT_EQ(lines_of({longest + "\nend\n"}), (Lines{longest, "end"}));
  EXPECT_EQ(lines_of({longest, "\nend\n"}), (Lines{longest, "end"}));
  EXPECT_EQ(lines_of({longest + longest + "y\nend\n"}), (Lines{longest, longest, "y", "end"}));
}

TEST(RankStream, puts_the_host_into_a_launchers_prefix) {
  const UniqueFd file(::memfd_create("output", MFD_CLOEXEC));
  Sink sink(file.get());
  RankStream launcher("[n1] ", sink, /*is_launcher=*/true), rank("[rank 0] ", sink);
  for (RankStream* stream : {&launcher, &rank}) {
    const UniqueFd writer = stream->open();
    ASSERT_EQ(::write(writer.get(), "[rank 3] a\nb", 12), 12);
    stream->drain();
  }
  sink.flush();
  std::array<char, 128> text{};
  ASSERT_GT(::pread(file.get(), text.data(), text.size() - 1, 0), 0);
  EXPECT_STREQ(text.data(), "[n1 rank 3] a\n[n1] b\n[rank 0] [rank 3] a\n[rank 0] b\n");
}

TEST(RankStream, keeps_the_last_lines) {
  Sink sink(-1);
  RankStream stream("", sink);
  UniqueFd writer = stream.open();
  std::string text;
  for (int line = 0; line < 25; ++line) text += concat(line, "\n");
  ASSERT_EQ(::write(writer.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  stream.read_some();
  EXPECT_EQ(stream.last_lines().size(), kLastLines);
  EXPECT_EQ(stream.last_lines().front(), "5");
}

TEST(RankStream, closes_at_the_end_and_keeps_an_unfinished_line) {
  Sink sink(-1);
  RankStream stream("", sink);
  UniqueFd writer = stream.open();
  ASSERT_EQ(::write(writer.get(), "half", 4), 4);
  writer.reset();
  stream.read_some();
  stream.read_some();
  EXPECT_EQ(stream.fd(), -1);
  EXPECT_EQ(stream.last_lines().back(), "half");
}

TEST(RankStream, drains_without_waiting_for_a_pipe_that_stays_open) {
  Sink sink(-1);
  RankStream stream("", sink);
  const UniqueFd writer = stream.open();
  ASSERT_EQ(::write(writer.get(), "last\nwords", 10), 10);
  stream.drain();
  EXPECT_EQ(stream.fd(), -1);
  EXPECT_EQ(stream.last_lines().size(), 2U);
}

TEST(Sink, writes_everything_with_its_prefix) {
  const testing::TempFolder folder;
  const UniqueFd fd(::open(folder.file("out").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  Sink sink(fd.get());
  const std::string line(3000, 'x');
  for (int i = 0; i < 3; ++i) sink.add_line("[rank 1] ", line);
  EXPECT_FALSE(sink.empty());
  sink.flush();
  EXPECT_TRUE(sink.empty());
  const std::string prefixed = "[rank 1] " + line + "\n";
  EXPECT_EQ(read_file(folder.file("out")), prefixed + prefixed + prefixed);
}

std::string numbered_lines(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += concat("line ", i, " ", std::string(1000, 'x'), "\n");
  return text;
}

bool takes_more(const Sink& sink) {
  pollfd writable{.fd = sink.fd(), .events = POLLOUT, .revents = 0};
  return ::poll(&writable, 1, 0) > 0;
}

// Reads from `fd` as much as was added while nobody read.
std::string read_all(Sink& sink, int fd, size_t bytes) {
  std::string read;
  std::array<char, 65536> buffer;
  while (read.size() < bytes) {
    while (!sink.empty() && takes_more(sink)) sink.write_some();
    const ssize_t some = ::read(fd, buffer.data(), buffer.size());
    if (some <= 0) break;
    read.append(buffer.data(), static_cast<size_t>(some));
  }
  return read;
}

struct StoppedReader : ::testing::Test {
  StoppedReader() {
    std::array<int, 2> ends{};
    if (::pipe(ends.data()) != 0) std::abort();
    reader.reset(ends[0]);
    writer.reset(ends[1]);
  }
  UniqueFd reader;
  UniqueFd writer;
};

TEST_F(StoppedReader, gets_everything_in_order_when_it_goes_on) {
  Sink sink(writer.get());
  const std::string text = numbered_lines(10000);  // ten times what memory keeps
  for (const std::string& line : split(text, '\n')) {
    if (!line.empty()) sink.add_line("", line);
    if (takes_more(sink)) sink.write_some();
  }
  EXPECT_FALSE(sink.full());
  EXPECT_EQ(read_all(sink, reader.get(), text.size()), text);
  EXPECT_TRUE(sink.empty());
}

TEST_F(StoppedReader, makes_the_ranks_wait_where_the_file_has_no_room_and_loses_nothing) {
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 3 * kMostPending, .rlim_max = before.rlim_max};
  Sink sink(writer.get());
  ::setrlimit(RLIMIT_FSIZE, &small);
  const std::string text = numbered_lines(10000);
  size_t added = 0;
  for (; added < text.size() && !sink.full(); added += 1000) sink.add(std::string_view(text).substr(added, 1000));
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(sink.full());
  EXPECT_LT(added, text.size());
  EXPECT_EQ(read_all(sink, reader.get(), added), text.substr(0, added));
  EXPECT_FALSE(sink.full());
}

// Poll says that a terminal takes something when it has room for a byte.
TEST(Sink, does_not_wait_for_a_terminal_that_takes_a_part) {
  const UniqueFd master(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(master && ::grantpt(master.get()) == 0 && ::unlockpt(master.get()) == 0);
  const UniqueFd terminal(::open(::ptsname(master.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(terminal);
  termios raw{};
  ::tcgetattr(terminal.get(), &raw);
  ::cfmakeraw(&raw);
  ::tcsetattr(terminal.get(), TCSANOW, &raw);
  Sink sink(terminal.get());
  const std::string text = numbered_lines(3000);
  sink.add(text);
  while (takes_more(sink)) sink.write_some();
  EXPECT_FALSE(sink.empty());
  EXPECT_EQ(read_all(sink, master.get(), text.size()), text);
}

TEST(LastLinesOfFile, are_at_most_twenty) {
  const testing::TempFolder folder;
  std::string text;
  for (int line = 0; line < 20000; ++line) text += concat("line ", line, "\n");
  write_file(folder.file("err"), text);
  const Lines lines = last_lines_of_file(folder.file("err"));
  EXPECT_EQ(lines.size(), kLastLines);
  EXPECT_EQ(lines.back(), "line 19999");
  EXPECT_EQ(last_lines_of_file(folder.file("nothing")), Lines{});
}

}  // namespace
}  // namespace lockstep
