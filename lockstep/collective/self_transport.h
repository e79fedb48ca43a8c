// collective/self_transport.h: the transport of a world of one rank: the result is what that rank gives.
//
// Threads: one at a time
// Ranks:   one
#pragma once

#include <memory>

#include "lockstep/collective/transport.h"

namespace lockstep {

std::unique_ptr<Transport> make_self();

// A call that is over.
std::shared_ptr<Pending> make_done();

}  // namespace lockstep
