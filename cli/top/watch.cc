// SPDX-License-Identifier: Apache-2.0
#include "cli/top/watch.h"

#include <algorithm>
#include <chrono>

namespace lockstep::top {
namespace {

// A search takes some milliseconds of a core that ranks may need.
constexpr std::chrono::milliseconds kBetweenSearches = std::chrono::seconds(5);
constexpr std::chrono::milliseconds kBetweenSearchesInVain = std::chrono::seconds(2);

}  // namespace

std::vector<JobView> Watch::look() {
  if (search_.passed()) {
    found_ = find_jobs();
    search_ = Deadline::after(found_.jobs.empty() ? kBetweenSearchesInVain : kBetweenSearches);
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
