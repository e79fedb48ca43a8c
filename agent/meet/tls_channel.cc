// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/tls_channel.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::string_view kIdentity = "lockstep";           // there is one secret, so one name
constexpr std::array<unsigned char, 2> kCipher{0x13, 0x02};  // TLS_AES_256_GCM_SHA384

constexpr size_t kMostAtATime = size_t{16} << 10;  // of what is encrypted before it is sent

// OpenSSL takes a key that was agreed on before as a session to resume. The caller owns it.
SSL_SESSION* session_of_secret(SSL* ssl) {
  const auto& secret = *static_cast<const Secret*>(SSL_get_app_data(ssl));
  SSL_SESSION* const session = ::SSL_SESSION_new();
  const SSL_CIPHER* const cipher = ::SSL_CIPHER_find(ssl, kCipher.data());
  if (session != nullptr && cipher != nullptr &&
      ::SSL_SESSION_set1_master_key(session, secret.data(), secret.size()) == 1 &&
      ::SSL_SESSION_set_cipher(session, cipher) == 1 &&
      ::SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1)
    return session;
  ::SSL_SESSION_free(session);
  return nullptr;
}

int use_secret(SSL* ssl, const EVP_MD*, const unsigned char** identity, size_t* length, SSL_SESSION** session) {
  *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
  *length = kIdentity.size();
  *session = session_of_secret(ssl);
  return *session != nullptr ? 1 : 0;
}

int find_secret(SSL* ssl, const unsigned char* identity, size_t length, SSL_SESSION** session) {
  const std::string_view name(reinterpret_cast<const char*>(identity), length);
  *session = name == kIdentity ? session_of_secret(ssl) : nullptr;
  return 1;  // without a session the handshake fails: there is no certificate
}

SSL_CTX* make_context(TlsChannel::Role role) {
  const bool serves = role == TlsChannel::Role::kServer;
  SSL_CTX* const context = ::SSL_CTX_new(serves ? ::TLS_server_method() : ::TLS_client_method());
  if (context == nullptr || ::SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
      ::SSL_CTX_set_ciphersuites(context, "TLS_AES_256_GCM_SHA384") != 1 || ::SSL_CTX_set_num_tickets(context, 0) != 1)
    throw SystemError({.what = "can't use OpenSSL for the connections between machines",
                       .likely = "an OpenSSL that is configured without TLS 1.3"});
  ::SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  if (serves) {
    ::SSL_CTX_set_psk_find_session_callback(context, &find_secret);
  } else {
    ::SSL_CTX_set_psk_use_session_callback(context, &use_secret);
    ::SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);  // and no certificate is trusted
  }
  return context;
}

}  // namespace

TlsChannel::TlsChannel(UniqueFd fd, const Secret& secret, Role role)
    : Channel(std::move(fd)), secret_(secret), context_(make_context(role)), ssl_(::SSL_new(context_.get())) {
  BIO* const in = ::BIO_new(::BIO_s_mem());
  BIO* const out = ::BIO_new(::BIO_s_mem());
  if (!ssl_ || in == nullptr || out == nullptr || SSL_set_app_data(ssl_.get(), &secret_) != 1)
    throw SystemError({.what = "OpenSSL is out of memory"});
  ::SSL_set_bio(ssl_.get(), in, out);
  if (role == Role::kServer)
    ::SSL_set_accept_state(ssl_.get());
  else
    ::SSL_set_connect_state(ssl_.get());
}

TlsChannel::~TlsChannel() { ::OPENSSL_cleanse(secret_.data(), secret_.size()); }

TlsChannel::Step TlsChannel::send_encrypted() {
  std::array<char, 4096> bytes;
  for (int count = 0; (count = ::BIO_read(::SSL_get_wbio(ssl_.get()), bytes.data(), bytes.size())) > 0;)
    to_send_.append(bytes.data(), static_cast<size_t>(count));
  while (!to_send_.empty()) {
    const auto sent = Channel::write(to_send_);
    if (!sent) return Step::kGone;
    if (*sent == 0) return Step::kNotYet;
    to_send_.erase(0, *sent);
  }
  return Step::kDone;
}

TlsChannel::Step TlsChannel::receive_encrypted() {
  std::array<char, 4096> bytes;
  const auto count = Channel::read(bytes);
  if (!count) return Step::kGone;
  if (*count == 0) return Step::kNotYet;
  const int taken = ::BIO_write(::SSL_get_rbio(ssl_.get()), bytes.data(), static_cast<int>(*count));
  return taken == static_cast<int>(*count) ? Step::kDone : Step::kGone;
}

// Sends what the call has to say even if it fails: an alert tells the other end why.
template <class Call>
TlsChannel::Step TlsChannel::run(const Call& call) {
  for (;;) {
    ::ERR_clear_error();
    const int result = call();
    const int error = result > 0 ? SSL_ERROR_NONE : ::SSL_get_error(ssl_.get(), result);
    if (send_encrypted() == Step::kGone) return Step::kGone;
    if (result > 0) return Step::kDone;
    if (error != SSL_ERROR_WANT_READ) return Step::kGone;
    if (const Step received = receive_encrypted(); received != Step::kDone) return received;
  }
}

// That the secret was used is asked for as well: nothing else may open a connection.
TlsChannel::Step TlsChannel::shake_hands() {
  if (::SSL_is_init_finished(ssl_.get()) == 1) return Step::kDone;
  const Step step = run([this] { return ::SSL_do_handshake(ssl_.get()); });
  return step == Step::kDone && ::SSL_session_reused(ssl_.get()) != 1 ? Step::kGone : step;
}

std::optional<size_t> TlsChannel::read(std::span<char> room) {
  size_t count = 0;
  Step step = shake_hands();
  if (step == Step::kDone) step = run([&] { return ::SSL_read_ex(ssl_.get(), room.data(), room.size(), &count); });
  return step == Step::kGone ? std::nullopt : std::optional(step == Step::kDone ? count : 0);
}

// Takes nothing more before what it took is on its way.
std::optional<size_t> TlsChannel::write(std::span<const char> bytes) {
  size_t count = 0;
  Step step = shake_hands();
  if (step == Step::kDone) step = send_encrypted();
  if (step == Step::kDone)
    step = run([&] { return ::SSL_write_ex(ssl_.get(), bytes.data(), std::min(bytes.size(), kMostAtATime), &count); });
  return step == Step::kGone ? std::nullopt : std::optional(step == Step::kDone ? count : 0);
}

// Before the handshake is over only the other end can bring it further.
short TlsChannel::events(bool has_to_write) const {
  const bool can_write = has_to_write && ::SSL_is_init_finished(ssl_.get()) == 1;
  return static_cast<short>(POLLIN | (can_write || !to_send_.empty() ? POLLOUT : 0));
}

}  // namespace lockstep
