// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/gloo_identity.h"

#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509.h>
#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <memory>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

template <auto free>
struct Free {
  template <class Object>
  void operator()(Object* object) const {
    free(object);
  }
};
using Key = std::unique_ptr<EVP_PKEY, Free<::EVP_PKEY_free>>;
using Certificate = std::unique_ptr<X509, Free<::X509_free>>;
using MemoryBio = std::unique_ptr<BIO, Free<::BIO_free_all>>;

constexpr const char* kAlwaysSince = "19700101000000Z";
constexpr const char* kForEver = "99991231235959Z";  // RFC 5280: has no end

void require(bool done) {
  if (!done)
    throw SystemError({.what = "can't make a key and a certificate for the connections between machines",
                       .likely = "an OpenSSL without elliptic curves, or out of memory"});
}

std::uint64_t random_number() {
  std::array<unsigned char, sizeof(std::uint64_t)> bytes{};
  require(::RAND_bytes(bytes.data(), bytes.size()) == 1);
  std::uint64_t number = 0;
  for (const unsigned char byte : bytes) number = number << 8U | byte;
  return number >> 1U;
}

// A name of its own, by which the others find it among those that they trust.
Certificate certificate_for(EVP_PKEY* key) {
  Certificate made(::X509_new());
  const std::string name = concat("lockstep ", random_number());
  X509_NAME* const subject = made ? ::X509_get_subject_name(made.get()) : nullptr;
  require(subject != nullptr &&
          ::X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC,
                                       reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0) == 1 &&
          ::X509_set_issuer_name(made.get(), subject) == 1 &&
          ::ASN1_INTEGER_set_uint64(::X509_get_serialNumber(made.get()), random_number()) == 1 &&
          ::ASN1_TIME_set_string(::X509_getm_notBefore(made.get()), kAlwaysSince) == 1 &&
          ::ASN1_TIME_set_string(::X509_getm_notAfter(made.get()), kForEver) == 1 &&
          ::X509_set_pubkey(made.get(), key) == 1 && ::X509_sign(made.get(), key, ::EVP_sha256()) > 0);
  return made;
}

template <class Write>
std::string pem_of(const Write& write) {
  const MemoryBio bio(::BIO_new(::BIO_s_mem()));
  require(bio && write(bio.get()) == 1);
  char* text = nullptr;
  const long length = BIO_get_mem_data(bio.get(), &text);
  return {text, static_cast<std::size_t>(length)};
}

UniqueFd file_with(const std::string& text) {
  UniqueFd fd(::memfd_create("lockstep certificate", MFD_CLOEXEC));
  if (!fd || ::write(fd.get(), text.data(), text.size()) != std::ssize(text)) throw system_error("make", "a memfd");
  return fd;
}

}  // namespace

GlooIdentity::GlooIdentity() {
  const Key key(::EVP_EC_gen("P-256"));
  require(key != nullptr);
  const Certificate own = certificate_for(key.get());
  certificate_ = pem_of([&](BIO* bio) { return ::PEM_write_bio_X509(bio, own.get()); });
  certificate_file_ = file_with(certificate_);
  key_file_ = file_with(pem_of(
      [&](BIO* bio) { return ::PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr); }));
}

void GlooIdentity::trust(const std::vector<std::string>& certificates) {
  trusted_file_ = file_with(join(certificates, "\n"));
}

std::string GlooIdentity::path_of(const UniqueFd& fd) { return concat("/proc/self/fd/", fd.get()); }

}  // namespace lockstep
