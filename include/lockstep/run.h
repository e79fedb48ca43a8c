// lockstep/run.h: a whole training program: command line, ranks, training, exit code.
//
// Flow:    main() of a user's program or of `lockstep train` -> here -> launch/, strategy/, train/loop.h
// Threads: call from main(), before other threads are started (it may fork)
// Ranks:   called once per process; starts the ranks of --ranks where no launcher has
#pragma once

#include "lockstep/task.h"

namespace lockstep {

// Gives a program every option of `lockstep train` (--help lists them). Blocks until training is over. Prints errors to
// stderr. Returns the exit code: 0; 2 for a usage error; a failed rank's own, 128 + n for a signal; 1 otherwise. If a
// device's thread hangs (lockstep/devices.h), it ends the process with that code instead, without destroying static objects.
int run(int argc, char** argv, const Task& task);

// The same for lockstep's own models, chosen with --model: `lockstep train`.
int run_builtin(int argc, char** argv);

}  // namespace lockstep
