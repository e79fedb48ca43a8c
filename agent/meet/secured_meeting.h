// SPDX-License-Identifier: Apache-2.0
// agent/meet/secured_meeting.h: the store of a job on several machines: how its first process serves it, and how the
// others join.
//
// Flow:    collective/meet/job_store.h, first_machine_store.cc -> here -> meeting_client.h, tls_channel.h, endpoint.h
// Owns:    nothing
// Threads: any
//
// If munge carries the secret (docs/design/rendezvous.md), the first byte of a connection tells who asks for it from TLS.
#pragma once

#include <optional>
#include <string>

#include "agent/meet/job_secret.h"
#include "agent/meet/meeting_client.h"
#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/error.h"

namespace lockstep {

// Does not wait for anybody. Throws SystemError.
MeetingClientPtr serve_secured(UniqueFd listener, SecretPtr secret);

// Joins by as many tries as the caller makes.
class SecuredJoin {
 public:
  explicit SecuredJoin(SecretPtr secret) : secret_(std::move(secret)) {}

  // Tries each address once, until `deadline`. Null: nobody answers, or no store with this secret. Throws
  // EnvironmentError: munge's credential can't be read.
  MeetingClientPtr try_at(const AddressList& addresses, const Deadline& deadline);

  // Tells whether somebody has answered for a minute, and this machine has found no secret meanwhile.
  bool is_hopeless() const { return secret_by_ && secret_by_->passed() && lacks_secret(); }

  // After the last try. who: "rank 1". place: where the store should be.
  RendezvousError error(const std::string& who, const std::string& place) const;

 private:
  std::unique_ptr<Channel> connect(const AddressList& addresses, const Deadline& deadline);
  bool lacks_secret() const { return !secret_->is_off() && !secret_->find(); }

  SecretPtr secret_;
  std::optional<Deadline> secret_by_{};  // since somebody has answered
};

}  // namespace lockstep
