// SPDX-License-Identifier: Apache-2.0
// agent/meet/secured_channel.h: channels between the first process of a job and the others, on several machines.
//
// Flow:    collective/meet/job_store.h, first_machine_store.cc -> here -> tls_channel.h, endpoint.h
// Owns:    nothing
// Threads: any
//
// If munge carries the secret, a process that does not have it says so first on a connection, gets a credential, and
// connects again. The first byte tells that from TLS.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "agent/meet/channel.h"
#include "agent/meet/job_secret.h"
#include "lockstep/base/sockets/endpoint.h"

namespace lockstep {

// Returns the end of the first process; null: it has no secret yet. Throws EnvironmentError, SystemError.
std::unique_ptr<Channel> serve_channel(UniqueFd fd, const SecretPtr& secret);

// The same for MeetingServer, which throws nothing: null also if the secret can't be had.
std::function<std::unique_ptr<Channel>(UniqueFd)> admit_by(SecretPtr secret);

struct SecuredConnection {
  std::unique_ptr<Channel> channel;  // none: there is no secret for it
  std::string address;               // that has answered, as a number
  std::optional<Secret> key{};       // that the channel uses
};
// Tries each address once, until `deadline`. Returns nothing if none of them answers. A connection does not prove that the
// other end has the same secret: the first read or write shows it. Throws EnvironmentError: munge's credential can't be read.
std::optional<SecuredConnection> connect_securely(const AddressList& addresses, const JobSecret& secret,
                                                  const Deadline& deadline);

}  // namespace lockstep
