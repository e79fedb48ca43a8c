// SPDX-License-Identifier: Apache-2.0
// cli/compare/summary.h: the tables that a comparison ends with: a line for each group of runs that differ in their seed
// only, with the median and the spread of its finished runs.
//
// Threads: one
#pragma once

#include <ostream>

#include "cli/compare/folder.h"

namespace lockstep::compare {

// `runs` in the order of the lines.
void print_summary(std::ostream& out, const Settings& settings, const Folder& folder, const std::vector<Run>& runs);

}  // namespace lockstep::compare
