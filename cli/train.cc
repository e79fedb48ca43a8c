// SPDX-License-Identifier: Apache-2.0
// lockstep-train: `lockstep train`. All of it is lockstep::run(), as in a user's own program.
#include "lockstep/run.h"

int main(int argc, char** argv) { return lockstep::run_builtin(argc, argv); }
