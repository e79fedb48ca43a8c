// SPDX-License-Identifier: Apache-2.0
// strategy/devices/thread_generator.h: random numbers of a thread's own, for devices that are threads of one process.
//
// torch has one CPU generator for all threads: with dropout on two of them, the order of draws would change from run to
// run, and each draw would wait for the generator's lock. While a ThreadGenerator lives, torch's random functions on its
// thread draw from it on CPUs, where the caller names no generator.
//
// Owns:    its generator
// Threads: make, use and destroy it on one thread; at most one per thread at a time
// Ranks:   no communication
//
// Side effect on the whole process: the first ThreadGenerator registers a kernel of lockstep that runs before torch's
// own for every random function. On threads without a ThreadGenerator it passes on what it was given.
// LOCKSTEP_THREAD_GENERATORS=0 switches it off (docs/process.md).
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

namespace lockstep {

class ThreadGenerator {
 public:
  explicit ThreadGenerator(uint64_t seed);
  ~ThreadGenerator();
  ThreadGenerator& operator=(ThreadGenerator&&) = delete;

  static std::optional<at::Generator> current();  // that the calling thread draws from, if it is not torch's
  static void seed(uint64_t seed);  // restarts the sequence of the calling thread, which must have a generator
};

// A number from torch's own CPU generator, whose state checkpoints keep: the devices of a step are seeded from it.
uint64_t draw_seed();

}  // namespace lockstep
