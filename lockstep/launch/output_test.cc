// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/output.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <array>

#include "lockstep/base/file.h"
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
