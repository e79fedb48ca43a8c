// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/cgroup.h"

#include "lockstep/base/files/file.h"
#include "lockstep/cores.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::TempFolder;

void write_in(const std::filesystem::path& folder, const std::string& name, const std::string& content) {
  std::filesystem::create_directories(folder);
  write_file(folder / name, content);
}

TEST(CpuQuota, is_that_of_the_tightest_group) {
  const TempFolder folder;
  write_file(folder / "membership", "0::/pod/container\n");
  write_in(folder / "pod", "cpu.max", "250000 100000\n");
  write_in(folder / "pod/container", "cpu.max", "max 100000\n");
  EXPECT_EQ(cpu_quota({folder / "", folder / "membership"}), 2.5);
}

TEST(CpuQuota, is_read_from_version_1) {
  const TempFolder folder;
  write_file(folder / "membership", "5:cpu,cpuacct:/pod\n4:memory:/pod\n");
  write_in(folder / "cpu/pod", "cpu.cfs_quota_us", "50000\n");
  write_in(folder / "cpu/pod", "cpu.cfs_period_us", "100000\n");
  write_in(folder / "cpu", "cpu.cfs_quota_us", "-1\n");
  write_in(folder / "cpu", "cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpu_quota({folder / "", folder / "membership"}), 0.5);
}

TEST(CpuQuota, is_unknown_without_a_limit) {
  const TempFolder folder;
  write_file(folder / "membership", "0::/\n");
  EXPECT_FALSE(cpu_quota({folder / "", folder / "membership"}));
  EXPECT_FALSE(cpu_quota({folder / "", folder / "nothing"}));
}

TEST(UsableCoreCount, is_at_most_the_cores_and_at_least_one) {
  const int cores = static_cast<int>(usable_cores().size());
  EXPECT_EQ(usable_core_count(std::nullopt), cores);
  EXPECT_EQ(usable_core_count(1e6), cores);
  EXPECT_EQ(usable_core_count(0.2), 1);
  EXPECT_EQ(usable_core_count(1.5), std::min(2, cores));
}

}  // namespace
}  // namespace lockstep
