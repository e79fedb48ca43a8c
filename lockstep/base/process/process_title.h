// SPDX-License-Identifier: Apache-2.0
// base/process/process_title.h: what ps and top show of a rank: "lockstep train [rank 1 of 8] --model …", and "lockstep-r1".
//
// Owns:    the memory of argv, once it has been read: show_rank() moves the arguments
// Threads: main's
#pragma once

#include <string>

namespace lockstep {

// Blanks at the end of argv[0], which `lockstep` leaves for the title of `lockstep train`.
inline constexpr size_t kRoomForRank = sizeof " [rank 1234567 of 1234567]" - 1;

// Changes only the short name where argv[0] has no such room (a program of the user's own).
void show_rank(int argc, char** argv, int rank, int ranks);

// Before there are ranks: takes the room away again, which ps would show as blanks.
void show_no_rank(int argc, char** argv);

}  // namespace lockstep
