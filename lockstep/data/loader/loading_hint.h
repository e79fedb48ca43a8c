// SPDX-License-Identifier: Apache-2.0
// data/loader/loading_hint.h: which option to change when the steps wait for data; see Loader::hint.
#pragma once

#include <string>

#include "lockstep/loader.h"

namespace lockstep {

struct LoadingSettings {
  int workers = 0;
  int prefetch = 0;
  int cores = 1;  // of this rank
};

// One sentence, or "" while waiting takes less than 5 % of `seconds`, the time of the steps.
std::string loading_hint(const LoadingStatistics& statistics, const LoadingSettings& settings, double seconds);

}  // namespace lockstep
