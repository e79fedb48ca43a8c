// lockstep/memory.h: how this process gets memory from the machine.
//
// Threads: keep_freed_memory() before other threads allocate; give_back_freed_memory() from any
#pragma once

namespace lockstep {

// Freed memory stays with the process and is used again, instead of going back to the machine and being cleared for
// it page by page in the next step. A quarter of a LeNet step (docs/design/lenet-step.md). All threads share one
// arena: what glibc gives each thread beside it holds no tensor above 64 MB, and such ones would go back all the same
// (a third of a step with devices as threads). lockstep::run() calls it; a program with a loop of its own does so
// first of all. Sends nothing, throws nothing; glibc's malloc only.
void keep_freed_memory();

// Gives back what is free now, once: after large memory that is not needed again, such as parameters that have moved.
void give_back_freed_memory();

}  // namespace lockstep
