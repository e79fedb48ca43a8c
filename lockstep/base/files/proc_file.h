// SPDX-License-Identifier: Apache-2.0
// base/files/proc_file.h: what the kernel says in files of /proc that have lines such as "VmHWM:   1234 kB".
#pragma once

#include <string>
#include <string_view>

namespace lockstep {

// The text after the colon in the first line that begins with `name`; "" if there is none, or no such file.
std::string proc_value(const std::string& file, std::string_view name);

double proc_bytes(const std::string& file, std::string_view name);  // of a value in kB; 0 if there is none

}  // namespace lockstep
