// SPDX-License-Identifier: Apache-2.0
// cli/top/layout.h: a job as lines of text, none longer than the terminal is wide.
//
// Flow:    cli/top/view.h -> here -> cli/top.cc, cli/top/screen.h
// Threads: pure functions
//
// In a narrow terminal columns are left out, always in the same order: loss, pid, for, exch, memory, phase, samples/s, age,
// update, data, comp, step, wait. Sentences are folded between words.
#pragma once

#include <string>
#include <vector>

#include "cli/top/view.h"

namespace lockstep::top {

constexpr int kWidthOfAllColumns = 120;

enum class Style { kPlain, kTitle, kHeading, kWarning, kFine };

struct Line {
  std::string text;  // ASCII
  Style style = Style::kPlain;
};

// `skip` ranks are left out at the top of the table.
std::vector<Line> lines_of(const JobView& job, int width, int skip = 0);

std::string one_line_of(const JobView& job, int width);

std::vector<std::string> fold(const std::string& sentence, int width);

}  // namespace lockstep::top
