// SPDX-License-Identifier: Apache-2.0
// collective/c10d/backend.h: World's transports as a c10d::Backend, so that PyTorch's own DDP, FSDP and functional
// collectives run over them unmodified: shared memory on one machine, the hierarchy over several.
//
// Flow:    c10d::ProcessGroup (C++ or Python) -> here -> backend_calls.h -> collective/transport/connect.h's transport
// Owns:    this rank's connections; a thread for collectives, once one was started without blocking
// Threads: any, like other backends: calls of several threads are ordered by a lock
// Ranks:   every rank makes the same collectives in the same order; send and receive are for the two that are named
//
// Tensors: on the CPU; dense, but all_reduce sums sparse ones (COO), too. Every dtype can be moved;
// lockstep/collective_types.h says what can be reduced, besides complex numbers where their parts may be reduced one by
// one.
//
// Every call returns a Work at once. A collective that its caller is going to wait for anyway (asyncOp == false) is
// done by then, on the caller's thread. The backend holds the tensors of every call until it is done, whoever waits.
//
// Callbacks of a collective's future may make collectives of this backend and wait for them (call_queue.h): all ranks
// make them in the same order where a callback is attached before the next collective is started.
//
// docs/design/c10d-backend.md has more of this, and what ends at which timeout.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>

#include "lockstep/collective/meet/store_ptr.h"
#include "lockstep/deadline.h"

namespace lockstep {

std::string this_machine();  // transport/connect.h

// Blocks until all `size` ranks are connected; the store carries addresses and is not used afterwards. A store, or a
// prefix of one, serves several backends if all ranks make them in the same order. Ranks with the same `machine` share
// memory; left out, it is this_machine() of connect.h. Throws RendezvousError: ranks that did not come, machines that
// can't reach each other; SystemError.
//
// Its destructor is as shutdown(), which waits for the calls under way, then leaves in good order; out of a callback it
// returns at once, and both follow. While an exception is on its way, the peers learn that this rank has failed.
// abort() ends the calls under way, here and on all peers, with PeerLost. setTimeout() waits for them.
c10::intrusive_ptr<c10d::Backend> make_c10d_backend(const StorePtr& store, int rank, int size, milliseconds timeout,
                                                    std::string machine = this_machine());

}  // namespace lockstep
