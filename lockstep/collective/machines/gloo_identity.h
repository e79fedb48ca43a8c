// SPDX-License-Identifier: Apache-2.0
// collective/machines/gloo_identity.h: a key and a certificate with which this rank proves to the others of its job that it
// belongs to them.
//
// Nobody signs for anybody: each rank makes a key and a certificate of its own for all its connections, tells the others the
// certificate through the job's store, which only ranks that know its secret can read or write, and trusts exactly the
// certificates that it finds there. The key never leaves the process. The certificates have no dates that a clock could
// be before or after: they are worth nothing once the job is over.
//
// Flow:    gloo_device.h -> here -> OpenSSL
// Owns:    memory that has a path, because Gloo reads keys and certificates from files; nobody else can open it
// Threads: one at a time
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/files/unique_fd.h"

namespace lockstep {

class GlooIdentity {
 public:
  GlooIdentity();  // Throws SystemError

  const std::string& certificate() const { return certificate_; }  // PEM
  void trust(const std::vector<std::string>& certificates);        // Throws SystemError

  // While this lives, and in this process only.
  std::string key_file() const { return path_of(key_file_); }
  std::string certificate_file() const { return path_of(certificate_file_); }
  std::string trusted_file() const { return path_of(trusted_file_); }

 private:
  static std::string path_of(const UniqueFd& fd);

  std::string certificate_;
  UniqueFd key_file_;
  UniqueFd certificate_file_;
  UniqueFd trusted_file_;
};

}  // namespace lockstep
