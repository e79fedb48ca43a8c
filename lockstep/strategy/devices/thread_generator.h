// strategy/devices/thread_generator.h: random numbers of a thread's own, for devices that are threads of one process.
//
// torch has one CPU generator for all threads: dropout on two of them would draw in an order that changes from run to
// run, and each draw would wait for the generator's lock. While a ThreadGenerator lives, dropout and bernoulli_ on its
// thread draw from it.
//
// Owns:    its generator
// Threads: belongs to the thread that makes it, which must also destroy it; at most one per thread at a time
// Ranks:   no communication
//
// The first one puts lockstep's bernoulli_ for CPU tensors in the place of torch's, for the whole process: the same
// kernel, asked to use this thread's generator where the caller names none and the thread has one.
#pragma once

#include <cstdint>

namespace lockstep {

class ThreadGenerator {
 public:
  explicit ThreadGenerator(std::uint64_t seed);
  ~ThreadGenerator();
  ThreadGenerator(const ThreadGenerator&) = delete;
  ThreadGenerator& operator=(const ThreadGenerator&) = delete;

  void seed(std::uint64_t seed);  // begins a sequence anew
};

// A number from torch's own CPU generator, whose state checkpoints keep: what the devices of a step are seeded from.
std::uint64_t draw_seed();

// A seed for one of several that share `seed`. Neighbours are unrelated (data/loader/random.h).
std::uint64_t seed_of(std::uint64_t seed, int index);

}  // namespace lockstep
