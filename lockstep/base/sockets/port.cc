// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/sockets/port.h"

#include <netinet/in.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>

#include "lockstep/base/files/file.h"
#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

struct Listener {
  std::string user;
  std::string socket;  // as a descriptor's link names it
};

// A line of /proc/net/tcp: number, local address:port, remote one, state, queues, timer, retransmits, user, timeout, inode.
std::optional<Listener> find_listener(const char* table, int port) {
  constexpr unsigned kListens = 0x0A;
  std::ifstream in(table);
  for (std::string line; std::getline(in, line);) {
    unsigned local = 0, state = 0;
    unsigned long user = 0, inode = 0;
    const int read =
        std::sscanf(line.c_str(), "%*d: %*[^:]:%x %*s %x %*s %*s %*s %lu %*s %lu", &local, &state, &user, &inode);
    if (read == 4 && state == kListens && static_cast<int>(local) == port)
      return Listener{concat(user), concat("socket:[", inode, "]")};
  }
  return std::nullopt;
}

bool holds(const fs::path& process, const std::string& socket) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(process / "fd", ignored))
    if (fs::read_symlink(entry, ignored) == socket) return true;
  return false;
}

std::string command_of(const fs::path& process) try {
  std::string command = read_file(process / "cmdline");
  std::ranges::replace(command, '\0', ' ');
  return command.substr(0, command.find_last_not_of(' ') + 1);
} catch (const SystemError&) {
  return "";  // it has ended
}

}  // namespace

bool is_loopback(std::string_view host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

std::string listener_of_port(int port) {
  auto listener = find_listener("/proc/net/tcp", port);
  if (!listener) listener = find_listener("/proc/net/tcp6", port);
  if (!listener) return "";
  std::error_code ignored;
  for (const auto& process : fs::directory_iterator("/proc", ignored)) {
    int pid = 0;
    if (parse_int(process.path().filename().string(), pid) && holds(process, listener->socket))
      return concat("pid ", pid, " (", command_of(process), ")");
  }
  return concat("a process of user ", listener->user);
}

std::optional<uid_t> user_of_other_end(int fd) {
  sockaddr_in own{}, other{};
  socklen_t length = sizeof own;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) != 0 ||
      ::getpeername(fd, reinterpret_cast<sockaddr*>(&other), &length) != 0)
    return std::nullopt;
  std::ifstream in("/proc/net/tcp");
  for (std::string line; std::getline(in, line);) {  // as above; this one is the other end's
    constexpr unsigned kEstablished = 0x01;          // of others the user is not told
    unsigned from = 0, from_port = 0, to = 0, to_port = 0, state = 0;
    unsigned long user = 0;
    const int read = std::sscanf(line.c_str(), "%*d: %x:%x %x:%x %x %*s %*s %*s %lu", &from, &from_port, &to, &to_port,
                                 &state, &user);
    if (read == 6 && from == other.sin_addr.s_addr && from_port == ntohs(other.sin_port) && to == own.sin_addr.s_addr &&
        to_port == ntohs(own.sin_port))
      return state == kEstablished ? std::optional(static_cast<uid_t>(user)) : std::nullopt;
  }
  return std::nullopt;
}

ReservedPort::ReservedPort(const std::string& address) {
  const AddressList found = address_of_number({address, 0});
  if (!found) throw SystemError({.what = concat("can't reserve a port on ", address, ", which is not an address")});
  fd_.reset(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd_ || !bind_to(fd_, *found)) throw system_error("reserve", concat("a port on ", address));
  number_ = endpoint_of(fd_.get()).port;
}

}  // namespace lockstep
