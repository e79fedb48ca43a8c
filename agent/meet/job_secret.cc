// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/job_secret.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <pwd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "agent/meet/munge.h"
#include "lockstep/base/files/write_all.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/process/environment_switch.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr size_t kDigits = 2 * sizeof(Secret);

EnvironmentError no_secret(const std::string& what, const std::string& here = "") {
  return EnvironmentError({.what = what, .here = here, .next = ways_to_a_secret()});
}

std::optional<Secret> parse_secret(std::string text) {
  while (text.ends_with('\n')) text.pop_back();
  Secret secret{};
  size_t bytes = 0;
  const bool parsed = ::OPENSSL_hexstr2buf_ex(secret.data(), secret.size(), &bytes, text.c_str(), '\0') == 1;
  ::ERR_clear_error();
  return parsed && bytes == secret.size() && text.size() == kDigits ? std::optional(secret) : std::nullopt;
}

std::string digits_of(const Secret& secret) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : secret) text += {kHex[byte >> 4U], kHex[byte & 15U]};
  return text + "\n";
}

// Returns nothing if there is no such file. Throws EnvironmentError: others can read it, or it is another user's.
std::optional<std::string> read_private(const fs::path& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info {};
  if (!fd || ::fstat(fd.get(), &info) != 0) return std::nullopt;
  if (!S_ISREG(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 077) != 0)
    throw no_secret("other users can access the file with the job's secret", path);
  std::array<char, kDigits + 2> text{};
  const ssize_t bytes = ::read(fd.get(), text.data(), text.size());
  return std::string(text.data(), static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
}

std::optional<Secret> told_secret() {
  if (const char* text = std::getenv("LOCKSTEP_SECRET")) {
    if (const auto secret = parse_secret(text)) return secret;
    throw no_secret(concat("LOCKSTEP_SECRET is not ", kDigits, " hexadecimal digits"));
  }
  const char* path = std::getenv("LOCKSTEP_SECRET_FILE");
  if (path == nullptr) return std::nullopt;
  const auto text = read_private(path);
  if (!text) throw no_secret(concat("can't read LOCKSTEP_SECRET_FILE: ", std::strerror(errno)), path);
  if (const auto secret = parse_secret(*text)) return secret;
  throw no_secret(concat("LOCKSTEP_SECRET_FILE does not hold ", kDigits, " hexadecimal digits"), path);
}

fs::path folder_in_home() {
  const char* home = std::getenv("HOME");
  const passwd* const user = home == nullptr ? ::getpwuid(::geteuid()) : nullptr;
  if (home == nullptr && user == nullptr) return {};
  return fs::path(home != nullptr ? home : user->pw_dir) / ".lockstep";
}

// Under another name first: whoever finds the file finds all of it.
void write_private(const fs::path& path, const std::string& text) {
  ::mkdir(path.parent_path().c_str(), 0700);
  const fs::path temporary = concat(path.string(), ".", ::getpid());
  ::unlink(temporary.c_str());
  const UniqueFd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd || ::write(fd.get(), text.data(), text.size()) != std::ssize(text) || ::fsync(fd.get()) != 0 ||
      ::rename(temporary.c_str(), path.c_str()) != 0)
    throw no_secret(concat("can't write a secret for this job: ", std::strerror(errno)), path);
}

bool has_munge() { return !is_switched_off("LOCKSTEP_MUNGE") && seal_by_munge("").has_value(); }

Secret random_secret() {
  Secret secret{};
  if (::getrandom(secret.data(), secret.size(), 0) != std::ssize(secret)) throw system_error("make", "random bytes");
  return secret;
}

}  // namespace

std::string ways_to_a_secret() {
  return concat("on one machine: ", kLineThatMakesASecret,
                ", and what it prints on the others; or LOCKSTEP_SECRET_FILE, a file of mode 0600 with the same "
                "digits; or munged "
                "with one key, or one home, for all machines; or, in a network that you trust, --insecure-network");
}

JobSecret::JobSecret(const std::string& job, bool is_rank_0) {
  off_ = network_is_insecure();
  if (off_) return;
  known_ = told_secret();
  if (known_) return;
  by_munge_ = has_munge();
  if (const fs::path folder = folder_in_home(); !folder.empty()) file_ = folder / concat("job-", hash_of(job));
  if (!is_rank_0) return;
  const Secret made = random_secret();
  if (by_munge_) {
    known_ = made;
    return;
  }
  if (file_.empty()) throw no_secret("neither munge nor a home folder for the job's secret");
  write_private(file_, digits_of(made));
  is_made_here_ = true;
}

JobSecret::~JobSecret() {
  if (is_made_here_) ::unlink(file_.c_str());
}

std::optional<Secret> JobSecret::find() const {
  if (known_ || off_ || file_.empty()) return known_;
  // NFS looks for a new file only once its folder is opened again.
  const UniqueFd folder(::open(file_.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const auto text = read_private(file_);
  return text ? parse_secret(*text) : std::nullopt;
}

std::optional<std::string> JobSecret::credential() const {
  return known_ ? seal_by_munge(digits_of(*known_)) : std::nullopt;
}

Secret secret_in(const std::string& credential) {
  if (const auto secret = parse_secret(open_by_munge(credential))) return *secret;
  throw no_secret("munge delivered no valid secret");
}

bool is_secret_told() {
  return std::getenv("LOCKSTEP_SECRET") != nullptr || std::getenv("LOCKSTEP_SECRET_FILE") != nullptr || has_munge();
}

bool network_is_insecure() {
  const char* insecure = std::getenv("LOCKSTEP_INSECURE_NETWORK");
  return insecure != nullptr && std::string_view(insecure) == "1";
}

std::string make_secret() { return digits_of(random_secret()); }

UniqueFd tell_in_memory() {
  const char* const digits = std::getenv("LOCKSTEP_SECRET");
  UniqueFd file(::memfd_create("lockstep-secret", MFD_CLOEXEC));
  if (!file || ::fchmod(file.get(), 0600) != 0 || !write_all(file.get(), digits == nullptr ? "" : digits))
    throw system_error("keep", "the job's secret in memory");
  ::unsetenv("LOCKSTEP_SECRET");
  ::setenv("LOCKSTEP_SECRET_FILE", concat("/proc/", ::getpid(), "/fd/", file.get()).c_str(), 1);
  return file;
}

}  // namespace lockstep
