// collective/shm/thresholds.h: every number of the shared-memory core that was chosen by measuring, in one place.
//
// Measured with bench/shm_core.cc on two cores of a Zen 4 server (1 MiB of L2 each, 32 MiB of shared L3), g++ 12 -O3.
#pragma once

#include <chrono>
#include <cstddef>

#include "lockstep/collective/shm/control_block.h"

namespace lockstep::shm {

// Waiting. A spin that succeeds costs 0.2 us, a futex wake-up 20 to 50 us. So it pays to spin for a while, and then, for
// about as long as a wake-up takes, to yield: even with a core per rank the peer may happen to wait for this very core.
// With fewer cores than ranks it does so more often than not.
inline constexpr int kSpins = 400;
inline constexpr int kYields = 200;
inline constexpr int kSpinsWhenCrowded = 20;
inline constexpr int kYieldsWhenCrowded = 50;
inline constexpr std::chrono::milliseconds kLongestSleep{10};  // how often a sleeper looks for trouble

// Reductions of up to this many bytes are done in one shot: everybody reads everybody's slot and reduces by itself.
constexpr std::size_t one_shot_reduction_bytes(int ranks) { return ranks <= 2 ? 2048 : 1024; }

// Data of up to this many bytes per rank is passed through the slots, which saves the barrier at the end.
inline constexpr std::size_t kOneShotExchangeBytes = 4096;

// Staging: each rank copies this much, twice in turn, past its peers. Half of L2, so that what one rank wrote is still
// in a cache when another reads it.
inline constexpr std::size_t kStagingBytes = std::size_t{512} << 10;

static_assert(one_shot_reduction_bytes(2) <= kSlotBytes && kOneShotExchangeBytes <= kSlotBytes);

}  // namespace lockstep::shm
