// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/munge.h"

#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "lockstep/base/process/host_name.h"
#include "lockstep/base/shared_library.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// The few parts of libmunge's stable binary interface (version 2) that are used here.
enum MungeError : int { kMungeSuccess = 0, kMungeInvalid = 14, kMungeExpired = 15, kMungeRewound = 16 };
enum MungeOption : int { kMungeCipher = 0, kMungeMac = 1, kMungeReader = 9 };
constexpr int kMungeAes256 = 5;
constexpr int kMungeSha256 = 5;

struct Munge {
  SharedLibrary library{"libmunge.so.2"};
  int (*encode)(char** credential, void* context, const void* bytes, int count) = library.find("munge_encode");
  int (*decode)(const char* credential, void* context, void** bytes, int* count, uid_t*,
                gid_t*) = library.find("munge_decode");
  const char* (*describe)(int error) = library.find("munge_strerror");
  void* (*create)() = library.find("munge_ctx_create");
  int (*set)(void* context, int option, ...) = library.find("munge_ctx_set");
  void (*destroy)(void* context) = library.find("munge_ctx_destroy");
};

const Munge& loaded_munge() {
  static const Munge loaded;
  return loaded;
}

// Memory that libmunge has allocated.
template <class T>
using Allocated = std::unique_ptr<T, decltype(&std::free)>;

EnvironmentError cannot_read(int error) {
  const bool clocks = error == kMungeExpired || error == kMungeRewound;
  return EnvironmentError(
      {.what = concat("can't read the secret that rank 0 sends through munge: ",
                      error == kMungeSuccess ? "another user has sent it" : loaded_munge().describe(error)),
       .here = concat("munged of ", host_name()),
       .likely = clocks ? "the clocks of this machine and rank 0's differ by minutes"
                 : error == kMungeInvalid
                     ? "munged has another key (/etc/munge/munge.key) here than on rank 0's machine"
                     : "rank 0 runs as another user, or another program answers",
       .next = concat(clocks ? "synchronise the clocks" : "give munged one key on all machines",
                      "; or export LOCKSTEP_SECRET=…, the output of one `openssl rand -hex 32`, on every machine")});
}

}  // namespace

std::optional<std::string> seal_by_munge(const std::string& text) {
  const Munge& munge = loaded_munge();
  if (!munge.library.is_complete()) return std::nullopt;
  const std::unique_ptr<void, void (*)(void*)> context(munge.create(), munge.destroy);
  char* made = nullptr;
  const bool sealed = context != nullptr && munge.set(context.get(), kMungeCipher, kMungeAes256) == kMungeSuccess &&
                      munge.set(context.get(), kMungeMac, kMungeSha256) == kMungeSuccess &&
                      munge.set(context.get(), kMungeReader, ::geteuid()) == kMungeSuccess &&
                      munge.encode(&made, context.get(), text.data(), static_cast<int>(text.size())) == kMungeSuccess;
  const Allocated<char> credential(made, &std::free);
  return sealed ? std::optional<std::string>(credential.get()) : std::nullopt;
}

std::string open_by_munge(const std::string& credential) {
  void* made = nullptr;
  int count = 0;
  uid_t user = ~uid_t{0};
  gid_t group = 0;
  const Munge& munge = loaded_munge();
  const int error = munge.library.is_complete()
                        ? munge.decode(credential.c_str(), nullptr, &made, &count, &user, &group)
                        : kMungeSuccess;
  const Allocated<void> text(made, &std::free);
  if (error != kMungeSuccess || user != ::geteuid()) throw cannot_read(error);
  return {static_cast<const char*>(text.get()), static_cast<size_t>(count)};
}

}  // namespace lockstep
