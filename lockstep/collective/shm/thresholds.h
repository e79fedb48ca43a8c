// collective/shm/thresholds.h: every number of the shared-memory core that was chosen by measuring, in one place.
//
// Measured with bench/collectives.cc on two cores of a Zen 4 server (1 MiB of L2 each, 32 MiB of shared L3), g++ 12 -O3.
#pragma once

#include <chrono>
#include <cstddef>

#include "lockstep/collective/shm/control_block.h"

namespace lockstep::shm {

// Waiting. A spin that succeeds costs 0.2 us, a futex wake-up 20 to 50 us. So it pays to spin for a while, and then,
// for about as long as a wake-up takes, to yield: even with a core per rank the peer may happen to wait for this very
// core. With fewer cores than ranks it does so more often than not.
inline constexpr int kSpins = 400;
inline constexpr int kYields = 200;
inline constexpr int kSpinsWhenCrowded = 20;
inline constexpr int kYieldsWhenCrowded = 50;
inline constexpr std::chrono::milliseconds kLongestSleep{10};  // how often a sleeper looks for trouble

// A reduction of up to so many bytes is done in one shot if some rank's memory is out of its peers' reach: everybody
// reads everybody's slot and reduces by itself. Up to 24 bytes travel in the announcement. Arenas are better reduced in
// place above kAlwaysOneShotBytes: the second wait costs less than p times the reading.
constexpr std::size_t one_shot_reduction_bytes(int ranks) { return ranks <= 4 ? 16384 : 8192; }
inline constexpr std::size_t kAlwaysOneShotBytes = 512;

// Data of up to this many bytes per rank is passed through the slots, which saves the barrier at the end.
inline constexpr std::size_t kOneShotExchangeBytes = 4096;

// Staging: each rank copies this much, twice in turn, past its peers. 64 MiB of ordinary memory between two ranks take,
// with 512 KiB / 2 MiB / 8 MiB of staging memory: 8.0 / 8.2 / 11.4 ms where the two cores share a cache, and
// 75 / 63 / 33 ms where they don't, because a line that another core holds modified comes slower than one that has
// gone to memory meanwhile. Options::staging_bytes sets another value.
inline constexpr std::size_t kStagingBytes = std::size_t{8} << 20;

static_assert(one_shot_reduction_bytes(2) <= kSlotBytes && kOneShotExchangeBytes <= kSlotBytes);

}  // namespace lockstep::shm
