// SPDX-License-Identifier: Apache-2.0
// lockstep/run.h: a whole training program: command line, ranks, training, exit code.
//
// Flow:    main() of a user's program or of `lockstep train` -> here -> agent/, strategy/, train/loop.h
// Owns:    the process: may fork ranks, sets the number of torch's threads, keeps freed memory (lockstep/memory.h), and
//          ignores SIGPIPE unless the program has a handler for it (where several machines are connected by Gloo)
// Threads: call from main(), before other threads are started
// Ranks:   called once per process; starts the ranks of --ranks. Under mpirun, srun or torchrun, the launcher's ranks
//          are used
#pragma once

#include "lockstep/task.h"

namespace lockstep {

// Gives a program every option of `lockstep train` (--help-all lists them). Blocks until training is over. Prints results to
// stdout and errors to stderr; throws nothing. Returns the exit code:
//
//   0        trained, or --help
//   1        an error, such as a lost rank or unreadable data
//   2        a usage error: an unknown option, a value out of range, options that do not go together
//   else     of ranks that were started here: the first failed rank's own code, or 128 + n if signal n ended it
//
// If a device's thread hangs (lockstep/devices.h), it ends the process with that code instead of returning, without
// destroying static objects.
int run(int argc, char** argv, const Task& task);

// The same for lockstep's own models, chosen with --model: `lockstep train`.
int run_builtin(int argc, char** argv);

}  // namespace lockstep
