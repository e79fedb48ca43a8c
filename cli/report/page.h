// SPDX-License-Identifier: Apache-2.0
// cli/report/page.h: makes the HTML page out of cli/report/page.html, page.css, page.js and Chart.js, all of which the
// program carries within itself (page_parts.cc.in).
//
// Flow:    what read_runs() returns -> here -> a file
// Threads: any
#pragma once

#include <string>

#include "cli/report/json.h"

namespace lockstep::report {

// One file that fetches nothing. Text of the data is never markup or script.
std::string page_of(const Json& data);

// The files, as CMake read them.
extern const char* const kPageHtml;
extern const char* const kPageCss;
extern const char* const kPageJs;
extern const char* const kChartJs;

}  // namespace lockstep::report
