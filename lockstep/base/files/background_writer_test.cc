// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/files/background_writer.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>

#include <array>
#include <thread>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::TempFolder;

UniqueFd new_file(const std::filesystem::path& path) {
  return UniqueFd(::open(path.c_str(), O_WRONLY | O_CREAT, 0600));
}

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    read_end.reset(ends[0]);
    write_end.reset(ends[1]);
  }
  UniqueFd read_end;
  UniqueFd write_end;
};

std::string read_to_end(int fd) {
  std::string all;
  std::array<char, 4096> buffer;
  for (ssize_t bytes = 0; (bytes = ::read(fd, buffer.data(), buffer.size())) > 0;)
    all.append(buffer.data(), to_size(bytes));
  return all;
}

TEST(BackgroundWriter, writes_what_it_is_offered_in_order) {
  const TempFolder folder;
  BackgroundWriter writer(new_file(folder / "f"), "f");
  std::string expected;
  for (int i = 0; i < 1000; ++i) {
    writer.offer(concat(i, '\n'));
    expected += concat(i, '\n');
  }
  EXPECT_EQ(writer.finish(), 0);
  EXPECT_EQ(read_file(folder / "f"), expected);
}

// A pipe that nobody reads stands for a disk that does not answer: whatever is offered returns, and the rest is counted.
TEST(BackgroundWriter, drops_and_counts_what_a_stuck_disk_does_not_take) {
  Pipe pipe;
  const std::string record(1000, 'x');
  constexpr int kOffered = 1000;  // ten times what the pipe and the queue hold
  {
    BackgroundWriter writer(std::move(pipe.write_end), "stuck", {.most_waiting = 20 * record.size()});
    for (int i = 0; i < kOffered; ++i) writer.offer(record);
    const int64_t dropped = writer.finish(std::chrono::milliseconds(10));
    EXPECT_GT(dropped, kOffered / 2);
    EXPECT_LE(dropped, kOffered);
  }
  read_to_end(pipe.read_end.get());  // the disk answers: the thread that was left behind ends
}

TEST(BackgroundWriter, says_when_a_killed_process_would_lose_nothing) {
  const TempFolder folder;
  BackgroundWriter writer(new_file(folder / "f"), "f", {.at_once = true});
  for (int i = 0; i < 100; ++i) {
    writer.offer("a line\n");
    ASSERT_TRUE(writer.wait_until_written(std::chrono::seconds(10)));
    ASSERT_EQ(std::filesystem::file_size(folder / "f"), 7 * (i + 1));
  }
}

TEST(BackgroundWriter, does_not_wait_longer_than_it_is_told_for_a_stuck_disk) {
  Pipe pipe;
  BackgroundWriter writer(std::move(pipe.write_end), "stuck", {.at_once = true});
  writer.offer(std::string(1 << 20, 'x'));
  EXPECT_FALSE(writer.wait_until_written(std::chrono::milliseconds(10)));
  pipe.read_end.reset();
}

TEST(BackgroundWriter, writes_whole_records_to_a_disk_that_answers_late) {
  Pipe pipe;
  const std::string record(1000, 'x');
  std::string read;
  int64_t dropped = 0;
  std::thread reader;
  {
    BackgroundWriter writer(std::move(pipe.write_end), "slow", {.most_waiting = 20 * record.size()});
    for (int i = 0; i < 1000; ++i) writer.offer(record);
    reader = std::thread([&] { read = read_to_end(pipe.read_end.get()); });
    dropped = writer.finish(std::chrono::minutes(1));
  }
  reader.join();
  EXPECT_GT(dropped, 0);
  EXPECT_EQ(read.size(), to_size(1000 - dropped) * record.size());
}

TEST(BackgroundWriter, counts_what_a_reader_that_has_gone_does_not_take) {
  Pipe pipe;
  pipe.read_end.reset(-1);
  BackgroundWriter writer(std::move(pipe.write_end), "closed");
  writer.offer("record");
  EXPECT_EQ(writer.finish(), 1);
}

// A limit on the size of files stands for a disk that becomes full in the midst of a record.
TEST(BackgroundWriter, leaves_what_was_in_a_file_before) {
  const TempFolder folder;
  write_file(folder / "f", "before\n");
  struct rlimit unlimited {};
  ::getrlimit(RLIMIT_FSIZE, &unlimited);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small = {.rlim_cur = 10, .rlim_max = unlimited.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  BackgroundWriter writer(UniqueFd(::open((folder / "f").c_str(), O_WRONLY | O_APPEND)), "f", {.at_once = true});
  writer.offer("does not fit\n");
  writer.offer("ok\n");
  EXPECT_EQ(writer.finish(), 1);
  ::setrlimit(RLIMIT_FSIZE, &unlimited);
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(read_file(folder / "f"), "before\nok\n");
}

TEST(BackgroundWriter, counts_what_a_full_disk_refuses) {
  BackgroundWriter writer(UniqueFd(::open("/dev/full", O_WRONLY)), "full");
  for (int i = 0; i < 3; ++i) writer.offer("record");
  EXPECT_EQ(writer.finish(), 3);
}

}  // namespace
}  // namespace lockstep
