// SPDX-License-Identifier: Apache-2.0
// lockstep/stop_all.h: stop() ends all work of this process from anywhere: a device's function, a signal watcher, a window's button.
//
// Ends what lives when it is called, but not what is made afterwards:
//
//   Devices   as if one of them had failed: those that wait for another one stop at once, those that compute when
//             their function returns; then Devices::run() throws PeerLost with `reason`
//   Loader    the next batch, or the wait for it, is a DataError with `reason`, at once
//   World     World::abandon(): every rank that waits in it, also on other machines, gets PeerLost
//
// Flow:    any thread -> here -> exceptions where work is waited for
// Owns:    nothing
// Threads: any, but no signal handler. Does not wait for the work to end: join what you wait for, such as Devices::run()
// Ranks:   one rank is enough: the others lose it
#pragma once

#include <string>

namespace lockstep {

void stop(const std::string& reason);

}  // namespace lockstep
