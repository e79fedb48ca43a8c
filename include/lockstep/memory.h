// SPDX-License-Identifier: Apache-2.0
// lockstep/memory.h: settings of glibc's malloc for the whole process (docs/process.md lists all such side effects).
//
// Flow:    main() or lockstep::run() -> here -> mallopt
// Owns:    nothing
// Threads: call keep_freed_memory() before other threads allocate; give_back_freed_memory() from any thread
// Ranks:   no communication
#pragma once

namespace lockstep {

// Freed memory stays with the process and is reused; otherwise the kernel takes it back and clears it page by page for
// the next step, which costs a quarter of a LeNet step (docs/design/lenet-step.md). All threads share one arena: the
// arenas that glibc makes for other threads hold no tensor above 64 MB, and would return larger ones to the kernel (a
// third of a step with devices as threads). lockstep::run() calls it; a program with its own loop calls it first of
// all. The environment variable LOCKSTEP_KEEP_FREED_MEMORY=0 makes it do nothing. Throws nothing; glibc's malloc only.
void keep_freed_memory();

// Returns memory that is free now to the kernel, once: after freeing much that is not needed again, such as parameters
// that have moved.
void give_back_freed_memory();

}  // namespace lockstep
