// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/parallel_for.h"

#include <ATen/Parallel.h>

namespace lockstep {

void on_own_cores(int64_t begin, int64_t end, int64_t grain, const std::function<void(int64_t, int64_t)>& part) {
  at::parallel_for(begin, end, grain, part);
}

}  // namespace lockstep
