// SPDX-License-Identifier: Apache-2.0
// collective/machines/tls_identity.h: a key and a certificate with which this rank proves to the others of its job that it
// belongs to them.
//
// docs/security.md#between-machines-tensors says whom it trusts. The certificates have no dates that a clock could be before or
// after: they are worth nothing once the job is over.
//
// Flow:    gloo_network.h -> here -> OpenSSL
// Threads: trust() first; then any
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <set>
#include <string>

namespace lockstep {

template <auto free>
struct FreeWith {
  void operator()(auto* object) const { free(object); }
};
using SslPtr = std::unique_ptr<SSL, FreeWith<::SSL_free>>;

class TlsIdentity {
 public:
  TlsIdentity();  // throws SystemError
  ~TlsIdentity();

  const std::string& fingerprint() const { return fingerprint_; }  // SHA-256 of the certificate, as hexadecimal digits
  void trust(std::set<std::string> fingerprints) { trusted_ = std::move(fingerprints); }

  // One end of a connection over the socket: TLS 1.3, whose handshake succeeds with a trusted other end only. Throws SystemError.
  SslPtr end_of(int socket, bool connects) const;

 private:
  static int is_trusted(X509_STORE_CTX* presented, void* identity);

  std::unique_ptr<SSL_CTX, FreeWith<::SSL_CTX_free>> context_;
  std::string fingerprint_;
  std::set<std::string> trusted_;
};

}  // namespace lockstep
