// SPDX-License-Identifier: Apache-2.0
// base/process/program_identity.h: which build of a program, of lockstep and of libtorch a process runs: state in memory may only
// be taken over by the same ones.
//
// Threads: any
#pragma once

#include <string>

namespace lockstep {

// "train_task 240fc530 liblockstep.so 0407ae4e libtorch_cpu.so 274ade0e": names of files, and the beginning of the build
// IDs that the linker has given them ("?" without one). Such libraries as are loaded.
std::string program_identity();

// Before state in memory that a process of program `other` has left is taken over. Throws CheckpointError: it is not this one.
void require_same_program(const std::string& other);

}  // namespace lockstep
