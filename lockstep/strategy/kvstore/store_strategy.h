// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/store_strategy.h: the parts of the strategy `kvstore`: devices of one process, workers and servers.
//
// dist_*: servers and workers go through the same training loop. A worker trains on its part of the batches. A server's
// threads serve; its loop counts a step once every worker has pushed it, validates and saves.
//
// Ranks:   local kinds: one process; dist_*: all ranks call, each the one for its role
#pragma once

#include <memory>

#include "lockstep/strategy/kvstore/link.h"

namespace lockstep {

// The keys of a store: the parameters that are trained, then the buffers.
std::vector<NamedTensor> trained_parameters(const torch::nn::Module& model);
std::vector<torch::Tensor> tensors_of(const std::vector<NamedTensor>& named);

std::unique_ptr<Strategy> make_local_strategy(const World& world, const Task& task, const StrategyOptions& options);

// workers: the world of all workers.
std::unique_ptr<Strategy> make_worker_strategy(const DistSetting& setting, const World& workers, const Task& task);
std::unique_ptr<Strategy> make_server_strategy(const DistSetting& setting, const Task& task);

}  // namespace lockstep
