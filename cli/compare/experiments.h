// SPDX-License-Identifier: Apache-2.0
// cli/compare/experiments.h: the strategies and the experiments that `lockstep compare` knows, as tables. A new
// experiment is a new row.
#pragma once

#include "cli/compare/settings.h"

namespace lockstep::compare {

// One strategy under the name that it has on the command line and in tables.
struct Contender {
  std::string name;
  std::string strategy;  // of lockstep train
  Options options;
  int most_devices = 1000;
  int servers = 0;  // ranks beside the devices; only over hosts

  // Bytes in and out of the busiest host's link in one step, each direction, in multiples of the gradient's; and the text of it.
  double (*busiest)(int workers, int servers) = nullptr;
  std::string formula;
};

struct Varied {
  std::string option;  // of lockstep train, without dashes
  Words values;
};

struct Case {
  std::string contender;
  std::vector<Varied> varied;  // every combination is trained
};

enum class DeviceCounts { kAll, kUpToAll };  // all cores, at least 2; each number from 1 up to that

struct Experiment {
  std::string name;
  std::string description;
  std::string across = "devices";  // what its plots are drawn against: also "contender", or the key of an option
  std::vector<Case> cases;
  DeviceCounts counts = DeviceCounts::kAll;
  std::vector<int> devices;  // in place of `counts`
  std::string model = "lenet";
  std::string data = "auto";
  int batch_size = 256;
  int batch_per_device = 0;
  Budget budget{.epochs = 2};
  bool over_hosts = false;  // a host for each worker and server
};

const std::vector<Contender>& contenders();
const std::vector<Experiment>& experiments();

const Contender& contender_named(const std::string& name);    // throws UsageError that lists them
const Experiment& experiment_named(const std::string& name);  // likewise

}  // namespace lockstep::compare
