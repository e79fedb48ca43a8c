// SPDX-License-Identifier: Apache-2.0
// base/process/program_identity.h: which build of a program, of lockstep and of libtorch a process runs: state in memory may only
// be taken over by the same ones.
//
// Threads: any
#pragma once

#include <string>

namespace lockstep {

// "train_task 240fc5301be37a52 liblockstep.so …": names of files, each with a hash of its build ID and the other notes
// that the linker has given it. Such libraries as are loaded.
std::string program_identity();

// Before state in memory that a process of program `other` has left is taken over. Throws CheckpointError: it is not this one.
void require_same_program(const std::string& other);

}  // namespace lockstep
