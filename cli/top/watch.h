// SPDX-License-Identifier: Apache-2.0
// cli/top/watch.h: looks at all jobs again and again.
//
// Flow:    cli/top/jobs.h -> here -> views of what happened since the look before
// Owns:    the looks before
// Threads: one
#pragma once

#include <vector>

#include "cli/top/view.h"
#include "lockstep/deadline.h"

namespace lockstep::top {

class Watch {
 public:
  std::vector<JobView> look();  // the first has no rates
  const std::vector<int>& unreadable() const { return found_.unreadable; }

 private:
  Found found_{};
  Deadline search_ = Deadline::after({});  // then for new jobs: that is the dearer part of a look
  std::vector<JobLook> before_{};
};

}  // namespace lockstep::top
