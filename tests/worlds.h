// tests/worlds.h: worlds whose ranks are threads, over each transport; and data to exchange.
#pragma once

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/collective/c10d_transport.h"
#include "lockstep/collective/world.h"
#include "lockstep/collective/world_state.h"
#include "tests/support.h"

namespace lockstep::testing {

enum class Fabric { kSharedMemory, kGloo };

inline std::string name_of(Fabric fabric) { return fabric == Fabric::kGloo ? "gloo" : "shared_memory"; }

using Body = std::function<void(World&)>;

// Each rank counts as a machine of its own.
inline void run_over_gloo(int ranks, const Body& body, const WorldOptions& options) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<int> nodes;
  for (int rank = 0; rank < ranks; ++rank) nodes.push_back(rank);
  const auto connect = [&](int rank) {
    return make_gloo(store, {.rank = rank, .size = ranks, .describe = "a test", .timeout = options.timeout});
  };
  run_threads(nodes, connect, body, options);
}

inline void run_over(Fabric fabric, int ranks, const Body& body,
                     const WorldOptions& options = {.timeout = std::chrono::seconds(30)}) {
  if (fabric == Fabric::kGloo && ranks > 1) return run_over_gloo(ranks, body, options);
  run_ranks(ranks, body, options);
}

inline const std::vector<torch::ScalarType> kDtypes{torch::kFloat32, torch::kFloat64, torch::kFloat16, torch::kBFloat16,
                                                    torch::kInt8,    torch::kUInt8,   torch::kInt16,   torch::kInt32,
                                                    torch::kInt64,   torch::kBool};

// Small integers, so that sums are exact in any order: 0 and 1 for bool, else 1 ... 3; the product of seven is below
// 2188.
inline torch::Tensor values_of(int rank, torch::IntArrayRef sizes, torch::ScalarType dtype) {
  const torch::Tensor mixed = (torch::arange(c10::multiply_integers(sizes)) * 31 + rank * 7919 + 5).remainder(3);
  return (dtype == torch::kBool ? mixed.remainder(2) : mixed + 1).to(dtype).reshape(sizes);
}

// Equal in every bit, shape and dtype.
inline ::testing::AssertionResult same(const torch::Tensor& one, const torch::Tensor& other) {
  if (one.sizes() == other.sizes() && one.scalar_type() == other.scalar_type() && torch::equal(one, other))
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << one.sizes() << " " << c10::toString(one.scalar_type()) << " differs from "
                                       << other.sizes() << " " << c10::toString(other.scalar_type());
}

}  // namespace lockstep::testing
