// lockstep/periodic_average.h: post-local SGD (Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020):
// after a beginning with gradients exchanged in each step, ranks go on by themselves and average their parameters now
// and then. What is sent falls by `every`.
//
//   auto guard = average.is_local() ? std::optional(ddp.no_sync()) : std::nullopt;   // needs share_parameters = false
//   ddp.backward(loss, samples);  optimizer.step();  optimizer.zero_grad();
//   average.after_step();
//
// Threads: one thread
// Ranks:   every rank makes the same calls in the same order
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/model/parameters.h"
#include "lockstep/world.h"

namespace lockstep {

struct PeriodicAverageOptions {
  std::int64_t first_steps = 0;  // with exchanged gradients
  std::int64_t every = 8;        // steps between averages afterwards
};

// Throws UsageError if one of them has 16 bits: optimizers keep such parameters in float32 beside, and would not see an
// average.
void require_no_16_bits(const std::vector<NamedTensor>& parameters);

class PeriodicAverage {
 public:
  PeriodicAverage(World world, const torch::nn::Module& module,
                  const PeriodicAverageOptions& options);  // throws UsageError

  bool is_local() const { return steps_ >= options_.first_steps; }  // the step that comes: without an exchange

  // Averages the parameters if it is time: every rank has the same afterwards. Blocks then, and sends 2(N-1)/N K.
  // Throws PeerLost.
  void after_step();

 private:
  World world_;
  std::vector<NamedTensor> parameters_;
  PeriodicAverageOptions options_;
  std::int64_t steps_ = 0;
};

}  // namespace lockstep
