// SPDX-License-Identifier: Apache-2.0
// collective/self_transport.h: the transport of a world of one rank: the result is what that rank gives.
//
// Threads: one at a time
// Ranks:   one
#pragma once

#include <memory>

#include "lockstep/collective/transport.h"

namespace lockstep {

std::unique_ptr<Transport> make_self();

}  // namespace lockstep
