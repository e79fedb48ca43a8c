// SPDX-License-Identifier: Apache-2.0
// lockstep/stop.h: a job that is asked to stop by a signal finishes its step, saves, and leaves its loop.
//
// Flow:    SIGTERM of a scheduler, Ctrl-C -> a flag of this process -> the exchange of the next step -> every rank
// Owns:    handlers of the signals, from the first call until the process ends
// Threads: stop_requested() on the thread that trains; the others any
// Ranks:   the flag goes with an exchange that a step makes anyway, so all ranks see it after the same step, whichever of
//          them got the signal
//
//   for (auto& batch : loader.epoch(epoch)) {
//     …
//     optimizer.step();
//     if (lockstep::stop_requested()) break;  // then save, and exit as the scheduler wants it
//   }
#pragma once

#include <vector>

namespace lockstep {

// From now on these signals and SIGINT only set a flag, where their action was the default: a handler that the program
// has installed before stays. A second SIGINT ends the process. Called again, it adds signals. Empty: SIGTERM and
// SIGUSR1. Throws UsageError (a signal that can't be caught), SystemError.
void catch_stop_signals(const std::vector<int>& signals = {});

// Tells whether a rank had such a signal before its part of the last exchange of gradients: DistributedDataParallel's, or a
// Strategy's forward_backward(). The same on all ranks that made this exchange. In a job of one rank: whether this
// process had one. The first call catches the signals, as catch_stop_signals() does; before it they end the process.
bool stop_requested();

// Tells whether this process itself had such a signal, and which: the number of the first; 0: none. For jobs whose ranks agree in
// another way, such as an all_reduce of this.
int stop_signal();

}  // namespace lockstep
