// SPDX-License-Identifier: Apache-2.0
// lockstep/spawn.h: the ranks of a job without a launcher: processes that a program starts itself, or worlds that it
// connects by rank, size and address. (World::from_env() is for ranks that a launcher has started; run_ranks() makes ranks
// of threads.)
//
// Flow:    a program -> spawn() -> processes with a World each; rank, size, address -> connect_world() -> a World
// Owns:    spawn() its processes, until it returns: by then each has been waited for
// Threads: spawn(): the main thread, before the process has others (it forks): libtorch's first parallel operation, Devices
//          and loaders start some. connect_world(): any
// Ranks:   spawn(): one process calls it, none of a job. connect_world(): every rank
#pragma once

#include "lockstep/world.h"

namespace lockstep {

// Runs fn(world) in `ranks` processes of this machine, each with its share of the cores, as torch.multiprocessing.spawn.
// Rank 0 writes to stdout and stderr as this process does; what others write goes to stderr, with their rank. Blocks until
// all have ended. When one fails, the others are ended. When this process is killed, they are, too. Throws UsageError (less
// than one rank; inside a rank that a launcher has started), PeerLost: a rank threw or was killed, with the first one's
// number, exit code or signal, and last lines.
void spawn(int ranks, const std::function<void(World&)>& fn, const WorldOptions& options = {});

// The world of `size` ranks that meet at rank 0. address: "HOST:PORT" of rank 0, where it listens; a port that nothing else
// uses. The processes may have been started in any way, on any machines that reach each other; each knows its rank. Blocks
// until all have called it, at most for options.timeout. Throws UsageError (an address without a port, a rank that is not
// in [0, size)), RendezvousError (ranks that are missing, come twice or have another size; a port in use).
[[nodiscard]] World connect_world(int rank, int size, const std::string& address, const WorldOptions& options = {});

// The same where something else connects the processes already, such as MPI (lockstep/mpi.h). exchange(mine): the texts of all
// ranks, in rank order; all call it as often. Throws what exchange throws; UsageError: it returns another number of texts.
[[nodiscard]] World connect_world(int rank, int size, const ExchangeTexts& exchange, const WorldOptions& options = {});

}  // namespace lockstep
