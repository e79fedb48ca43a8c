// SPDX-License-Identifier: Apache-2.0
// tests/worlds.h: worlds whose ranks are threads, over each transport; and data to exchange.
#pragma once

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/machines/hierarchy.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/collective/world/world_state.h"
#include "lockstep/world.h"
#include "tests/support.h"

namespace lockstep::testing {

enum class Fabric { kSharedMemory, kLonelyHosts, kHosts };

inline std::string name_of(Fabric fabric) {
  switch (fabric) {
    case Fabric::kSharedMemory: return "shared_memory";
    case Fabric::kLonelyHosts: return "lonely_hosts";
    case Fabric::kHosts: return "hosts";
  }
  return {};
}

using Body = std::function<void(World&)>;
using Nodes = std::vector<int>;

// Shared memory between the ranks that count as one machine, Gloo between them: nodes[r] is the machine of rank r.
inline void run_over_machines(const Nodes& nodes, const Body& body,
                              const WorldOptions& options = {.timeout = std::chrono::seconds(30)}) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const Topology topology{nodes};
  IntVector<IntVector<shm::GroupPtr>> insides;
  for (int node = 0; node < topology.machines(); ++node) {
    const std::vector<int> ranks = topology.ranks_on(node);
    insides.push_back(
        shm::make_thread_group(static_cast<int>(ranks.size()), {.timeout = options.timeout, .job_ranks = ranks}));
  }
  const auto connect = [&](int rank) {
    shm::GroupPtr& inside = insides[topology.machine_of[rank]][topology.local_rank(rank)];
    return std::make_unique<Hierarchy>(std::move(inside), topology, store,
                                       TransportOptions{.rank = rank,
                                                        .size = static_cast<int>(nodes.size()),
                                                        .describe = concat("rank ", rank),
                                                        .timeout = options.timeout});
  };
  run_threads(nodes, connect, body, options);
}

// Each rank on a machine of its own.
inline Nodes lonely(int ranks) {
  Nodes nodes;
  for (int rank = 0; rank < ranks; ++rank) nodes.push_back(rank);
  return nodes;
}

// Some uneven spread of ranks over two or three machines.
inline Nodes spread(int ranks) {
  const Nodes seven{0, 1, 1, 0, 2, 2, 0};
  const Nodes six{0, 1, 2, 0, 1, 2};
  const Nodes few{0, 0, 1, 1};
  if (ranks == 2) return {0, 1};
  const Nodes& all = ranks > 6 ? seven : (ranks > 4 ? six : few);
  return {all.begin(), all.begin() + ranks};
}

inline void run_over(Fabric fabric, int ranks, const Body& body,
                     const WorldOptions& options = {.timeout = std::chrono::seconds(30)}) {
  if (fabric == Fabric::kLonelyHosts && ranks > 1) return run_over_machines(lonely(ranks), body, options);
  if (fabric == Fabric::kHosts && ranks > 1) return run_over_machines(spread(ranks), body, options);
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
