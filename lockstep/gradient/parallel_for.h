// gradient/parallel_for.h: a loop of which parts run at the same time.
//
// Threads: libtorch's own for operators, of the calling thread; lockstep/devices.h has one of several devices
// Ranks:   no communication
#pragma once

#include <cstdint>
#include <functional>

namespace lockstep {

// Calls part(first, last) for pieces of [begin, end) that together are all of it, of at least `grain` where they can
// be, at the same time where there are threads for them. Blocks until all are done.
using ParallelFor = std::function<void(std::int64_t begin, std::int64_t end, std::int64_t grain,
                                       const std::function<void(std::int64_t, std::int64_t)>& part)>;

// at::parallel_for: on as many cores as at::get_num_threads() says. That is a plain loop in a file compiled without
// OpenMP, hence this one.
void on_own_cores(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  const std::function<void(std::int64_t, std::int64_t)>& part);

}  // namespace lockstep
