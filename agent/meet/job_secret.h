// SPDX-License-Identifier: Apache-2.0
// agent/meet/job_secret.h: the 256 bits that the ranks of a job have in common and nobody else knows.
//
// Flow:    the environment, files, munge -> here -> tls_channel.h, secured_meeting.h
// Owns:    on rank 0, where nothing else carries it, a file in the user's home, until it is destroyed
// Threads: any
// Ranks:   each finds it by itself, or asks rank 0 for it where munge carries it
//
// Never in an argument, a message or a log. docs/security.md says where it comes from, and in which order.
#pragma once

#include <array>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/base/files/unique_fd.h"

namespace lockstep {

using Secret = std::array<unsigned char, 32>;

class JobSecret {
 public:
  // `job`: the same on all its ranks, in a file's name by its hash. Throws EnvironmentError: a variable or file that is no
  // secret, or that others can read; no munge, and no home to write to.
  JobSecret(const std::string& job, bool is_rank_0);
  ~JobSecret();
  JobSecret& operator=(JobSecret&&) = delete;

  // As network_is_insecure() says.
  bool is_off() const { return off_; }

  // Returns nothing if munge carries it here, or rank 0 has not made the file yet, or it is not in this machine's home. Reads the
  // file again each time: the one of an older job may still be there.
  std::optional<Secret> find() const;

  // True if nobody has told it and this machine has munge: rank 0 gives out credentials, the others ask for one.
  bool comes_by_munge() const { return by_munge_; }

  // Seals it for another rank, in rank 0, where it comes by munge. Returns nothing if munged has gone.
  std::optional<std::string> credential() const;

 private:
  bool off_ = false;
  bool by_munge_ = false;
  std::optional<Secret> known_;
  std::filesystem::path file_;  // in the home; empty: there is none
  bool is_made_here_ = false;
};

using SecretPtr = std::shared_ptr<const JobSecret>;

// The secret in a credential of rank 0. Throws EnvironmentError.
Secret secret_in(const std::string& credential);

// Tells whether a job here has a secret without a file in the home: by a variable, or by munge.
bool is_secret_told();

// LOCKSTEP_INSECURE_NETWORK=1, which --insecure-network sets: nothing is encrypted, and whoever connects is let in.
bool network_is_insecure();

// A new secret's digits.
std::string make_secret();

// Makes LOCKSTEP_SECRET a LOCKSTEP_SECRET_FILE in memory, while the result lives: ps would show it among a child's variables.
UniqueFd tell_in_memory();

// A line for a shell that makes a secret, and prints the line that tells it to another machine.
inline constexpr const char* kLineThatMakesASecret =
    "export LOCKSTEP_SECRET=$(openssl rand -hex 32); echo \"export LOCKSTEP_SECRET=$LOCKSTEP_SECRET\"";

// The ways to give a job a secret, for an error's `next`.
std::string ways_to_a_secret();

}  // namespace lockstep
