// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/connect/socket_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cstdlib>
#include <string>

#include "lockstep/error.h"

namespace lockstep::shm {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFolderPrefix = "lockstep-shm-";
constexpr std::size_t kLongestFolder = 90;  // a socket's path has room for 107 characters

fs::path folder_base() {
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  std::error_code ignored;
  if (runtime != nullptr && fs::is_directory(runtime, ignored) && std::string(runtime).size() < kLongestFolder - 20)
    return runtime;
  return "/tmp";
}

UniqueFd lock_folder(const fs::path& folder) {
  UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (fd && ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) fd.reset();
  return fd;
}

// A RendezvousServer holds the lock of its folder as long as it lives: a folder that can be locked belongs to one that
// was killed.
void remove_stale_folders(const fs::path& base) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(base, ignored)) {
    if (!entry.path().filename().string().starts_with(kFolderPrefix)) continue;
    struct stat status {};
    if (::lstat(entry.path().c_str(), &status) != 0 || status.st_uid != ::geteuid()) continue;
    if (lock_folder(entry.path())) fs::remove_all(entry.path(), ignored);
  }
}

// mkdtemp gives mode 0700. Another server may remove the folder before it is locked: then try again.
fs::path make_folder(const fs::path& base, UniqueFd& lock) {
  while (true) {
    std::string pattern = (base / kFolderPrefix).string() + "XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) throw system_error("make a folder in", base.string());
    lock = lock_folder(pattern);
    struct stat status {};
    if (lock && ::fstat(lock.get(), &status) == 0 && status.st_nlink > 0) return pattern;
  }
}

}  // namespace

fs::path make_socket_folder(UniqueFd& lock) {
  const fs::path base = folder_base();
  remove_stale_folders(base);
  return make_folder(base, lock);
}

}  // namespace lockstep::shm
