// SPDX-License-Identifier: Apache-2.0
// base/defects.h: deliberate defects, to show that the fuzzer of tests/step_fuzz finds such ones. Only that test is built
// with LOCKSTEP_DEFECTS; everywhere else defect() is the constant false and leaves no code behind.
#pragma once

#include <string_view>

namespace lockstep {

#ifdef LOCKSTEP_DEFECTS
inline std::string_view& present_defect() {
  static std::string_view name;
  return name;
}
inline bool defect(std::string_view name) { return present_defect() == name; }
#else
constexpr bool defect(std::string_view) { return false; }
#endif

}  // namespace lockstep
