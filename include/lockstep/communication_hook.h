// lockstep/communication_hook.h: other ways to sum a bucket of gradients over the ranks than all-reducing it as it
// is: fewer bytes for a sum that is not exact. Worth it where the network is the limit; ranks of one machine that
// share parameters send nothing and need none.
//
// Flow:    gradient/reducer.h gives a full bucket -> start() -> collective/ -> the function that start() returned
// Owns:    what it keeps from step to step: what was not sent yet (error feedback), a basis. It is not in checkpoints
// Threads: as the reducer
// Ranks:   every rank has a hook with the same options, and starts the same buckets in the same order
//
// K: bytes of a bucket in float32, N ranks. What each rank sends and receives:
//   16 bits      half of an all-reduce of K                        (exact up to rounding)
//   PowerSGD     two all-reduces of 4 r (n + m) bytes for each n x m matrix; K for what is no matrix
//   2 bits       K/16 to every other rank
//   top-k        8 bytes for each of the k largest elements to every other rank
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/world.h"

namespace lockstep {

struct GradientBucket {
  std::size_t number = 0;            // the same in every step
  torch::Tensor flat;                // (n) the gradients of this rank, weighted; afterwards their sum over ranks
  std::vector<torch::Tensor> parts;  // views of `flat`, shaped as the parameters
  double unit = 1;                   // what they were divided by, beside the weights: it changes with the global batch
};

class CommunicationHook {
 public:
  virtual ~CommunicationHook() = default;

  // Begins the exchange. The function that it returns ends it: blocks, and leaves the sum in the bucket. Throws
  // PeerLost.
  using Finish = std::function<void()>;
  virtual Finish start(const World& world, const GradientBucket& bucket) = 0;
};

// Sent and summed in float16 or bfloat16.
std::shared_ptr<CommunicationHook> sixteen_bit_hook(torch::ScalarType dtype);  // throws UsageError: another dtype

// PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019): matrices as products of rank r, with error feedback and the
// last step's basis to begin with. A matrix: a gradient of 2 dimensions and more, the first against the others.
struct PowerSGDOptions {
  std::int64_t rank = 4;
  std::uint64_t seed = 0;
};
std::shared_ptr<CommunicationHook> power_sgd_hook(const PowerSGDOptions& options = {});

// Each element as -threshold, 0 or +threshold; what that leaves stays in a residual, which is added to the next step's
// gradient. S2: MXNet's gradient compression. (Seide et al., Interspeech 2014, did it with one bit.)
std::shared_ptr<CommunicationHook> two_bit_hook(double threshold = 0.5);  // throws UsageError: not positive

// The share of elements that are largest by absolute value, with error feedback (Lin et al., "Deep gradient
// compression", ICLR 2018, without its momentum correction).
std::shared_ptr<CommunicationHook> top_k_hook(double share = 0.01);  // throws UsageError: not in (0, 1]

enum class Compression { kNone, kFloat16, kBFloat16, kPowerSGD, kTwoBit, kTopK };

struct CompressionOptions {
  Compression kind = Compression::kNone;
  double amount = 0;  // PowerSGD: rank, two bits: threshold, top-k: share; 0: its default
};

// The hook of these options; null for kNone. Throws UsageError: an amount out of range.
std::shared_ptr<CommunicationHook> make_hook(const CompressionOptions& options);

}  // namespace lockstep
