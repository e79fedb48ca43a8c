// SPDX-License-Identifier: Apache-2.0
#include "tests/train/ranks.h"

namespace lockstep::testing {

Ranks::Ranks(int count, const Words& command, std::map<std::string, std::string> more) {
  more["ASAN_OPTIONS"] = "detect_leaks=0";  // takes seconds at the end of each program, whose end is timed
  more["WORLD_SIZE"] = more["LOCAL_WORLD_SIZE"] = std::to_string(count);
  more["MASTER_ADDR"] = "127.0.0.1";
  more["MASTER_PORT"] = std::to_string(port_.number());
  for (int rank = 0; rank < count; ++rank) {
    more["RANK"] = more["LOCAL_RANK"] = std::to_string(rank);
    children_.push_back(
        std::make_unique<Child>(with_variables(more, command + Words{"--quiet", "--metrics", metrics()})));
  }
}

bool Ranks::have_made(size_t steps) const {
  return wait_until([&] { return steps_in(metrics()) >= steps; });
}

}  // namespace lockstep::testing
