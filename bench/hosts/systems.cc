// SPDX-License-Identifier: Apache-2.0
#include "bench/hosts/systems.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "bench/collectives/cases.h"
#include "lockstep/base/text.h"
#include "lockstep/world.h"

namespace lockstep::bench {
namespace {

class WorldRank final : public System {
 public:
  explicit WorldRank(World world) : world_(std::move(world)) {}

  int rank() const override { return world_.rank(); }
  void barrier() override { world_.barrier(); }
  double slowest(double seconds) override {
    const at::Tensor all = at::full({1}, seconds, at::kDouble);
    world_.all_reduce(all, ReduceOp::kMax);
    return all.item<double>();
  }
  std::function<void()> prepare(const Case& one) override;

 private:
  at::Tensor array(std::int64_t elements) const { return world_.allocate({elements}, at::kFloat).zero_(); }

  World world_;
};

// As World::allocate gives it: where lockstep's buckets lie.
std::function<void()> WorldRank::prepare(const Case& one) {
  const auto part = static_cast<std::int64_t>(one.part(world_.size()));
  const at::Tensor data = array(static_cast<std::int64_t>(one.count()));
  const Algorithm algorithm = one.algorithm == "ring" ? Algorithm::kRing : Algorithm::kDirect;
  if (one.operation == "all_reduce") return [=, this] { world_.all_reduce(data, {.algorithm = algorithm}); };
  if (one.operation == "broadcast") return [=, this] { world_.broadcast(data); };
  const at::Tensor own = array(part);
  const at::Tensor all = array(part * world_.size());
  if (one.operation == "reduce_scatter")
    return [=, this] { static_cast<void>(world_.reduce_scatter(all, {.output = own})); };
  const at::Tensor table = all.view({world_.size(), part});
  if (one.operation == "all_gather") return [=, this] { static_cast<void>(world_.all_gather(own, {.output = table})); };
  return nullptr;
}

using Body = std::function<void(int rank, int host, const std::string& address)>;

RunningSystemPtr start(const std::string& name, const Network& network, int ranks_per_host, const Body& body) {
  std::vector<RankProgram> programs;
  for (int rank = 0; rank < network.hosts() * ranks_per_host; ++rank) {
    const int host = rank / ranks_per_host;
    programs.push_back({.command = {},
                        .body =
                            [=, &network](const std::string& address) {
                              network.host(host).enter();
                              at::set_num_threads(1);
                              body(rank, host, address);
                              return 0;
                            },
                        .variables = network.variables(host, rank % ranks_per_host, ranks_per_host)});
  }
  return std::make_unique<RunningSystem>(name, static_cast<int>(programs.size()), programs);
}

}  // namespace

RunningSystemPtr start_hierarchy(const Network& network, int ranks_per_host) {
  return start("lockstep", network, ranks_per_host, [](int, int, const std::string& address) {
    WorldRank system(World::from_env());
    serve(system, address);
  });
}

RunningSystemPtr start_flat_gloo(const Network& network, int ranks_per_host) {
  const int size = network.hosts() * ranks_per_host;
  return start("Gloo", network, ranks_per_host, [size, &network](int rank, int host, const std::string& address) {
    const auto system =
        make_gloo_rank({.store = address + ".store", .rank = rank, .size = size, .address = network.address(host)});
    serve(*system, address);
  });
}

}  // namespace lockstep::bench
