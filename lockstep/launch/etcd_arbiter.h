// SPDX-License-Identifier: Apache-2.0
// launch/etcd_arbiter.h: a voter whose memory is a key of etcd: the same for both halves of the machines.
//
// Flow:    arbiter.h -> here -> etcd's JSON gateway (etcd 3.4 and later), over HTTP without TLS
// Owns:    keys lockstep/JOB/DECISION, which etcd removes after a week
// Threads: one
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/arbiter.h"
#include "lockstep/launch/endpoint.h"

namespace lockstep {

class EtcdArbiter final : public Arbiter {
 public:
  explicit EtcdArbiter(std::vector<Endpoint> servers) : servers_(std::move(servers)) {}

  // Reads the key, answers as an Acceptor with that memory, and writes it back if nobody else has written meanwhile.
  std::string answer(const ArbiterQuestion& question) override;

 private:
  // The body of the first answer, of whichever server gives one. Nothing: none does, or not with status 200.
  std::optional<std::string> post(const std::string& path, const std::string& body) const;

  std::vector<Endpoint> servers_;
};

}  // namespace lockstep
