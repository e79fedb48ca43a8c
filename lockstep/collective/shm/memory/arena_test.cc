// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/memory/arena.h"

#include <sys/resource.h>

#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>

#include "tests/shm/support.h"

namespace lockstep::shm {
namespace {

using testing::expect_none;
using testing::run_processes;
using testing::run_threads;

std::shared_ptr<Arena> make_arena(std::size_t reserve = std::size_t{1} << 30) {
  return std::make_shared<Arena>(make_segment("test", 0), reserve, "the test's memory");
}

TEST(arena, uses_freed_memory_again) {
  const auto arena = make_arena();
  Memory first = arena->allocate(100);
  const std::byte* const address = first.data();
  Memory second = arena->allocate(100000);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(address) % 64, 0U);
  first = Memory();
  Memory third = arena->allocate(64);
  EXPECT_EQ(third.data(), address);
  const std::size_t taken = arena->bytes_taken();
  for (int i = 0; i < 1000; ++i) second = arena->allocate(50000);
  EXPECT_LE(arena->bytes_taken(), taken + (std::size_t{1} << 20));
}

TEST(arena, joins_neighbours_that_are_free) {
  const auto arena = make_arena();
  std::vector<Memory> parts;
  for (int i = 0; i < 16; ++i) parts.push_back(arena->allocate(std::size_t{64} << 10));
  EXPECT_EQ(arena->bytes_taken(), std::size_t{1} << 20);
  parts.clear();
  const Memory all = arena->allocate(std::size_t{1} << 20);
  EXPECT_EQ(arena->bytes_taken(), std::size_t{1} << 20);
}

TEST(arena, grows_without_moving_and_outlives_its_owner) {
  auto arena = make_arena();
  Memory first = arena->allocate(1000);
  std::memset(first.data(), 7, 1000);
  Memory large = arena->allocate(std::size_t{20} << 20);
  std::memset(large.data(), 1, large.size());
  arena.reset();
  EXPECT_EQ(first.data()[999], std::byte{7});
}

TEST(arena, refuses_more_than_its_addresses) {
  const auto arena = make_arena(std::size_t{4} << 20);
  const Memory half = arena->allocate(std::size_t{2} << 20);
  EXPECT_THROW(arena->allocate(std::size_t{3} << 20), SystemError);
  EXPECT_NO_THROW(arena->allocate(std::size_t{2} << 20));
}

// A core dump of each rank would else hold all ranks' gradients.
TEST(arena, is_left_out_of_core_dumps) {
  const auto arena = make_arena();
  const Memory memory = arena->allocate(4096);
  std::ostringstream address;
  address << std::hex << reinterpret_cast<std::uintptr_t>(memory.data());
  std::ifstream maps("/proc/self/smaps");
  std::string flags;
  for (std::string line; std::getline(maps, line);)
    if (line.starts_with(address.str() + "-"))
      while (std::getline(maps, flags) && !flags.starts_with("VmFlags:")) {
      }
  EXPECT_NE(flags.find(" dd"), std::string::npos) << flags;
}

TEST(arena, memory_outlives_the_group) {
  std::optional<Memory> kept;
  expect_none(run_threads(2, [&](Group& group) {
    Memory memory = group.allocate(1 << 20);
    std::memset(memory.data(), 3, memory.size());
    group.barrier();
    if (group.rank() == 0) kept = std::move(memory);
  }));
  EXPECT_EQ(kept->data()[kept->size() - 1], std::byte{3});
}

// A peer meets memory that did not exist when it connected.
TEST(arena, peers_map_what_was_added_when_they_first_read_it) {
  const auto codes = run_processes(3, [](Group& group) {
    for (std::size_t bytes = 4096; bytes <= std::size_t{16} << 20; bytes *= 16) {
      Memory memory = group.allocate(bytes);
      std::memset(memory.data(), 10 + group.rank(), bytes);
      std::vector<std::uint64_t> offsets(3);
      const std::uint64_t mine = memory.offset();
      group.all_gather({.input = &mine, .output = offsets.data(), .count = 1, .dtype = DType::kInt64});
      for (int rank = 0; rank < 3; ++rank) {
        const std::byte* const data = group.peer_memory(rank, offsets[static_cast<unsigned>(rank)], bytes);
        if (data[bytes - 1] != static_cast<std::byte>(10 + rank)) return 1;
      }
      group.barrier();
    }
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>(3, 0));
}

TEST(arena, a_file_size_limit_is_an_error_and_not_a_signal) {
  const auto codes = run_processes(2, [](Group& group) {
    const rlimit limit{.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
    if (group.rank() == 1) ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      group.allocate(std::size_t{8} << 20);
      if (group.rank() == 1) return 1;
    } catch (const SystemError& error) {
      if (group.rank() == 0 || std::string(error.what()).find("RLIMIT_FSIZE") == std::string::npos) return 2;
    }
    group.barrier();  // nothing is broken
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

// Memory that a collective needs for itself: the peers learn of it.
TEST(arena, refused_staging_memory_fails_all_ranks) {
  const auto codes =
      run_processes(2,
                    [](Group& group) {
                      const rlimit limit{.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
                      if (group.rank() == 1) ::setrlimit(RLIMIT_FSIZE, &limit);
                      std::vector<float> data(1 << 20);
                      try {
                        group.all_reduce({.input = data.data(), .output = data.data(), .count = data.size()});
                      } catch (const SystemError&) {
                        ::_exit(group.rank() == 1 ? 0 : 1);
                      } catch (const PeerLost& error) {
                        const bool named = std::string(error.what()).find("rank 1 failed") != std::string::npos;
                        ::_exit(group.rank() == 0 && named ? 0 : 2);
                      }
                      return 3;
                    },
                    {.timeout = std::chrono::seconds(20), .staging_bytes = 4 << 20});
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

}  // namespace
}  // namespace lockstep::shm
