// SPDX-License-Identifier: Apache-2.0
// agent/meet/tls_channel.h: a channel that only somebody with the job's secret can open, read or change: TLS 1.3
// with a key that both ends have already (RFC 8446, 2.2), and a fresh Diffie-Hellman exchange. There are no certificates.
//
// Flow:    secured_meeting.cc -> here -> OpenSSL
// Owns:    OpenSSL's state of one connection
// Threads: one at a time
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <string>

#include "agent/meet/channel.h"
#include "agent/meet/job_secret.h"

namespace lockstep {

class TlsChannel : public Channel {
 public:
  enum class Role { kServer, kClient };

  // The handshake is part of the first reads and writes; until it has succeeded none of them moves anything. Throws
  // SystemError: OpenSSL can't be used.
  TlsChannel(UniqueFd fd, const Secret& secret, Role role);
  ~TlsChannel() override;

  std::optional<size_t> read(std::span<char> room) override;
  std::optional<size_t> write(std::span<const char> bytes) override;
  short events(bool has_to_write) const override;

 private:
  struct Free {
    void operator()(SSL* ssl) const { ::SSL_free(ssl); }
    void operator()(SSL_CTX* context) const { ::SSL_CTX_free(context); }
  };
  enum class Step { kDone, kNotYet, kGone };

  template <class Call>
  Step run(const Call& call);  // one of OpenSSL's, with what it wants to send and to receive
  Step send_encrypted();
  Step receive_encrypted();
  Step shake_hands();

  Secret secret_;
  std::unique_ptr<SSL_CTX, Free> context_;
  std::unique_ptr<SSL, Free> ssl_;
  std::string to_send_;
};

}  // namespace lockstep
