// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cores.h"

#include <sched.h>

#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {

CoreSet usable_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) throw system_error("read", "this process's cores");
  CoreSet cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

CoreSet cores_of_rank(const CoreSet& all, int rank, int ranks) {
  const int cores = static_cast<int>(all.size());
  if (ranks >= cores) return {all[to_size(rank % cores)]};
  const auto begin = all.begin() + static_cast<ptrdiff_t>(rank) * cores / ranks;
  const auto end = all.begin() + static_cast<ptrdiff_t>(rank + 1) * cores / ranks;
  return {begin, end};
}

void pin_this_thread(const CoreSet& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  if (::sched_setaffinity(0, sizeof set, &set) != 0) throw system_error("pin a thread to cores", to_string(cores));
}

std::string to_string(const CoreSet& cores) {
  std::string text;
  for (size_t i = 0; i < cores.size();) {
    size_t last = i;
    while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text += std::to_string(cores[i]);
    if (last > i) text += '-' + std::to_string(cores[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace lockstep
