// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/memory/arena.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
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

std::shared_ptr<Arena> make_arena() { return std::make_shared<Arena>(make_segment("test", 0), "the test's memory"); }

constexpr size_t kMiB = size_t{1} << 20;

size_t bytes_taken(Arena& arena) {  // from the machine
  struct stat status {};
  EXPECT_EQ(::fstat(arena.window().fd(), &status), 0);
  return static_cast<size_t>(status.st_blocks) * 512;
}

TEST(arena, uses_freed_memory_again) {
  const auto arena = make_arena();
  Memory first = arena->allocate(100);
  const std::byte* const address = first.data();
  Memory second = arena->allocate(100000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(address) % 64, 0U);
  first = Memory();
  Memory third = arena->allocate(64);
  EXPECT_EQ(third.data(), address);
  const size_t taken = bytes_taken(*arena);
  for (int i = 0; i < 1000; ++i) second = arena->allocate(50000);
  EXPECT_LE(bytes_taken(*arena), taken + (size_t{1} << 20));
}

TEST(arena, joins_neighbours_that_are_free) {
  const auto arena = make_arena();
  std::vector<Memory> parts;
  for (int i = 0; i < 16; ++i) parts.push_back(arena->allocate(size_t{64} << 10));
  EXPECT_EQ(bytes_taken(*arena), size_t{1} << 20);
  parts.clear();
  const Memory all = arena->allocate(size_t{1} << 20);
  EXPECT_EQ(bytes_taken(*arena), size_t{1} << 20);
}

TEST(arena, grows_without_moving_and_outlives_its_owner) {
  auto arena = make_arena();
  Memory first = arena->allocate(1000);
  std::memset(first.data(), 7, 1000);
  Memory large = arena->allocate(size_t{20} << 20);
  std::memset(large.data(), 1, large.size());
  arena.reset();
  EXPECT_EQ(first.data()[999], std::byte{7});
}

size_t addresses_of_this_process() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

TEST(arena, reserves_few_addresses_beyond_the_memory_that_it_takes) {
  const size_t before = addresses_of_this_process();
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<Memory> memories;
  for (int i = 0; i < 100; ++i) memories.push_back(arenas.emplace_back(make_arena())->allocate(1000));
  EXPECT_LE(addresses_of_this_process() - before, 100 * 2 * Arena::kFirstExtent);
}

// Sizes around those of the window's extents. No array crosses the end of one, and a hole takes no memory.
TEST(arena, holds_arrays_in_extents_and_finds_them_again) {
  const auto arena = make_arena();
  std::vector<Memory> memories;
  size_t taken = 0;
  for (const size_t mib : {40, 30, 1, 65, 60, 130})
    for (const size_t more : {0, 1}) {
      const size_t bytes = mib * kMiB + more;
      taken += bytes;
      memories.push_back(arena->allocate(bytes));
      memories.back().data()[0] = memories.back().data()[bytes - 1] = static_cast<std::byte>(memories.size());
    }
  EXPECT_LE(bytes_taken(*arena), taken + memories.size() * kMiB);
  for (size_t i = 0; i < memories.size(); ++i) {
    const Memory& each = memories[i];
    EXPECT_EQ(each.data()[0], static_cast<std::byte>(i + 1));
    EXPECT_EQ(each.data()[each.size() - 1], static_cast<std::byte>(i + 1));
    EXPECT_EQ(arena->window().offset_of(each.data(), each.size()), each.offset());
    EXPECT_EQ(arena->window().at(each.offset(), each.size()), each.data());
  }
  memories.clear();
  const size_t before = bytes_taken(*arena);
  const Memory again = arena->allocate(60 * kMiB);  // what is free on both sides of an extent's end is not one range
  EXPECT_EQ(bytes_taken(*arena), before);
  EXPECT_EQ(arena->window().offset_of(again.data(), again.size()), again.offset());
  EXPECT_THROW(arena->window().at(Arena::kFirstExtent - 10, 20), SystemError);
}

