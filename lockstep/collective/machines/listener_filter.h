// SPDX-License-Identifier: Apache-2.0
// collective/machines/listener_filter.h: who may connect to a socket that somebody else listens at: Gloo, which reads what
// whoever connects sends, and ends the process when there are no descriptors left.
//
// Flow:    gloo_network.h -> here -> the kernel, which drops the packets of everybody else
// Threads: one at a time
#pragma once

#include "lockstep/base/sockets/endpoint.h"

namespace lockstep {

// `sources`: ends of connections, with addresses as numbers; port 0: any. `listener`: of IPv4. Connections that are
// made already are not affected. Throws SystemError.
void admit_only(const std::vector<Endpoint>& sources, const UniqueFd& listener);

}  // namespace lockstep
