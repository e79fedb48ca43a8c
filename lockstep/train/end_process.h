// SPDX-License-Identifier: Apache-2.0
// train/end_process.h: how a program that may have used Devices ends.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "lockstep/devices.h"

namespace lockstep {

// Returns exit_code, for main() to return. If the thread of a hung device was left running, ends the process here: the thread
// uses static objects, which returning from main() would destroy (lockstep/devices.h).
inline int end_process_with(int exit_code) {
  if (Devices::left_behind() == 0) return exit_code;
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(exit_code);
}

}  // namespace lockstep
