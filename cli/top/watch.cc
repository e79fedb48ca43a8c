// SPDX-License-Identifier: Apache-2.0
#include "cli/top/watch.h"

#include <time.h>

#include <algorithm>
#include <chrono>

namespace lockstep::top {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kBetweenSearches = std::chrono::seconds(5);
constexpr milliseconds kBetweenSearchesInVain = std::chrono::seconds(2);
constexpr milliseconds kBetweenSearchesAtMost = std::chrono::minutes(1);

milliseconds own_core_time() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return milliseconds(time.tv_sec * 1000 + time.tv_nsec / 1'000'000);
}

// Where a search takes many milliseconds of a core, which ranks may need, the next one comes later.
milliseconds until_next_search(bool in_vain, milliseconds took) {
  return std::clamp(1000 * took, in_vain ? kBetweenSearchesInVain : kBetweenSearches, kBetweenSearchesAtMost);
}

}  // namespace

std::vector<JobView> Watch::look() {
  if (search_.passed()) {
    const milliseconds before = own_core_time();
    found_ = find_jobs();
    search_ = Deadline::after(until_next_search(found_.jobs.empty(), own_core_time() - before));
  }
  std::erase_if(found_.jobs, has_ended);
  std::vector<JobView> views;
  std::vector<JobLook> looks;
  for (const Job& job : found_.jobs) {
    looks.push_back(look_at(job));
    const auto before = std::ranges::find(before_, job.number, [](const JobLook& look) { return look.job.number; });
    views.push_back(view_of(before == before_.end() ? JobLook{} : *before, looks.back()));
  }
  before_ = std::move(looks);
  return views;
}

}  // namespace lockstep::top
