// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/cgroup.h"

#include "lockstep/base/files/file.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::TempFolder;

void write_all(const std::filesystem::path& folder, const std::vector<std::pair<std::string, std::string>>& files) {
  std::filesystem::create_directories(folder);
  for (const auto& [name, content] : files) write_file(folder / name, content);
}

TEST(MemoryRoom, is_that_of_the_tightest_group) {
  const TempFolder folder;
  write_file(folder / "membership", "0::/job/step\n");
  write_all(folder / "job", {{"memory.max", "1000\n"}, {"memory.current", "900"}, {"memory.stat", "anon 1\n"}});
  write_all(folder / "job/step", {{"memory.max", "max"}, {"memory.current", "5"}, {"memory.stat", ""}});
  write_all(folder / "", {{"memory.max", "2000"}, {"memory.current", "900"}, {"memory.stat", ""}});
  const auto room = memory_room({folder / "", folder / "membership"});
  ASSERT_TRUE(room);
  EXPECT_EQ(room->limit, 1000U);
  EXPECT_EQ(room->left, 100U);
  EXPECT_EQ(room->cgroup, folder / "job");
}

TEST(MemoryRoom, counts_file_cache_as_free_and_reads_version_1) {
  const TempFolder folder;
  write_file(folder / "membership", "7:pids:/x\n4:memory:/a/path/of/the/machine/outside\n");
  write_all(folder / "memory",
            {{"memory.limit_in_bytes", "1000"},
             {"memory.usage_in_bytes", "990"},
             {"memory.stat", "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 30\ntotal_rss 700\n"}});
  const auto room = memory_room({folder / "", folder / "membership"});
  ASSERT_TRUE(room);
  EXPECT_EQ(room->left, 240U);
}

TEST(MemoryRoom, is_unknown_without_a_limit) {
  const TempFolder folder;
  write_file(folder / "membership", "0::/\n");
  EXPECT_FALSE(memory_room({folder / "", folder / "membership"}));
  EXPECT_FALSE(memory_room({folder / "", folder / "nothing"}));
  EXPECT_NO_THROW(require_memory_room(uint64_t{1} << 60, std::nullopt));
}

TEST(MemoryRoom, refuses_what_the_kernel_would_kill_for) {
  const MemoryRoom room{.limit = 3 << 20, .left = 2 << 20, .cgroup = "/sys/fs/cgroup/job"};
  EXPECT_NO_THROW(require_memory_room(2 << 20, room));
  const auto message = testing::message_of<SystemError>([&] { require_memory_room(uint64_t{1} << 60, room); });
  EXPECT_TRUE(testing::contains(message, "/sys/fs/cgroup/job"));
  EXPECT_TRUE(testing::contains(message, "2.0 MiB are left of the 3.0 MiB")) << message;
}

}  // namespace
}  // namespace lockstep
