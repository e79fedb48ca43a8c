// SPDX-License-Identifier: Apache-2.0
// step/parallel_for.h: a loop whose parts run at the same time.
//
// Threads: those that libtorch's operators use on the calling thread, or the devices of lockstep/devices.h
// Ranks:   no communication
#pragma once

#include <cstdint>
#include <functional>

namespace lockstep {

// Cuts [begin, end) into parts of at least `grain` where possible and calls part(first, last) for each, at the same time
// where there are threads for them. Blocks until all are done.
using ParallelFor =
    std::function<void(int64_t begin, int64_t end, int64_t grain, const std::function<void(int64_t, int64_t)>& part)>;

// at::parallel_for, on as many cores as at::get_num_threads() says. at::parallel_for is a template that becomes a plain
// loop in a source compiled without OpenMP; this function is compiled with it.
void on_own_cores(int64_t begin, int64_t end, int64_t grain, const std::function<void(int64_t, int64_t)>& part);

}  // namespace lockstep
