// SPDX-License-Identifier: Apache-2.0
// collective/store/job_secret.h: the 256 bits that the ranks of a job have in common and nobody else knows.
//
// Flow:    the environment, files -> here -> tls_channel.h
// Owns:    with kFile of rank 0 a file in the user's home, until it is destroyed
// Threads: any
// Ranks:   each finds it by itself; in a home that the machines share rank 0 puts it there
//
// Never in an argument, a message or a log. In this order:
//
//   LOCKSTEP_SECRET        64 hexadecimal digits
//   LOCKSTEP_SECRET_FILE   a file with them, which only its owner, this user, can read
//   ~/.lockstep/job-…      such a file, which rank 0 makes for this job
//
// LOCKSTEP_INSECURE_NETWORK=1: none at all.
#pragma once

#include <array>
#include <filesystem>
#include <optional>
#include <string>

namespace lockstep {

using Secret = std::array<unsigned char, 32>;

class JobSecret {
 public:
  // `job`: the same on all its ranks, in a file's name by its hash. Throws EnvironmentError: a variable or file that is no
  // secret, or that others can read; no home to write to.
  JobSecret(const std::string& job, bool is_rank_0);
  ~JobSecret();
  JobSecret(const JobSecret&) = delete;
  JobSecret& operator=(const JobSecret&) = delete;

  // LOCKSTEP_INSECURE_NETWORK: nobody is asked for a secret, and nothing is encrypted.
  bool is_off() const { return off_; }

  // Nothing: rank 0 has not made the file yet, or it is not in this machine's home. Reads it again each time: the one of
  // an older job may still be there.
  std::optional<Secret> find() const;

 private:
  bool off_ = false;
  std::optional<Secret> told_;
  std::filesystem::path file_;  // in the home
  bool is_made_here_ = false;
};

// The ways to give a job a secret, for an error's `next`.
std::string ways_to_a_secret();

}  // namespace lockstep
