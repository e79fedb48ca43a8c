// SPDX-License-Identifier: Apache-2.0
// data/loader/loading_hint.h: which option to change when the steps wait for data; see Loader::hint.
#pragma once

#include <string>

#include "lockstep/loader.h"

namespace lockstep {

// One sentence, or "" while waiting takes less than 5 % of `seconds`, the time of the steps. `cores`: of this rank.
std::string loading_hint(const LoadingStatistics& statistics, const LoaderOptions& options, int cores, double seconds);

}  // namespace lockstep
