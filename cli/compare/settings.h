// SPDX-License-Identifier: Apache-2.0
// cli/compare/settings.h: what a comparison is asked for. Everything in it is written into comparison.json, and a
// comparison is only continued with the same.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "bench/network.h"

namespace lockstep::compare {

using Json = bench::Json;
using Words = std::vector<std::string>;
using Options = std::map<std::string, std::string>;  // of lockstep train, without dashes: {"average-every", "8"}

// How long each run trains. Exactly one is not 0.
struct Budget {
  int epochs = 0;
  std::int64_t samples = 0;
  int steps = 0;
  double seconds = 0;  // since the end of the first step

  bool given() const { return epochs > 0 || samples > 0 || steps > 0 || seconds > 0; }
};

// What carries messages between ranks that are hosts of their own.
enum class Links { kNone, kShaped, kLoopback };

struct Settings {
  std::string experiment;
  std::string model;
  std::string data;
  int batch_size = 0;        // global
  int batch_per_device = 0;  // 0: batch_size
  int threads = 1;           // per rank
  Budget budget;
  std::vector<int> devices;
  Words strategies;                   // labels of experiments.h; empty: those of the experiment
  std::map<std::string, Words> vary;  // option -> values, in place of the experiment's
  std::vector<int> seeds{1, 2, 3};
  std::uint64_t order_seed = 1;
  bool trace = false;
  Words train;  // more arguments of lockstep train
  Links links = Links::kNone;
  bench::LinkOptions link{.megabits_per_second = 100};
};

Json to_json(const Settings& settings);

}  // namespace lockstep::compare