// A peer that maps an extent late must not take memory for the hole at its end.
TEST(arena, a_hole_takes_no_memory_from_a_peer_either) {
  const auto codes = run_processes(2, [](Group& group) {
    std::vector<uint64_t> offsets(2);
    const std::vector<size_t> sizes{kMiB, 70 * kMiB};
    std::vector<Memory> memories;
    for (const size_t bytes : sizes) memories.push_back(group.allocate(bytes));
    const auto blocks = [&] {
      struct stat status {};
      ::fstat(group.memory_file(), &status);
      return status.st_blocks;
    };
    const auto before = blocks();
    const uint64_t mine = memories[0].offset();
    group.run({.operation = Operation::kAllGather,
               .input = &mine,
               .output = offsets.data(),
               .count = 1,
               .dtype = DType::kInt64});
    static_cast<void>(group.peer_memory(1 - group.rank(), offsets[static_cast<unsigned>(1 - group.rank())], kMiB));
    group.barrier();
    return blocks() == before ? 0 : 1;
  });
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

TEST(arena, names_the_limit_of_addresses) {
  const int code = testing::exit_code_of(testing::fork_child([] {
    const size_t some = addresses_of_this_process() + 32 * kMiB;
    const rlimit limit{.rlim_cur = some, .rlim_max = some};
    ::setrlimit(RLIMIT_AS, &limit);
    try {
      const auto memory = make_arena()->allocate(kMiB);
    } catch (const SystemError& error) {
      const bool named = std::string(error.what()).find("ulimit -v") != std::string::npos;
      return named && !error.text().next.empty() ? 0 : 1;
    }
    return 2;
  }));
  EXPECT_EQ(LOCKSTEP_TEST_PATIENCE > 1 ? 0 : code, 0);  // a sanitizer itself needs addresses
}

// A core dump of each rank would else hold all ranks' gradients.
TEST(arena, is_left_out_of_core_dumps) {
  const auto arena = make_arena();
  const Memory memory = arena->allocate(4096);
  std::ostringstream address;
  address << std::hex << reinterpret_cast<uintptr_t>(memory.data());
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
    for (size_t bytes = 4096; bytes <= size_t{16} << 20; bytes *= 16) {
      Memory memory = group.allocate(bytes);
      std::memset(memory.data(), 10 + group.rank(), bytes);
      std::vector<uint64_t> offsets(3);
      const uint64_t mine = memory.offset();
      group.run({.operation = Operation::kAllGather,
                 .input = &mine,
                 .output = offsets.data(),
                 .count = 1,
                 .dtype = DType::kInt64});
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

// Without a second node only this can be seen: the pages are new ones, each of one rank, and their neighbours' bytes stay.
TEST(arena, each_rank_takes_the_pages_of_its_share) {
  constexpr size_t kBytes = 5 * kMiB + 1000, kBefore = 192;
  const auto codes = run_processes(3, [](Group& group) {
    Memory memory;
    if (group.rank() == 0) memory = group.allocate(kBytes);
    uint64_t offset = group.rank() == 0 ? memory.offset() : 0;
    group.run({.operation = Operation::kBroadcast, .output = &offset, .count = sizeof(offset), .dtype = DType::kUInt8});
    std::byte* const data = group.peer_memory(0, offset, kBytes);
    const auto count = [&](int value) { return std::count(data, data + kBytes, static_cast<std::byte>(value)); };
    if (group.rank() == 0) std::memset(data, 7, kBytes);
    group.barrier();
    if (group.rank() < 2) take_own_pages(data + kBefore, kBytes - kBefore, group.rank(), 3);
    group.barrier();
    const ptrdiff_t page = ::sysconf(_SC_PAGESIZE);
    const bool two_thirds = std::abs(count(0) - static_cast<ptrdiff_t>(kBytes * 2 / 3)) <= 2 * page;
    const bool beside = data[kBefore - 1] == std::byte{7} && data[kBytes - 1] == std::byte{7};
    group.barrier();
    if (group.rank() == 2) take_own_pages(data + kBefore, kBytes - kBefore, 2, 3);
    group.barrier();
    const bool all =
        count(7) < 2 * page && data[kBefore - 1] == std::byte{7} && count(0) + count(7) == ptrdiff_t{kBytes};
    group.barrier();
    data[kBytes / 2 + to_size(group.rank())] = std::byte{9};
    group.barrier();
    return two_thirds && beside && all && count(9) == 3 ? 0 : 1;
  });
  EXPECT_EQ(codes, std::vector<int>(3, 0));
}

TEST(arena, a_file_size_limit_is_an_error_and_not_a_signal) {
  const auto codes = run_processes(2, [](Group& group) {
    const rlimit limit{.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
    if (group.rank() == 1) ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      group.allocate(size_t{8} << 20);
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
  const auto codes = run_processes(
      2,
      [](Group& group) {
        const rlimit limit{.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
        if (group.rank() == 1) ::setrlimit(RLIMIT_FSIZE, &limit);
        std::vector<float> data(1 << 20);
        try {
          group.run(
              {.operation = Operation::kAllReduce, .input = data.data(), .output = data.data(), .count = data.size()});
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
