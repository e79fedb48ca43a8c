// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/sockets/port.h"

#include <netinet/in.h>

#include <algorithm>
#include <fstream>

#include <fmt/format.h>

#include "lockstep/base/files/file.h"
#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kListens = "0A", kEstablished = "01";

struct TcpLine {
  std::string local, remote;  // "0100007F:1F90"
  std::string state, user, inode;
};

// Fields of /proc/net/tcp: number, local address:port, remote one, state, queues, timer, retransmits, user, timeout,
// inode.
template <class Wanted>
std::optional<TcpLine> find_line(const char* table, const Wanted& is_wanted) {
  std::ifstream in(table);
  for (std::string text; std::getline(in, text);) {
    TcpLine line;
    std::string skipped;
    std::istringstream(text) >> skipped >> line.local >> line.remote >> line.state >> skipped >> skipped >> skipped >>
        line.user >> skipped >> line.inode;
    if (is_wanted(line)) return line;
  }
  return std::nullopt;
}

std::optional<TcpLine> find_listener(const char* table, int port) {
  const std::string end = fmt::format(":{:04X}", port);
  return find_line(table, [&](const TcpLine& line) { return line.state == kListens && line.local.ends_with(end); });
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
    if (parse_int(process.path().filename().string(), pid) && holds(process, concat("socket:[", listener->inode, "]")))
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
  const auto text_of = [](const sockaddr_in& end) {
    return fmt::format("{:08X}:{:04X}", end.sin_addr.s_addr, ntohs(end.sin_port));
  };
  const std::string here = text_of(own), there = text_of(other);
  const auto others =
      find_line("/proc/net/tcp", [&](const TcpLine& line) { return line.local == there && line.remote == here; });
  uid_t user = 0;  // of connections in other states it is not told
  if (!others || others->state != kEstablished || !parse_int(others->user, user)) return std::nullopt;
  return user;
}

ReservedPort::ReservedPort(const std::string& address) {
  const AddressList found = address_of_number({address, 0});
  if (!found) throw SystemError({.what = concat("can't reserve a port on ", address, ", which is not an address")});
  fd_.reset(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd_ || !bind_to(fd_, *found)) throw system_error("reserve", concat("a port on ", address));
  number_ = endpoint_of(fd_.get()).port;
}

}  // namespace lockstep
