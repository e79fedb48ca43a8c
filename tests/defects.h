// SPDX-License-Identifier: Apache-2.0
// tests/defects.h: which of the deliberate defects of tests/defects.py is present. A test sets it.
#pragma once

#include <string_view>

namespace lockstep {

inline std::string_view& present_defect() {
  static std::string_view name;
  return name;
}
inline bool defect(std::string_view name) { return present_defect() == name; }

}  // namespace lockstep
