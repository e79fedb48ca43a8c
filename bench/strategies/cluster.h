// SPDX-License-Identifier: Apache-2.0
// bench/strategies/cluster.h: one training, spread over the hosts of a network: a worker or a server on each.
//
// Flow:    StrategyCase -> `lockstep train` in every host -> seconds of each step, bytes of each link
// Owns:    the processes, until train() returns
// Threads: the main thread while it is the only one (it forks)
#pragma once

#include <string>
#include <vector>

#include "bench/hosts/network.h"
#include "bench/strategies/cases.h"

namespace lockstep::bench {

struct Training {
  std::vector<double> step_seconds;  // of each step
  std::vector<LinkBytes> links;      // of each host, while it ran
};

struct TrainingOptions {
  std::string model = "mlp";
  int workers = 1;
  int batch_per_worker = 4;
  int steps = 10;
};

// `network`: a host for each server and each worker. Blocks until all processes have ended. Throws SystemError: one
// of them failed, or they take too long.
Training train(const Network& network, const StrategyCase& one, const TrainingOptions& options);

}  // namespace lockstep::bench
