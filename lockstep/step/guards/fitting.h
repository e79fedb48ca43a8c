// SPDX-License-Identifier: Apache-2.0
// step/guards/fitting.h: whether the module, the optimizer and the options that a DistributedDataParallel is made of fit
// together.
//
// Threads: one thread
// Ranks:   no communication
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <set>
#include <string>
#include <vector>

namespace lockstep {

// Returns those of all groups.
std::vector<torch::Tensor> parameters_of(const torch::optim::Optimizer& optimizer);

// Throws UsageError naming one that is no parameter or buffer of the module.
void require_known_names(const torch::nn::Module& module, const std::set<std::string>& names);

// Throws UsageError unless the optimizer holds parameters of the module and, if it steps shared parameters, none that is
// ignored.
void require_fitting(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module, bool shares,
                     const std::set<std::string>& ignored);

}  // namespace lockstep
