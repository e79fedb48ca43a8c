// SPDX-License-Identifier: Apache-2.0
// lockstep/mpi.h: a World of the ranks of an MPI communicator, for programs that have one. Needs <mpi.h> and an MPI library;
// lockstep itself links none. Included by itself.
//
// Flow:    MPI_Comm -> connect_world() -> a World
// Owns:    nothing; the communicator is used only while from_mpi() runs
// Threads: that which may call MPI
// Ranks:   all of the communicator call it at the same time
#pragma once

#include <mpi.h>

#include <numeric>

#include "lockstep/spawn.h"

namespace lockstep {

// The ranks of `communicator`, with the same numbers. MPI carries their addresses; tensors go through lockstep, and between
// machines through TLS with the job's secret (docs/security.md). Between MPI_Init and MPI_Finalize. MPI's calls have no deadline. Throws as connect_world(); errors of MPI are handled as the communicator says.
[[nodiscard]] inline World from_mpi(MPI_Comm communicator, const WorldOptions& options = {}) {
  int rank = 0, size = 1;
  MPI_Comm_rank(communicator, &rank);
  MPI_Comm_size(communicator, &size);
  const auto exchange = [communicator, size](const std::string& mine) {
    const int length = static_cast<int>(mine.size());
    std::vector<int> lengths(static_cast<size_t>(size)), begins(lengths.size());
    MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, communicator);
    std::exclusive_scan(lengths.begin(), lengths.end(), begins.begin(), 0);
    std::string all(static_cast<size_t>(begins.back() + lengths.back()), '\0');
    MPI_Allgatherv(mine.data(), length, MPI_CHAR, all.data(), lengths.data(), begins.data(), MPI_CHAR, communicator);
    std::vector<std::string> texts;
    for (size_t i = 0; i < lengths.size(); ++i)
      texts.push_back(all.substr(static_cast<size_t>(begins[i]), static_cast<size_t>(lengths[i])));
    return texts;
  };
  return connect_world(rank, size, exchange, options);
}

}  // namespace lockstep
