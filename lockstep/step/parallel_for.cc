// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/parallel_for.h"

#include <ATen/Parallel.h>

namespace lockstep {

void on_own_cores(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  const std::function<void(std::int64_t, std::int64_t)>& part) {
  at::parallel_for(begin, end, grain, part);
}

}  // namespace lockstep
