// SPDX-License-Identifier: Apache-2.0
// cli/top/json.h: the object of `lockstep top --json`; docs/watching.md lists its fields.
//
// Flow:    cli/top/view.h -> here -> a line on stdout
// Threads: pure functions
#pragma once

#include <string>
#include <vector>

#include "cli/top/view.h"

namespace lockstep::top {

std::string json_of(const std::vector<JobView>& jobs);  // one line

}  // namespace lockstep::top
