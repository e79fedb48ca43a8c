// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/connect/local_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

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

constexpr std::size_t kMostDescriptors = 2;

// What sendmsg and recvmsg take, for one Message with descriptors.
struct Envelope {
  explicit Envelope(Message& message) : data{.iov_base = &message, .iov_len = sizeof message} {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }

  iovec data;
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * kMostDescriptors)> control{};
  msghdr header{};
};

UniqueFd make_socket(int type) {
  UniqueFd fd(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw system_error("make", "a Unix socket");
  return fd;
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    throw SystemError({.what = "the path of a socket is too long", .here = path});
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

void take_descriptors(msghdr& header, std::vector<UniqueFd>& descriptors) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
      descriptors.emplace_back(fd);
    }
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

UniqueFd listen_at(const std::string& path, int type) {
  UniqueFd fd = make_socket(type);
  const sockaddr_un address = address_of(path);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(fd.get(), SOMAXCONN) != 0)
    throw system_error("listen at", path);
  return fd;
}

UniqueFd connect_to(const std::string& path, int type) {
  UniqueFd fd = make_socket(type);
  const sockaddr_un address = address_of(path);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    throw system_error("connect to", path);
  return fd;
}

UniqueFd accept_from(int listener) {
  UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd && (errno == EMFILE || errno == ENFILE)) throw system_error("accept", "a rank of this machine");
  return fd;
}

bool is_own_user(int socket) {
  ucred other{};
  socklen_t length = sizeof other;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &other, &length) == 0 && other.uid == ::geteuid();
}

bool send_message(int socket, const Message& message, Deadline deadline, const std::vector<int>& descriptors) {
  Message copy = message;
  Envelope envelope(copy);
  const std::size_t bytes = descriptors.size() * sizeof(int);
  envelope.header.msg_controllen = bytes > 0 ? CMSG_SPACE(bytes) : 0;
  if (cmsghdr* const part = CMSG_FIRSTHDR(&envelope.header)) {
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(part), descriptors.data(), bytes);
  }
  while (::sendmsg(socket, &envelope.header, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    // Of a user without privileges only so many descriptors (RLIMIT_NOFILE) may be on their way at a time.
    if (errno == ETOOMANYREFS && !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    if (errno != EAGAIN || !wait_for(POLLOUT, socket, deadline)) return false;
  }
  return true;
}

Received receive_message(int socket, Message& message, std::vector<UniqueFd>& descriptors, std::size_t expected) {
  Envelope envelope(message);
  msghdr& header = envelope.header;
  const ssize_t bytes = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  if (bytes < 0) return errno == EAGAIN || errno == EINTR ? Received::kNothingYet : Received::kClosed;
  if (bytes == 0) return Received::kClosed;
  take_descriptors(header, descriptors);
  if (!well_formed(message, bytes) || (header.msg_flags & MSG_TRUNC) != 0) return Received::kGarbage;
  if (descriptors.size() < expected && (header.msg_flags & MSG_CTRUNC) != 0) {
    errno = EMFILE;
    throw system_error("receive", "the descriptors of another rank's memory");
  }
  return descriptors.size() == expected ? Received::kMessage : Received::kGarbage;
}

bool wait_readable(int socket, Deadline deadline) { return wait_for(POLLIN, socket, deadline); }

}  // namespace lockstep::shm
