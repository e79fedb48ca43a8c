// SPDX-License-Identifier: Apache-2.0
// tests/simulated_cuda/traps.h: a message for host code that touches a device's memory.
#pragma once

namespace simulated_cuda {

// From now on SIGSEGV at an address of a device prints which device and where, then ends the process as before.
void explain_faults();

}  // namespace simulated_cuda
