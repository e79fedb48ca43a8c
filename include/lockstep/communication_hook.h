// SPDX-License-Identifier: Apache-2.0
// lockstep/communication_hook.h: lossy ways to sum a bucket of gradients over the ranks: fewer bytes, and a sum that is
// not exact. Worth it where the network is the limit; ranks of one machine that share parameters send nothing and need
// none.
//
// Flow:    step/buckets.cc gives a full bucket -> start() -> collective/ -> the function that start() returned
// Owns:    what it keeps from step to step: the part that was not sent (error feedback), a basis. Not in checkpoints, but in
//          what a rank keeps for its replacement
// Threads: start() on autograd's threads, one at a time; what it returned on the thread that waits
// Ranks:   every rank has a hook with the same options, and starts the same buckets in the same order
//
// K: bytes of a bucket in float32, N ranks. What each rank sends and receives:
//   16 bits      half of an all-reduce of K                        (exact up to rounding)
//   PowerSGD     two all-reduces of 4 r (n + m) bytes for each n x m matrix; all-reduces of what is not a matrix
//   2 bits       K/16 to every other rank
//   top-k        8 bytes for each of the k largest elements to every other rank
#pragma once

#include "lockstep/world.h"

namespace lockstep {

// Size of a bucket: of gradients that are all-reduced at once (Li et al., "PyTorch Distributed", VLDB 2020). Between CPUs without
// a hook smaller ones are faster: they go out earlier.
inline constexpr size_t kBucketBytes = size_t{25} << 20;
inline constexpr size_t kCpuBucketBytes = size_t{8} << 20;

struct GradientBucket {
  size_t number = 0;     // the same in every step
  Tensor flat;           // (n) the weighted gradients of this rank; afterwards their sum over ranks
  Tensors parts;         // views of `flat`, one per parameter; a matrix as (rows, columns)
  Tensors parameters{};  // of the parts
  bool is_last = true;   // of the buckets of a step
  double unit = 1;       // divisor already applied to `flat`; it changes with the global batch
};

class CommunicationHook {
 public:
  virtual ~CommunicationHook() = default;

  // Starts the exchange, inside of backward(); so it must not wait for other ranks, which may be elsewhere in theirs. The
  // function that it returns finishes it: blocks until the sum is in the bucket. Throws PeerLost.
  using Finish = std::function<void()>;
  virtual Finish start(const World& world, const GradientBucket& bucket) = 0;

  // Tells whether it adds what it has not sent to the next step's gradient. Then no gradient may be infinite, as a scaled loss
  // can make it: a loss scale is refused.
  virtual bool keeps_residual() const { return false; }

  // Its state on this rank, kept from step to step; and in a new hook with the same options and buckets, before its first
  // step. The tensors of state() are those that the next step writes to.
  virtual NamedTensors state() const { return {}; }
  virtual void set_state(const NamedTensors& state) { static_cast<void>(state); }
};

// Sends and sums in float16 or bfloat16.
std::shared_ptr<CommunicationHook> sixteen_bit_hook(torch::ScalarType dtype);  // throws UsageError: another dtype

// PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019): sends matrices as products of rank r, with error feedback and
// a warm start from the last step's basis. A gradient of two or more dimensions is a matrix: its first dimension
// against the others.
struct PowerSGDOptions {
  int64_t rank = 4;
  uint64_t seed = 0;
};
std::shared_ptr<CommunicationHook> power_sgd_hook(const PowerSGDOptions& options = {});

// Sends each element as -threshold, 0 or +threshold; the rest is kept in a residual, which is added to the next step's
// gradient. This is MXNet's gradient compression (Seide et al., Interspeech 2014, did it with one bit).
std::shared_ptr<CommunicationHook> two_bit_hook(double threshold = 0.5);  // throws UsageError: not positive

// Sends the share of elements that are largest by absolute value, with error feedback (Lin et al., "Deep Gradient
// Compression", ICLR 2018, without its momentum correction).
std::shared_ptr<CommunicationHook> top_k_hook(double share = 0.01);  // throws UsageError: not in (0, 1]

enum class Compression { kNone, kFloat16, kBFloat16, kPowerSGD, kTwoBit, kTopK };

struct CompressionOptions {
  Compression kind = Compression::kNone;
  double amount = 0;  // PowerSGD: rank, two bits: threshold, top-k: share; 0: its default
};

// The hook of these options; null for kNone. Throws UsageError: an amount out of range.
std::shared_ptr<CommunicationHook> make_hook(const CompressionOptions& options);

}  // namespace lockstep
