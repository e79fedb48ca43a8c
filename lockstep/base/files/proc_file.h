// SPDX-License-Identifier: Apache-2.0
// base/files/proc_file.h: what the kernel says in files of /proc that have lines such as "VmHWM:   1234 kB".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// The text after the colon in the first line that begins with `name`; "" if there is none, or no such file.
std::string proc_value(const std::string& file, std::string_view name);

// The fields of the file after the name, which may itself have blanks and brackets, of /proc/PID/stat: the state is the
// first. Throws SystemError: no such process.
std::vector<std::string> fields_of_stat(const std::string& file);

double proc_bytes(const std::string& file, std::string_view name);  // of a value in kB; 0 if there is none

}  // namespace lockstep
