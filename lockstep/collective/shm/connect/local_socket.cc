// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/connect/local_socket.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cstdlib>
#include <span>

#include "lockstep/base/poll.h"
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
    const UniqueFd lock = lock_folder(entry.path());  // held until the folder is gone
    if (lock) fs::remove_all(entry.path(), ignored);
  }
}

bool well_formed(const Message& message, ssize_t bytes) {
  const Message expected;
  return bytes == static_cast<ssize_t>(sizeof message) && message.magic == expected.magic &&
         message.version == expected.version;
}

}  // namespace

// mkdtemp gives mode 0700. Another server may remove the folder before it is locked: then try again.
SocketFolder::SocketFolder() {
  const fs::path base = folder_base();
  remove_stale_folders(base);
  struct stat status {};
  do {
    std::string pattern = (base / kFolderPrefix).string() + "XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) throw system_error("make a folder in", base.string());
    path_ = pattern;
    lock_ = lock_folder(path_);
  } while (!lock_ || ::fstat(lock_.get(), &status) != 0 || status.st_nlink == 0);
}

void SocketFolder::remove() {
  std::error_code ignored;
  if (lock_) fs::remove_all(path_, ignored);
  lock_.reset();
}

bool send_message(int socket, const Message& message, Deadline deadline, const std::vector<int>& descriptors) {
  return send_with_descriptors(socket, std::as_bytes(std::span(&message, 1)), descriptors, deadline);
}

Received receive_message(int socket, Message& message, std::vector<UniqueFd>& descriptors, std::size_t expected) {
  const auto bytes = receive_with_descriptors(socket, std::as_writable_bytes(std::span(&message, 1)), descriptors, expected);
  if (bytes < 0) return Received::kNothingYet;
  if (bytes == 0) return Received::kClosed;
  return well_formed(message, bytes) && descriptors.size() == expected ? Received::kMessage : Received::kGarbage;
}

bool wait_readable(int socket, Deadline deadline) { return wait_for(POLLIN, socket, deadline); }

}  // namespace lockstep::shm
