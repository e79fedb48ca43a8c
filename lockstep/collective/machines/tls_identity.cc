// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/tls_identity.h"

#include <openssl/ec.h>
#include <openssl/x509.h>

#include <array>
#include <iomanip>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Key = std::unique_ptr<EVP_PKEY, FreeWith<::EVP_PKEY_free>>;
using Certificate = std::unique_ptr<X509, FreeWith<::X509_free>>;

constexpr const char* kAlwaysSince = "19700101000000Z";
constexpr const char* kForEver = "99991231235959Z";  // RFC 5280: has no end
constexpr const char* kCiphers = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";

constexpr size_t kReadAhead = size_t{64} << 10;

void require(bool done) {
  if (!done)
    throw SystemError({.what = "can't make a key and a certificate for the connections between machines",
                       .likely = "an OpenSSL without elliptic curves or TLS 1.3, or out of memory"});
}

Certificate certificate_for(EVP_PKEY* key) {
  Certificate made(::X509_new());
  require(made && ::ASN1_INTEGER_set(::X509_get_serialNumber(made.get()), 1) == 1 &&
          ::ASN1_TIME_set_string(::X509_getm_notBefore(made.get()), kAlwaysSince) == 1 &&
          ::ASN1_TIME_set_string(::X509_getm_notAfter(made.get()), kForEver) == 1 &&
          ::X509_set_pubkey(made.get(), key) == 1 && ::X509_sign(made.get(), key, ::EVP_sha256()) > 0);
  return made;
}

std::string fingerprint_of(const X509* certificate) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned length = 0;
  require(::X509_digest(certificate, ::EVP_sha256(), digest.data(), &length) == 1);
  std::string digits;
  for (unsigned i = 0; i < length; ++i) digits += concat(std::hex, std::setw(2), std::setfill('0'), int{digest[i]});
  return digits;
}

}  // namespace

TlsIdentity::TlsIdentity() : context_(::SSL_CTX_new(::TLS_method())) {
  const Key key(::EVP_EC_gen("P-256"));
  require(key != nullptr);
  const Certificate own = certificate_for(key.get());
  fingerprint_ = fingerprint_of(own.get());
  require(context_ && ::SSL_CTX_set_min_proto_version(context_.get(), TLS1_3_VERSION) == 1 &&
          ::SSL_CTX_set_ciphersuites(context_.get(), kCiphers) == 1 &&
          ::SSL_CTX_set_num_tickets(context_.get(), 0) == 1 &&
          ::SSL_CTX_use_certificate(context_.get(), own.get()) == 1 &&
          ::SSL_CTX_use_PrivateKey(context_.get(), key.get()) == 1);
  ::SSL_CTX_set_session_cache_mode(context_.get(), SSL_SESS_CACHE_OFF);
  ::SSL_CTX_set_verify(context_.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  ::SSL_CTX_set_cert_verify_callback(context_.get(), &is_trusted, this);
  ::SSL_CTX_set_mode(context_.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  ::SSL_CTX_set_read_ahead(context_.get(), 1);
  ::SSL_CTX_set_default_read_buffer_len(context_.get(), kReadAhead);
}

TlsIdentity::~TlsIdentity() = default;  // here: whose users do not link OpenSSL

// In place of OpenSSL's chain of authorities.
int TlsIdentity::is_trusted(X509_STORE_CTX* presented, void* identity) try {
  const X509* const certificate = ::X509_STORE_CTX_get0_cert(presented);
  return static_cast<const TlsIdentity*>(identity)->trusted_.contains(fingerprint_of(certificate)) ? 1 : 0;
} catch (const std::exception&) {  // out of memory
  return 0;
}

SslPtr TlsIdentity::end_of(int socket, bool connects) const {
  SslPtr ssl(::SSL_new(context_.get()));
  require(ssl && ::SSL_set_fd(ssl.get(), socket) == 1);
  connects ? ::SSL_set_connect_state(ssl.get()) : ::SSL_set_accept_state(ssl.get());
  return ssl;
}

}  // namespace lockstep
