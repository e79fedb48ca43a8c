// SPDX-License-Identifier: Apache-2.0
// tests/defects.h: switches on one of the deliberate defects that tests/*/defects.patch puts into the library, to show that
// a fuzzer finds it. tests/defects.cmake puts this header into every patched source.
#pragma once

#include <string_view>

namespace lockstep {

inline std::string_view& present_defect() {
  static std::string_view name;
  return name;
}
inline bool defect(std::string_view name) { return present_defect() == name; }

}  // namespace lockstep
