// SPDX-License-Identifier: Apache-2.0
// collective/shm/thresholds.h: every number of the shared-memory core that was chosen by measuring, in one place.
//
// Measured with bench/collectives.cc on two cores of a Zen 4 server (1 MiB of L2 each, 32 MiB of shared L3), g++ 12
// -O3.
#pragma once

#include <algorithm>

#include "lockstep/collective/shm/memory/control_block.h"

namespace lockstep::shm {

// Waiting. A spin that succeeds costs 0.2 us, a futex wake-up 20 to 50 us. So it pays to spin for a while, and then,
// for about as long as a wake-up takes, to yield: even with a core per rank the peer may happen to wait for this very
// core. With fewer cores than ranks it does so more often than not.
inline constexpr int kSpins = 400;
inline constexpr int kYields = 200;
inline constexpr int kSpinsWhenCrowded = 20;
inline constexpr int kYieldsWhenCrowded = 50;
inline constexpr milliseconds kLongestSleep{10};  // how often a sleeper looks for trouble

// A reduction of up to so many bytes is done in one shot if some rank's memory is out of its peers' reach: everybody
// reads everybody's slot and reduces by itself. Up to 24 bytes travel in the announcement. Arenas are better reduced in
// place above kAlwaysOneShotBytes: the second wait costs less than p times the reading.
constexpr size_t one_shot_reduction_bytes(int ranks) { return ranks <= 4 ? 16384 : 8192; }
inline constexpr size_t kAlwaysOneShotBytes = 512;

// From so many bytes on, ranks take chunks of an array that is reduced in place, instead of a fixed part each. 64 MiB
// between two ranks that arrive together take 5.4 ms in chunks and 6.4 in parts, 16 MiB 0.90 and 1.00, but 4 MiB, which
// the caches keep, 0.10 and 0.07. A chunk of 512 KiB takes 50 to 100 us.
inline constexpr size_t kInChunksFromBytes = size_t{8} << 20;
inline constexpr size_t kReducedChunkBytes = size_t{512} << 10;

// Data of up to this many bytes per rank is passed through the slots, which saves the barrier at the end.
inline constexpr size_t kOneShotExchangeBytes = 4096;

// Staging: a rank shows its peers a chunk at a time, this many chunks in turn; a chunk has a lane for each rank. 1 MiB
// of ordinary memory between two ranks takes, with chunks of 64 / 128 / 256 / 512 KiB: 116 / 113 / 100 / 91 us. With
// more ranks than cores every chunk costs a turn of the scheduler, so it grows with the ranks: 64 MiB between 8 ranks
// on 2 cores take 287 / 246 / 256 ms with 0.5 / 2 / 8 MiB. Options::staging_bytes sets another size.
constexpr size_t chunk_bytes(int ranks) {
  constexpr size_t kLane = size_t{256} << 10;
  constexpr size_t kMost = size_t{2} << 20;
  return std::min(kMost, kLane * static_cast<unsigned>(ranks));
}
inline constexpr uint32_t kStagingChunks = 4;

// From so many bytes on, what peers read next is stored past the caches (show_bytes). 64 KiB written by one core and read
// by another, over and over, take 8 us if the cores share a cache, 30 us if not, and 4.3 us past the caches in either
// case; 4 KiB 0.25, 1.0 and 0.6 us; 16 KiB 1.1, 3.5 and 1.7 us. (A virtual machine moves between the first two.)
inline constexpr size_t kStreamFromBytes = 16384;

// Up to so many ranks, each one reads all that the others stage and reduces everything by itself: as many bytes move as
// when each reduces a part and shows the result, in fewer steps.
inline constexpr int kReduceAllRanks = 2;

static_assert(one_shot_reduction_bytes(2) <= kSlotBytes && kOneShotExchangeBytes <= kSlotBytes);

}  // namespace lockstep::shm
